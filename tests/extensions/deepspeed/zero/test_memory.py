"""`accel estimate` gives the bytes that the tensors of an engine have."""

from __future__ import annotations

import pytest
import torch
from support.runs.zero_runs import connect
from torch import nn

from accel_runtime.extensions.estimate.zero import compute_zero

pytest.importorskip(
    "deepspeed.runtime", reason="deepspeed is in an environment of its own: make test-deepspeed"
)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5), nn.Linear(5, 3, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def measure(layout, precision):
    """Return the bytes of parameters, of gradients before the step, and of master weights with the state after it."""
    accelerator = connect(layout, mixed_precision=precision)
    model, optimizer = accelerator.prepare(*build())
    accelerator.backward(model(torch.ones(2, 7)).sum())
    sharded = accelerator._run.strategy._engines[optimizer.optimizer].sharded
    gradients = [gradient for _, gradient in sharded.list_gradients()]
    gradients += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    sizes = [sum(gradient.nbytes for gradient in gradients)]
    optimizer.step()
    state = [tensor for entry in optimizer.optimizer.state.values() for tensor in entry.values()]
    tensors = [
        *sharded.list_flats(),
        *(tensor for tensor in state if torch.is_tensor(tensor) and tensor.dim()),
    ]
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    return [sum(tensor.nbytes for tensor in weights), *sizes, sum(tensor.nbytes for tensor in tensors)]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_estimate_is_what_an_engine_has(clusters, stage, precision):
    model, optimizer = build()
    rows = compute_zero(optimizer, model, 2, half=precision != "no")
    row = next(row for row in rows if (row.stage, row.offload) == (stage, "no"))
    persistent = next((row.parameters for row in rows if row.offload == "all" and stage == 3), 0)
    counts = 4  # of the steps
    padding = 32  # of gradients, which the last rank does not have
    for parameters, gradients, state in clusters[2].run(measure, f"stage {stage}", precision):
        assert parameters == row.parameters - persistent
        assert row.gradients - padding <= gradients <= row.gradients
        assert state == row.optimizer - counts
