"""Collectives over nested data, checked before anything is sent."""

from __future__ import annotations

import os
import time
from difflib import Match as Named  # a named tuple that every process can unpickle

import pytest
import torch

from accel_runtime.backends import connect
from accel_runtime.collectives import MismatchError, gather, gather_valid, reduce
from accel_runtime.env import Settings
from accel_runtime.topology import Topology


def backend():
    return connect(Settings.from_env(os.environ), Topology.from_env(os.environ))


def test_gather_concatenates_nested_tensors_in_rank_order(ranks):
    def gathered():
        b = backend()
        own = torch.tensor([[b.topology.rank * 2], [b.topology.rank * 2 + 1]])
        return gather({"x": own, "y": [own.float(), (own > 1,)]}, b)

    x = torch.arange(2 * ranks.size).view(-1, 1)
    for got in ranks.run(gathered):
        assert torch.equal(got["x"], x)
        assert torch.equal(got["y"][0], x.float())
        assert torch.equal(got["y"][1][0], x > 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(2,), (0, 3), (2, 0)])
def test_gather_keeps_dtype_and_shape(ranks, dtype, shape):
    def gathered(dtype, shape):
        return gather(torch.ones(shape, dtype=dtype), backend())

    wanted = torch.ones((shape[0] * ranks.size, *shape[1:]), dtype=dtype)
    for got in ranks.run(gathered, dtype, shape):
        assert got.dtype == dtype
        assert torch.equal(got, wanted)


def test_a_scalar_a_rank_becomes_one_entry_a_rank(several):
    def gathered():
        b = backend()
        return gather(torch.tensor(b.topology.rank), b).tolist()

    assert several.run(gathered) == [list(range(several.size))] * several.size


def test_what_is_gathered_carries_no_gradient(several):
    def gathered():
        return gather(torch.ones(2, requires_grad=True) * 2, backend()).requires_grad

    assert several.run(gathered) == [False] * several.size


def test_one_process_gets_its_own_data_back(alone):
    data = {"x": torch.ones(2)}
    assert gather(data, backend()) is data
    assert gather_valid(data, (1,), 2, backend()) is data


@pytest.mark.parametrize(
    ("reduction", "wanted"),
    [
        ("sum", lambda n: n * (n + 1) / 2),
        ("mean", lambda n: (n + 1) / 2),
        ("max", lambda n: n),
        ("min", lambda _: 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_reduce_combines_nested_tensors_into_new_ones(ranks, reduction, wanted, dtype):
    def reduced(reduction, dtype):
        b = backend()
        mine = torch.full((2,), b.topology.rank + 1, dtype=dtype)
        total = reduce({"x": [mine]}, reduction, b)["x"][0]
        assert total is not mine
        assert mine.tolist() == [b.topology.rank + 1] * 2
        return total

    for got in ranks.run(reduced, reduction, dtype):
        assert got.tolist() == [wanted(ranks.size)] * 2
        whole = reduction == "mean" and not dtype.is_floating_point
        assert got.dtype == (torch.float32 if whole else dtype)


def test_scalars_empty_and_complex_tensors_are_reduced_too(ranks):
    def reduced():
        b = backend()
        return reduce([torch.tensor(1.0), torch.ones(0), torch.tensor([1 + 2j])], "mean", b)

    for scalar, empty, complex_ in ranks.run(reduced):
        assert scalar == 1
        assert empty.shape == (0,)
        assert complex_.tolist() == [1 + 2j]


def test_an_unknown_reduction_is_refused(alone):
    with pytest.raises(ValueError, match="sum, mean, max or min; it is 'median'"):
        reduce(torch.ones(1), "median", backend())


# Disagreement ----------------------------------------------------------------------------


def different(kind, rank):
    """A call that differs on the last rank from that of the others."""
    b = backend()
    odd = rank == b.topology.world_size - 1
    calls = {
        "shape": lambda: gather({"x": torch.ones(3 if odd else 2)}, b),
        "dtype": lambda: gather([torch.ones(2, dtype=torch.int64 if odd else torch.float32)], b),
        "structure": lambda: gather({"b" if odd else "a": torch.ones(2)}, b),
        "fewer tensors": lambda: gather([torch.ones(2)] * (1 if odd else 2), b),
        "operation": lambda: (reduce if odd else gather)(torch.ones(2), *["sum"] * odd, b),
        "reduction": lambda: reduce(torch.ones(2), "max" if odd else "sum", b),
        "objects": lambda: gather_valid(["a"] if odd else torch.ones(1), (1,) * b.topology.world_size, 1, b),
        "no tensor": lambda: gather([2.0 if odd else torch.ones(1)], b),
    }
    return calls[kind]()


def named(kind):
    """What the last rank's line says of its call."""
    return {
        "shape": "gather ['x']: float32[3] on cpu",
        "dtype": "gather [0]: int64[2] on cpu",
        "structure": "gather ['b']: float32[2] on cpu",
        "fewer tensors": "gather [0]: float32[2] on cpu",
        "operation": "reduce sum : float32[2] on cpu",
        "reduction": "reduce max : float32[2] on cpu",
        "objects": "gather_for_metrics of objects",
        "no tensor": "gather [0]: float",
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["shape", "dtype", "structure", "fewer tensors", "operation", "reduction", "objects", "no tensor"],
)
def test_ranks_that_disagree_all_get_an_error_that_lists_their_calls_and_can_go_on(several, kind):
    def mismatched(kind):
        b = backend()
        started = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            different(kind, b.topology.rank)
        went_on = gather(torch.tensor([b.topology.rank]), b).tolist()
        return str(caught.value), time.monotonic() - started, went_on

    for message, seconds, went_on in several.run(mismatched, kind):
        *others, last = message.splitlines()[1:]
        assert last == f"  rank {several.size - 1}: {named(kind)}"
        assert [line.split(":")[0] for line in others] == [
            f"  rank {rank}" for rank in range(several.size - 1)
        ]
        assert seconds < 5
        assert went_on == list(range(several.size))


def test_what_is_no_tensor_is_named_by_its_place_on_every_rank(ranks):
    def refused():
        with pytest.raises(TypeError, match=r"data\['x'\]\[1\] is str"):
            reduce({"x": [torch.ones(1), "text"]}, "sum", backend())
        return True

    assert all(ranks.run(refused))


def test_gather_refuses_what_is_no_tensor(several):
    def refused():
        with pytest.raises(TypeError, match="data is float"):
            gather(1.5, backend())
        return True

    assert all(several.run(refused))


# Without repeats -------------------------------------------------------------------------


def valid_of(data, *, size=2, short=1):
    """`gather_valid` of a step whose last rank has `short` samples and then repeats."""
    b = backend()
    world = b.topology.world_size
    return gather_valid(data(b.topology.rank), (*(size,) * (world - 1), short), size, b)


def test_repeats_are_left_out_of_tensors(several):
    def gathered():
        return valid_of(lambda rank: torch.tensor([rank * 2, rank * 2 + 1])).tolist()

    assert several.run(gathered) == [list(range(2 * several.size - 1))] * several.size


def test_all_rows_of_a_sample_are_kept_or_left_out_together(several):
    def gathered():
        return valid_of(lambda rank: torch.arange(6).view(6, 1) + rank * 6)

    for got in several.run(gathered):
        assert got.flatten().tolist() == list(range(6 * several.size - 3))


def test_rows_that_do_not_fit_the_samples_are_refused_on_every_rank(several):
    def refused():
        with pytest.raises(ValueError, match="a tensor of 3 rows for a batch of 2 samples"):
            valid_of(lambda _: torch.arange(3))
        return True

    assert all(several.run(refused))


def test_a_scalar_a_rank_is_kept_from_every_rank_even_from_one_without_samples(several):
    def gathered():
        tensors = valid_of(torch.tensor, short=0)
        objects = valid_of(lambda rank: {"loss": float(rank), "texts": ["a", "b"]}, short=0)
        return tensors.tolist(), objects["loss"]

    assert several.run(gathered) == [(list(range(several.size)), list(range(several.size)))] * several.size


def test_columns_of_objects_lose_their_repeats_and_keep_their_container(several):
    def gathered():
        def texts(rank):
            return [f"{rank}a", f"{rank}b"]

        as_dict = valid_of(lambda rank: {"ids": torch.tensor([rank * 2, rank * 2 + 1]), "texts": texts(rank)})
        as_tuple = valid_of(lambda rank: (texts(rank), [rank, rank]))
        as_collated = valid_of(lambda rank: [torch.tensor([rank, rank]), tuple(texts(rank))])
        named = valid_of(lambda rank: Named(a=float(rank), b=texts(rank), size=rank))
        assert type(named) is Named
        return as_dict["ids"].tolist(), as_dict["texts"], as_tuple, as_collated[1], named.b

    texts = [f"{rank}{letter}" for rank in range(several.size) for letter in "ab"][:-1]
    numbers = [rank for rank in range(several.size) for _ in "ab"][:-1]
    ids = list(range(2 * several.size - 1))
    assert several.run(gathered) == [(ids, texts, (texts, numbers), texts, texts)] * several.size


@pytest.mark.parametrize("sample", [{"id": 3}, ["two", "words"], ("a", 1), 7], ids=str)
def test_a_list_has_one_entry_a_sample_whatever_the_entries_are(several, sample):
    def gathered(sample):
        return valid_of(lambda _: [sample, sample])

    assert several.run(gathered, sample) == [[sample] * (2 * several.size - 1)] * several.size


def test_a_list_that_is_not_one_entry_a_sample_is_kept_whole(several):
    def gathered():
        return valid_of(lambda rank: [f"note of {rank}"])

    assert several.run(gathered) == [[f"note of {rank}" for rank in range(several.size)]] * several.size


def test_lists_of_different_lengths_are_joined_also_where_one_is_empty(several):
    def gathered():
        return valid_of(lambda rank: [rank] * rank, size=9)

    joined = [rank for rank in range(several.size) for _ in range(rank)]
    assert several.run(gathered) == [joined] * several.size


def test_objects_are_gathered_outside_of_all_loops_too(several):
    def gathered():
        merged = valid_of(lambda rank: {"ids": torch.tensor([rank]), "texts": ["a"]}, size=0, short=0)
        return merged["ids"].tolist(), merged["texts"]

    assert several.run(gathered) == [(list(range(several.size)), ["a"] * several.size)] * several.size
