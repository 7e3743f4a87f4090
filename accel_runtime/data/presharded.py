"""Source for data that the script has sharded by rank: each rank has its own loader, and all take as many steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import IsolatedRNG, RandomStates
from accel_runtime.data.source import Source, batch_size_of
from accel_runtime.data.state import MapStyleState, PreshardedState, StreamState
from accel_runtime.data.stream_reader import fingerprint_samples
from accel_runtime.environment.topology import RankGrid
from accel_runtime.foundation.epoch_progress import EpochProgress, StepInfo

__all__ = [
    "ModelParallelRanksDifferError",
    "PreshardedSource",
    "are_consistent",
    "build_world_size_error",
]

_UNKNOWN = -1
_END: Any = object()
"""Stands for a batch after the last; a batch may be None."""


class PreshardedSource(Source[PreshardedState]):
    """Every rank's own batches, unchanged.

    Ranks may have different numbers of batches. All take as many steps as the longest; a rank without a batch left is
    given its first batch of the epoch as padding. A rank without any data is given a batch of another rank. The state
    contains that of each rank, and is valid for the same number of ranks only. Model-parallel ranks read the same and count
    as one.

    Args:
        local: The source of this rank's batches, as on one process.
        loader: The script's loader of this rank.
        backend: Exchanges the number of samples of every step.
        pad_last: If true, `local` pads its last batch, and the sizes of all steps are full ones.
    """

    state_type = PreshardedState

    def __init__(
        self, local: Source[Any], loader: DataLoader[Any], backend: Backend, *, pad_last: bool = False
    ) -> None:
        self._local = local
        self._backend = backend
        self._epoch_length = _epoch_length(loader)
        self._pad_last = pad_last and batch_size_of(loader) is not None
        self._draws = loader.num_workers == 0

    @property
    @override
    def stride(self) -> int:
        return self._local.stride

    @override
    def iterate(self, progress: EpochProgress, start: PreshardedState) -> Iterator[Any]:
        self.check(start)
        step, local = start.offset, start.local
        if local is None:
            local = self._local.state_type().skip(step, self._local.stride)
        at_start = (start.random_at_start or RandomStates.capture()) if self._draws else None
        count_samples = self._choose_count_function()
        # Before the main iteration: both may use the same workers.
        padding = (
            self._reread_padding_batch(progress.epoch, local, at_start, count_samples)
            if step and local.random is not None
            else None
        )
        with IsolatedRNG(start.random_of_next)() if start.random_of_next is not None else nullcontext():
            reader = _LocalReader(self._local, EpochProgress(progress.epoch), local, draws=self._draws)
        data_rank, fingerprints = self._backend.data_rank, ReadFingerprints(self._backend)
        world_size = data_rank.world_size
        progress.read_states_from(
            lambda _: PreshardedState(step, world_size, data_rank.rank, reader.state, at_start, reader.random)
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
            is_last = not any(counts)
            progress.advance(StepInfo(previous, sizes, is_last, True).weigh_for(data_rank.rank))
            fingerprints.add(batch, is_last=is_last)
            yield batch if num_valid else copy.deepcopy(padding.batch)

    @override
    def num_steps(self, epoch: int) -> int:
        """Return the steps of this rank's own data; the epoch has as many as the longest rank's."""
        return self._local.num_steps(epoch)

    @override
    def next_epoch(self) -> PreshardedState:
        return PreshardedState(local=self._local.next_epoch())

    @override
    def check(self, start: PreshardedState) -> None:
        world_size = self._backend.data_rank.world_size
        if start.world_size not in {None, world_size}:
            raise build_world_size_error(start.world_size or 0, world_size)
        if start.local is not None:
            self._local.check(start.local)

    def _choose_count_function(self) -> _CountFunction:
        """Return how to count each rank's samples of a step: from all lengths, or by an exchange in every step."""
        gathered = self._backend.all_gather_numbers(self._epoch_length, "lengths of loaders")
        lengths = reduce_to_data_ranks(gathered, self._backend.grid)
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
        return reduce_to_data_ranks(counts, self._backend.grid)

    def _reread_padding_batch(
        self,
        epoch: int,
        local: MapStyleState | StreamState,
        at_start: RandomStates | None,
        count_samples: _CountFunction,
    ) -> _PaddingBatch:
        """Read the first batch of a resumed epoch again, as it was read then, and return the padding batch."""
        with IsolatedRNG(at_start)():
            reader = _LocalReader(self._local, EpochProgress(epoch), local.rewind())
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
        received = self._backend.broadcast_object(batch, "a batch", self._backend.grid.first_ranks[source])
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
        progress: The progress of their iteration.
        start: The state that it begins at.
        draws: If true, reading may draw from the generators of this process.
    """

    def __init__(
        self,
        local: Source[Any],
        progress: EpochProgress,
        start: MapStyleState | StreamState,
        *,
        draws: bool = False,
    ) -> None:
        self._progress = progress
        self._draws = draws
        self._batches = local.iterate(progress, start)
        self.state = start
        """State after the last batch taken."""
        self.random: RandomStates | None = None
        """Random states that the batch after it was read under, if reading may draw from them."""
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

    def take(self) -> Any:
        """Return the next batch, and read the one after it."""
        self.check()
        batch = self.next_batch
        if batch is not _END:
            self.state = self._progress.state()
            self.random = RandomStates.capture() if self._draws else None
        self._read()
        return batch

    def _read(self) -> None:
        try:
            self.next_batch = next(self._batches, _END)
        except Exception as error:  # noqa: BLE001 - raised after the exchange, as the other ranks wait in it
            self.error, self.next_batch = error, _END
        info = self._progress.step_info
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


def reduce_to_data_ranks(gathered: list[Any], grid: RankGrid) -> list[Any]:
    """Return one value per data rank; raise ModelParallelRanksDifferError if its model-parallel ranks differ."""
    if not are_consistent(gathered, grid):
        data_rank = grid.data_rank(0)
        raise ModelParallelRanksDifferError(
            f"Model-parallel ranks ({data_rank.model_parallel_size} for each part of the batch) have read different samples (by rank: "
            f'{gathered}). With data="sharded", split the data into {data_rank.world_size} parts, by '
            "accelerator.data_parallel_rank of accelerator.data_parallel_size, not by process. If each process shuffles on "
            "its own, seed it by that rank."
        )
    return [gathered[first] for first in grid.first_ranks]


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
            reduce_to_data_ranks(gathered, self._backend.grid)


def are_consistent(gathered: list[Any], grid: RankGrid) -> bool:
    """Return whether all ranks with the same data-parallel rank gave equal values."""
    firsts = grid.first_ranks
    return all(value == gathered[firsts[part]] for part, value in zip(grid.data_ranks, gathered, strict=True))
