"""Local SGD averages weights as an explicit computation does."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from support.training.models import MixedNet
from torch import nn

from accel_runtime import Accelerator, LocalSGD

DATA = torch.linspace(-1, 1, 5 * 3 * 4 * 2, dtype=torch.float64).view(5, 3, 4, 2).sin()
"""`[step, rank, row, feature]`."""


def run_step(model, optimizer, batch):
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def copy_weights(model):
    return [p.detach().clone() for p in model.parameters()]


def build_sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def compute_expected_weights(size, every):
    """Return the weights of each rank after each step."""
    models = [MixedNet() for _ in range(size)]
    optimizers = [build_sgd(model) for model in models]
    weights_after_step = []
    for number, batches in enumerate(DATA, 1):
        for model, optimizer, batch in zip(models, optimizers, batches[:size], strict=True):
            run_step(model, optimizer, batch)
        if number % every == 0 or number == len(DATA):
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in parameters]).sum(0) / size
                for parameter in parameters:
                    parameter.data.copy_(mean)
        weights_after_step.append([copy_weights(model) for model in models])
    return weights_after_step


@pytest.mark.parametrize("every", [1, 2, 7])
def test_local_sgd_averages_weights_in_one_collective(ranks, every):
    def train_locally(every):
        accelerator = Accelerator()
        model = accelerator.prepare(MixedNet())
        optimizer, backend, weights_seen = build_sgd(model), accelerator._backend, []
        with (
            patch.object(backend.handshake, "exchange", wraps=backend.handshake.exchange) as sent,
            LocalSGD(accelerator, model, every) as local,
        ):
            for batches in DATA:
                run_step(model, optimizer, batches[accelerator.process_index])
                local.step()
                weights_seen.append(copy_weights(model))
        weights_seen[-1] = copy_weights(model)
        return weights_seen, sent.call_count, local.num_steps, accelerator.unwrap_model(model).seen.item()

    averages = (len(DATA) // every + 1) * (ranks.size > 1)
    for rank, (weights_seen, sent, steps, is_own) in enumerate(ranks.run(train_locally, every)):
        assert (sent, steps) == (averages, len(DATA))
        assert is_own == pytest.approx(DATA[:, rank].sum().item(), abs=1e-5)
        for actual, hand in zip(weights_seen, compute_expected_weights(ranks.size, every), strict=True):
            pairs = zip(actual, hand[rank], strict=True)
            assert all(torch.allclose(g, h, rtol=0, atol=1e-6) for g, h in pairs)


def test_gradients_are_not_averaged_inside_local_sgd(several):
    def compute_gradient(enabled):
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        with LocalSGD(accelerator, model, 8, enabled=enabled):
            model(torch.tensor([[float(accelerator.process_index)]])).sum().backward()
            return next(model.parameters()).grad.item()

    assert several.run(compute_gradient, True) == [float(rank) for rank in range(several.size)]
    mean = sum(range(several.size)) / several.size
    assert several.run(compute_gradient, False) == [mean] * several.size


def test_an_exception_ends_local_sgd_without_an_average(pair):
    def fail_on_last_rank():
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1))
        if accelerator.is_last_process:
            with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, 2):
                1 / 0  # noqa: B018
        return accelerator.gather(torch.tensor([1])).tolist()

    assert pair.run(fail_on_last_rank) == [[1, 1]] * 2


def test_local_sgd_steps_must_be_at_least_one():
    with pytest.raises(ValueError, match="local_sgd_steps=0: expected at least 1"):
        LocalSGD(Accelerator(), nn.Linear(1, 1), 0)
