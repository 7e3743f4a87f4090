"""Packing of tensors into one row of bytes, and unpacking."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.backends.tensors import (
    build_layout,
    pack_into,
    unpack_row,
    unpack_rows,
)
from accel_runtime.foundation.nested import TensorSpec

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
SHAPES = st.lists(st.integers(0, 3), max_size=3)
SPECS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6)


def build_plan(specs):
    return build_layout(tuple(TensorSpec(dtype, tuple(shape), "cpu") for dtype, shape in specs))


def draw_tensors(specs):
    return [torch.randn(shape).mul(9).to(dtype) for dtype, shape in specs]


def pack_ranks(specs, world):
    """Return one packed row per rank, and the tensors of each rank."""
    everyone = [draw_tensors(specs) for _ in range(world)]
    rows = torch.zeros(world, build_plan(specs).size, dtype=torch.uint8)
    for tensors, row in zip(everyone, rows, strict=True):
        pack_into(tensors, build_plan(specs), row)
    return rows, everyone


@given(SPECS, st.integers(1, 3))
def test_packed_tensors_of_several_ranks_are_unpacked_concatenated(specs, world):
    rows, everyone = pack_ranks(specs, world)
    joined = unpack_rows(rows, build_plan(specs))
    for actual, rank_tensors in zip(joined, zip(*everyone, strict=True), strict=True):
        expected = torch.cat(rank_tensors) if rank_tensors[0].dim() else torch.stack(rank_tensors)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@given(SPECS)
def test_packed_tensors_of_one_rank_are_unpacked_unchanged(specs):
    rows, everyone = pack_ranks(specs, 1)
    for actual, expected in zip(unpack_row(rows[0], build_plan(specs)), everyone[0], strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@given(SPECS, st.integers(1, 3))
def test_unpacking_applies_a_function_over_the_ranks(specs, world):
    rows, everyone = pack_ranks(specs, world)
    last = unpack_row(rows, build_plan(specs), lambda numbers: numbers[-1])
    for actual, expected in zip(last, everyone[-1], strict=True):
        assert torch.equal(actual, expected)


def test_noncontiguous_tensors_and_tensors_with_gradients_are_packed():
    tensors = [
        torch.arange(6.0).view(2, 3).T.requires_grad_(),
        torch.tensor([1j, 2]).conj(),
        torch.ones(1).expand(3),
    ]
    plan = build_layout(tuple(TensorSpec(t.dtype, t.shape, "cpu") for t in tensors))
    row = torch.zeros(plan.size, dtype=torch.uint8)
    pack_into(tensors, plan, row)
    for actual, expected in zip(unpack_row(row, plan), tensors, strict=True):
        assert torch.equal(actual, expected)
        assert not actual.requires_grad


def test_unpacked_results_do_not_share_memory():
    specs = [(torch.float32, [2])] * 3
    rows, _ = pack_ranks(specs, 2)
    first, second, _ = unpack_rows(rows, build_plan(specs))
    before = second.clone()
    first.zero_()
    assert torch.equal(second, before)
    assert first.untyped_storage().nbytes() == first.nbytes
