"""Replicated parameters must have equal gradients on all tensor parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator, ParallelismConfig


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.up, self.between = nn.LayerNorm(4), nn.Linear(4, 8), nn.LayerNorm(2)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        heads = self.up(self.before(x)).unflatten(-1, (-1, 2))
        return self.down(self.between(heads).flatten(-2))


def collect_error(**also):
    torch.manual_seed(0)
    plan = {"up": "colwise", "down": "rowwise"} | also
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_plan=plan))
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(3, 4)).square().mean())
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_a_norm_between_sharded_layers_is_rejected_at_the_first_step(pair):
    for message in pair.run(collect_error):
        assert "between.weight" in message
        assert "before.weight" not in message
        assert "replicated_with_grad_allreduce" in message


@pytest.mark.parametrize("style", ["replicated_with_grad_allreduce"])
def test_a_plan_with_an_explicit_style_is_accepted(pair, style):
    assert pair.run(lambda: collect_error(between=style)) == ["", ""]
