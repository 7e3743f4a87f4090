"""The ssh launcher: how options select it, and what its plan runs on each host."""

import os
import re
import shlex

import pytest
import yaml
from support.launchers.launch_specs import build_spec

from accel_cli.errors import ProfileError, UsageError
from accel_cli.extensions.ssh.launcher import Ssh
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.profile import planner
from accel_cli.profile.layers import parse_assignments
from accel_cli.profile.store import write
from accel_runtime.environment.settings import Parallel

CPU = Machine(8)


def resolved(**options):
    return planner.resolve(Request("x.py", options=options), os.environ, CPU)


def test_hosts_select_the_launcher_without_a_profile(cwd):
    launcher = resolved(hosts="a,ann@b").profile.launcher
    assert (launcher.kind, launcher.hosts) == ("ssh", ["a", "ann@b"])


def test_hosts_select_the_launcher_instead_of_that_of_the_profile(cwd, home):
    write(
        home / "profiles" / "default.yaml",
        "schema_version: 1\nlauncher:\n  kind: torchrun\n  max_restarts: 3\n",
    )
    found = resolved(hosts="a,b", nproc_per_node="2")
    assert (found.profile.launcher.kind, found.profile.launcher.max_restarts) == ("ssh", 0)
    assert found.get_source("launcher.kind") == "--hosts"


def test_hosts_override_those_of_a_profile_and_keep_its_other_keys(cwd, home):
    write(
        home / "profiles" / "default.yaml",
        "schema_version: 1\nlauncher:\n  kind: ssh\n  hosts: [c]\n  lost_after: 9\n",
    )
    launcher = resolved(hosts="a,b").profile.launcher
    assert (launcher.hosts, launcher.lost_after) == (["a", "b"], 9)


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("hostfile", "hosts", {"hosts": "a,b"}),
        ("hosts", ["c"], {"hostfile": "hosts"}),
    ],
    ids=["--hosts", "--hostfile"],
)
def test_a_hostfile_and_hosts_need_the_other_key_of_the_profile_to_be_unset(cwd, home, key, value, option):
    text = yaml.safe_dump({"schema_version": 1, "launcher": {"kind": "ssh", key: value, "lost_after": 9}})
    write(home / "profiles" / "default.yaml", text)
    cure = f"launcher.{key}=null"
    with pytest.raises(ProfileError, match=re.escape(f"--set {cure}")):
        resolved(**option)
    launcher = resolved(**option, set=[cure]).profile.launcher
    assert (getattr(launcher, key), launcher.lost_after) == (None, 9)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"hosts": "a:22"}, "a port belongs in ~/.ssh/config"),
        ({"hosts": "a,a"}, "a is listed twice"),
        ({"hosts": "a slots=2,ann@A slots=4"}, "a is listed twice"),
        ({"hosts": "a slots=2 slots=4"}, "expected slots=N once after the host"),
        ({"hosts": ""}, "at least one host"),
        ({"hosts": "a,b", "hostfile": "hosts"}, "hosts and hostfile are both set"),
        ({"hosts": "a,b", "nnodes": "1:2"}, "launcher.nnodes: expected a whole number"),
        ({"set": ["launcher.kind=ssh"]}, "hosts or hostfile is needed"),
    ],
)
def test_invalid_hosts_are_an_error(cwd, options, problem):
    with pytest.raises(ProfileError, match=re.escape(problem)):
        resolved(**options)


def test_every_host_runs_the_same_launch_with_its_rank_and_processes():
    plan = Ssh(hosts=["ann@a slots=2", "b"], ranks="all").plan(build_spec("--lr", "a b", device="cpu"))
    first, second = (plan.job.build_launch_command(rank, "10.0.0.1:29400", "run") for rank in (0, 1))
    assert shlex.join(first) == (
        "/venv/bin/python -m accel_cli launch --quiet --no-profile --nnodes 2 --rdzv-endpoint 10.0.0.1:29400 --rdzv-id run "
        "--node-rank 0 --nproc-per-node 2 --set launcher.kind=torchrun --set 'launcher.ranks=\"all\"' -- train.py --lr 'a b'"
    )
    assert [*second[12:16]] == ["--node-rank", "1", "--nproc-per-node", "1"]
    assert (plan.nnodes, plan.process_description) == (2, "2 and 1 processes")


def test_a_host_may_have_a_python_of_its_own():
    job = Ssh(hosts=["a", "b python=/opt/b/python"], python="/opt/python").plan(build_spec()).job
    for rank, python in enumerate(("/opt/python", "/opt/b/python")):
        assert job.build_ssh_command(job.hosts[rank])[-1].startswith(f"exec {python} -c ")
        assert job.build_launch_command(rank, "a:1", "id")[0] == python


def test_with_restarts_the_rendezvous_assigns_the_ranks():
    plan = Ssh(hosts=["a", "b"], max_restarts=2).plan(build_spec())
    command = plan.job.build_launch_command(1, "a:1", "run")
    assert "--node-rank" not in command
    assert "launcher.max_restarts=2" in command


def test_one_host_has_no_rendezvous():
    command = Ssh(hosts=["a"]).plan(build_spec()).job.build_launch_command(0, "", "run")
    assert not {"--nnodes", "--rdzv-endpoint", "--node-rank"} & set(command)


def test_nnodes_takes_the_first_hosts_of_the_list():
    plan = Ssh(hosts=["a", "b", "c"], nnodes=2).plan(build_spec())
    assert [host.name for host in plan.job.hosts] == ["a", "b"]
    with pytest.raises(UsageError, match="only 3 host"):
        Ssh(hosts=["a", "b", "c"], nnodes=4).plan(build_spec())


def test_more_processes_than_slots_are_an_error():
    with pytest.raises(UsageError, match="host a has slots=2"):
        Ssh(hosts=["a slots=2"], nproc_per_node=3).plan(build_spec())


def test_gpu_ids_are_the_processes_of_a_host_without_slots():
    plan = Ssh(hosts=["a", "b slots=1"], gpu_ids="0,2").plan(build_spec())
    assert plan.job.counts == (2, 1)
    assert Ssh(hosts=["a"], gpu_ids="all").plan(build_spec()).job.counts == ("auto",)
    assert Ssh(hosts=["a slots=3"], gpu_ids="0,2").plan(build_spec(device="cpu")).job.counts == (3,)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"hosts": ["a", "b slots=4"]}, "Invalid slots=4 of host b: launcher.gpu_ids 0,2 chooses 2 GPU"),
        (
            {"hosts": ["a"], "nproc_per_node": 3},
            "Invalid launcher.nproc_per_node 3: launcher.gpu_ids 0,2 chooses 2",
        ),
    ],
)
def test_more_processes_than_gpu_ids_are_an_error_unless_gloo_shares_the_gpus(options, problem):
    launcher = Ssh(gpu_ids="0,2", **options)
    with pytest.raises(UsageError, match=problem):
        launcher.plan(build_spec())
    assert max(launcher.plan(build_spec(process_group_backend="gloo")).job.counts) > 2


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_variables_of_a_scheduler_do_not_replace_the_hosts(cwd, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launcher = resolved(hosts="a,b").profile.launcher
    assert (launcher.kind, launcher.hosts) == ("ssh", ["a", "b"])


def plan_on_host(total, **options):
    """Plan the launch of a host with two processes, of two hosts with `total` processes."""
    launcher = Torchrun(nnodes=2, nproc_per_node=2, rdzv_endpoint="a:1", **options)
    settings = {"parallel": Parallel(dp_shard=6)} if total == "6" else {}
    return planner.build_plan(
        launcher, build_spec(environ={"ACCEL_NUM_PROCESSES": total}, device="cpu", **settings)
    )


@pytest.mark.parametrize("total", ["6", "0"])
def test_a_host_checks_ranks_and_layout_against_the_processes_of_all_hosts(total):
    assert plan_on_host(total, ranks="5").layout == ("dp_shard 6" if total == "6" else "")


def test_a_rank_beyond_the_processes_of_all_hosts_is_an_error():
    with pytest.raises(UsageError, match="the last rank is 5"):
        plan_on_host("6", ranks="6")
    with pytest.raises(UsageError, match="the last rank is 9"):
        Ssh(hosts=["a slots=8", "b slots=2"], ranks="10").plan(build_spec())


def test_forwarded_values_are_the_same_after_yaml_is_parsed():
    folder = "/data/a #1: ü"
    command = Ssh(hosts=["a"], log_dir=folder).plan(build_spec()).job.build_launch_command(0, "", "run")
    assert parse_assignments([command[-3]]).values == {"launcher.log_dir": folder}


def test_the_command_of_ssh_asks_for_no_password_and_takes_no_option_from_a_host():
    plan = Ssh(hosts=["a"], connect_timeout=3, python="/opt/my python").plan(build_spec())
    assert plan.argv[0] == "ssh"
    assert {"-oBatchMode=yes", "-oConnectTimeout=3"} <= set(plan.argv)
    assert plan.argv[-3:-1] == ("--", "a")
    assert shlex.split(plan.argv[-1])[:3] == ["exec", "/opt/my python", "-c"]
