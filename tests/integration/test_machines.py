"""Runs on several nodes: namespaces with names and addresses, launched by one command, and failures."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.hosts.network import Hosts, hosts
from support.processes.waits import limit, wait_until

pytestmark = pytest.mark.service("root")
MEET = ("-q", "--cpu", "--rdzv-endpoint", "h0:29400")
TOLD = """
import os
print(*(f"{n}={os.environ.get(n)}" for n in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
      "GLOO_SOCKET_IFNAME")))
"""
FAILS = """
import os, sys, time
from pathlib import Path
tries, most = Path("tries"), int(sys.argv[1])
def count():
    return tries.stat().st_size if tries.exists() else 0
if os.environ["RANK"] == "1":
    before = count()
    with tries.open("a") as file:
        file.write("x")
    if before < most:
        sys.exit(5)
    print("finished after", before)
while count() <= most:
    time.sleep(0.02)
"""
LIVES = """
import os, time
from pathlib import Path
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
mine = Path(f"{rank}of{world}.{os.getpid()}")
mine.write_text(str(os.getpid()))
while not Path("enough").exists():
    time.sleep(0.05)
print("finished as", rank, "of", world)
"""

TALKS = """
import time
from pathlib import Path
from accel_runtime import Accelerator
accelerator = Accelerator(cpu=True)
Path(f"up{accelerator.process_index}").touch()
for _ in range(2000):
    accelerator.wait_for_everyone()
    time.sleep(0.02)
"""


def read_output(process, timeout=150):
    """Return the output of an ended process, without rank prefixes."""
    return re.sub(r"^\[\d+\] ", "", process.communicate(timeout=limit(timeout))[0], flags=re.MULTILINE)


def numbered(host, number):
    """Launch on one of two nodes with the given node rank."""
    return Hosts([host]).launch(*MEET, "--nnodes", "2", "--node-rank", number, "train.py")[0]


def running(cwd, pattern):
    """The processes of `LIVES` that have started and are alive."""
    pids = [int(path.read_text() or 0) for path in cwd.glob(pattern)]
    return [pid for pid in pids if Path("/proc", str(pid)).exists()]


def test_nodes_with_different_numbers_of_processes_join_if_a_name_resolves_to_loopback(script, cwd):
    """Debian gives a machine's own name 127.0.1.1, where no other machine finds it."""
    script(TOLD)
    with hosts(2) as two:
        two[0].call_itself("127.0.1.1")
        launched = [Hosts([host]).launch(*MEET, "--nnodes", "2", "--nproc-per-node", count, "train.py")[0]
                    for host, count in zip(two, "12", strict=True)]  # fmt: skip
        lines = [
            line for process in launched for line in read_output(process).splitlines() if "RANK=" in line
        ]
    assert [process.returncode for process in launched] == [0, 0]
    variables = [dict(part.split("=") for part in line.split()) for line in lines]
    assert sorted(rank_variables["RANK"] for rank_variables in variables) == ["0", "1", "2"]
    assert {rank_variables["WORLD_SIZE"] for rank_variables in variables} == {"3"}
    assert sorted(rank_variables["LOCAL_WORLD_SIZE"] for rank_variables in variables) == ["1", "2", "2"]
    assert {rank_variables["MASTER_ADDR"] for rank_variables in variables} == {"10.77.0.10"}
    assert {
        rank_variables["LOCAL_WORLD_SIZE"]: rank_variables["GLOO_SOCKET_IFNAME"]
        for rank_variables in variables
    } == {
        "1": "eth0",
        "2": "None",
    }


def test_two_nodes_count_restarts_together_and_print_one_reason(script):
    script(FAILS)
    with hosts(2) as two:
        launched = two.launch(*MEET, "--nnodes", "2", "--max-restarts", "5", "train.py", "5")
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 0], outputs
    restarts = [[line for line in output.splitlines() if "restart " in line] for output in outputs]
    assert restarts[0] == restarts[1]
    assert [line.partition(": rank")[0] for line in restarts[0]] == [
        f"accel: restart {n} of 5" for n in range(1, 6)
    ]
    assert all(re.search(r"rank 1 on h[01]: exited with code 5", line) for line in restarts[0])
    assert "finished after 5" in "".join(outputs)


@pytest.mark.full
def test_all_nodes_end_without_remaining_restarts(script):
    script(FAILS)
    with hosts(2) as two:
        launched = two.launch(*MEET, "--nnodes", "2", "--max-restarts", "1", "train.py", "9")
        outputs = [read_output(process) for process in launched]
    assert sorted(process.returncode for process in launched) == [1, 5], outputs
    assert any("restart 1 of 1" in output for output in outputs)
    assert not any("restart 2" in output for output in outputs)
    assert any(
        re.search(r"the run ended on another machine: rank 1 on h[01]: exited with code 5", o)
        for o in outputs
    )


def test_a_run_continues_without_a_lost_node_and_accepts_its_replacement(script, cwd):
    script(LIVES)
    options = (*MEET, "--nnodes", "1:2", "--max-restarts", "3", "--set", "launcher.last_call_timeout=2",
               "--set", "process_group_timeout=6", "train.py")  # fmt: skip
    with hosts(2) as two:
        first, _ = two.launch(*options)
        wait_until(lambda: len(running(cwd, "?of2.*")) == 2)
        two[1].kill()
        wait_until(lambda: running(cwd, "0of1.*"))
        (replacement,) = Hosts([two[1]]).launch(*options)
        wait_until(lambda: len(running(cwd, "?of2.*")) == 2)
        (cwd / "enough").touch()
        outputs = [read_output(first), read_output(replacement)]
    assert (first.returncode, replacement.returncode) == (0, 0), outputs
    assert "restart 1 of 3: h1 (10.77.0.11) does not respond" in outputs[0]
    assert (
        "restarting all processes, since machines joined or left: 2 machines joined at h0:29400: "
        in outputs[0]
    )
    assert outputs[0].count("restart ") == 1
    assert "finished as" in outputs[0]
    assert "finished as" in outputs[1]


@pytest.mark.slow
def test_a_host_that_vanishes_is_named_in_the_reason_although_a_connection_fails_first(script, cwd):
    script(TALKS)
    options = (*MEET, "--nnodes", "1:2", "--max-restarts", "1", "--set", "launcher.last_call_timeout=2", "train.py")  # fmt: skip
    with hosts(2) as two:
        first, _ = two.launch(*options)
        wait_until(lambda: len([*cwd.glob("up*")]) == 2)
        two[1].kill()
        output = read_output(first)
    assert first.returncode == 0, output
    assert re.search(r"restart 1 of 1: rank 0 on h0: .*; h1 \(10.77.0.11\) does not respond", output)
    assert "1 machines" not in output


def test_a_killed_process_restarts_all_processes_on_three_nodes(script, cwd):
    script(LIVES)
    with hosts(3) as three:
        launched = three.launch(*MEET, "--nnodes", "3", "--max-restarts", "1", "train.py")
        wait_until(lambda: len(running(cwd, "?of3.*")) == 3)
        victim = running(cwd, "2of3.*")[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(running(cwd, "?of3.*")) == 3 and victim not in running(cwd, "2of3.*"))
        (cwd / "enough").touch()
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 0, 0], outputs
    for output in outputs:
        assert re.search(r"restart 1 of 1: rank 2 on h\d: terminated by SIGKILL", output)


def test_both_nodes_report_a_broken_network_and_end(script, cwd):
    script(LIVES)
    with hosts(2) as two:
        launched = two.launch(*MEET, "--nnodes", "2", "--set", "process_group_timeout=6", "train.py")
        wait_until(lambda: len(running(cwd, "?of2.*")) == 2)
        two[1].cut()
        cut = time.monotonic()
        outputs = [read_output(process) for process in launched]
        took = time.monotonic() - cut
    assert [process.returncode for process in launched] == [1, 1], outputs
    assert "h1 (10.77.0.11) does not respond" in outputs[0]
    assert "h1 (10.77.0.11) lost the connection to the rendezvous at h0:29400" in outputs[1]
    assert took < limit(120)  # by itself a process group waits for half an hour
    assert not running(cwd, "?of2.*")


@pytest.mark.parametrize(
    ("number", "named"),
    [
        pytest.param(
            signal.SIGTERM,
            "h1 (10.77.0.11): its launcher received SIGTERM and ended its processes",
            marks=pytest.mark.full,
        ),
        (
            signal.SIGKILL,
            "h1 (10.77.0.11) does not respond: its launcher exited, the machine is down, or the network failed",
        ),
    ],
)
def test_a_launcher_ended_by_a_signal_is_named_on_the_other_node(script, cwd, number, named):
    script(TALKS)
    with hosts(2) as two:
        # One after the other, so that the first has the store.
        launched = [numbered(host, n) for host, n in zip(two, "01", strict=True)]
        wait_until(lambda: len([*cwd.glob("up*")]) == 2)
        launched[1].send_signal(number)
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [1, 143 if number == signal.SIGTERM else -9], (
        outputs
    )
    assert f"accel: error: {named}" in outputs[0].splitlines()[-1]
    assert "RankLostError: rank 1 ended" in outputs[0]


@pytest.mark.parametrize(("restarts", "code"), [pytest.param("0", 2, marks=pytest.mark.full), ("1", 0)])
def test_a_third_node_in_a_run_of_two_is_rejected_or_a_spare(script, cwd, restarts, code):
    script(LIVES)
    with hosts(3) as three:
        options = (*MEET, "--nnodes", "2", "--max-restarts", restarts, "train.py")
        launched = Hosts(three[:2]).launch(*options)
        wait_until(lambda: len(running(cwd, "?of2.*")) == 2)
        launched += Hosts(three[2:]).launch(*options)
        if code:
            launched[2].wait(limit(60))
        else:
            time.sleep(3)  # it says what it waits for after two seconds
        (cwd / "enough").touch()
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 0, code], outputs
    if code:
        assert (
            "h2 (10.77.0.12) cannot join: the run already has all 2 machines (h0 (10.77.0.10), h1"
            in outputs[2]
        )
    else:
        assert (
            "waiting as a spare: the run has all its machines (h0 (10.77.0.10), h1 (10.77.0.11))"
            in outputs[2]
        )
        assert "this machine was a spare and was not needed" in outputs[2]


@pytest.mark.full
def test_a_missing_node_is_reported_while_waiting_and_at_the_end(script):
    script(TOLD)
    with hosts(3) as three:
        launched = Hosts(three[:2]).launch(
            *MEET, "--nnodes", "3", "--set", "launcher.rdzv_timeout=15", "train.py", env={"PET_NNODES": ""}
        )
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [1, 1]
    for output in outputs:
        assert "waiting: 2 of 3 machines joined (h0 (10.77.0.10), h1 (10.77.0.11)), 1 missing" in output
        assert (
            "2 of 3 machines joined (h0 (10.77.0.10), h1 (10.77.0.11)) within rdzv_timeout; 1 missing"
            in output
        )


@pytest.mark.full
def test_node_ranks_of_a_scheduler_fix_the_order_and_name_missing_nodes(script):
    script(TOLD)
    numbers = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.77.0.11\n10.77.0.10"}
    with hosts(2) as two:
        launched = [Hosts([host]).launch("--cpu", "train.py", env={**numbers, "SKYPILOT_NODE_RANK": str(1 - n)})[0]
                    for n, host in enumerate(two)]  # fmt: skip
        outputs = [read_output(process) for process in launched]
        (alone,) = Hosts([two[1]]).launch(
            "-q",
            "--cpu",
            "--set",
            "launcher.rdzv_timeout=3",
            "train.py",
            env={**numbers, "SKYPILOT_NODE_RANK": "0"},
        )
        missed = read_output(alone)
    assert "RANK=1 WORLD_SIZE=2" in outputs[0]
    assert "RANK=0 WORLD_SIZE=2" in outputs[1]
    assert "SKYPILOT_*: nnodes 2, rdzv_endpoint 10.77.0.11:20000, node_rank 1" in outputs[0]
    assert "1 missing: node_rank 1." in missed


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("nowhere:29400", "Cannot resolve the host 'nowhere' of rdzv_endpoint nowhere:29400 on h1"),
        ("h0:29401", "no answer from the rendezvous at h0:29401 for 3 s (Connection refused)"),
        ("10.99.0.1:29400", "h1 has no route to 10.99.0.1"),
    ],
)
def test_a_wrong_endpoint_is_an_error(script, endpoint, reason):
    script(TOLD)
    with hosts(2) as two:
        (launched,) = Hosts([two[1]]).launch(
            "-q",
            "--cpu",
            "--nnodes",
            "2",
            "--rdzv-endpoint",
            endpoint,
            "--set",
            "launcher.rdzv_timeout=3",
            "train.py",
        )
        assert reason in read_output(launched)
    assert launched.returncode in {1, 2}


def test_nodes_with_different_options_are_rejected(script):
    script(TOLD)
    with hosts(2) as two:
        launched = [Hosts([host]).launch(*MEET, "--nnodes", count, "--set", "launcher.rdzv_timeout=30", "train.py")[0]
                    for host, count in zip(two, "23", strict=True)]  # fmt: skip
        outputs = [read_output(process) for process in launched]
    message = "h1 (10.77.0.11) has nnodes 3, and h0 (10.77.0.10) has nnodes 2"
    assert launched[1].returncode == 2
    assert f"the machines do not match: {message}" in outputs[1]
    assert f"refused: {message}" in outputs[0]


def test_node_rank_options_are_the_order_of_the_nodes(script):
    script(TOLD)
    with hosts(2) as two:
        launched = [numbered(host, number) for host, number in zip(two, "10", strict=True)]
        outputs = [read_output(process) for process in launched]
    assert "RANK=1 WORLD_SIZE=2" in outputs[0]
    assert "RANK=0 WORLD_SIZE=2" in outputs[1]


def test_equal_node_ranks_are_an_error_on_both_nodes(script):
    script(TOLD)
    with hosts(2) as two:
        launched = [numbered(host, "1") for host in two]
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [2, 2]
    assert all(
        "invalid --node-rank: expected 0 to 1, each on one machine, got 1 on h" in text for text in outputs
    )


@pytest.mark.full
def test_accel_test_trains_on_two_nodes(cwd):
    with hosts(2) as two:
        two[0].call_itself("127.0.1.1")
        command = ("test", "--cpu", "--nnodes", "2", "--rdzv-endpoint", "h0:29400")
        checked = [host.accel(*command) for host in two]
        outputs = [read_output(process) for process in checked]
    assert [process.returncode for process in checked] == [0, 0], outputs
    assert "2 machines joined at h0:29400" in outputs[0]


def test_no_network_namespace_is_left():
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"accel{os.getpid()}" not in namespaces
