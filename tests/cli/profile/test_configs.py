"""The ready profiles load, check and plan."""

from pathlib import Path

import pytest

from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.machine import Machine
from accel_cli.profile import planner
from accel_cli.profile.layers import read_file, resolve

FILES = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
TPU = Machine(8, others=(XlaDevices(Tpu(("TPU v4",) * 4, "PCI"), Packages("2.9.0", "2.9.0", "0.0.21")),))
GPUS = Machine(8, "cuda", ("H100",) * 4, bf16=True, torch="2.13.0")
EXPECTED = {
    "bf16": ("torchrun", 1, 4, "cuda", "bf16"),
    "cpu": ("single", 1, 1, "cpu", "no"),
    "cpu-two-processes": ("torchrun", 1, 2, "cpu", "no"),
    "hybrid": ("torchrun", 2, 4, "cuda", "bf16", "dp_replicate 2 x dp_shard 4"),
    "one-gpu": ("single", 1, 1, "cuda", "no"),
    "sagemaker": ("sagemaker", 1, 1, "ml.g5.2xlarge", "bf16"),
    "sagemaker-spot": ("sagemaker", 2, 1, "ml.g5.12xlarge", "bf16"),
    "slurm": ("slurm", 2, 8, "cuda", "bf16"),
    "kubernetes": ("kubernetes", 2, 8, "cuda", "bf16"),
    "ray": ("ray", 2, 8, "cuda", "bf16"),
    "skypilot": ("skypilot", 2, 8, "cuda", "bf16"),
    "kubernetes-kubeflow": ("kubernetes", 2, 8, "cuda", "bf16"),
    "ssh": ("ssh", 2, 8, "cuda", "bf16"),
    "sharded": ("torchrun", 1, 4, "cuda", "bf16", "dp_shard 4"),
    "several-gpus": ("torchrun", 1, 4, "cuda", "no"),
    "several-machines": ("torchrun", 2, 4, "cuda", "no"),
    "tensor-parallel": ("torchrun", 1, 4, "cuda", "bf16", "dp_shard 2 x tp 2"),
    "tpu": ("xla", 1, 1, "xla (PJRT_DEVICE=TPU)", "bf16"),
    "tpu-pod": ("xla", 1, 1, "xla (PJRT_DEVICE=TPU)", "bf16"),
    "tpu-spmd": ("xla", 1, 1, "xla (PJRT_DEVICE=TPU)", "bf16"),
}


def test_every_ready_profile_is_expected_here():
    assert {path.stem for path in FILES} == set(EXPECTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_ready_profile_plans_what_its_name_says(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile = resolve([read_file(path, "file")]).profile
    machine = TPU if "tpu" in path.stem else GPUS
    job = LaunchSpec("x.py", (), "script", profile.settings, {}, {}, machine, "python")
    plan = planner.build_plan(profile.launcher, job)
    planned = (plan.launcher, plan.nnodes, plan.nproc_per_node, plan.device, profile.mixed_precision)
    assert (*planned, *([plan.layout] if plan.layout else [])) == EXPECTED[path.stem]
