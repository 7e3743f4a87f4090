"""Sharding of rows over devices: inputs, and outputs with the same number of rows."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_runtime.extensions.xla.spmd import RowSharding

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@dataclass
class Answer:
    """An output that is a dataclass."""

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]
    text: str = "nothing to cut"


def build_row_sharding(marked=None):
    def sharding(rank):
        return SimpleNamespace(xla_spec=lambda _: f"first of {rank}")

    return RowSharding(4, sharding, (marked if marked is not None else []).append)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8,), "first of 1"),
        ((4, 3), "first of 2"),
        ((12, 0, 2), "first of 3"),
        ((), None),
        ((0, 3), None),
        ((6, 4), None),
        ((2,), None),
    ],
)
def test_a_tensor_is_sharded_by_rows_if_the_devices_divide_them(shape, expected):
    assert build_row_sharding().xla_spec(torch.zeros(shape)) == expected


def test_outputs_with_the_rows_of_the_input_are_sharded_in_any_container():
    def passed(*args, output, **kwargs):
        marked = []
        build_row_sharding(marked).shard_outputs(nn.Identity(), args, kwargs, output)
        return [tuple(tensor.shape) for tensor in marked]

    batch, other, total = torch.zeros(8, 2), torch.zeros(4, 2), torch.tensor(1.0)
    assert passed(batch, output=batch) == [(8, 2)]
    assert passed(batch, output=(total, [batch, other])) == [(8, 2)]
    assert passed(rows={"x": batch}, output=OrderedDict(loss=total, logits=batch)) == [(8, 2)]
    assert passed(batch, output=Answer(batch, (other, batch))) == [(8, 2), (8, 2)]
    assert passed(torch.zeros(6, 2), output=torch.zeros(6, 2)) == []
    assert passed(batch, output="a text") == []
    assert passed(batch, output=Answer) == []


def test_deepcopy_keeps_the_row_sharding_of_a_hook():
    module = build_row_sharding()
    assert copy.deepcopy([module])[0] is module
