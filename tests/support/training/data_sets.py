"""Data sets, streams, samplers and batch samplers of the tests."""

from __future__ import annotations

import random

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, SequentialSampler, get_worker_info


class MappedDataset(Dataset):
    """Returns `make(index)` for each index below `count`: for samples that are computed, random or unreadable."""

    def __init__(self, count, make):
        self.count, self.make = count, make

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


# Streams ----------------------------------------------------------------------------------


class SampleStream(IterableDataset):
    """A stream of given samples, without a length: for data that differ between ranks."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class RangeStream(IterableDataset):
    """A stream of numbers that every rank and worker reads completely, without a length.

    Args:
        count: The numbers are 0 to `count` - 1.
        make: Converts a number to a sample.
    """

    start = 0

    def __init__(self, count, make=int):
        self.count, self.make = count, make

    def read_numbers(self):
        """Return the numbers in the order of the stream; subclasses override it."""
        return range(self.start, self.count)

    def __iter__(self):
        return map(self.make, self.read_numbers())


def split_range(worker_id):
    """Split a `RangeStream` among the workers: a `worker_init_fn`, as in torch's documentation."""
    info = get_worker_info()
    dataset = info.dataset
    each = -(-(dataset.count - dataset.start) // info.num_workers)
    dataset.start = worker_id * each
    dataset.count = min(dataset.start + each, dataset.count)


class SizedStream(RangeStream):
    """A stream with a length."""

    def __len__(self):
        return self.count


class WorkerSplitStream(RangeStream):
    """A stream that splits itself among the workers, as in torch's documentation."""

    def read_numbers(self):
        info = get_worker_info()
        return range(self.count) if info is None else range(info.id, self.count, info.num_workers)


class ShuffledStream(RangeStream):
    """A stream that shuffles with all random number generators of the process."""

    def read_numbers(self):
        import numpy as np

        order = list(range(self.count))
        random.shuffle(order)
        order = [order[at] for at in torch.randperm(self.count).tolist()]
        np.random.shuffle(order)  # noqa: NPY002
        return order


class BufferedShuffleStream(RangeStream):
    """A stream that shuffles with a buffer, so that it draws random numbers while it is read."""

    def read_numbers(self):
        buffer = []
        for number in range(self.count):
            buffer.append(number)
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class StatefulStream(RangeStream):
    """A stream with `state_dict` and `load_state_dict` that counts the samples it reads."""

    def __init__(self, count, make=int):
        super().__init__(count, make)
        self.offset = self.num_read = 0

    def read_numbers(self):
        numbers = self.list_numbers()
        while self.offset < len(numbers):
            self.offset += 1
            self.num_read += 1
            yield numbers[self.offset - 1]
        self.offset = 0

    def list_numbers(self):
        """Return the numbers of this process."""
        return range(self.count)

    def state_dict(self):
        return {"at": self.offset}

    def load_state_dict(self, state):
        self.offset = state["at"]


class WorkerSplitStatefulStream(StatefulStream):
    """A stateful stream that splits itself among the workers."""

    def list_numbers(self):
        info = get_worker_info()
        return range(self.count) if info is None else range(info.id, self.count, info.num_workers)


class ShardedStream(RangeStream):
    """A stream of shards that are split among the workers, like `datasets.IterableDataset`."""

    def __init__(self, count, make=int, *, shards=3):
        super().__init__(count, make)
        self.num_shards = self.n_shards = shards

    def shard(self, **_):
        raise AssertionError("sharding by rank gives ranks different numbers of batches")

    def read_numbers(self):
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        for shard in range(worker, self.num_shards, num_workers):
            yield from range(shard, self.count, self.num_shards)


class FailingStream(IterableDataset):
    """A stream of numbers with a read error: before number `at`, or without it when the iteration starts."""

    def __init__(self, at=None):
        self.at = at

    def __iter__(self):
        if self.at is None:
            raise FileNotFoundError("the shard")
        return self._read_numbers()

    def _read_numbers(self):
        yield from range(self.at)
        raise FileNotFoundError("the shard")


# Samplers and batch samplers ----------------------------------------------------------------


class RandomOrderSampler(Sampler):
    """A sampler that draws with the global generator of torch, and has no generator that could be shared.

    Args:
        count: The number of indices to draw from.
        num_samples: The number of indices to draw, by default all.
        lazy: Draw with the first index, instead of at the start of the iteration.
    """

    def __init__(self, count, num_samples=None, *, lazy=False):
        self.count, self.num_samples = count, count if num_samples is None else num_samples
        self.lazy = lazy

    def __iter__(self):
        return self._draw() if self.lazy else iter(list(self._draw()))

    def _draw(self):
        yield from torch.randperm(self.count)[: self.num_samples].tolist()

    def __len__(self):
        return self.num_samples


class PythonShuffledSampler(Sampler):
    """A sampler that shuffles all indices with Python's generator when it is iterated over."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        order = list(range(self.count))
        random.shuffle(order)
        return iter(order)

    def __len__(self):
        return self.count


class PythonRandomSampler(Sampler):
    """A sampler that draws each index with Python's generator when it is read."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        remaining = list(range(self.count))
        while remaining:
            yield remaining.pop(random.randrange(len(remaining)))

    def __len__(self):
        return self.count


class RepeatingSampler(Sampler):
    """A sampler that repeats one index: for ranks with the same number of samples in different orders."""

    def __init__(self, index, count):
        self.index, self.count = index, count

    def __iter__(self):
        return iter([self.index] * self.count)

    def __len__(self):
        return self.count


class EndlessSampler(Sampler):
    """An endless sampler without a length."""

    def __iter__(self):
        while True:
            yield 0


class EpochSampler(SequentialSampler):
    """A sampler that rotates the indices by the epoch, and records the calls of `set_epoch`."""

    def __init__(self, count):
        super().__init__(range(count))
        self.count, self.epoch, self.epochs = count, 0, []

    def __iter__(self):
        return iter([(index + self.epoch) % self.count for index in range(self.count)])

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)


class VariableBatchSampler(Sampler):
    """A batch sampler of given batches with different lengths, without a `batch_size`.

    Args:
        batches: The indices of each batch.
        shuffle: Draw the order of the batches with the global generator of torch.
    """

    def __init__(self, batches, *, shuffle=False):
        self.batches, self.shuffle = batches, shuffle

    def __iter__(self):
        order = torch.randperm(len(self.batches)).tolist() if self.shuffle else range(len(self.batches))
        return iter([self.batches[at] for at in order])

    def __len__(self):
        return len(self.batches)
