"""Sharing out a sequence: every item to exactly one rank."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.state import split_bounds, split_items

Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024 - what scripts have


class Rows(list):
    """Like a dataset of `datasets`: it has a length and `select`."""

    def select(self, indices):
        return Rows([self[i] for i in indices])


class Dataset:
    """One that is no list."""

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def select(self, indices):
        return Dataset([self.items[i] for i in indices])


def parts(inputs, world_size, *, pad=False):
    return [split_items(inputs, rank, world_size, pad=pad) for rank in range(world_size)]


@given(st.integers(0, 200), st.integers(1, 17))
def test_every_item_goes_to_exactly_one_rank_and_the_first_ones_get_one_more(length, world_size):
    ends = [split_bounds(length, rank, world_size) for rank in range(world_size)]
    assert [i for begin, end in ends for i in range(begin, end)] == list(range(length))
    sizes = [end - begin for begin, end in ends]
    assert sizes == [length // world_size + (rank < length % world_size) for rank in range(world_size)]


@given(
    st.integers(0, 40),
    st.integers(1, 6),
    st.sampled_from([list, tuple, torch.tensor, Dataset]),
    st.booleans(),
)
def test_all_kinds_are_split_alike_and_padding_repeats_the_last_item(length, world_size, kind, pad):
    if pad and length == 0 and world_size > 1:
        return
    got = parts(kind(list(range(length))), world_size, pad=pad)
    lists = [p.items if kind is Dataset else [int(i) for i in p] for p in got]
    real = [item for rank, own in enumerate(lists) for item in own[: _own(length, rank, world_size)]]
    assert real == list(range(length))
    extra = [item for rank, own in enumerate(lists) for item in own[_own(length, rank, world_size) :]]
    assert set(extra) <= {length - 1}
    assert not pad or len({len(own) for own in lists}) == 1
    assert pad or not extra


def _own(length, rank, world_size):
    begin, end = split_bounds(length, rank, world_size)
    return end - begin


def test_a_dict_is_split_value_by_value_also_nested_and_is_left_as_it_was():
    inputs = {"text": ["a", "b", "c"], "rest": {"x": torch.arange(3), "y": (1, 2, 3)}, "set": Dataset("abc")}
    before = copy.deepcopy(inputs)
    first, second = parts(inputs, 2)
    assert first["text"] == ["a", "b"]
    assert second["text"] == ["c"]
    assert first["rest"]["x"].tolist() == [0, 1]
    assert second["rest"]["y"] == (3,)
    assert first["set"].items == ["a", "b"]
    assert inputs["text"] == before["text"]
    assert torch.equal(inputs["rest"]["x"], before["rest"]["x"])
    assert list(inputs) == list(before)


def test_a_list_that_is_padded_is_another_list():
    inputs = [1]
    assert parts(inputs, 3, pad=True) == [[1], [1], [1]]
    assert inputs == [1]


def test_fewer_items_than_ranks_leave_some_with_nothing():
    assert parts(["only"], 3) == [["only"], [], []]
    assert [p.shape for p in parts(torch.ones(1, 4), 3)] == [(1, 4), (0, 4), (0, 4)]


def test_rows_of_a_tensor_are_repeated_whole():
    assert parts(torch.tensor([[1, 2], [3, 4], [5, 6]]), 2, pad=True)[1].tolist() == [[5, 6], [5, 6]]


def test_a_part_of_a_named_tuple_is_a_tuple():
    assert parts(Pair(1, 2), 2) == [(1,), (2,)]


@pytest.mark.parametrize("empty", [[], {}, {"a": []}, torch.empty(0, 2)], ids=str)
def test_padding_nothing_is_refused_where_there_is_somebody_to_pad_for(empty):
    with pytest.raises(ValueError, match="cannot pad an empty input"):
        split_items(empty, 0, 2, pad=True)
    assert split_items(empty, 0, 1, pad=True) is not None


def test_values_of_different_length_are_refused_by_name():
    with pytest.raises(ValueError, match=r"differ in length \(a: 2, b: 3\)"):
        split_items({"a": [1, 2], "b": [1, 2, 3]}, 0, 2)


@pytest.mark.parametrize("odd", ["text", 3, {1, 2}, torch.tensor(1), {"a": 3}], ids=repr)
def test_what_cannot_be_split_is_refused(odd):
    with pytest.raises(TypeError, match=r"Cannot split a .* between processes"):
        split_items(odd, 0, 2)
