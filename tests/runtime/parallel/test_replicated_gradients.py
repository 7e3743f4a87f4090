"""What a plan leaves whole has to learn the same on all ranks of a tensor parallel group."""

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


def said(**also):
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


def test_a_norm_between_divided_layers_is_refused_at_the_first_step_by_name(pair):
    for message in pair.run(said):
        assert "between.weight" in message
        assert "before.weight" not in message
        assert "replicated_with_grad_allreduce" in message


@pytest.mark.parametrize("style", ["replicated_with_grad_allreduce"])
def test_a_plan_that_says_what_it_does_is_taken(pair, style):
    assert pair.run(lambda: said(between=style)) == ["", ""]
