"""The plan of a host, compared with that of a launcher on a machine: no process, no network."""

import re
import socket
import time

import pytest

from accel_cli.container import gpus, host
from accel_cli.container.problem import ContainerError
from accel_cli.container.ready import Ready
from accel_cli.container.told import Told
from accel_cli.container.work import Work
from accel_cli.launchers.base import Job
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.planning.machine import Machine, cpus
from accel_cli.planning.nodes import Facts
from accel_runtime.env import Parallel, Settings, SettingsError

NAMES = ("algo-1", "algo-2")


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    monkeypatch.setattr(gpus, "count", lambda *_: 4)


def ready(tmp_path, *, names=NAMES, environ=None, again=False, **work):
    do = Work(**{"kind": "script", "target": "train.py", "args": ("--lr", "1e-3"), **work})
    return Ready(tmp_path, do, Told(names, names[-1]), environ or {}, again)


def test_it_is_the_plan_that_accel_launch_makes_on_a_machine_with_a_number(tmp_path):
    plan = ready(
        tmp_path, environ={"TRAINING_JOB_NAME": "job-1"}, agent={"max_restarts": 2, "ranks": "all"}
    ).plan()
    settings, machine = Settings(shared_files=False), Machine(cpus(), "cuda", ("A100",) * 4, torch="2.13.0")
    section = Torchrun(nnodes=2, rdzv_endpoint="algo-1:7777", rdzv_id="job-1", rdzv_timeout=1800, max_restarts=2, ranks="all",
                       shutdown_timeout=110, log_dir=str(tmp_path / "output" / "data" / "accel-runs"))  # fmt: skip
    job = Job(
        "train.py",
        ("--lr", "1e-3"),
        "script",
        settings,
        {},
        {},
        machine,
        plan.argv[0],
        nodes=Facts(node_rank=1),
    )
    same = section.plan(job)
    assert (plan.argv, plan.env, plan.runner) == (same.argv, same.env, same.runner)
    assert (plan.nnodes, plan.nproc_per_node, plan.device) == (same.nnodes, same.nproc_per_node, same.device)
    own = {"failure_file": str(tmp_path / "output" / "failure"), "host": "algo-2"}
    assert plan.agent == {**same.agent, **own}


def test_a_number_of_processes_is_taken_and_auto_is_the_gpus_or_one_on_the_cpu(tmp_path):
    cpu = {"settings": {"ACCEL_DEVICE": "cpu"}}
    asked = ({}, {"nproc_per_node": 2}, cpu, {**cpu, "nproc_per_node": 3})
    assert [ready(tmp_path, **work).plan().nproc_per_node for work in asked] == [4, 2, 1, 3]


def test_one_host_meets_nobody(tmp_path):
    plan = ready(tmp_path, names=("algo-1",)).plan()
    assert (plan.agent["local_addr"], plan.agent["node_rank"]) == ("127.0.0.1", None)
    assert host.headline(plan) == "algo-1 runs 4 processes, cuda"


@pytest.mark.parametrize(("again", "resume"), [(False, "0"), (True, "1")])
def test_checkpoints_of_before_switch_resuming_on(tmp_path, again, resume):
    assert ready(tmp_path, again=again).plan().env["ACCEL_RESUME"] == resume


def test_a_variable_that_the_container_has_stays(tmp_path):
    plan = ready(tmp_path, environ={"OMP_NUM_THREADS": "7", "SM_MASTER_PORT": "7000"}).plan()
    assert "OMP_NUM_THREADS" not in plan.env
    assert plan.agent["rdzv_endpoint"] == "algo-1:7000"


def test_a_program_is_started_by_the_agent_itself(tmp_path):
    assert ready(tmp_path, kind="program").plan().runner == "accel_cli.runner.agent:run"


def test_the_name_of_the_first_host_is_waited_for(monkeypatch, capfd):
    asked = []

    def getaddrinfo(*_):
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(host, "_SAID_S", 0)
    host._wait_for("algo-1", time.monotonic() + 30)
    assert len(asked) == 3
    assert re.search(r"accel: waiting: algo-1 has no address yet; 2\d s left", capfd.readouterr().err)
    asked.clear()
    with pytest.raises(
        ContainerError, match="the name of the first host, algo-1, did not resolve within 300 s"
    ):
        host._wait_for("algo-1", time.monotonic() - 1)


def test_a_layout_that_the_hosts_cannot_have_is_refused_before_processes_start(tmp_path):
    said = Settings(parallel=Parallel(dp_shard=8)).to_env()
    assert ready(tmp_path, settings=said).plan().nproc_per_node == 4
    with pytest.raises(SettingsError, match="there are 4 processes"):
        ready(tmp_path, names=NAMES[:1], settings=said).plan()
