"""FSDP 2 of Accelerate under `accel launch`: on the CPU Accelerate would replicate the model, and the launch refuses it."""

from __future__ import annotations

import importlib.util
import json

import pytest
from gpu.test_commands import python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.limit(240),
    pytest.mark.feature("Scripts of Accelerate"),
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]
SCRIPT = """
import json
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

torch.manual_seed(0)
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
losses = []
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    facts = {"sharded": all(isinstance(p, DTensor) for p in model.parameters()), "losses": losses}
    print("FACTS", json.dumps(facts), flush=True)
accelerator.end_training()
"""


def train(script, *options):
    output = python("-m", "accel_cli", "launch", "--no-profile", "-q", *options, script)
    (line,) = [line for line in output.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


def test_a_profile_that_shards_uses_fsdp2_and_trains_the_same(cuda, tmp_path):
    processes = ("--nproc-per-node", cuda.device_count())
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    replicated = train(script, *processes)
    sharded = train(script, *processes, "--set", "parallel.dp_shard=auto")
    assert (replicated["sharded"], sharded["sharded"]) == (False, True)
    assert sharded["losses"] == pytest.approx(replicated["losses"], rel=1e-4)
