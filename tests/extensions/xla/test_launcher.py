"""Plans and errors of the xla launcher."""

import sys
from dataclasses import replace

import pytest
from pydantic import ValidationError
from support.launchers import plans

from accel_cli.commands.plan_view import format_headline, format_plan
from accel_cli.errors import ProfileError, UsageError
from accel_cli.extensions.xla.launcher import Xla
from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import NodeLayout
from accel_runtime.environment.settings import Settings

PAIR = Packages("2.9.0", "2.9.0", "0.0.21")
CHIPS = Tpu(("TPU v5e",) * 4, "PCI")
TPU = Machine(cpus=8, others=(XlaDevices(CHIPS, PAIR),))
NONE = Machine(cpus=8, others=(XlaDevices(packages=PAIR),))
TOLD = Settings(device="xla").to_env()
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def job(kind="script", machine=TPU, env=None, environ=None, **settings):
    profile_settings = Settings(**settings)
    return LaunchSpec(
        "train.py", ("--lr", "-1"), kind, profile_settings, env or {}, environ or {}, machine, python="py"
    )


def test_one_process_per_node_starts_the_replicas_on_the_chosen_device():
    plan = Xla().plan(job())
    assert (plan.nproc_per_node, plan.nnodes, plan.agent.start_method) == (1, 1, "torch_xla.launch")
    assert plan.argv[1].endswith("accel_cli/extensions/xla/replicas.py")
    assert plan.argv[2:] == ("all", "", "script", "train.py", "--lr", "-1")
    assert plan.env == {**TOLD, **LOOPBACK, "PJRT_DEVICE": "TPU"}
    assert plan.agent.starts_replicas


def test_the_command_has_the_number_of_replicas_and_the_function():
    assert Xla(replicas=1).plan(job()).argv[2:5] == ("1", "", "script")
    assert Xla(main_training_function="main").plan(job("module")).argv[2:5] == ("all", "main", "module")
    check = replace(job("module"), is_builtin=True)  # no script of the user's
    assert Xla(main_training_function="main").plan(check).argv[2:5] == ("all", "", "module")
    plan = Xla(spmd=True).plan(job())
    assert plan.argv[2] == "spmd"
    assert plan.env["ACCEL_SPMD"] == "1"


@pytest.mark.parametrize(("environ", "env"), [({"PJRT_DEVICE": "CPU"}, {}), ({}, {"PJRT_DEVICE": "CPU"})])
def test_pjrt_device_of_the_user_is_kept_and_shown(environ, env):
    plan = Xla().plan(job(machine=NONE, environ=environ, env=env))
    assert plan.env["PJRT_DEVICE"] == "CPU"
    assert plan.device == "xla (PJRT_DEVICE=CPU)"
    assert "  PJRT_DEVICE=CPU" in format_plan(plan, None).splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "program"}, "train.py is a program"),
        ({"device": "cpu"}, "Cannot use device: cpu with launcher.kind: xla"),
        ({"device": "cuda"}, "Set PJRT_DEVICE=CPU"),
        ({"process_group_backend": "nccl"}, "process_group_backend: nccl with launcher.kind: xla"),
        ({"process_group_backend": "smddp"}, "process_group_backend: smddp with launcher.kind: xla"),
        ({"mixed_precision": "fp16"}, "Use bf16, which"),
        ({"environ": {"XLA_USE_BF16": "1"}}, "XLA_USE_BF16=1: torch_xla would round every float32 number"),
        ({"env": {"XLA_DOWNCAST_BF16": "1"}}, "use mixed_precision: bf16"),
        ({"environ": {"XLA_USE_F16": "1"}}, "XLA_USE_F16=1"),
        ({"environ": {"XLA_DOWNCAST_FP16": "1"}}, "XLA_DOWNCAST_FP16=1"),
        ({"environ": {"WORLD_SIZE": "4"}}, "Run accel launch once on each node"),
        (
            {"environ": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}},
            "CPU_NUM_DEVICES=2: torch_xla's CPU device has no collectives between its replicas",
        ),
        ({"env": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}}, "or set launcher.spmd: true"),
        ({"machine": NONE}, "this machine has no TPU (8 CPU cores). Set PJRT_DEVICE=CPU"),
        ({"machine": Machine(8, others=(XlaDevices(CHIPS),))}, "torch_xla is not installed"),
        (
            {"machine": Machine(8, others=(XlaDevices(CHIPS, Packages("2.9.0", "2.13.0", "1")),))},
            "needs torch 2.9, but torch 2.13.0 is installed",
        ),
    ],
)
def test_unsupported_settings_of_xla_are_an_error(options, message):
    with pytest.raises(UsageError) as caught:
        Xla().plan(job(**options))
    assert message in str(caught.value)


def test_several_cpu_devices_need_spmd_or_one_replica():
    environ = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    assert Xla(spmd=True).plan(job(environ=environ))
    assert Xla(replicas=1).plan(job(environ=environ))


def test_rounding_variables_that_are_off_are_accepted():
    assert Xla().plan(job(environ={"XLA_USE_BF16": "0", "WORLD_SIZE": "1"}))


@pytest.mark.parametrize("replicas", [2, 0, True, "two", 8])
def test_replicas_other_than_all_or_one_are_an_error(replicas):
    with pytest.raises(
        ValidationError, match="expected all or 1: torch_xla starts a replica on every device"
    ):
        Xla(replicas=replicas)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 1, "spmd": True}, "spmd uses all devices"),
        ({"replicas": 1, "nnodes": 2}, "several nodes use all devices of each"),
        ({"nnodes": "1:2"}, "the hosts of a TPU do not change"),
    ],
)
def test_contradictory_keys_of_xla_are_an_error(options, message):
    with pytest.raises(ValidationError, match=message):
        Xla(rdzv_endpoint="host0:29400", **options)


def test_the_hosts_of_a_pod_are_nodes_of_a_rendezvous():
    plan = Xla(nnodes=2, rdzv_endpoint="host0:29400").plan(
        replace(job(), nodes=NodeLayout(node_rank=1, static=True))
    )
    assert (plan.nnodes, plan.agent.rdzv_endpoint, plan.agent.node_rank) == (2, "host0:29400", 1)
    assert LOOPBACK.keys().isdisjoint(plan.env)


def prepared(*assignments, **options):
    typed = {"set": ("launcher.kind=xla", *assignments), "no_profile": True, **options}
    return plans.prepare(Request("train.py", options=typed), {}, TPU)


@pytest.mark.parametrize(("typed", "replicas"), [("1", 1), ("all", "all"), ("auto", "all")])
def test_nproc_per_node_sets_the_replicas(typed, replicas):
    resolved, plan = prepared(nproc_per_node=typed)
    assert resolved.profile.launcher.replicas == replicas
    assert plan.argv[2] == str(replicas)


def test_an_error_of_replicas_names_the_typed_option():
    with pytest.raises(ProfileError, match=r"--nproc-per-node: launcher\.replicas: expected all or 1"):
        prepared(nproc_per_node="4")


def test_a_node_rank_option_is_in_the_plan():
    options = {"nnodes": "2", "rdzv_endpoint": "host0:29400", "node_rank": 1}
    _, plan = prepared(**options)
    assert plan.agent.node_rank == 1


def test_the_start_line_omits_an_unknown_number_of_replicas():
    resolved, plan = prepared()
    assert format_headline(plan, resolved).startswith(
        "xla, a replica on every device, xla (PJRT_DEVICE=TPU), mixed precision no;"
    )
