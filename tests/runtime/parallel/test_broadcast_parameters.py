"""Parameters and buffers are broadcast from the first rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.parallel.fully_shard import broadcast_parameters


def build_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[0].weight = model[2].weight if model[0].weight.shape == model[2].weight.shape else model[0].weight
    return model


def broadcast_and_list(make):
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    model = make()
    broadcast_parameters(model, accelerator._backend)
    return [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())]


def test_all_ranks_get_the_values_of_the_first_rank(ranks):
    torch.manual_seed(0)
    expected = build_model()
    results = ranks.run(broadcast_and_list, build_model)
    assert results == [[t.tolist() for t in (*expected.parameters(), *expected.buffers())]] * ranks.size


def test_models_of_different_shapes_are_rejected_by_name(pair):
    def other():
        return nn.Linear(2 + Accelerator().process_index, 2)

    with pytest.raises(
        AssertionError,
        match=r"Linear differs between rank 1 and rank 0: weight is \[2, 3\] float32, and on rank 0 \[2, 2\]",
    ):
        pair.run(broadcast_and_list, other)


def test_a_model_on_meta_on_only_some_ranks_is_rejected(pair):
    def other():
        return nn.Linear(2, 2, device="meta" if Accelerator().process_index else "cpu")

    with pytest.raises(AssertionError, match="weight is on the meta device on one of them only"):
        pair.run(broadcast_and_list, other)
