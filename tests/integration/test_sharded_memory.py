"""Each of four ranks needs at most 0.30 of the memory of a full model, measured in the processes."""

from __future__ import annotations

import json

import pytest
from support.processes.commands import run_accel

pytestmark = pytest.mark.slow  # eight processes, with 50 million parameters

SCRIPT = """
import ctypes, gc, json, sys
from pathlib import Path

import torch
from torch import nn

from accel_runtime import Accelerator

M_MMAP_THRESHOLD = -3
# What is freed goes back at once, so that what a process has is what it holds.
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)


def resident(key):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def held(tensors):
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


accelerator = Accelerator()
before = resident("VmRSS")
model = Deep()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
for _ in range(2):  # the second step has the optimizer's state from its beginning
    accelerator.backward(model(torch.ones(1, 1024)).sum())
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    parameters = list(model.parameters())
    found = {"held": [held(parameters), held([p.grad for p in parameters]), held(states)]}
    optimizer.zero_grad()
found = accelerator.gather_for_metrics([found | {"peak": resident("VmHWM") - before}], use_gather_object=True)
accelerator.print(json.dumps(found))
accelerator.end_training()
"""
PARAMETERS = 24 * 2 * 1024 * 1024


def measure_memory(path, monkeypatch, shards):
    monkeypatch.setenv("ACCEL_PARALLEL_DP_SHARD", str(shards))
    result = run_accel("launch", "--cpu", "--nproc-per-node", 4, path, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("[{")))


@pytest.mark.full
def test_each_rank_holds_only_its_shards_of_parameters_gradients_and_states(cwd, script, monkeypatch):
    path = script(SCRIPT)
    replicated, sharded = (measure_memory(path, monkeypatch, shards) for shards in (1, 4))
    assert len(replicated) == len(sharded) == 4
    for rank, (all_of_it, part) in enumerate(zip(replicated, sharded, strict=True)):
        assert all_of_it["held"][:2] == [4 * PARAMETERS] * 2
        assert sum(part["held"]) <= 0.26 * sum(all_of_it["held"]), (
            f"rank {rank} holds {part}, and whole {all_of_it}"
        )
        # The peak includes gathered parameters: a layer or two and their gradients.
        assert part["peak"] <= 0.30 * all_of_it["peak"], f"rank {rank} needed {part}, and whole {all_of_it}"
