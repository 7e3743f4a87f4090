"""The layout of models in a plan, and its errors."""

import pytest
from support.launchers import plans

from accel_cli.commands.plan_view import format_headline, format_plan
from accel_cli.errors import ProfileError, UsageError
from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import NodeLayout
from accel_cli.profile import planner
from accel_cli.profile.schema import Profile
from accel_runtime.environment.settings import Settings

GPUS = Machine(8, "cuda", ("H100",) * 4, bf16=True)
TPU = Machine(8, others=(XlaDevices(Tpu(("TPU v4",) * 4, "PCI"), Packages("2.9.0", "2.9.0", "0.0.21")),))
SINGLE = {"kind": "single"}
FOUR = {"kind": "torchrun", "nproc_per_node": 4}
RANGE = {"kind": "torchrun", "nproc_per_node": 2, "nnodes": "1:3", "rdzv_endpoint": "a:1"}
SLURM = {"kind": "slurm", "nnodes": 2, "gpus_per_node": 8}
P4 = {"kind": "sagemaker", "instance_type": "ml.p4d.24xlarge", "instance_count": 2}


def planned(launcher, machine=GPUS, nodes=None, environ=None, **options):
    profile = Profile.model_validate({"launcher": launcher, **options})
    job = LaunchSpec(
        "x.py",
        (),
        "script",
        profile.settings,
        {},
        environ or {},
        machine,
        "python",
        nodes=nodes or NodeLayout(),
    )
    return planner.build_plan(profile.launcher, job)


@pytest.mark.parametrize(
    ("launcher", "parallel", "options"),
    [
        (FOUR, {}, ""),
        (FOUR, {"dp_replicate": 4}, "dp_replicate 4"),
        (FOUR, {"dp_shard": "auto"}, "dp_shard 4"),
        (FOUR, {"dp_shard": "auto", "tp": 2}, "dp_shard 2 x tp 2"),
        (FOUR, {"dp_shard": 2, "dp_replicate": 2}, "dp_replicate 2 x dp_shard 2"),
        (FOUR, {"cp": 4}, "cp 4"),
        (FOUR, {"sp": 2, "dp_shard": 2}, "dp_shard 2 x sp 2"),
        (SINGLE, {"dp_shard": "auto"}, "dp_shard 1"),
        (RANGE, {"dp_shard": "auto", "tp": 2}, "dp_shard 1 to 3 x tp 2"),
        (SLURM, {"dp_shard": 8, "dp_replicate": 2}, "dp_replicate 2 x dp_shard 8"),
        (P4, {"dp_shard": "auto"}, "dp_shard 16"),
        (P4 | {"instance_type": "ml.p5.48xlarge", "nproc_per_node": 1}, {"dp_shard": 2}, "dp_shard 2"),
        (P4 | {"instance_type": "ml.g99.48xlarge"}, {"dp_shard": "auto", "tp": 2}, "dp_shard auto x tp 2"),
    ],
)
def test_a_plan_has_the_sizes_of_parallelism(launcher, parallel, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if launcher["kind"] == "sagemaker":
        launcher = {**launcher, "allow_unknown_instance": True}
    assert planned(launcher, parallel=parallel).layout == options


@pytest.mark.parametrize(
    ("launcher", "options", "reason"),
    [
        (FOUR, {"parallel": {"dp_shard": 8}}, "dp_shard: 8 x cp: 1 x tp: 1 is 8, and there are 4 processes. Start 8"),
        (FOUR, {"parallel": {"tp": 2}}, "dp_replicate: 2 (more replicas) or dp_shard: auto (more shards)"),
        (FOUR, {"parallel": {"tp": 3, "dp_shard": "auto"}}, "4 is not a multiple of 3"),
        (SINGLE, {"parallel": {"tp": 2}}, "tp: 2 is 2, and there is 1 process. Start 2"),
        (SINGLE, {"parallel": {"dp_shard": 4}}, "there is 1 process"),
        (RANGE, {"parallel": {"dp_shard": 4}}, "there may be 2 to 6 processes, and dp_shard: auto fits"),
        (RANGE, {"parallel": {"dp_shard": "auto", "tp": 4}}, "2 is not a multiple of 4"),
        (SLURM, {"parallel": {"dp_shard": 8}}, "there are 16 processes"),
        (P4, {"parallel": {"dp_shard": 8}}, "there are 16 processes"),
        (P4 | {"instance_type": "ml.m5.large"}, {"parallel": {"tp": 4}}, "there are 2 processes"),
        (P4, {"parallel": {"dp_shard": 2}, "device": "cpu", "mixed_precision": "no", "launcher": P4 | {"instance_count": 1}}, "there is 1 process"),
        (FOUR, {"fully_shard": {"cpu_offload": True}}, "fully_shard.cpu_offload has no effect with parallel.dp_shard: 1"),
        (FOUR, {"parallel": {"tp_plan": {"up": "colwise"}}}, "parallel.tp_plan has no effect with tp: 1"),
        (FOUR, {"parallel": {"dp_shard": 4}, "fully_shard": {"reshard_after_forward": 3}}, "does not divide the 4"),
    ],
)  # fmt: skip
def test_an_impossible_layout_is_an_error(launcher, options, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        planned(options.pop("launcher", launcher), **options)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"parallel": {"dp_shard": "auto"}}, {"parallel": {"tp": 2}}, {"fully_shard": {"cpu_offload": True}}],
)
@pytest.mark.parametrize("spmd", [True, False])
def test_parallel_sections_are_an_error_on_a_tpu_that_names_spmd(options, spmd):
    launcher = {"kind": "xla", "spmd": spmd}
    with pytest.raises(UsageError, match=r"TPU \(torch_xla\): it shards models by launcher.spmd: true"):
        planned(launcher, TPU, **options)
    assert planned(launcher, TPU).layout == ""


def test_ranks_of_another_launcher_are_counted_in_the_layout(monkeypatch):
    around = NodeLayout("mpirun", ranks={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert planned(SINGLE, nodes=around, parallel={"tp": 2}).layout == "tp 2"
    with pytest.raises(UsageError, match="there are 2 processes"):
        planned(SINGLE, nodes=around, parallel={"tp": 4})


def test_a_launch_prints_its_layout_or_an_error_of_planning(cwd):
    sizes = ("parallel.dp_shard=2", "parallel.tp=2")
    resolved, plan = plans.prepare(
        Request("x.py", options={"nproc_per_node": "4", "cpu": True, "set": sizes}), {}
    )
    assert "mixed precision no, dp_shard 2 x tp 2; profile" in format_headline(plan, resolved)
    assert "layout: dp_shard 2 x tp 2" in format_plan(plan, None).splitlines()
    assert "parallel.dp_shard: 2  [--set]" in format_plan(plan, resolved)
    assert plan.env["ACCEL_PARALLEL_DP_SHARD"] == "2"
    with pytest.raises(UsageError, match="there are 3 processes"):
        plans.prepare(Request("x.py", options={"nproc_per_node": "3", "cpu": True, "set": sizes}), {})


def test_a_launch_of_replicated_models_prints_no_layout(cwd):
    resolved, plan = plans.prepare(Request("x.py", options={"nproc_per_node": "2", "cpu": True}), {})
    assert plan.layout == ""
    assert "layout" not in format_plan(plan, None)
    assert "dp_" not in format_headline(plan, resolved)


def test_names_of_fsdp1_are_an_error_with_their_replacement(cwd):
    for key in ("fully_shard.sharding_strategy", "fully_shard.fsdp_backward_prefetch", "use_orig_params"):
        with pytest.raises(ProfileError, match=f"{key}: this is an option of FSDP1; under fully_shard, "):
            plans.prepare(Request("x.py", options={"set": (f"{key}=x",)}), {})


def test_every_launcher_declares_if_it_supports_sharding():
    assert [kind for kind, launcher in LAUNCHERS.items() if not launcher.supports_sharding] == ["xla"]
    assert Settings().parallel.plain
