"""The places of a sequence: every one is some rank's, once, and causal work is shared out equally."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from accel_runtime.parallel.context_parallel import join_sequence, sequence_slices, slice_sequence


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_every_place_is_in_one_part_and_all_are_equally_long(parts):
    for length in range(parts, 10 * parts, parts):
        own = [
            list(chain.from_iterable(range(*span) for span in sequence_slices(length, parts, part)))
            for part in range(parts)
        ]
        assert sorted(chain.from_iterable(own)) == list(range(length))
        assert {len(places) for places in own} == {length // parts}
        assert all(places == sorted(places) for places in own)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_every_part_sees_as_many_earlier_places(parts):
    work = {
        sum(place + 1 for span in sequence_slices(6 * 2 * parts, parts, part) for place in range(*span))
        for part in range(parts)
    }
    assert len(work) == 1


def test_a_length_that_would_leave_parts_of_unlike_length_is_refused():
    with pytest.raises(ValueError, match=r"a sequence of 10 .* 4 ranks \(cp: 4\): pad or cut it to 8 or 12"):
        sequence_slices(10, 4, 0)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(("length", "parts"), [(6, 1), (12, 3), (9, 3), (16, 4)])
def test_parts_make_the_whole_again(dim, length, parts):
    shape = [2, 3, 4]
    shape[dim] = length
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    assert torch.equal(
        join_sequence([slice_sequence(whole, dim, parts, part) for part in range(parts)], dim), whole
    )
