"""Buffers that are broadcast from the first rank."""

from __future__ import annotations

import torch
from torch import nn

from accel_runtime.parallel.fully_shard import build_buffer_broadcast


def test_persistent_buffers_are_broadcast_together_and_others_are_not():
    model = nn.BatchNorm1d(2)
    model.register_buffer("table", torch.zeros(9), persistent=False)
    model.register_buffer("none", None)
    sent = []

    def broadcast(tensor):
        sent.append(tensor.numel())
        return tensor + 1

    build_buffer_broadcast(model, broadcast)(())
    assert sorted(sent) == [1, 4]
    assert model.running_mean.tolist() == [1, 1]
    assert model.running_var.tolist() == [2, 2]
    assert model.num_batches_tracked.item() == 1
    assert model.table.tolist() == [0] * 9


def test_a_replaced_buffer_is_broadcast():
    model = nn.BatchNorm1d(2)
    shared = build_buffer_broadcast(model, lambda tensor: tensor + 1)
    model.running_mean = torch.full((2,), 5.0)
    shared(())
    assert model.running_mean.tolist() == [6, 6]


def test_buffers_on_meta_are_not_broadcast():
    model = nn.BatchNorm1d(2, device="meta")
    build_buffer_broadcast(model, lambda _: None)(())
    assert model.running_mean.is_meta
