"""A strategy that owns both passes of a step trains as one process: a pipeline in a folder of its own."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import nn

STEPS, MICRO_BATCHES, ROWS = 3, 2, 4
MAX_NORM = 0.5


def build_model():
    """Return a model that is equal on all ranks."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.double()


def build_batches():
    """Return inputs, targets and the weight of each micro-batch."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS * MICRO_BATCHES
    inputs = torch.randn(count, ROWS, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, ROWS, 2, generator=generator, dtype=torch.float64)
    return [(*rows, 3.0 + index) for index, rows in enumerate(zip(inputs, targets, strict=True))]


def train_alone(*, weighted):
    """Return the losses, the norms and the parameters of a program of torch on one process."""
    model, losses, norms = build_model(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = build_batches()
    for step in range(STEPS):
        cycle = batches[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        total = sum(weight for *_, weight in cycle) if weighted else len(cycle)
        for inputs, targets, weight in cycle:
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(loss.item())
            (loss * (weight if weighted else 1.0) / total).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, dict(model.named_parameters())


def train_in_stages(weighted, mixed_precision="no", broken=False):
    """Return the losses, the norms and the parameters of this rank, the warning on losses, and the name of the strategy."""
    from support.training.pipeline_strategy import add_rows

    from accel_runtime import Accelerator

    with add_rows(), mock.patch.dict(os.environ, {"ACCEL_PIPELINE_PARTS": "2"}):
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=MICRO_BATCHES, mixed_precision=mixed_precision
        )
        # Autocast leaves float64 as it is.
        dtype = torch.float32 if mixed_precision == "bf16" else torch.float64
        model, losses, norms = build_model().to(dtype), [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for inputs, targets, weight in build_batches():
            with accelerator.accumulate(model):
                rows = (inputs * float("nan") if broken else inputs).to(dtype)
                loss = accelerator.forward_backward(
                    model, rows, targets.to(dtype), nn.functional.mse_loss, weight if weighted else None
                )
                losses.append(None if loss is None else loss.item())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
                optimizer.step()
                optimizer.zero_grad()
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        warning = accelerator._run.checks._losses.describe()
        return losses, norms, parameters, warning, type(accelerator._run.strategy).__name__


@pytest.mark.parametrize(
    ("weighted", "mixed_precision"), [(False, "no"), (True, "no"), (False, "fp16"), (True, "fp16")]
)
def test_two_stages_train_as_one_process(clusters, weighted, mixed_precision):
    """In fp16 the rank without losses scales, unscales and clips its gradients too."""
    losses, norms, parameters = train_alone(weighted=weighted)
    first, last = clusters[2].run(train_in_stages, weighted, mixed_precision)
    assert first[0] == [None] * len(losses)
    assert last[0] == pytest.approx(losses, rel=1e-12)
    assert first[1] == last[1] == pytest.approx(norms, rel=1e-12)
    assert {*first[2]}.isdisjoint(last[2])
    assert {**first[2], **last[2]}.keys() == parameters.keys()
    for name, actual in {**first[2], **last[2]}.items():
        torch.testing.assert_close(actual, parameters[name].detach(), rtol=0, atol=1e-12)
    assert first[4] == "PipelineStrategy"


def test_stages_compute_in_the_number_format_of_the_run(clusters):
    losses, _, _ = train_alone(weighted=False)
    _, last = clusters[2].run(train_in_stages, False, "bf16")
    assert last[0] != pytest.approx(losses, rel=1e-4)
    assert last[0] == pytest.approx(losses, rel=0.1)


def test_the_losses_of_the_last_stage_are_checked(clusters):
    first, last = clusters[2].run(train_in_stages, False, "no", True)
    assert first[3] is None
    assert "NaN or infinite" in last[3]
