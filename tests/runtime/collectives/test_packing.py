"""Tensors lie in one row of bytes and come back as they were."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.collectives.tensors import (
    build_layout,
    pack_into,
    unpack_row,
    unpack_rows,
)
from accel_runtime.nested import TensorSpec

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
SHAPES = st.lists(st.integers(0, 3), max_size=3)
SPECS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6)


def planned(specs):
    return build_layout(tuple(TensorSpec(dtype, tuple(shape), "cpu") for dtype, shape in specs))


def drawn(specs):
    return [torch.randn(shape).mul(9).to(dtype) for dtype, shape in specs]


def packed(specs, world):
    """A row a rank of numbers that differ, and what they were made of."""
    everyone = [drawn(specs) for _ in range(world)]
    rows = torch.zeros(world, planned(specs).size, dtype=torch.uint8)
    for tensors, row in zip(everyone, rows, strict=True):
        pack_into(tensors, planned(specs), row)
    return rows, everyone


@given(SPECS, st.integers(1, 3))
def test_any_tensors_of_several_ranks_come_back_joined(specs, world):
    rows, everyone = packed(specs, world)
    joined = unpack_rows(rows, planned(specs))
    for got, own in zip(joined, zip(*everyone, strict=True), strict=True):
        wanted = torch.cat(own) if own[0].dim() else torch.stack(own)
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@given(SPECS)
def test_any_tensors_of_one_rank_come_back_as_views(specs):
    rows, everyone = packed(specs, 1)
    for got, wanted in zip(unpack_row(rows[0], planned(specs)), everyone[0], strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@given(SPECS, st.integers(1, 3))
def test_any_tensors_are_combined_over_the_ranks(specs, world):
    rows, everyone = packed(specs, world)
    last = unpack_row(rows, planned(specs), lambda numbers: numbers[-1])
    for got, wanted in zip(last, everyone[-1], strict=True):
        assert torch.equal(got, wanted)


def test_what_is_not_contiguous_or_needs_a_gradient_is_packed_as_it_reads():
    tensors = [
        torch.arange(6.0).view(2, 3).T.requires_grad_(),
        torch.tensor([1j, 2]).conj(),
        torch.ones(1).expand(3),
    ]
    plan = build_layout(tuple(TensorSpec(t.dtype, t.shape, "cpu") for t in tensors))
    row = torch.zeros(plan.size, dtype=torch.uint8)
    pack_into(tensors, plan, row)
    for got, wanted in zip(unpack_row(row, plan), tensors, strict=True):
        assert torch.equal(got, wanted)
        assert not got.requires_grad


def test_results_that_were_packed_together_do_not_share_memory():
    specs = [(torch.float32, [2])] * 3
    rows, _ = packed(specs, 2)
    first, second, _ = unpack_rows(rows, planned(specs))
    before = second.clone()
    first.zero_()
    assert torch.equal(second, before)
    assert first.untyped_storage().nbytes() == first.nbytes
