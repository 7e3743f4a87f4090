"""Plans of the launchers single and torchrun."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

import accel_cli
from accel_cli.errors import UsageError
from accel_cli.launchers import suggest_launcher
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.launchers.single import Single
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import NodeLayout
from accel_runtime.environment.settings import Settings

CPU = Machine(cpus=8)
GPUS = Machine(cpus=8, accelerator="cuda", devices=("H100",) * 4, bf16=True, torch="2.13.0")
SAID = Settings().to_env()


def job(kind="script", machine=CPU, env=None, environ=None, **settings):
    profile_settings = Settings(**settings)
    return LaunchSpec(
        "train.py",
        ("--lr", "-1", "a b"),
        kind,
        profile_settings,
        env or {},
        environ or {},
        machine,
        python="py",
    )


WORKER = str(Path(accel_cli.__file__).parent / "worker.py")


@pytest.mark.parametrize(
    ("kind", "argv"),
    [
        ("script", ("py", WORKER, "script", "train.py", "--lr", "-1", "a b")),
        ("module", ("py", WORKER, "module", "train.py", "--lr", "-1", "a b")),
        ("program", ("train.py", "--lr", "-1", "a b")),
    ],
)
def test_single_runs_a_script_module_or_program(kind, argv):
    plan = Single().plan(job(kind))
    assert (plan.argv, plan.nnodes, plan.nproc_per_node, plan.device) == (argv, 1, 1, "cpu")
    assert plan.env == SAID


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def test_torchrun_divides_the_cores_among_its_processes():
    plan = Torchrun(nproc_per_node=2).plan(job())
    assert plan.nproc_per_node == 2
    assert plan.env == {**SAID, **LOOPBACK, "OMP_NUM_THREADS": "4"}
    assert plan.argv[0] == "py"
    assert plan.argv[1].endswith("worker.py")
    assert plan.argv[2:] == ("script", "train.py", "--lr", "-1", "a b")
    assert plan.agent.rdzv_endpoint == "127.0.0.1:0"
    assert plan.agent.is_single_node


def test_a_program_is_started_by_the_worker():
    argv = Torchrun(nproc_per_node=2).plan(job("program")).argv
    assert argv[1].endswith("worker.py")
    assert argv[2:] == ("program", "train.py", "--lr", "-1", "a b")


def test_several_nodes_use_the_rendezvous_endpoint():
    plan = Torchrun(nnodes=3, nproc_per_node=2, rdzv_endpoint="node0:29400").plan(job())
    assert (plan.nnodes, plan.agent.rdzv_endpoint, plan.agent.is_single_node) == (3, "node0:29400", False)


LOCAL = ["localhost:1", "LOCALHOST.:1", "localhost.localdomain:1", "a.localhost:1", "127.0.0.1:1", "127.1.2.3:1", "[::1]:1",
         "0.0.0.0:1", "[::]:1"]  # fmt: skip


@pytest.mark.parametrize("endpoint", LOCAL)
@pytest.mark.parametrize("nnodes", [2, "1:3"])
def test_a_loopback_endpoint_for_several_nodes_is_an_error(endpoint, nnodes):
    with pytest.raises(
        ValidationError, match=r"is not reachable from other nodes.* set launcher.allow_loopback: true"
    ):
        Torchrun(nnodes=nnodes, rdzv_endpoint=endpoint)
    here = Torchrun(nnodes=nnodes, rdzv_endpoint=endpoint, allow_loopback=True).plan(job())
    assert here.agent.rdzv_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["10.0.0.7:1", "localhosts:1", "[fd00::1]:1", "node0:1", "1.localhost.example:1"]
)
def test_an_endpoint_that_other_nodes_reach_is_valid(endpoint):
    assert Torchrun(nnodes=2, rdzv_endpoint=endpoint).rdzv_endpoint == endpoint


def test_a_loopback_endpoint_for_one_node_is_valid():
    assert Torchrun(rdzv_endpoint="localhost:1").plan(job()).agent.rdzv_endpoint == "127.0.0.1:0"


def test_no_network_interface_is_set_for_several_nodes():
    plan = Torchrun(nnodes=2, nproc_per_node=2, rdzv_endpoint="node0:29400").plan(job())
    assert LOOPBACK.keys().isdisjoint(plan.env)


@pytest.mark.parametrize(
    ("platform", "kind", "expected", "message"),
    [
        ("linux", "script", "auto", "forkserver (torch is imported once for all processes)"),
        ("linux", "module", "forkserver", "forkserver (launcher.start_method)"),
        ("linux", "script", "exec", "exec (launcher.start_method)"),
        ("linux", "program", "auto", "exec (a program may not be Python)"),
        ("darwin", "script", "auto", "exec (the fork server needs Linux, and this is darwin)"),
    ],
)
def test_the_start_method_has_a_reason(monkeypatch, platform, kind, expected, message):
    monkeypatch.setattr(sys, "platform", platform)
    plan = Torchrun(nproc_per_node=2, start_method=expected).plan(job(kind))
    assert f"{plan.agent.start_method} ({plan.agent.start_method_reason})" == message


def test_an_impossible_fork_server_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="Cannot use start_method: forkserver: the fork server needs"):
        Torchrun(nproc_per_node=2, start_method="forkserver").plan(job())


def test_auto_starts_one_process_for_each_accelerator_or_one_on_the_cpu():
    assert Torchrun().plan(job(machine=GPUS)).nproc_per_node == 4
    assert Torchrun().plan(job(machine=GPUS, device="cpu")).nproc_per_node == 1
    assert Torchrun().plan(job()).nproc_per_node == 1


def test_inherited_variables_are_not_overridden():
    environ = {"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "WARN"}
    plan = Torchrun(nproc_per_node=2).plan(job(env={"NCCL_DEBUG": "INFO", "A": "1"}, environ=environ))
    assert plan.env == {**SAID, **LOOPBACK, "A": "1"}


def test_the_profile_sets_the_number_of_threads_unless_it_is_inherited():
    assert Torchrun(nproc_per_node=2, omp_num_threads=3).plan(job()).env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("launcher", "settings", "machine", "message"),
    [
        (
            Torchrun(nproc_per_node=5),
            {},
            GPUS,
            "Cannot start 5 processes: this machine has 4 cuda device(s)",
        ),
        (Single(), {"device": "cuda"}, CPU, "Device cuda not found: this machine has 8 CPU cores"),
        (Single(), {"device": "xpu"}, GPUS, "Device xpu not found: this machine has 4 x H100"),
        (Torchrun(nproc_per_node=2), {"process_group_backend": "nccl"}, CPU, "'nccl': it needs GPUs"),
        (Single(), {}, Machine(2, problem="torch cannot be imported"), "torch cannot be imported"),
    ],
)
def test_a_missing_device_is_an_error(launcher, settings, machine, message):
    with pytest.raises(UsageError) as caught:
        launcher.plan(job(machine=machine, **settings))
    assert message in str(caught.value)


def test_more_processes_than_gpus_need_gloo():
    launcher = Torchrun(nproc_per_node=5)
    assert launcher.plan(job(machine=GPUS, process_group_backend="gloo")).device == "cuda"
    with pytest.raises(UsageError, match="process_group_backend: gloo"):
        launcher.plan(job(machine=GPUS, process_group_backend="nccl"))


def test_more_processes_than_gpus_run_on_the_cpu():
    assert Torchrun(nproc_per_node=5).plan(job(machine=GPUS, device="cpu")).nproc_per_node == 5


def test_the_suggested_launcher_depends_on_the_number_of_accelerators():
    assert [suggest_launcher(machine) for machine in (CPU, GPUS)] == ["single", "torchrun"]
    assert suggest_launcher(Machine(8, "cuda", ("H100",))) == "single"


def numbered(number):
    return replace(job(), nodes=NodeLayout(node_rank=number, static=True))


def test_a_range_of_nodes_has_a_minimum_and_a_maximum():
    plan = Torchrun(nnodes="1:4", rdzv_endpoint="node0:29400").plan(job(process_group_timeout=10))
    assert (plan.agent.min_nodes, plan.agent.max_nodes, plan.agent.lost_after) == (1, 4, 10)


@pytest.mark.parametrize("nnodes", ["4:1", "0:2", "two", "1:2:3", "", 0])
def test_an_invalid_number_of_nodes_is_an_error(nnodes):
    with pytest.raises(ValidationError, match="expected"):
        Torchrun(nnodes=nnodes, rdzv_endpoint="node0:29400")


@pytest.mark.parametrize(
    ("launcher", "number", "message"),
    [
        ({"nnodes": 2, "max_restarts": 1}, 0, "max_restarts 1 lets nodes join later"),
        ({"nnodes": "1:2"}, 0, "nnodes 1:2 lets nodes join later"),
        ({"nnodes": 2}, 2, "Invalid --node-rank 2: expected 0 to 1 for nnodes 2"),
    ],
)
def test_a_node_rank_is_an_error_if_nodes_may_join_later(launcher, number, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Torchrun(rdzv_endpoint="node0:29400", **launcher).plan(numbered(number))


def test_a_node_rank_above_zero_is_an_error_on_one_node():
    with pytest.raises(UsageError, match="--node-rank 1 needs several nodes"):
        Single().plan(numbered(1))
