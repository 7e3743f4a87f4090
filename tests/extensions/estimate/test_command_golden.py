"""Tables and data of `accel estimate`, compared with golden files."""

from __future__ import annotations

import shlex

import pytest
from support.cases import golden
from support.processes import commands

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(8)), nn.Linear(64, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def make(batch_size=8):
    return Net(), torch.zeros(batch_size, 64), torch.optim.AdamW, torch.sum
"""
OPTIONS = {
    "all": "--devices 4 --memory 3.2MB --all",
    "json": "--devices 2 --memory 80GB --mixed-precision bf16 --batch-size 4 --json",
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_an_estimate_equals_its_golden_file(script, cwd, name):
    script(MODULE, "models.py")
    result = commands.run_accel("estimate", "models:make", *shlex.split(OPTIONS[name]), cwd=cwd)
    assert result.returncode == 0, result.stderr
    golden.check(f"estimate/{name}.txt", f"{result.stdout}\nstderr:\n{result.stderr}")
