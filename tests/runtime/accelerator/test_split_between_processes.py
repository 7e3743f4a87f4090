"""Splitting a sequence between processes."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.accelerator.state import split_bounds, split_items

Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024 - what scripts have


class Rows(list):
    """A list with `select`, as a dataset of the `datasets` library."""

    def select(self, indices):
        return Rows([self[i] for i in indices])


class Dataset:
    """A dataset that is not a list."""

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def select(self, indices):
        return Dataset([self.items[i] for i in indices])


def split_for_all_ranks(inputs, world_size, *, pad=False):
    return [split_items(inputs, rank, world_size, pad=pad) for rank in range(world_size)]


@given(st.integers(0, 200), st.integers(1, 17))
def test_each_item_belongs_to_one_rank_and_the_first_ranks_get_one_more(length, world_size):
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
def test_all_kinds_of_inputs_are_split_equally_and_padded_with_the_last_item(length, world_size, kind, pad):
    if pad and length == 0 and world_size > 1:
        return
    actual = split_for_all_ranks(kind(list(range(length))), world_size, pad=pad)
    lists = [p.items if kind is Dataset else [int(i) for i in p] for p in actual]
    real = [
        item
        for rank, rank_items in enumerate(lists)
        for item in rank_items[: count_items(length, rank, world_size)]
    ]
    assert real == list(range(length))
    extra = [
        item
        for rank, rank_items in enumerate(lists)
        for item in rank_items[count_items(length, rank, world_size) :]
    ]
    assert set(extra) <= {length - 1}
    assert not pad or len({len(rank_items) for rank_items in lists}) == 1
    assert pad or not extra


def count_items(length, rank, world_size):
    begin, end = split_bounds(length, rank, world_size)
    return end - begin


def test_a_nested_dict_is_split_by_value_and_not_modified():
    inputs = {"text": ["a", "b", "c"], "rest": {"x": torch.arange(3), "y": (1, 2, 3)}, "set": Dataset("abc")}
    before = copy.deepcopy(inputs)
    first, second = split_for_all_ranks(inputs, 2)
    assert first["text"] == ["a", "b"]
    assert second["text"] == ["c"]
    assert first["rest"]["x"].tolist() == [0, 1]
    assert second["rest"]["y"] == (3,)
    assert first["set"].items == ["a", "b"]
    assert inputs["text"] == before["text"]
    assert torch.equal(inputs["rest"]["x"], before["rest"]["x"])
    assert list(inputs) == list(before)


def test_padding_does_not_modify_the_input_list():
    inputs = [1]
    assert split_for_all_ranks(inputs, 3, pad=True) == [[1], [1], [1]]
    assert inputs == [1]


def test_ranks_beyond_the_number_of_items_get_empty_parts():
    assert split_for_all_ranks(["only"], 3) == [["only"], [], []]
    assert [p.shape for p in split_for_all_ranks(torch.ones(1, 4), 3)] == [(1, 4), (0, 4), (0, 4)]


def test_padding_repeats_whole_rows_of_a_tensor():
    assert split_for_all_ranks(torch.tensor([[1, 2], [3, 4], [5, 6]]), 2, pad=True)[1].tolist() == [
        [5, 6],
        [5, 6],
    ]


def test_a_part_of_a_named_tuple_is_a_tuple():
    assert split_for_all_ranks(Pair(1, 2), 2) == [(1,), (2,)]


@pytest.mark.parametrize("empty", [[], {}, {"a": []}, torch.empty(0, 2)], ids=str)
def test_padding_an_empty_input_is_rejected_for_several_ranks(empty):
    with pytest.raises(ValueError, match="cannot pad an empty input"):
        split_items(empty, 0, 2, pad=True)
    assert split_items(empty, 0, 1, pad=True) is not None


def test_values_of_different_lengths_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"differ in length \(a: 2, b: 3\)"):
        split_items({"a": [1, 2], "b": [1, 2, 3]}, 0, 2)


@pytest.mark.parametrize("inputs", ["text", 3, {1, 2}, torch.tensor(1), {"a": 3}], ids=repr)
def test_inputs_that_cannot_be_split_are_rejected(inputs):
    with pytest.raises(TypeError, match=r"Cannot split a .* between processes"):
        split_items(inputs, 0, 2)
