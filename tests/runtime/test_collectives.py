"""Collectives of nested data, which are compared between ranks before data is sent."""

from __future__ import annotations

import math
import os
import warnings
from difflib import Match as Named  # a named tuple of the standard library, which every process can unpickle
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from accel_runtime import Accelerator
from accel_runtime.backends import connect
from accel_runtime.backends.tensors import broadcast, gather, pad_across_processes, reduce
from accel_runtime.collectives.handshake import MismatchError, scatter_objects
from accel_runtime.data.metrics import (
    broadcast_object_list,
    gather_object,
    gather_samples,
)
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import StepInfo
from accel_runtime.foundation.nested import leaves


def connect_backend():
    return connect(Settings.from_env(os.environ), Topology.from_env(os.environ))


def test_gather_concatenates_nested_tensors_in_rank_order(ranks):
    def gathered():
        b = connect_backend()
        tensor = torch.tensor([[b.topology.rank * 2], [b.topology.rank * 2 + 1]])
        return gather({"x": tensor, "y": [tensor.float(), (tensor > 1,)]}, b)

    x = torch.arange(2 * ranks.size).view(-1, 1)
    for actual in ranks.run(gathered):
        assert torch.equal(actual["x"], x)
        assert torch.equal(actual["y"][0], x.float())
        assert torch.equal(actual["y"][1][0], x > 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(2,), (0, 3), (2, 0)])
def test_gather_keeps_dtype_and_shape(ranks, dtype, shape):
    def gathered(dtype, shape):
        return gather(torch.ones(shape, dtype=dtype), connect_backend())

    expected = torch.ones((shape[0] * ranks.size, *shape[1:]), dtype=dtype)
    for actual in ranks.run(gathered, dtype, shape):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)


def test_gather_returns_one_entry_for_the_scalar_of_each_rank(several):
    def gathered():
        b = connect_backend()
        return gather(torch.tensor(b.topology.rank), b).tolist()

    assert several.run(gathered) == [list(range(several.size))] * several.size


def test_gathered_tensors_do_not_require_gradients(several):
    def gathered():
        return gather(torch.ones(2, requires_grad=True) * 2, connect_backend()).requires_grad

    assert several.run(gathered) == [False] * several.size


def test_collectives_of_one_process_return_their_input(alone):
    data = {"x": torch.ones(2)}
    assert gather(data, connect_backend()) is data
    assert gather_samples(data, [], connect_backend()) is data
    assert pad_across_processes(data, connect_backend()) is data
    assert broadcast(data, connect_backend()) is data


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", lambda n: n * (n + 1) / 2),
        ("mean", lambda n: (n + 1) / 2),
        ("max", lambda n: n),
        ("min", lambda _: 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_reduce_combines_nested_tensors_into_new_ones(ranks, reduction, expected, dtype):
    def reduced(reduction, dtype):
        b = connect_backend()
        tensor = torch.full((2,), b.topology.rank + 1, dtype=dtype)
        total = reduce({"x": [tensor]}, reduction, b)["x"][0]
        assert total is not tensor
        assert tensor.tolist() == [b.topology.rank + 1] * 2
        return total

    for actual in ranks.run(reduced, reduction, dtype):
        assert actual.tolist() == [expected(ranks.size)] * 2
        is_integer_mean = reduction == "mean" and not dtype.is_floating_point
        assert actual.dtype == (torch.float32 if is_integer_mean else dtype)


class LargeStorages(TorchDispatchMode):
    """Records the operations that return a tensor of at least so many bytes in memory of its own."""

    def __init__(self, size):
        super().__init__()
        self.size, self.operations = size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {
            tensor.untyped_storage().data_ptr()
            for tensor in leaves([args, kwargs or {}])
            if is_tensor(tensor)
        }
        for tensor in filter(is_tensor, leaves(result)):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.size and storage.data_ptr() not in known:
                self.operations.append(str(function))
        return result


def is_tensor(leaf):
    return isinstance(leaf, torch.Tensor)


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize("parts", [1, 4])
def test_reduce_of_large_tensors_copies_them_once(pair, reduction, parts):
    def reduced():
        b = connect_backend()
        tensors = list(torch.ones(4 * 10_000).split(40_000 // parts))
        with LargeStorages(160_000) as mode:
            reduce(tensors, reduction, b)
        assert all(tensor.eq(1).all() for tensor in tensors)
        return mode.operations

    assert pair.run(reduced) == [["aten.cat.default"]] * 2


def test_reduce_accepts_scalars_empty_and_complex_tensors(ranks):
    def reduced():
        b = connect_backend()
        return reduce([torch.tensor(1.0), torch.ones(0), torch.tensor([1 + 2j])], "mean", b)

    for scalar, empty, complex_ in ranks.run(reduced):
        assert scalar == 1
        assert empty.shape == (0,)
        assert complex_.tolist() == [1 + 2j]


def test_an_unknown_reduction_is_rejected(alone):
    with pytest.raises(ValueError, match="Invalid reduction 'median': expected sum, mean, max or min"):
        reduce(torch.ones(1), "median", connect_backend())


def test_gather_accepts_different_numbers_of_rows_on_each_rank(several):
    def gathered(large):
        b = connect_backend()
        rank = b.topology.rank
        scale = 1000 if large else 1
        data = [torch.full((rank * scale, 3), float(rank)), torch.arange(rank + 1), torch.tensor(rank)]
        return gather(data, b)

    for large in (False, True):
        for matrix, numbers, scalars in several.run(gathered, large):
            ranks = range(several.size)
            assert matrix[:, 2].tolist() == [
                float(r) for r in ranks for _ in range(r * (1000 if large else 1))
            ]
            assert numbers.tolist() == [n for r in ranks for n in range(r + 1)]
            assert scalars.tolist() == list(ranks)


def test_gather_accepts_large_data_on_one_rank_and_small_on_others(several):
    def gathered():
        b = connect_backend()
        last = b.topology.rank == b.topology.world_size - 1
        return gather({"x": torch.full((5000 if last else 2,), b.topology.rank), "y": torch.ones(0)}, b)

    for actual in several.run(gathered):
        expected = [
            rank for rank in range(several.size) for _ in range(5000 if rank == several.size - 1 else 2)
        ]
        assert actual["x"].tolist() == expected
        assert actual["y"].shape == (0,)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32, torch.complex64]


def draw_tree(data):
    """Draw nested tensors, some with different rows on each rank, as `(dtype, trailing, rows)`."""
    leaf = st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 3), max_size=2),
        st.one_of(st.none(), st.lists(st.sampled_from([0, 1, 2, 700]), min_size=3, max_size=3)),
    )
    return data.draw(
        st.recursive(
            leaf,
            lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner)),
        )
    )


def build_tree(tree, rank):
    """Build the nested tensors of one rank."""
    if isinstance(tree, tuple):
        dtype, trailing, rows = tree
        shape = trailing if rows is None else [rows[rank], *trailing]
        shape = [] if rows is None else shape
        return (torch.arange(max(1, math.prod(shape)))[: math.prod(shape)] + rank).to(dtype).view(shape)
    if isinstance(tree, dict):
        return {key: build_tree(value, rank) for key, value in tree.items()}
    return [build_tree(value, rank) for value in tree]


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gather_of_any_nested_tensors_equals_concatenation(several, data):
    tree = draw_tree(data)

    def gathered(tree):
        b = connect_backend()
        return gather(build_tree(tree, b.topology.rank), b)

    everyone = [list(leaves(build_tree(tree, rank))) for rank in range(several.size)]
    expected = [
        torch.cat([t if t.dim() else t.view(1) for t in rank_tensors])
        for rank_tensors in zip(*everyone, strict=True)
    ]
    for actual in several.run(gathered, tree):
        gathered_leaves = leaves(actual)
        assert [(t.dtype, t.shape) for t in gathered_leaves] == [(t.dtype, t.shape) for t in expected]
        assert all(torch.equal(a, b) for a, b in zip(gathered_leaves, expected, strict=True))


@given(
    st.lists(st.tuples(st.sampled_from([torch.float32, torch.int64, torch.bfloat16]), st.integers(0, 900)))
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reduce_of_any_tensors_equals_elementwise_reduction(several, tree):
    def reduced(tree):
        b = connect_backend()
        tensors = [torch.arange(n).remainder(9).add(b.topology.rank).to(dtype) for dtype, n in tree]
        return reduce(tensors, "sum", b), reduce(tensors, "max", b)

    n = several.size
    for total, most in several.run(reduced, tree):
        for (dtype, count), t, m in zip(tree, total, most, strict=True):
            base = torch.arange(count).remainder(9)
            assert torch.equal(t, (base * n + sum(range(n))).to(dtype))
            assert torch.equal(m, (base + n - 1).to(dtype))


@pytest.mark.parametrize("size", [2, 3000], ids=["small", "large"])
def test_reduce_counts_booleans_and_applies_a_scale(ranks, size):
    def reduced(size):
        b = connect_backend()
        truths = torch.tensor([True, b.topology.rank == 0]).repeat(size)
        return (
            reduce(truths, "sum", b)[:2].tolist(),
            reduce(truths, "max", b).dtype,
            reduce(torch.ones(size), "sum", b, 0.5)[0].item(),
            reduce(torch.ones(size, dtype=torch.int16), "sum", b).dtype,
        )

    n = ranks.size
    assert ranks.run(reduced, size) == [([n, 1], torch.bool, n / 2, torch.int16)] * n


@pytest.mark.parametrize("size", [2, 3000], ids=["small", "large"])
def test_broadcast_overwrites_the_tensors_of_the_other_ranks(several, size):
    def sent(size):
        b = connect_backend()
        rank = b.topology.rank
        weight = torch.full((size, 2), float(rank), requires_grad=True)
        data = {"weight": weight, "step": torch.tensor(rank), "turned": torch.full((size, 3), rank).T}
        assert broadcast(data, b, b.topology.world_size - 1) is data
        return {key: tensor.detach().unique().tolist() for key, tensor in data.items()}

    last = several.size - 1
    assert several.run(sent, size) == [{"weight": [last], "step": [last], "turned": [last]}] * several.size


def test_broadcast_rejects_a_source_outside_the_world_size(ranks):
    def refused():
        with pytest.raises(ValueError, match=r"Invalid from_process .*: expected a rank from 0 to"):
            broadcast(torch.ones(1), connect_backend(), 9)
        with pytest.raises(ValueError, match="Invalid from_process -1"):
            broadcast_object_list([1], connect_backend(), -1)
        return True

    assert all(ranks.run(refused))


@pytest.mark.parametrize(
    ("dim", "first", "expected"),
    [(0, False, [1, 7, 7]), (-1, True, [7, 7, 1]), (1, False, [1])],
)
def test_pad_across_processes_pads_to_the_longest_tensor(several, dim, first, expected):
    def padded(dim, first):
        b = connect_backend()
        tensor = torch.ones(3 if b.topology.rank else 1)
        scalar = torch.tensor(5.0)
        actual = pad_across_processes([tensor, scalar], b, dim=dim, pad_index=7, pad_first=first)
        assert actual[1] is scalar
        return actual[0].tolist()

    assert several.run(padded, dim, first) == [expected] + [[1, 1, 1]] * (several.size - 1)


def test_pad_across_processes_keeps_other_dimensions(several):
    def padded():
        b = connect_backend()
        rank = b.topology.rank
        return list(pad_across_processes(torch.ones(rank + 1, rank + 2, dtype=torch.int64), b, dim=1).shape)

    assert several.run(padded) == [[rank + 1, several.size + 1] for rank in range(several.size)]


# Objects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3000], ids=["small", "large"])
def test_gather_object_joins_the_lists_of_all_ranks(several, size):
    def gathered(size):
        b = connect_backend()
        rank = b.topology.rank
        return gather_object([{"rank": rank, "text": "x" * size, "t": torch.ones(size) * rank}] * rank, b)

    for actual in several.run(gathered, size):
        assert [item["rank"] for item in actual] == [
            rank for rank in range(several.size) for _ in range(rank)
        ]
        assert all(item["t"].tolist() == [float(item["rank"])] * size for item in actual)
        actual[0]["t"].add_(1)


def test_gather_object_rejects_objects_that_are_not_lists(ranks):
    def refused():
        for item, kind in (({"a": 1}, "dict"), ("text", "str"), (7, "int")):
            with pytest.raises(TypeError, match=f"cannot gather an? {kind}: .* Put it into a list"):
                gather_object(item, connect_backend())
        return True

    assert all(ranks.run(refused))


def test_broadcast_object_list_overwrites_the_lists_of_other_ranks(several):
    def sent():
        b = connect_backend()
        objects = [b.topology.rank, {"x": torch.full((2,), b.topology.rank)}]
        assert broadcast_object_list(objects, b, 1) is objects
        return objects[0], objects[1]["x"].tolist()

    assert several.run(sent) == [(1, [1, 1])] * several.size


@pytest.mark.parametrize("size", [1, 5000], ids=["small", "large"])
def test_scatter_objects_gives_each_rank_its_own_object(ranks, size):
    def dealt(size):
        b = connect_backend()
        world = b.topology.world_size
        items = [{"x": torch.full((size, 2), rank), "t": (str(rank), None)} for rank in range(world)]
        received = scatter_objects("tests", items if b.topology.rank == 0 else None, b.handshake)
        received_again = scatter_objects(
            "tests", list(range(world)) if b.topology.rank == 0 else None, b.handshake
        )
        return received["x"].unique().tolist(), received["x"].shape, received["t"], received_again

    assert ranks.run(dealt, size) == [([r], (size, 2), (str(r), None), r) for r in range(ranks.size)]


def test_scatter_objects_rejects_too_few_objects_on_every_rank(several):
    def refused():
        b = connect_backend()
        with pytest.raises(
            MismatchError, match=f"expected one object per rank .{b.topology.world_size}., got 1"
        ):
            scatter_objects("tests", [1] if b.topology.rank == 0 else None, b.handshake)
        return gather(torch.tensor(b.topology.rank), b).tolist()

    assert several.run(refused) == [list(range(several.size))] * several.size


def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(several):
    def refused():
        b = connect_backend()
        with pytest.raises(MismatchError, match=r"rank 1: gather_object at .*: .*pickle"):
            gather_object([(x for x in [])] if b.topology.rank == 1 else [], b)
        return gather_object([b.topology.rank], b)

    assert several.run(refused) == [list(range(several.size))] * several.size


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_gather_rejects_a_nested_tensor(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=layout)
    with pytest.raises(TypeError, match=r"Cannot send data, nested tensor"):
        gather(nested, connect_backend())


def without_warnings(function):
    """Run a function without warnings, also in another process: torch calls some kinds of tensors experimental."""

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()

    return run


def list_special_tensors():
    """Return a tensor of each kind that is not a dense one, by name."""
    dense = torch.ones(2, 3)
    rows = [torch.ones(2), torch.ones(3)]
    return {
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "sparse_csr": dense.to_sparse_csr(),
        "sparse_csc": dense.to_sparse_csc(),
        "sparse_bsr": torch.ones(2, 2).to_sparse_bsr((1, 1)),
        "mkldnn": dense.to_mkldnn(),
        "per-channel": torch.quantize_per_channel(dense, torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "int4": torch.empty(2, dtype=torch.int4),
    }


def test_tensors_that_cannot_be_merged_are_rejected_by_name_on_one_and_on_several_processes(several):
    @without_warnings
    def refuse():
        accelerator, messages = Accelerator(), {}
        for name, tensor in list_special_tensors().items():
            for method in (accelerator.gather_for_metrics, accelerator.gather, accelerator.reduce):
                with pytest.raises(TypeError) as error:
                    method({"x": [tensor]})
                assert "data['x'][0], " in str(error.value)
                messages[name, method.__name__] = str(error.value)
        return messages

    alone = refuse()
    assert len(alone) == 24
    assert several.run(refuse) == [alone] * several.size


def test_a_list_of_special_tensors_is_gathered_as_objects(several):
    @without_warnings
    def gathered():
        tensors = [list_special_tensors()["nested"], torch.ones(2, 3).to_sparse_csr()]
        got = Accelerator().gather_for_metrics(tensors, use_gather_object=True)
        return [str(tensor.layout) for tensor in got], got[0].unbind()[1].tolist()

    assert (
        several.run(gathered)
        == [(["torch.strided", "torch.sparse_csr"] * several.size, [1, 1, 1])] * several.size
    )


NUMBERS = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("size", [(), (4,), (20000,)], ids=["scalar", "small", "large"])
def test_numbers_of_every_dtype_are_reduced(several, size):
    reductions = ("sum", "mean", "max", "min")

    @without_warnings
    def reduced():
        b = connect_backend()
        results = {}
        for dtype, reduction in product(NUMBERS, reductions):
            if dtype.is_complex and reduction in {"max", "min"}:
                continue
            total = reduce(torch.full(size, 1 + b.topology.rank, dtype=torch.float32).to(dtype), reduction, b)
            results[dtype, reduction] = (
                total.dtype,
                total.shape,
                total.to(torch.complex64).real.unique().tolist(),
            )
        return results

    world = several.size
    values = {"sum": sum(range(1, world + 1)), "mean": (1 + world) / 2, "max": world, "min": 1}
    for results in several.run(reduced):
        for (dtype, reduction), (got_dtype, shape, got) in results.items():
            expected = values[reduction]
            if dtype == torch.bool:
                expected = world if reduction == "sum" else 1
            is_integer = not (dtype.is_floating_point or dtype.is_complex)
            kept = torch.float32 if reduction == "mean" and is_integer else dtype
            kept = torch.int64 if reduction == "sum" and dtype == torch.bool else kept
            assert (got_dtype, tuple(shape), got) == (kept, size, [expected]), (dtype, reduction)


@pytest.mark.parametrize("size", [3, 20000])
def test_large_integers_without_a_sign_are_reduced_exactly(several, size):
    large = {torch.uint16: 2**16 - 3, torch.uint32: 2**32 - 3, torch.uint64: 2**64 - 3}

    def reduced():
        b = connect_backend()
        own = {
            dtype: torch.tensor([number if b.topology.rank == 0 else 2], dtype=dtype).expand(size)
            for dtype, number in large.items()
        }
        return {
            (dtype, reduction): reduce(tensor, reduction, b)[-1].item()
            for dtype, tensor in own.items()
            for reduction in ("sum", "max", "min")
        }

    for results in several.run(reduced):
        for dtype, number in large.items():
            total = (number + 2 * (several.size - 1)) % (number + 3)
            assert [results[dtype, each] for each in ("sum", "max", "min")] == [total, number, 2]


def test_dtypes_without_a_reduction_are_rejected_by_name_on_one_and_on_several_processes(several):
    def refuse():
        b, messages = connect_backend(), []
        for data, reduction in (
            ({"x": torch.ones(2, dtype=torch.complex64)}, "max"),
            (torch.empty(2, dtype=torch.bits8), "sum"),
            (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "mean"),
        ):
            with pytest.raises(TypeError) as error:
                reduce(data, reduction, b)
            messages.append(str(error.value))
        return messages

    alone = refuse()
    assert "Cannot reduce data['x'], complex64[2] on cpu: complex numbers have no max" in alone[0]
    assert several.run(refuse) == [alone] * several.size


# Without padding -------------------------------------------------------------------------


def gather_padded_step(data, *, size=2, short=1):
    """Gather the samples of a step whose last rank has `short` samples and then padding."""
    b = connect_backend()
    world = b.topology.world_size
    step = StepInfo((*(size,) * (world - 1), short), (size,) * world, is_last=True)
    return gather_samples(data(b.topology.rank), [step] if size else [], b)


def test_gather_samples_removes_padding_from_tensors(several):
    def gathered():
        return gather_padded_step(lambda rank: torch.tensor([rank * 2, rank * 2 + 1])).tolist()

    assert several.run(gathered) == [list(range(2 * several.size - 1))] * several.size


def test_gather_samples_removes_all_rows_of_a_padding_sample(several):
    def gathered():
        return gather_padded_step(lambda rank: torch.arange(6).view(6, 1) + rank * 6)

    for actual in several.run(gathered):
        assert actual.flatten().tolist() == list(range(6 * several.size - 3))


def test_rows_that_do_not_match_the_samples_are_rejected_on_every_rank(several):
    def refused():
        with pytest.raises(ValueError, match="tensors of 3 rows for batches of 2 samples"):
            gather_padded_step(lambda _: torch.arange(3))
        return True

    assert all(several.run(refused))


def test_gather_samples_keeps_the_scalar_of_a_rank_without_samples(several):
    def gathered():
        tensors = gather_padded_step(torch.tensor, short=0)
        objects = gather_padded_step(lambda rank: {"loss": float(rank), "texts": ["a", "b"]}, short=0)
        return tensors.tolist(), objects["loss"]

    assert several.run(gathered) == [(list(range(several.size)), list(range(several.size)))] * several.size


def test_gather_samples_removes_padding_from_lists_and_keeps_their_container(several):
    def gathered():
        def texts(rank):
            return [f"{rank}a", f"{rank}b"]

        as_dict = gather_padded_step(
            lambda rank: {"ids": torch.tensor([rank * 2, rank * 2 + 1]), "texts": texts(rank)}
        )
        as_tuple = gather_padded_step(lambda rank: (texts(rank), [rank, rank]))
        as_collated = gather_padded_step(lambda rank: [torch.tensor([rank, rank]), tuple(texts(rank))])
        named = gather_padded_step(lambda rank: Named(a=float(rank), b=texts(rank), size=rank))
        assert type(named) is Named
        return as_dict["ids"].tolist(), as_dict["texts"], as_tuple, as_collated[1], named.b

    texts = [f"{rank}{letter}" for rank in range(several.size) for letter in "ab"][:-1]
    numbers = [rank for rank in range(several.size) for _ in "ab"][:-1]
    ids = list(range(2 * several.size - 1))
    assert several.run(gathered) == [(ids, texts, (texts, numbers), texts, texts)] * several.size


@pytest.mark.parametrize("sample", [{"id": 3}, ["two", "words"], ("a", 1), 7], ids=str)
def test_a_list_with_one_entry_for_each_sample_loses_its_padding(several, sample):
    def gathered(sample):
        return gather_padded_step(lambda _: [sample, sample])

    assert several.run(gathered, sample) == [[sample] * (2 * several.size - 1)] * several.size


def test_a_list_without_one_entry_for_each_sample_is_kept_completely(several):
    def gathered():
        return gather_padded_step(lambda rank: [f"note of {rank}"])

    assert several.run(gathered) == [[f"note of {rank}" for rank in range(several.size)]] * several.size


def test_lists_of_different_lengths_are_joined_also_if_one_is_empty(several):
    def gathered():
        return gather_padded_step(lambda rank: [rank] * rank, size=9)

    joined = [rank for rank in range(several.size) for _ in range(rank)]
    assert several.run(gathered) == [joined] * several.size


def test_gather_samples_outside_of_a_loop_gathers_everything(several):
    def gathered():
        merged = gather_padded_step(
            lambda rank: {"ids": torch.tensor([rank]), "texts": ["a"]}, size=0, short=0
        )
        return merged["ids"].tolist(), merged["texts"]

    assert several.run(gathered) == [(list(range(several.size)), ["a"] * several.size)] * several.size


def test_samples_of_several_steps_are_gathered_in_dataset_order(several):
    """Gather two full steps of 2 samples for each rank, and a last one with one sample in total."""

    def gathered():
        b = connect_backend()
        world, rank = b.topology.world_size, b.topology.rank
        full = StepInfo((2,) * world, (2,) * world, is_last=False)
        last_step = StepInfo((1, *(0,) * (world - 1)), (2,) * world, is_last=True)
        ids = [base + i for base in (2 * rank, 2 * (world + rank)) for i in range(2)] + [4 * world + rank, 99]
        data = {"ids": torch.tensor(ids), "tokens": torch.tensor(ids).repeat_interleave(3)}
        tensors = gather_samples(data, [full, full, last_step], b)
        texts = gather_samples({"texts": [str(i) for i in ids]}, [full, full, last_step], b)
        return tensors["ids"].tolist(), tensors["tokens"].tolist(), texts["texts"]

    expected = list(range(4 * several.size + 1))
    tokens = [i for i in expected for _ in range(3)]
    assert several.run(gathered) == [(expected, tokens, [str(i) for i in expected])] * several.size


def test_gather_samples_accepts_different_batch_sizes_on_each_rank(several):
    def gathered():
        b = connect_backend()
        world, rank = b.topology.world_size, b.topology.rank
        sizes = tuple(range(world))  # the first rank has none
        step = StepInfo(sizes, sizes, is_last=True)
        return gather_samples([torch.full((rank, 2), rank), torch.tensor(rank)], [step], b)

    for rows, scalars in several.run(gathered):
        assert rows[:, 1].tolist() == [rank for rank in range(several.size) for _ in range(rank)]
        assert scalars.tolist() == list(range(several.size))


def test_rows_that_match_on_one_rank_only_are_rejected_on_every_rank(several):
    def refused():
        b = connect_backend()
        world = b.topology.world_size
        step = StepInfo((2,) * world, (2,) * world, is_last=False)
        with pytest.raises(ValueError, match="rows for batches of 2 samples"):
            gather_samples(torch.ones(2 if b.topology.rank else 3), [step], b)
        return gather(torch.tensor(b.topology.rank), b).tolist()

    assert several.run(refused) == [list(range(several.size))] * several.size


def test_lists_of_tensors_gathered_as_objects_have_one_entry_for_each_sample(several):
    def gathered():
        b = connect_backend()
        world, rank = b.topology.world_size, b.topology.rank
        step = StepInfo((2,) * (world - 1) + (1,), (2,) * world, is_last=True)
        tensors = [torch.full((rank + 1,), i) for i in (2 * rank, 2 * rank + 1)]
        return [t.tolist() for t in gather_samples(tensors, [step], b, as_objects=True)]

    expected = [[i] * (i // 2 + 1) for i in range(2 * several.size - 1)]
    assert several.run(gathered) == [expected] * several.size


def test_objects_that_cannot_be_joined_are_reported(several):
    def refused():
        b = connect_backend()
        is_second_rank = b.topology.rank == 1
        for value, message in (
            ({"b" if is_second_rank else "a": "text"}, "keys differ"),
            ({"a": "text", "x": torch.ones(1, 3 if is_second_rank else 2)}, "tensors differ"),
        ):
            with pytest.raises(MismatchError, match=message):
                gather_samples(value, [], b)
        return True

    assert all(several.run(refused))
