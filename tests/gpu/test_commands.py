"""Commands and launchers on a GPU: processes forked before CUDA starts, reports, and estimates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.cases.gpu_rehearsal import REHEARSAL

from accel_runtime import Accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.limit(120)]

ROOT = Path(__file__).parents[2]
SAYS, STARTS, ESTIMATE = "accel env, accel test and describe()", "Forked starts", "accel estimate"
CHECK = "Check of the nodes"


def python(*arguments, **variables):
    """Run Python in the repository, from the source tree."""
    environ = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        | variables
    )
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert process.returncode == 0, (
        f"exit code {process.returncode}\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    )
    return process.stdout


@pytest.mark.feature(SAYS)
def test_the_probe_lists_every_gpu(cuda):
    hardware = json.loads(python("-m", "accel_runtime.torch_probe"))
    assert hardware == {
        "accelerator": "cuda",
        "devices": [cuda.get_device_name(index) for index in range(cuda.device_count())],
        "rocm": torch.version.hip is not None,
        "bf16": cuda.is_bf16_supported(),
        "torch": torch.__version__,
    }


@pytest.mark.feature(SAYS)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_checks_of_accel_test_pass(device, precision):
    output = python("-m", "accel_runtime.selfcheck", ACCEL_MIXED_PRECISION=precision)
    assert "everything works here" in output
    assert f"1 of 1 ranks answer, on {device.type}" in output


@pytest.mark.feature(SAYS)
def test_describe_names_the_device(device):
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    description = str(accelerator.describe())
    assert str(device) in description
    assert "bfloat16" in description


@pytest.mark.feature(SAYS)
def test_accel_env_and_accel_test_run(cuda, commands):
    assert cuda.get_device_name(0) in python("-m", "accel_cli", "env")
    assert "everything works here" in python("-m", "accel_cli", "test")


@pytest.mark.feature(CHECK)
def test_the_node_check_measures_the_gpu(device):
    """Its rate, the comparison of a product, and the errors that the driver has counted, if nvidia-ml-py is installed."""
    code = (
        "import json, os; from accel_runtime.extensions.node_check.check import check_nodes\n"
        "result = check_nodes(os.environ)\n"
        "print(json.dumps([result.records.to_dict(), [f.column for f in result.findings]]))"
    )
    records, columns = json.loads(python("-c", code).splitlines()[-1])
    (measured,) = records["ranks"]
    assert (measured["error"], measured["failure"], measured["missing_step"]) == ("", "", "")
    assert measured["is_gpu"] == (device.type == "cuda")
    assert "rate" not in columns
    if not REHEARSAL:
        assert measured["device"] == torch.cuda.get_device_name(0)
        assert measured["tflops"] > 1
        assert (
            (measured["uncorrected_errors"] is not None)
            or not find_spec("pynvml")
            or not measured["row_problem"]
        )


@pytest.mark.feature(CHECK)
def test_a_preflight_on_a_gpu_passes_and_the_script_gets_the_gpu(device, commands, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("--no-profile", "--preflight", "--nproc-per-node", 1, "--log-dir", tmp_path / "logs")
    output = python("-m", "accel_cli", "launch", *options, *(["--cpu"] if REHEARSAL else []), script)
    assert f"rank 0 (False, False) {device} [1.0, 1.0, 1.0, 1.0]" in output
    (file,) = tmp_path.glob("logs/*/preflight.json")
    assert json.loads(file.read_text())["ranks"][0]["is_gpu"] == (device.type == "cuda")


SCRIPT = """
import torch
before = torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()
from accel_runtime import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.ones(4, device=accelerator.device), "sum")
print("rank", accelerator.process_index, before, str(accelerator.device), total.tolist(), flush=True)
"""


@pytest.mark.feature(STARTS)
@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_a_process_of_accel_launch_uses_cuda(device, commands, tmp_path, method):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = python(
        "-m", "accel_cli", "launch", "--no-profile", "--set", "launcher.kind=torchrun", "--set", f"launcher.start_method={method}", "--nproc-per-node", 1,
        *(["--cpu"] if REHEARSAL else []), script,
    )  # fmt: skip
    assert f"rank 0 (False, False) {device} [1.0, 1.0, 1.0, 1.0]" in output


NOTEBOOK = """
import torch
from accel_runtime import Accelerator, notebook_launcher, release_memory
from accel_runtime.utils import is_bf16_available, is_cuda_available
def train():
    accelerator = Accelerator()
    total = accelerator.reduce(torch.ones(4, device=accelerator.device), "sum")
    # In one piece: both write to the same pipe.
    print(f"rank {accelerator.process_index} {accelerator.device} {total.tolist()}\\n", end="", flush=True)
is_cuda_available(), release_memory()
notebook_launcher(train, num_processes=2)
"""


@pytest.mark.feature(STARTS)
def test_processes_of_notebook_launcher_use_cuda_after_device_queries(device, tmp_path):
    """Run two processes over gloo: the device queries of a notebook must not start CUDA before the fork."""
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    output = python(script, ACCEL_PROCESS_GROUP_BACKEND="gloo")
    count = max(torch.cuda.device_count(), 1)
    for rank in range(2):
        expected_device = "cpu" if REHEARSAL else f"cuda:{rank % count}"
        assert f"rank {rank} {expected_device} [2.0, 2.0, 2.0, 2.0]" in output


MODELS = """
import torch
from torch import nn

def perceptron():
    layers = [part for _ in range(8) for part in (nn.Linear(4096, 4096), nn.ReLU())]
    return nn.Sequential(*layers), (torch.zeros(1024, 4096),)

class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 256, 512, 1024, 1024]
        self.layers = nn.Sequential(*(
            part for a, b in zip(widths, widths[1:])
            for part in (nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        ))
        self.head = nn.Linear(1024, 1000)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))

def convolutions():
    return Conv(), (torch.zeros(64, 3, 128, 128),)

def transformer():
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), (torch.zeros(8, 256, 1024),)
"""
MEASURE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import models
from accel_runtime import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # the workspace of cuBLAS, which is no model's
base = torch.cuda.memory_allocated()
model, inputs = getattr(models, sys.argv[2])()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
inputs = [one.to(accelerator.device) for one in inputs]
for number in range(3):
    torch.cuda.reset_peak_memory_stats()
    accelerator.backward(model(*inputs).float().square().mean())
    optimizer.step()
    kept = torch.cuda.memory_allocated() - base
    optimizer.zero_grad()
print(json.dumps({"kept": kept, "peak": torch.cuda.max_memory_allocated() - base}))
"""


@pytest.mark.feature(ESTIMATE)
@pytest.mark.parametrize("model", ["perceptron", "convolutions", "transformer"])
def test_an_estimate_matches_the_measured_memory(device, tmp_path, model):
    """Parameters, gradients and states must be within 2%, the peak within 25% of the measurement."""
    (tmp_path / "models.py").write_text(MODELS)
    request = {
        "target": f"{tmp_path}/models.py:{model}", "devices": 1, "memory": None, "headroom": 10, "batch_size": None,
        "seq_length": None, "optimizer": "adamw", "mixed_precision": "no", "dtype": None, "wrap": "auto", "activations": True,
    }  # fmt: skip
    estimate = json.loads(python("-m", "accel_runtime.extensions.estimate", json.dumps(request)))["result"]
    estimated = next(
        layout["bytes"]
        for layout in estimate["layouts"]
        if not (layout["sharded"] or layout["activation_checkpointing"])
    )
    exact = sum(estimated[name] for name in ("parameters", "gradients", "optimizer"))
    assert 0 < exact < estimated["total"]
    if REHEARSAL:
        return
    (tmp_path / "measure.py").write_text(MEASURE)
    measured = json.loads(python(tmp_path / "measure.py", tmp_path, model).splitlines()[-1])
    estimated_bytes = (
        f"MiB: estimated {exact >> 20} and {estimated['total'] >> 20}, measured {measured['kept'] >> 20} and "
    )
    estimated_bytes += f"{measured['peak'] >> 20} at the peak"
    inputs = 64 << 20
    assert abs(measured["kept"] - exact) <= 0.02 * exact + inputs, estimated_bytes
    assert abs(measured["peak"] - estimated["total"]) <= 0.25 * measured["peak"], estimated_bytes
