"""Processes that train on the same batch are reported, unless a loader shards the data."""

from __future__ import annotations

import copy

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator
from accel_runtime.checks.inputs import FirstInput


class Scaled(nn.Module):
    """A model whose forward pass takes data by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x=None, scale=None):
        x = torch.ones(1, 2) if x is None else x
        return self.layer(x) * (1 if scale is None else scale["by"])


def collect_warnings(batches, **options):
    """Return the messages on this rank when it trains on the batches of `batches(rank)`."""
    with collect_messages("accel_runtime.checks") as messages:
        accelerator = Accelerator(**options)
        accelerator.prepare(Scaled().requires_grad_(requires_grad=False))
        model = accelerator.prepare(Scaled())
        copy.deepcopy(model)(torch.ones(1, 2))
        for args, kwargs in batches(accelerator):
            with accelerator.accumulate(model):
                accelerator.backward(model(*args, **kwargs).sum())
        assert not [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, FirstInput)]
    return messages


def batch(seed, **others):
    return [torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))], others


def same_batches(_):
    return [batch(step) for step in range(4)]


def unprepared_loader(_):
    torch.manual_seed(0)
    return [([x], {}) for x in DataLoader(torch.randn(8, 2), batch_size=2, shuffle=True)]


def evaluate_on_one_process(accelerator):
    """Evaluate on one rank first: the check must not wait for the other ranks."""
    if accelerator.is_main_process:
        with torch.no_grad():
            accelerator._run.prepared.models[1].module(torch.ones(1, 2))
    return same_batches(accelerator)


@pytest.mark.parametrize("batches", [same_batches, unprepared_loader, evaluate_on_one_process])
def test_equal_batches_are_reported_once_with_the_line(pair, batches):
    (message,), other = pair.run(collect_warnings, batches)
    assert other == []
    assert message.startswith("Ranks 0 and 1 train on the same batch, at test_inputs.py:")
    assert "Give the DataLoader to prepare()" in message


def test_equal_batches_are_reported_with_accumulation(pair):
    def train():
        return collect_warnings(same_batches, gradient_accumulation_steps=2)

    assert [len(messages) for messages in pair.run(train)] == [1, 0]


def different_batches(accelerator):
    return [batch(10 * accelerator.process_index + step) for step in range(4)]


def different_batches_in_a_dict(accelerator):
    return [batch(step, scale={"by": torch.tensor(accelerator.process_index)}) for step in range(4)]


def without_tensors(_):
    return [((), {})] * 4


def prepared_loader(accelerator):
    loader = accelerator.prepare(DataLoader(torch.ones(8, 2)))
    return [([x], {}) for x in loader]


@pytest.mark.parametrize(
    "batches", [different_batches, different_batches_in_a_dict, without_tensors, prepared_loader]
)
def test_different_batches_and_prepared_loaders_are_not_reported(pair, batches):
    assert pair.run(collect_warnings, batches) == [[], []]
