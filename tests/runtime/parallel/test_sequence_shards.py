"""The slices of a sequence: each position belongs to one rank, and causal work is balanced."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from accel_runtime.parallel.sharded_attention import join_sequence, sequence_slices, slice_sequence


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_each_position_is_in_one_slice_and_all_have_equal_length(parts):
    for length in range(parts, 10 * parts, parts):
        positions_by_part = [
            list(chain.from_iterable(range(*span) for span in sequence_slices(length, parts, part)))
            for part in range(parts)
        ]
        assert sorted(chain.from_iterable(positions_by_part)) == list(range(length))
        assert {len(positions) for positions in positions_by_part} == {length // parts}
        assert all(positions == sorted(positions) for positions in positions_by_part)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_all_ranks_have_equal_causal_work(parts):
    work = {
        sum(position + 1 for span in sequence_slices(6 * 2 * parts, parts, part) for position in range(*span))
        for part in range(parts)
    }
    assert len(work) == 1


def test_a_length_that_is_not_divisible_is_rejected():
    with pytest.raises(
        ValueError, match=r"A sequence of 10 .* 4 ranks \(cp: 4\) .* Pad or truncate it to 8 or 12"
    ):
        sequence_slices(10, 4, 0)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(("length", "parts"), [(6, 1), (12, 3), (9, 3), (16, 4)])
def test_joining_the_slices_restores_the_sequence(dim, length, parts):
    shape = [2, 3, 4]
    shape[dim] = length
    sequence = torch.arange(torch.Size(shape).numel()).view(shape)
    assert torch.equal(
        join_sequence([slice_sequence(sequence, dim, parts, part) for part in range(parts)], dim), sequence
    )
