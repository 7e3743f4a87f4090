"""Plans of `accel launch` with the source of each value, compared with golden files; hardware is a stub."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from support.cases import golden
from support.processes.commands import call_accel

import accel_cli
from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.planning.machine import Machine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems choose other network interfaces"
)

CONFIGS = Path(__file__).parents[3] / "configs"
CPU = Machine(8)
GPUS = Machine(8, "cuda", ("H100",) * 4, bf16=True, torch="2.13.0")
TPU = Machine(8, others=(XlaDevices(Tpu(("TPU v4",) * 4, "PCI"), Packages("2.9.0", "2.9.0", "0.0.21")),))
MACHINES = {"cpu": CPU, "gpus": GPUS, "tpu": TPU}

PROJECT = """\
schema_version: 1
launcher:
  kind: torchrun
  nproc_per_node: 2
mixed_precision: bf16
env:
  OMP_NUM_THREADS: "3"
"""
USER = "schema_version: 1\ndevice: cpu\nlog_level: info\n"
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[3-4]",
}
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
RANKS |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}
TWO_NODES = "--nnodes 2 --nproc-per-node 2 --rdzv-endpoint 10.1.1.1:29500"
SHARDED = "--set parallel.dp_shard=auto --set fully_shard.wrap=Block --set fully_shard.activation_checkpointing=true"
WATCHED = "--ranks 0,2 --log-dir logs --stall-timeout 60 --shutdown-timeout 5 --max-restarts 2"
SAGEMAKER = (
    "--set launcher.region=us-east-1 --set launcher.role=arn:aws:iam::123456789012:role/training "
    "--set launcher.bucket=my-bucket --set launcher.pytorch_version='\"2.9\"' --job-name my-run --offline"
)
REQUEUED = (
    "--set launcher.requeue=true --set launcher.signal=USR1@120 --set launcher.nproc_per_node=2 "
    "--set launcher.setup=['module load cuda'] --set launcher.mem=64G --job-name my-run"
)
PLANS = {
    "auto-cpu": ("cpu", "--dry-run train.py", {}),
    "auto-gpus": ("gpus", "--dry-run train.py", {}),
    "auto-tpu": ("tpu", "--explain train.py", {}),
    "arguments": ("cpu", "--dry-run --cpu train.py --cpu -- --lr 1 'a b'", {}),
    "elastic-nodes": ("cpu", "--dry-run --nnodes 1:3 --rdzv-endpoint node0:29400 --rdzv-id job train.py", {}),
    "gpu-ids": ("gpus", "--dry-run --gpu-ids 0,2 train.py", {}),
    "gpu-ids-all": ("gpus", "--dry-run --gpu-ids all train.py", {}),
    "gpu-ids-one": ("gpus", "--dry-run --gpu-ids 1 train.py", {}),
    "inside-ranks": ("cpu", "--explain train.py", RANKS),
    "inside-slurm": ("gpus", "--explain train.py", SLURM),
    "layers": (
        "gpus",
        "--explain --set process_group_timeout=60 --resume train.py",
        {"ACCEL_LOG_LEVEL": "debug"},
    ),
    "masked": ("cpu", "--explain train.py", {}),
    "module": ("cpu", "--dry-run --nproc-per-node 2 -m json.tool x", {}),
    "no-profile": ("gpus", "--explain --no-profile --mixed-precision fp16 train.py", {}),
    "program": ("cpu", "--dry-run --nproc-per-node 2 --no-python env --cpu", {}),
    "sagemaker-offline": ("cpu", f"--profile sagemaker {SAGEMAKER} train.py --lr 1", {}),
    "sagemaker-spot-offline": ("cpu", f"--profile sagemaker-spot {SAGEMAKER} train.py", {}),
    "sharded-options": ("gpus", f"--dry-run {SHARDED} --mixed-precision bf16 train.py", {}),
    "slurm-requeued": ("cpu", f"--dry-run --profile slurm {REQUEUED} train.py --lr 1", {}),
    "tensor-parallel-options": (
        "gpus",
        "--dry-run --set parallel.tp=2 --set parallel.dp_replicate=2 train.py",
        {},
    ),
    "two-nodes": ("cpu", f"--dry-run {TWO_NODES} train.py", {}),
    "two-nodes-numbered": ("gpus", f"--explain {TWO_NODES} --node-rank 1 train.py", {}),
    "variables-of-accelerate": ("gpus", "--explain train.py", ACCELERATE),
    "watched": ("cpu", f"--dry-run --nproc-per-node 4 {WATCHED} train.py", {}),
    "xla-replica": ("tpu", "--dry-run --set launcher.kind=xla --set launcher.replicas=1 train.py", {}),
}
"""A machine, the arguments of `accel launch`, and environment variables."""


@pytest.fixture
def launch(cwd, home, script, capfd, monkeypatch):
    """Call `accel launch` on a stub of a machine, and return its output without names of this machine."""
    script("pass")
    here = {
        str(cwd): "<cwd>",
        str(home): "<home>",
        sys.executable: "<python>",
        str(Path(accel_cli.__file__).parent): "<accel_cli>",
    }

    def call(machine, args, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("accel_cli.planning.machine.detect_quickly", lambda _environ: MACHINES[machine])
        monkeypatch.setattr("accel_cli.planning.machine.count_cpus", lambda: MACHINES[machine].cpus)
        result = call_accel(capfd, "launch", *args)
        assert result.returncode == 0, result.stderr
        text = f"{result.stdout}\nstderr:\n{result.stderr}" if result.stderr else result.stdout
        for path, shown in here.items():
            text = text.replace(path, shown)
        return text

    return call


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_ready_profile_is_explained_as_in_its_golden_file(launch, home, path):
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / path.name).write_bytes(path.read_bytes())
    machine = "tpu" if "tpu" in path.stem else "gpus"
    paths = launch(machine, ["--explain", "--profile", path.stem, "train.py", "--lr", "1"], {})
    golden.check(f"launch/configs/{path.stem}.txt", paths)


@pytest.mark.parametrize("name", PLANS)
def test_options_are_planned_as_in_their_golden_file(launch, home, cwd, name):
    machine, typed, env = PLANS[name]
    (home / "profiles").mkdir(parents=True)
    if name in {"layers", "masked"}:
        (home / "profiles" / "default.yaml").write_text(USER)
        (cwd / "accel.yaml").write_text(PROJECT + ("  HF_TOKEN: secret\n" if name == "masked" else ""))
    for path in CONFIGS.glob("s*.yaml"):
        (home / "profiles" / path.name).write_bytes(path.read_bytes())
    golden.check(f"launch/{name}.txt", launch(machine, shlex.split(typed), env))


def test_every_golden_plan_belongs_to_a_launch():
    assert golden.names("launch") == {*PLANS, "configs"}
    assert golden.names("launch/configs") == {path.stem for path in CONFIGS.glob("*.yaml")}
