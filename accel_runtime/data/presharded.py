"""Source for data that the script has sharded by rank: each rank has its own loader, and all take as many steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import IsolatedRNG, capture_states, current_states, to_serializable
from accel_runtime.data.iterable_worker import fingerprint_samples
from accel_runtime.data.sharding import loss_scale
from accel_runtime.data.source import Source, batch_size_of
from accel_runtime.environment.topology import DataRank
from accel_runtime.foundation.steps import EpochIterator, StepInfo

__all__ = [
    "ModelParallelRanksDifferError",
    "PreshardedSource",
    "are_consistent",
    "build_world_size_error",
]

_UNKNOWN = -1
_END: Any = object()
"""Stands for a batch after the last; a batch may be None."""


class PreshardedSource(Source):
    """Every rank's own batches, unchanged.

    Ranks may have different numbers of batches. All take as many steps as the longest; a rank without a batch left is
    given its first batch of the epoch as padding. A rank without any data is given a batch of another rank. The state
    contains that of each rank, and is valid for the same number of ranks only. Model-parallel ranks read the same and count
    as one.

    Args:
        local: The source of this rank's batches, as on one process.
        loader: The script's loader of this rank.
        backend: Exchanges the number of samples of every step.
        pad_last: If true, every rank pads its own last batch.
    """

    kind = "Separate"

    def __init__(
        self, local: Source, loader: DataLoader[Any], backend: Backend, *, pad_last: bool = False
    ) -> None:
        self._local = local
        self._backend = backend
        self._epoch_length = _epoch_length(loader)
        self._pad_last = pad_last and batch_size_of(loader) is not None
        self._draws = loader.num_workers == 0

    @override
    def iterate(self, loop: EpochIterator, start: dict[str, Any]) -> Iterator[Any]:
        self.check(start)
        step = start.get("position", 0)
        local = start.get("local", {}) if "local" in start or not step else self._local.skip_steps(step, {})
        began = {"began": start["began"] if "began" in start else capture_states()} if self._draws else {}
        count_samples = self._choose_count_function()
        # Before the main iteration: both may use the same workers.
        padding = (
            self._reread_padding_batch(loop.epoch, local, began, count_samples)
            if step and "random" in local
            else None
        )
        with IsolatedRNG(start["reading"])() if "reading" in start else nullcontext():
            reader = _LocalReader(self._local, EpochIterator(loop.epoch), local, draws=self._draws)
        data_rank, fingerprints = self._backend.data_rank, ReadFingerprints(self._backend)
        world_size = data_rank.world_size
        loop.read_states_from(
            lambda _: {"position": step, "world_size": world_size} | began | reader.state_dict()
        )
        counts = count_samples(step, reader)
        padding = padding or self._build_padding_batch(reader, counts)
        while any(counts):
            num_valid, batch, step = counts[data_rank.rank], reader.take(), step + 1
            if num_valid and batch is _END:
                raise RuntimeError(
                    f"The sampler yielded fewer samples than its length: batch {step} is missing."
                )
            previous, counts = tuple(counts), count_samples(step, reader)
            pairs = zip(previous, padding.batch_sizes, strict=True)
            sizes = tuple(size if self._pad_last else count or size for count, size in pairs)
            scale = loss_scale(previous, data_rank.rank)
            is_last = not any(counts)
            loop.advance(StepInfo(previous, sizes, is_last, True, scale))
            fingerprints.add(batch, is_last=is_last)
            yield batch if num_valid else copy.deepcopy(padding.batch)

    @override
    def num_steps(self) -> int:
        """Return the steps of this rank's own data; the epoch has as many as the longest rank's."""
        return self._local.num_steps()

    @override
    def skip_steps(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        if not steps:
            return start
        return {
            "position": start.get("position", 0) + steps,
            "world_size": self._backend.data_rank.world_size,
            "local": self._local.skip_steps(steps, start.get("local", {})),
        }

    @override
    def next_epoch(self) -> dict[str, Any]:
        return {"local": self._local.next_epoch()}

    @override
    def check(self, start: dict[str, Any]) -> None:
        world_size = self._backend.data_rank.world_size
        if start.get("world_size", world_size) != world_size:
            raise build_world_size_error(start["world_size"], world_size)
        self._local.check(start.get("local", {}))

    @override
    def with_restored_rng(self, start: dict[str, Any]) -> dict[str, Any]:
        return start | {"local": self._local.with_restored_rng(start["local"])} if "local" in start else start

    @override
    def restart(self, start: dict[str, Any]) -> dict[str, Any]:
        if "local" not in start:
            return start
        epoch_keys = {key: start[key] for key in ("world_size", "began") if key in start}
        return epoch_keys | {"local": self._local.restart(start["local"])}

    def _choose_count_function(self) -> _CountFunction:
        """Return how to count each rank's samples of a step: from all lengths, or by an exchange in every step."""
        gathered = self._backend.all_gather_numbers(self._epoch_length, "lengths of loaders")
        lengths = reduce_to_data_ranks(gathered, self._backend.data_rank)
        self._full_sizes = [size for _, size in lengths]
        if any(count == _UNKNOWN for count, _ in lengths):
            return self._exchange_counts
        return lambda step, _: [min(size, max(0, count - step * size)) for count, size in lengths]

    def _exchange_counts(self, _: int, reader: _LocalReader) -> list[int]:
        """Return every rank's number of samples in its next batch; raise if a rank could not read it."""
        local = (reader.num_valid, int(reader.error is not None))
        counts, failed = map(
            list, zip(*self._backend.all_gather_numbers(local, "samples of a step"), strict=True)
        )
        if any(failed) and reader.error is None:
            ranks = ", ".join(str(rank) for rank, has_failed in enumerate(failed) if has_failed)
            raise RuntimeError(f"rank {ranks} could not read its data: see the error of that rank")
        reader.check()
        return reduce_to_data_ranks(counts, self._backend.data_rank)

    def _reread_padding_batch(
        self, epoch: int, local: dict[str, Any], began: dict[str, Any], count_samples: _CountFunction
    ) -> _PaddingBatch:
        """Read the first batch of a resumed epoch again, as it was read then, and return the padding batch."""
        start: dict[str, Any] = {key: local[key] for key in ("random", "persisted") if key in local}
        with IsolatedRNG(began.get("began"))():
            reader = _LocalReader(self._local, EpochIterator(epoch), start)
        counts = count_samples(0, reader)
        reader.check()
        return self._build_padding_batch(reader, counts)

    def _build_padding_batch(self, reader: _LocalReader, counts: list[int]) -> _PaddingBatch:
        """Return the padding batch: this rank's first batch, or that of the first rank which has one.

        `reader` is at the start of the epoch, and `counts` are every rank's numbers of samples there.
        """
        batch = copy.deepcopy(reader.next_batch)  # scripts may modify their batches in place
        sizes = [
            self._full_sizes[rank] if count and self._pad_last else count for rank, count in enumerate(counts)
        ]
        if all(sizes) or not any(sizes):
            return _PaddingBatch(batch, sizes)
        source = next(rank for rank, size in enumerate(sizes) if size)
        received = self._backend.broadcast_object(
            batch, "a batch", source * self._backend.data_rank.model_parallel_size
        )
        return _PaddingBatch(
            batch if sizes[self._backend.data_rank.rank] else received,
            [size or sizes[source] for size in sizes],
        )


class _PaddingBatch(NamedTuple):
    """Batch for a rank that has no batch left."""

    batch: Any
    batch_sizes: list[int]
    """Number of samples in the padding batch of every rank."""


def build_world_size_error(saved: int, current: int) -> ValueError:
    """Return the error for a state that was saved on another number of processes."""
    return ValueError(
        f'This loader state was saved on {saved} processes with data="sharded" and cannot be resumed on {current}. Resume '
        f"with {saved} processes."
    )


class _LocalReader:
    """Batches of one rank, read one ahead.

    Args:
        local: The source of the batches.
        loop: The epoch iterator.
        start: Its state.
        draws: If true, reading may draw from the generators of this process.
    """

    def __init__(
        self, local: Source, loop: EpochIterator, start: dict[str, Any], *, draws: bool = False
    ) -> None:
        self._loop = loop
        self._state = start
        self._draws = draws
        self._rng_states: dict[str, Any] = {}
        self._batches = local.iterate(loop, start)
        self.error: Exception | None = None
        """Error of reading the next batch."""
        self.next_batch: Any = _END
        self.num_valid = 0
        """Number of samples in the next batch; 0 at the end."""
        self._read()

    def check(self) -> None:
        """Raise the error of reading the next batch, if any."""
        if self.error is not None:
            raise self.error

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch taken, and the random states that the next one was read under."""
        reading = {"reading": to_serializable(self._rng_states)} if self._rng_states else {}
        return {"local": self._state} | reading

    def take(self) -> Any:
        """Return the next batch, and read the one after it."""
        self.check()
        batch = self.next_batch
        if batch is not _END:
            self._state = self._loop.state_dict()
            self._rng_states = current_states() if self._draws else {}
        self._read()
        return batch

    def _read(self) -> None:
        try:
            self.next_batch = next(self._batches, _END)
        except Exception as error:  # noqa: BLE001 - raised after the exchange, as the other ranks wait in it
            self.error, self.next_batch = error, _END
        info = self._loop.step_info
        self.num_valid = info.num_valid[0] if self.next_batch is not _END and info is not None else 0


_CountFunction = Callable[[int, _LocalReader], list[int]]


def _epoch_length(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return the samples in an epoch of this rank, if the lengths are known, and in a full batch."""
    batches, full_size = loader.batch_sampler, batch_size_of(loader) or 0
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return _UNKNOWN, full_size
    sampler: Any = batches.sampler
    if not hasattr(sampler, "__len__"):
        return _UNKNOWN, full_size
    count, size = len(sampler), batches.batch_size
    return count - count % size if batches.drop_last else count, size


class ModelParallelRanksDifferError(RuntimeError):
    """Different samples on model-parallel ranks, which must read the same. Raised on every rank."""


def reduce_to_data_ranks(gathered: list[Any], data_rank: DataRank) -> list[Any]:
    """Return one value per data rank; raise ModelParallelRanksDifferError if its model-parallel ranks differ."""
    if not are_consistent(gathered, data_rank.model_parallel_size):
        raise ModelParallelRanksDifferError(
            f"Model-parallel ranks ({data_rank.model_parallel_size} for each part of the batch) have read different samples (by rank: "
            f'{gathered}). With data="sharded", split the data into {data_rank.world_size} parts, by '
            "accelerator.data_parallel_rank of accelerator.data_parallel_size, not by process. If each process shuffles on "
            "its own, seed it by that rank."
        )
    return gathered[:: data_rank.model_parallel_size]


class ReadFingerprints:
    """Fingerprints of the batches that model-parallel ranks read, compared after batches 1, 2, 4, 8, ... and the last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._fingerprint = self._num_batches = 0

    def add(self, batch: Any, *, is_last: bool) -> None:
        """Add a batch (collective); raise ModelParallelRanksDifferError if model-parallel ranks have read others."""
        if self._backend.data_rank.model_parallel_size == 1:
            return
        self._fingerprint = 0 if batch is _END else fingerprint_samples([batch], self._fingerprint)
        self._num_batches += 1
        if is_last or self._num_batches & (self._num_batches - 1) == 0:
            gathered = [
                number
                for (number,) in self._backend.all_gather_numbers(
                    [self._fingerprint], "fingerprints of batches"
                )
            ]
            reduce_to_data_ranks(gathered, self._backend.data_rank)


def are_consistent(gathered: list[Any], model_parallel_size: int) -> bool:
    """Return whether each group of model-parallel ranks gave equal values."""
    return all(value == gathered[rank - rank % model_parallel_size] for rank, value in enumerate(gathered))
