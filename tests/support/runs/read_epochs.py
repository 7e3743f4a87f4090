"""Read the steps of a source on all ranks, and check their invariants."""

from __future__ import annotations

import warnings
from dataclasses import is_dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset

from accel_runtime.backends.single import Single
from accel_runtime.data.iterable import IterableSource
from accel_runtime.data.prepare import DispatchedIterable, DispatchedMapStyle
from accel_runtime.data.sharding import sharding_of_loader
from accel_runtime.data.state import PreshardedState
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import EpochProgress
from accel_runtime.storage.schema import write_record


class Step(NamedTuple):
    """A step on one rank: its samples, its information, and the offset after it."""

    samples: list
    step_info: tuple
    offset: object


class SimulatedRank(Single):
    """A rank without processes, whose collectives assume that the other ranks have the same values."""

    def __init__(self, rank, world_size):
        super().__init__(Topology(rank, world_size), torch.device("cpu"))

    def all_gather_numbers(self, numbers, subject):  # noqa: ARG002 - the interface
        return [tuple(numbers)] * self.topology.world_size


def get_backend():
    """Return the backend of this process."""
    from accel_runtime import Accelerator

    # A loader of these tests may have more workers than this machine has cores.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    return Accelerator()._backend


def build_iterable_source(loader, backend, *, split=False, even=True):
    """Return a source of a stream that every rank reads."""
    return IterableSource(
        loader, backend, sharding_of_loader(loader, backend.data_rank, split=split, pad_last=even)
    )


def build_dispatched_source(loader, backend, *, split=False, even=True):
    """Return a source that the first rank reads for all ranks."""
    source = DispatchedIterable if isinstance(loader.dataset, IterableDataset) else DispatchedMapStyle
    return source(loader, backend, sharding_of_loader(loader, backend.data_rank, split=split, pad_last=even))


def to_ids(batch):
    """Return the samples of a batch as a list of numbers."""
    return torch.as_tensor(batch).flatten().tolist()


def read_steps(source, start=None, stop=None, to_samples=to_ids):
    """Return the steps of this rank after an offset, at most `stop`."""
    iterator, steps = EpochProgress(), []
    for batch in source.iterate(iterator, (start or source.state_type()).adapt_random(restored=False)):
        steps.append(Step(to_samples(batch), iterator.step_info, iterator.state()))
        if len(steps) == stop:
            break
    return steps


def check_steps(steps_by_rank):
    """Assert the invariants of the steps of all ranks; return the global batches without padding."""
    world = len(steps_by_rank)
    assert len({len(steps) for steps in steps_by_rank}) == 1, "all ranks have the same number of steps"
    batches = []
    for steps in zip(*steps_by_rank, strict=True):
        step_infos = [step.step_info for step in steps]
        first = step_infos[0]
        assert all(step_info[:3] == first[:3] for step_info in step_infos), (
            "the step information is equal on all ranks"
        )
        assert len(first.num_valid) == len(first.batch_sizes) == world
        assert tuple(len(step.samples) for step in steps) == first.batch_sizes
        assert min(first.batch_sizes) > 0
        assert all(count <= size for count, size in zip(first.num_valid, first.batch_sizes, strict=True))
        assert sum(first.num_valid) > 0
        factors = [step_info.loss_scale for step_info in step_infos]
        even = [1.0] * world
        exact = [count * world / sum(first.num_valid) for count in first.num_valid]
        assert factors == (even if len(set(first.batch_sizes)) == 1 and factors == even else exact)
        batches.append(
            list(chain.from_iterable(s.samples[: s.step_info.num_valid[r]] for r, s in enumerate(steps)))
        )
    assert [steps.step_info.is_last for steps in steps_by_rank[0]] == [False] * (len(batches) - 1) + [
        True
    ] * bool(batches)
    offsets = [[to_plain(drop_local_state(step.offset)) for step in steps] for steps in steps_by_rank]
    assert all(rank_offsets == offsets[0] for rank_offsets in offsets), "the offset is equal on all ranks"
    return batches


def drop_local_state(offset):
    """Remove the fields of an offset that differ between ranks if data are split by rank."""
    if isinstance(offset, PreshardedState):
        return replace(offset, data_rank=None, local=None, random_at_start=None, random_of_next=None)
    return offset


def to_plain(offset):
    """Convert an offset to values that == compares."""
    if is_dataclass(offset):
        return to_plain(write_record(offset))
    if isinstance(offset, dict):
        return {key: to_plain(value) for key, value in offset.items()}
    if isinstance(offset, list):
        return [to_plain(value) for value in offset]
    return offset.tolist() if isinstance(offset, torch.Tensor) else offset


def split_batches(samples, size, *, drop_last=False):
    """Return the batches that one process reads."""
    samples = list(samples)
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]
