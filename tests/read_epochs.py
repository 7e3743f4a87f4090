"""Walking a source on all ranks, and what has to hold of every walk; with the streams the tests read."""

from __future__ import annotations

import random
import warnings
from itertools import chain
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_runtime.backends.single import Single
from accel_runtime.data.iterable import IterableSource as EachReads
from accel_runtime.data.prepare import DispatchedIterable, DispatchedMapStyle
from accel_runtime.data.sharding import sharding_of_loader
from accel_runtime.data.source import EpochIterator
from accel_runtime.topology import Topology


class Step(NamedTuple):
    """What one rank saw of a step."""

    samples: list
    step_info: tuple
    position: dict


class Likewise(Single):
    """A rank of a world whose other ranks do just what this one does: no processes, no waiting."""

    def __init__(self, rank, world_size):
        super().__init__(Topology(rank, world_size), torch.device("cpu"))

    def all_gather(self, tensor):
        return torch.stack([tensor] * self.topology.world_size)


def backend():
    """The backend of a shared process."""
    from accel_runtime import Accelerator

    # This machine may have fewer cores than a loader of these tests has workers.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    return Accelerator()._backend


def read(loader, backend, *, split=False, even=True):
    """A stream that every rank reads."""
    return EachReads(
        loader, backend, sharding_of_loader(loader, backend.data_rank, split=split, pad_last=even)
    )


def dispatched(loader, backend, *, split=False, even=True):
    """Data that the first rank reads for all."""
    source = DispatchedIterable if isinstance(loader.dataset, IterableDataset) else DispatchedMapStyle
    return source(loader, backend, sharding_of_loader(loader, backend.data_rank, split=split, pad_last=even))


def ids(batch):
    """The samples of a batch, as numbers."""
    return torch.as_tensor(batch).flatten().tolist()


def walked(source, start=None, stop=None, read=ids):
    """The steps of one rank after a position, as many as asked for."""
    loop, steps = EpochIterator(), []
    for batch in source.iterate(loop, start or {}):
        steps.append(Step(read(batch), loop.step_info, loop.state_dict()))
        if len(steps) == stop:
            break
    return steps


def checked(walks):
    """What the ranks saw: every promise of a walk holds. Returns the global batches, without repeats."""
    world = len(walks)
    assert len({len(steps) for steps in walks}) == 1, "equally many steps everywhere"
    seen = []
    for steps in zip(*walks, strict=True):
        shares = [step.step_info for step in steps]
        first = shares[0]
        assert all(step_info[:3] == first[:3] for step_info in shares), "one share everywhere"
        assert len(first.num_valid) == len(first.batch_sizes) == world
        assert tuple(len(step.samples) for step in steps) == first.batch_sizes
        assert min(first.batch_sizes) > 0
        assert all(count <= size for count, size in zip(first.num_valid, first.batch_sizes, strict=True))
        assert sum(first.num_valid) > 0
        factors = [step_info.loss_scale for step_info in shares]
        even = [1.0] * world
        exact = [count * world / sum(first.num_valid) for count in first.num_valid]
        assert factors == (even if len(set(first.batch_sizes)) == 1 and factors == even else exact)
        seen.append(
            list(chain.from_iterable(s.samples[: s.step_info.num_valid[r]] for r, s in enumerate(steps)))
        )
    assert [steps.step_info.is_last for steps in walks[0]] == [False] * (len(seen) - 1) + [True] * bool(seen)
    positions = [[plain(shared(step.position)) for step in steps] for steps in walks]
    assert all(own == positions[0] for own in positions), "one position everywhere"
    return seen


def shared(position):
    """Without what of data that are split by process is each rank's own."""
    return {key: value for key, value in position.items() if key not in {"local", "reading", "began"}}


def plain(position):
    """A position that can be compared."""
    if isinstance(position, dict):
        return {key: plain(value) for key, value in position.items()}
    if isinstance(position, list):
        return [plain(value) for value in position]
    return position.tolist() if isinstance(position, torch.Tensor) else position


def chunks(samples, size, *, drop_last=False):
    """The global batches of one process."""
    samples = list(samples)
    found = [samples[at : at + size] for at in range(0, len(samples), size)]
    return [batch for batch in found if len(batch) == size or not drop_last]


class Stream(IterableDataset):
    """So many samples; knows nothing of ranks and workers."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Sized(Stream):
    """Has a length."""

    def __len__(self):
        return self.count


class Divided(Stream):
    """Splits itself among the workers, as torch's documentation shows it."""

    def __iter__(self):
        info = get_worker_info()
        return iter(
            range(self.count)[slice(None) if info is None else slice(info.id, None, info.num_workers)]
        )


class Ranged(Stream):
    """Is split by a `worker_init_fn`, as torch's documentation shows it."""

    start = 0

    def __iter__(self):
        return iter(range(self.start, self.count))


def divide(worker_id):
    """The `worker_init_fn` of `Ranged`."""
    info = get_worker_info()
    dataset = info.dataset
    each = -(-(dataset.count - dataset.start) // info.num_workers)
    dataset.start = worker_id * each
    dataset.count = min(dataset.start + each, dataset.count)


class Shuffled(Stream):
    """Shuffles with the process's own random numbers, of every kind."""

    def __iter__(self):
        import numpy as np

        order = list(range(self.count))
        random.shuffle(order)
        order = [order[at] for at in torch.randperm(self.count).tolist()]
        np.random.shuffle(order)  # noqa: NPY002
        return iter(order)


class Buffered(Stream):
    """Shuffles as it reads, with the process's own random numbers."""

    def __iter__(self):
        buffer = []
        for sample in range(self.count):
            buffer.append(sample)
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class Stateful(Stream):
    """Says where it stands, and can be put there; counts what it reads."""

    def __init__(self, count):
        super().__init__(count)
        self.at = self.read = 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            self.read += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class DividedStateful(Stateful):
    """As `Stateful`, and splits itself among the workers."""

    def __iter__(self):
        info = get_worker_info()
        place, of = (0, 1) if info is None else (info.id, info.num_workers)
        own = range(place, self.count, of)
        while self.at < len(own):
            self.at += 1
            yield own[self.at - 1]
        self.at = 0


class Shards(Stream):
    """As `datasets.IterableDataset`: so many shards, which workers share out among themselves."""

    def __init__(self, count, shards):
        super().__init__(count)
        self.num_shards = self.n_shards = shards

    def shard(self, **_):
        raise AssertionError("reading everything is what is exact")

    def __iter__(self):
        info = get_worker_info()
        place, of = (0, 1) if info is None else (info.id, info.num_workers)
        for shard in range(place, self.num_shards, of):
            yield from range(shard, self.count, self.num_shards)
