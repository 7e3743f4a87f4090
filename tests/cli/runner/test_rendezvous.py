"""Rendezvous of nodes: stores of attempts, restart budget, and checks before a node joins."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.waits import limit, wait_until
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.planning import network
from accel_cli.planning.plan import Plan
from accel_cli.runner import bootstrap
from accel_cli.runner.bootstrap import BootstrapStore, NodeInfo, ScriptIdentity, open_listener
from accel_cli.runner.rendezvous import (
    SHARED_STORE_OFF,
    NodeRendezvous,
    RestartBudget,
    RestartReason,
    SingleNodeRendezvous,
    format_arrivals,
)

SCRIPT = ScriptIdentity(
    "train.py", ("--lr", "0.1", "--token=abc"), {"train.py": "1", "package/model.py": "2"}
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Remove the variable that `NodeRendezvous` sets for the whole process."""
    monkeypatch.setenv(SHARED_STORE_OFF, "0")


def agent_settings(**fields):
    """Return settings of an elastic agent."""
    launcher = Torchrun(allow_loopback=True, **fields)
    job = SimpleNamespace(
        nodes=SimpleNamespace(node_rank=None, static=False),
        environ={},
        option_values={},
        settings=SimpleNamespace(process_group_timeout=1800),
    )
    return launcher.build_agent_settings(job, ("exec", ""))


def pair(port):
    """Return the settings of two launchers on this machine."""
    return agent_settings(nnodes=2, rdzv_endpoint=f"127.0.0.1:{port}")


def left_behind(handler):
    """Run two attempts; return the ports of their stores, and whether the second has a key of the first."""
    infos, stores = [], []
    for _ in range(2):
        infos.append(handler.next_rendezvous().bootstrap_store_info)
        info = infos[-1]
        stores.append(
            TCPStore(info.master_addr, info.master_port, is_master=False, timeout=timedelta(seconds=9))
        )
        if len(stores) == 1:
            stores[0].set("of the dead attempt", "1")
    return infos[0].master_port == infos[1].master_port, stores[1].check(["of the dead attempt"])


@pytest.mark.slow
def test_torch_reuses_the_store_of_the_failed_attempt_at_a_restart():
    """The bug that `NodeRendezvous` works around (torch 2.13, pytorch#167288).

    If this fails, torch has mended it: read docs/design/restarts.md for what can go.
    """
    parameters = RendezvousParameters(
        "c10d", "127.0.0.1:0", "bug", 1, 1, local_addr="127.0.0.1", is_host=True
    )
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    assert left_behind(handler) == (True, True)
    handler.shutdown()


@pytest.mark.full
def test_every_attempt_on_several_nodes_has_a_separate_store(port):
    options = agent_settings(nnodes="1:2", rdzv_endpoint=f"127.0.0.1:{port}", last_call_timeout=1)
    handler = NodeRendezvous.create(BootstrapStore(options, 1, SCRIPT), options)
    assert left_behind(handler) == (False, False)
    handler.shutdown()


def test_every_attempt_on_one_node_has_a_separate_store_on_loopback():
    alone = SingleNodeRendezvous(BootstrapStore(agent_settings(), 1, SCRIPT), "run")
    assert left_behind(alone) == (False, False)
    info = alone.next_rendezvous()
    assert not reachable(outward(), info.bootstrap_store_info.master_port)


def met(handlers):
    """Return the number of nodes that each handler finds in a round that they start at the same time."""
    with ThreadPoolExecutor() as pool:
        return [info.world_size for info in pool.map(lambda handler: handler.next_rendezvous(), handlers)]


def test_nodes_with_equal_address_and_process_id_are_distinct(port, monkeypatch):
    handlers = []
    for _ in range(2):
        # As in two containers: torch's own number of a handler is the same in both, too.
        monkeypatch.setattr(NodeRendezvous, "_node_desc_generator", dynamic_rendezvous._NodeDescGenerator())
        options = replace(pair(port), rdzv_timeout=120)
        handlers.append(NodeRendezvous.create(BootstrapStore(options, 1, SCRIPT), options))
    assert met(handlers) == [2, 2]
    assert len({node.id for node in handlers[0].nodes}) == 2
    assert (
        handlers[0].describe_departed(handlers[1].read_heartbeats()) != ""
    )  # no time has passed, so there is no news
    handlers[1].bootstrap.publish_departure("its launcher received SIGTERM and ended its processes")
    # It is published in a thread, which a busy machine may let run later.
    line = f"{handlers[1].bootstrap.node.name}: its launcher received SIGTERM"
    wait_until(lambda: line in handlers[0].describe_departed({}))
    for handler in handlers:
        handler.shutdown()


def test_a_surplus_node_is_rejected_while_the_others_continue(port):
    options = replace(pair(port), rdzv_timeout=120)
    handlers = [NodeRendezvous.create(BootstrapStore(options, 1, SCRIPT), options) for _ in range(3)]
    assert met(handlers[:2]) == [2, 2]
    with pytest.raises(UsageError, match=r"cannot join: the run already has all 2 machines \(.*, .*\)"):
        handlers[2].next_rendezvous()
    assert not handlers[0].is_closed()
    for handler in handlers[:2]:
        handler.shutdown()


def test_unknown_fields_of_a_node_with_another_version_are_ignored():
    node = NodeInfo("h0", "10.0.0.1", 1, 1, "2", None, "2.9", "0.1")
    assert NodeInfo.from_json(json.dumps({**json.loads(node.to_json()), "colour": "blue"})) == node


def outward():
    """An address of this machine other than loopback's usual one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return probe.getsockname()[0]


def reachable(address, port):
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def test_nodes_use_one_restart_for_a_failure_that_several_of_them_report():
    store = BootstrapStore(agent_settings(), 1, SCRIPT)
    machines = [RestartBudget(store, 3), RestartBudget(store, 3)]
    machines[1].use(0, RestartReason(is_consequence=True, time=1.0, text="rank 1 lost a connection"))
    machines[0].use(0, RestartReason(is_consequence=False, time=2.0, text="rank 0 ran out of memory"))
    assert [(budget.used, budget.remaining) for budget in machines] == [(1, 2), (1, 2)]
    assert [budget.get_reason(0).text for budget in machines] == ["rank 0 ran out of memory"] * 2
    assert machines[0].get_reason(1) is None


def come(options):
    """The first launcher at the rendezvous, in a thread of this process."""
    first = []
    thread = threading.Thread(target=lambda: first.append(BootstrapStore(options, 1, SCRIPT)))
    thread.start()
    thread.join(limit(120))
    return first[0]


def test_the_clock_thread_ends_with_its_store(port):
    before = set(threading.enumerate())
    first = come(pair(port))
    (clock,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "clock"]
    assert abs(float(first.store.get(first.get_key("clock"))) - time.time()) < 30
    del first
    clock.join(limit(120))
    assert not clock.is_alive()


def test_a_node_with_another_version_is_rejected_and_the_first_node_is_informed(port, monkeypatch):
    options = pair(port)
    first = come(options)
    monkeypatch.setattr(bootstrap.torch, "__version__", "1.0")
    with pytest.raises(UsageError, match=r"has torch 1\.0, and .* has torch 2\..*Make them the same"):
        BootstrapStore(options, 1, SCRIPT)
    assert "has torch 1.0" in first.get_value("refused")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "eval.py"}, r"starts eval\.py, and .* starts train\.py\. Start the same command on all machines"),
        ({"arguments": ("--lr", "0.2", "--token=abc")}, r"with '0\.2', and .* with another value there\. Start the"),
        ({"arguments": ("--lr", "0.1", "--token=xyz")}, r"with '--token=\*\*\*', and .* with another value there\."),
        ({"arguments": ("--lr", '{"a": [0]}', "--token=abc")}, r"with '\{\"a\": \[0\]\}', and .* with another value there"),
        ({"arguments": ()}, r"starts train\.py with 0 arguments, and .* with 3\. Start the same .* --rdzv-id NAME"),
        ({"modules": {"package/model.py": "x"}}, r"has another package/model\.py than .*\. Copy the same files to all"),
        ({"modules": {"a.py": "", "train.py": "x", "package/model.py": "x"}}, "has another train.py and 1 other files than"),
    ],
)  # fmt: skip
def test_a_node_that_starts_something_else_is_rejected(port, fields, message):
    options = pair(port)
    first = come(options)
    with pytest.raises(UsageError, match=message):
        BootstrapStore(options, 1, replace(SCRIPT, **fields))
    assert first.get_value("refused")
    assert "abc" not in first.get_value("script"), "an argument may be a secret"


def test_nodes_of_a_named_run_may_have_different_arguments(port):
    options = replace(pair(port), run_id="sweep-1")
    first = come(options)
    BootstrapStore(
        options, 1, replace(SCRIPT, arguments=("--output", "/local/1"), modules={"scratch.py": ""})
    )
    with pytest.raises(UsageError, match=r"starts eval\.py"):
        BootstrapStore(options, 1, replace(SCRIPT, name="eval.py"))
    assert first.is_host


def test_a_node_that_joins_a_started_run_may_have_edited_modules(port, capsys):
    options = pair(port)
    first = come(options)
    first.mark_started()
    BootstrapStore(options, 1, replace(SCRIPT, modules={"train.py": "x"}))
    assert "has another train.py than" in capsys.readouterr().err


def test_the_modules_of_a_script_are_those_it_can_import_from_its_folder(cwd):
    for name in (
        "train.py",
        "package/__init__.py",
        "package/a/__init__.py",
        "package/a/model.py",
        "data/x.py",
        "a.txt",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    plans = {
        ("script", "../cwd/train.py"): "train.py",
        ("module", "package.a.model"): "package.a.model",
        ("program", "/usr/bin/python3"): "python3",
    }
    for (kind, target), name in plans.items():
        script = ScriptIdentity.from_plan(
            Plan("torchrun", ("python", "worker.py", kind, target, target, "-x"), {}, "cpu", target)
        )
        assert (script.name, script.arguments) == (name, (target, "-x"))
        modules = {"train.py", "package/__init__.py", "package/a/__init__.py", "package/a/model.py"}
        assert set(script.modules) == (set() if kind == "program" else modules)
        assert len(set(script.modules.values())) == len(script.modules)


def test_a_node_with_a_wrong_clock_is_rejected(port, monkeypatch):
    options = pair(port)
    first = come(options)
    other = SimpleNamespace(
        time=lambda: time.time() + (100 if threading.current_thread() is threading.main_thread() else 0),
        monotonic=time.monotonic,
        sleep=time.sleep,
    )
    monkeypatch.setattr(bootstrap, "time", other)
    with pytest.raises(
        UsageError, match=r"the clock of .* is (99|10\d) s ahead of that of the first machine"
    ):
        BootstrapStore(options, 1, SCRIPT)
    assert "clock" in first.get_value("refused")


@pytest.mark.parametrize("behaviour", ["speaks first", "answers wrongly"])
def test_another_program_at_the_rendezvous_port_is_an_error(monkeypatch, behaviour):
    monkeypatch.setattr(bootstrap, "_CONNECT_TIMEOUT_S", 1)

    def serve(listener):
        with suppress(OSError):  # the end of the test
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    if behaviour == "answers wrongly":
                        connection.recv(1)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=serve, args=(other,), daemon=True).start()
        options = agent_settings(nnodes=2, rdzv_endpoint=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(AccelError, match=r"port .* on 127.0.0.1 is used by another program"):
            BootstrapStore(options, 1, SCRIPT)


def test_a_rendezvous_that_does_not_answer_is_an_error_after_its_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = agent_settings(
            nnodes=2, rdzv_endpoint=f"127.0.0.1:{silent.getsockname()[1]}", rdzv_timeout=1
        )
        with pytest.raises(AccelError, match=r"no answer .* for 1 s \(it accepts connections, but does not"):
            BootstrapStore(options, 1, SCRIPT)


def test_a_launcher_that_answers_late_is_waited_for(monkeypatch):
    """One that is suspended accepts connections all the same."""
    monkeypatch.setattr(bootstrap, "_CONNECT_TIMEOUT_S", 0.1)
    listener = open_listener("", 0)
    options = pair(listener.getsockname()[1])
    second, first = [], []
    thread = threading.Thread(target=lambda: second.append(BootstrapStore(options, 1, SCRIPT)))
    thread.start()
    time.sleep(1)
    first.append(come(replace(options, rdzv_socket=listener.detach())))
    thread.join(limit(120))
    assert not second[0].is_host
    assert first[0].is_host


def test_a_rendezvous_of_another_run_is_an_error(port, monkeypatch):
    monkeypatch.setattr(bootstrap, "_STORE_TIMEOUT_S", 5)
    options = pair(port)
    other = come(replace(options, run_id="other"))
    with pytest.raises(AccelError, match=r"does not belong to run 'mine'"):
        BootstrapStore(replace(options, run_id="mine"), 1, SCRIPT)
    assert other.is_host, "its store ends with it"


def test_the_store_is_served_on_a_socket_that_a_launcher_has_bound():
    bound = network.bind_free_port(0, 0)
    number = bound.getsockname()[1]
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", number)):
        pass
    assert come(replace(pair(number), rdzv_socket=bound.detach())).is_host


def test_the_descriptor_of_another_socket_is_left_alone(port):
    with network.bind_free_port(0, 0) as other:
        assert come(replace(pair(port), rdzv_socket=other.fileno())).is_host
        assert other.getsockname()[1] != port


def test_two_sockets_have_different_ports_although_none_listens():
    with network.bind_free_port(0, 0) as first:
        number = first.getsockname()[1]
        with network.bind_free_port(number, 1) as second:
            assert second.getsockname()[1] not in {0, number}


def test_the_line_names_joined_nodes_missing_nodes_and_the_remaining_time():
    assert format_arrivals(["h0"], 3, 3, 41.6) == "waiting: 1 of 3 machines joined (h0), 2 missing; 42 s left"
    assert format_arrivals(["h0"], 2, 2, 9, ["node_rank 1"]) == (
        "waiting: 1 of 2 machines joined (h0), 1 missing: node_rank 1; 9 s left"
    )
    assert format_arrivals(["a", "b"], 1, 4, 9) == (
        "2 machines joined (a, b) for a run of 1 to 4; starting soon, unless more join"
    )
    assert format_arrivals(["a", "b"], 1, 2, 9) == "2 machines joined (a, b) for a run of 1 to 2; starting"
    assert format_arrivals(["a"], 2, 4, 9) == (
        "waiting: 1 machine joined (a) for a run of 2 to 4, 1 missing; 9 s left"
    )
