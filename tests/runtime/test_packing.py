"""Tensors travel together and arrive as they were."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.backends.base import Backend
from accel_runtime.backends.single import Single
from accel_runtime.packing import gather_all, reduce_all
from accel_runtime.topology import Topology

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.lists(
    st.builds(lambda shape, dtype: torch.randn(shape).mul(9).to(dtype), SHAPES, st.sampled_from(DTYPES)),
    max_size=6,
)


class Counting(Single):
    """One process that counts its collectives."""

    def __init__(self):
        super().__init__(Topology(), torch.device("cpu"))
        self.calls = 0

    def all_gather(self, tensor):
        self.calls += 1
        return super().all_gather(tensor)

    def all_reduce(self, tensor, reduction):
        self.calls += 1
        return super().all_reduce(tensor, reduction)


@given(TENSORS)
def test_any_tensors_come_back_stacked_from_one_collective(tensors):
    backend: Backend = Counting()
    gathered = gather_all(tensors, backend)
    assert backend.calls == bool(tensors)
    for got, sent in zip(gathered, tensors, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, (1, *sent.shape))
        assert torch.equal(got[0], sent)


@given(TENSORS)
def test_any_tensors_are_reduced_by_one_collective_a_dtype(tensors):
    backend = Counting()
    reduced = reduce_all(tensors, "sum", backend)
    assert backend.calls == len({tensor.dtype for tensor in tensors})
    for got, sent in zip(reduced, tensors, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_many_tensors_of_several_ranks_arrive_in_place(several):
    def gathered():
        import torch

        from accel_runtime import Accelerator

        rank = Accelerator().process_index
        mine = {
            "flag": torch.tensor([rank == 1]),
            "x": torch.full((2, 3), float(rank)),
            "n": torch.tensor(rank),
        }
        accelerator = Accelerator()
        return accelerator.gather(mine), accelerator.reduce([mine["x"], mine["n"], mine["x"] * 2])

    size = several.size
    for everyone, total in several.run(gathered):
        assert everyone["flag"].tolist() == [rank == 1 for rank in range(size)]
        assert everyone["x"][:, 0].tolist() == [float(rank) for rank in range(size) for _ in range(2)]
        assert everyone["n"].tolist() == list(range(size))
        assert [int(t.reshape(-1)[0]) for t in total] == [sum(range(size)) * k for k in (1, 1, 2)]
