"""Source for iterable datasets (streams), and checks that ranks and workers read the same stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import IsolatedRNG, RandomStates, broadcast_from_first
from accel_runtime.backends.single import Single
from accel_runtime.data.iterable_worker import WorkerBatch, WorkerReader, WorkerTask, build_worker_count_error
from accel_runtime.data.sharding import BatchSharding
from accel_runtime.data.source import Source
from accel_runtime.data.state import ReaderState, StreamState
from accel_runtime.data.stream_reader import ReadingRNG, combine_fingerprints
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import EpochProgress
from accel_runtime.foundation.torch_internals import copy_loader, iterator_function, replace_iterator

__all__ = ["IterableSource", "StreamsDifferError"]

_Steps = Iterator[tuple[WorkerBatch, list[Any]]]
"""Global batches: the worker's description of the batch, and the batches of the ranks."""


class StreamsDifferError(RuntimeError):
    """Ranks, or workers of one rank, that do not read the same stream. Raised on every rank."""


def _check_ranks(
    steps: Iterator[tuple[WorkerBatch, list[Any], bool]], backend: Backend
) -> Iterator[tuple[WorkerBatch, list[Any], bool]]:
    """Pass steps on, and compare fingerprints of the ranks before the steps 1, 2, 4, 8, ... and the last."""
    try:
        ahead = next(steps, None)
    except StreamsDifferError:
        raise  # raised on every rank
    except Exception:
        _compare_ranks(0, 0, backend, failed=True)
        raise
    if ahead is None:
        _compare_ranks(0, 0, backend)
    fingerprint, num_samples, step = 0, 0, 0
    while ahead is not None:
        info, batches, is_last = ahead
        fingerprint = combine_fingerprints(fingerprint, info.fingerprint_after)
        num_samples, step = num_samples + info.num_samples, step + 1
        if is_last or step & (step - 1) == 0:
            _compare_ranks(fingerprint, num_samples, backend)
        yield info, batches, is_last
        ahead = next(steps, None)


def _compare_ranks(fingerprint: int, num_samples: int, backend: Backend, *, failed: bool = False) -> None:
    if backend.topology.world_size == 1:
        return
    gathered = backend.all_gather_numbers([num_samples, fingerprint, int(failed)], "fingerprints of a stream")
    failed_ranks = [rank for rank, (_, _, has_failed) in enumerate(gathered) if has_failed]
    if failed_ranks and not failed:
        raise RuntimeError(
            f"rank {', '.join(map(str, failed_ranks))} could not read the stream: see the error of that rank"
        )
    if failed_ranks or len(set(gathered)) == 1:
        return
    raise StreamsDifferError(
        f"The ranks do not read the same stream (samples read so far, by rank: {[count for count, _, _ in gathered]}). Every rank reads "
        "the whole stream and keeps its slices of it, so all must read the same samples in the same order. If the dataset "
        'gives each rank its own part, use prepare_data_loader(loader, data="sharded"). If each process shuffles on its own, '
        "use the same seed on all, or let the first rank read for all: dispatch_batches=True."
    )


class IterableSource(Source[StreamState]):
    """Global batches of a stream that every rank reads completely.

    The script's loader is copied, not rebuilt, so workers, pinning, collating and the iterator of a subclass stay as they
    are. Only its dataset is replaced by a `WorkerReader`.

    Args:
        loader: The script's loader over an IterableDataset.
        backend: Exchanges random states and fingerprints between the ranks.
        sharding: The sharding of the samples.
        all_ranks: Read the batches of all ranks, in rank order in every step, without communication.
    """

    state_type = StreamState

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, sharding: BatchSharding, *, all_ranks: bool = False
    ) -> None:
        self.sharding = sharding
        self._backend = Single(Topology(), backend.runtime, is_counted=False) if all_ranks else backend
        self._loader = loader
        self._task = WorkerTask(
            loader.dataset,
            loader.collate_fn,
            loader.worker_init_fn,
            sharding,
            tuple(range(sharding.world_size)) if all_ranks else (sharding.rank,),
            single_samples=loader.batch_size is None,
            compare_ranks=self._backend.topology.world_size > 1,
        )
        self._generators = () if loader.generator is None else (loader.generator,)
        self._persistent: _StreamLoader | None = None

    @property
    @override
    def can_fetch_ahead(self) -> bool:
        return self._loader.num_workers > 0 and self._backend.topology.world_size == 1

    @property
    @override
    def stride(self) -> int:
        return self.sharding.padded_size

    @override
    def iterate(self, progress: EpochProgress, start: StreamState) -> Iterator[Any]:
        self.check(start)
        if start.random is not None:
            start.random.restore_generators(self._generators)
        current = RandomStates.capture(self._generators)
        random = self._find_states(start, current)
        reading = self._begin_reading(start, random, current)
        if self._loader.persistent_workers:
            reading.stream.reader.set_epoch(progress.epoch)
        position = _StreamPosition(start, reading, self._loader.num_workers)
        progress.read_states_from(lambda _: position.state())
        steps = self._read_steps(reading, start.skipped_steps, position)
        marked = _mark_last(steps, self._loader.num_workers)
        for info, batches, is_last in _check_ranks(marked, self._backend):
            position.advance(info)
            progress.advance(self.sharding.step_info(info.num_samples, is_last=is_last))
            yield from batches

    def _find_states(self, start: StreamState, current: RandomStates) -> RandomStates:
        """Return the random states at the start of the epoch; `current` itself if all ranks have the same."""
        if start.begun:
            return start.random or current
        # Nothing has been drawn between two epochs, and every rank has saved its own states.
        saved = current if start.random is None else current.update(start.random)
        return broadcast_from_first(current if saved == current else saved, self._backend)

    @override
    def num_steps(self) -> int:
        if not hasattr(self._loader.dataset, "__len__"):
            kind = type(self._loader.dataset).__name__
            raise TypeError(
                f"The number of steps is unknown: the stream {kind} has no length. Add __len__, or count the steps."
            )
        return self.sharding.num_steps(len(self._loader.dataset), self.sharding.padded_size)

    @override
    def next_epoch(self) -> StreamState:
        stream, random = self._persistent, RandomStates.capture(self._generators)
        if stream is None:
            return StreamState(random=random)
        return StreamState(random=random, worker_seed=stream.worker_seed, worker_iterations=stream.iterations)

    @override
    def check(self, start: StreamState) -> None:
        if start.workers is not None and len(start.workers) != self._loader.num_workers:
            raise build_worker_count_error(len(start.workers))

    def _begin_reading(self, start: StreamState, random: RandomStates, current: RandomStates) -> _Reading:
        """Return what the iteration reads from, and under which random states, the same on all ranks."""
        is_current = random is current
        if not is_current:
            random.restore_generators(self._generators)
        no_workers = self._loader.num_workers == 0
        takes_over = self._backend.data_rank.rank == 0 and not start.begun and random == current
        reading_rng, draws_in_turn = ReadingRNG(), False
        context: AbstractContextManager[None] = nullcontext()
        if no_workers:
            # Such an epoch is read from the global generators, in turn with the script's own draws.
            draws_in_turn = start.draws_in_turn if start.begun else is_current
            reading_rng = self._build_reading_rng(start, random, draws_in_turn=draws_in_turn)
        elif not (is_current or takes_over):
            context = IsolatedRNG(random)()  # only the workers' seed is drawn in this process
        stream = self._persistent if start == StreamState() else None  # until a state is loaded
        if self._persistent is not None and start.random is None:
            # Other workers, which skip batches, take over the seed: persistent workers have one for all epochs.
            replaced = self._persistent
            start = replace(start, worker_seed=replaced.worker_seed, worker_iterations=replaced.iterations)
        if stream is None:
            stream = _StreamLoader(self._loader, WorkerReader(self._task, start, reading_rng), start)
            self._persistent = stream if self._loader.persistent_workers else None
        begun = StreamState(
            begun=True,
            random=random,
            draws_in_turn=draws_in_turn,
            worker_iterations=stream.iterations if self._persistent else 0,
        )
        # Inside an epoch the seed for workers has been drawn before, and the generator restored is past that draw.
        stream.choose_generator(
            spare=start.worker_iterations > 0 or (no_workers and start.begun and not self._generators)
        )
        return _Reading(stream, begun, context, reading_rng.isolated if takes_over else None)

    def _build_reading_rng(
        self, start: StreamState, random: RandomStates, *, draws_in_turn: bool
    ) -> ReadingRNG:
        """Return the random states that a loader without workers reads an epoch under."""

        def build() -> IsolatedRNG:
            reading = IsolatedRNG(random)
            if not self._generators:
                with reading():  # torch draws a seed for workers even without workers
                    torch.empty((), dtype=torch.int64).random_()
            return reading

        # An epoch that is read in turn is replayed under its own states up to the saved offset, and then continues so.
        return ReadingRNG(
            None if draws_in_turn else build(),
            build() if start.begun and draws_in_turn and start.offset else None,
            build() if start.begun else None,
        )

    def _read_steps(self, reading: _Reading, skip: int, position: _StreamPosition) -> _Steps:
        """Yield all steps; the first is read under random states that are the same on all ranks."""
        steps = self._group_by_step(reading.stream, skip, position)
        with reading.context:
            first = next(steps, None)
        if reading.takes_over is not None:
            reading.takes_over.take_over()  # on the first data rank, global states advance as on one process
        if first is not None:
            yield first
            yield from steps

    def _group_by_step(self, stream: _StreamLoader, skip: int, position: _StreamPosition) -> _Steps:
        """Yield all steps after the first `skip`; workers that read the whole stream skip them themselves.

        Raises StreamsDifferError if such workers have read different samples.
        """
        num_others = len(self._task.ranks) - 1
        stream.begin()
        fingerprint: int | None = None
        batches = iter(stream.loader)
        for number, batch in enumerate(batches):
            step = [batch, *islice(batches, num_others)]
            info, *_ = [stream.infos.popleft() for _ in step]
            if info.worker is not None and number < skip:
                position.advance(info)
                continue
            if info.worker is None:
                if fingerprint not in {None, info.fingerprint_before}:
                    raise StreamsDifferError(
                        "The workers of this loader do not read the same stream, so samples would be lost and repeated. "
                        "Split the dataset by torch.utils.data.get_worker_info() in its __iter__, or make every worker read "
                        "the same: seed its shuffling from the epoch, not from the worker."
                    )
                fingerprint = info.fingerprint_after
            yield info, step


class _Reading(NamedTuple):
    """Iteration over a stream that is about to begin."""

    stream: _StreamLoader
    begun: StreamState
    """State at the start of the epoch."""
    context: AbstractContextManager[None]
    """Context that the first batch is read in."""
    takes_over: IsolatedRNG | None
    """Random states that become those of the process after the first batch."""


class _StreamLoader:
    """Copy of the script's loader that yields plain batches and queues the workers' descriptions of them."""

    def __init__(self, loader: DataLoader[Any], reader: WorkerReader, start: StreamState) -> None:
        self.reader = reader
        self.infos: deque[WorkerBatch] = deque()
        """Descriptions of the batches that were yielded."""
        self.iterations = start.worker_iterations
        """Number of iterations begun by its workers, or by the workers that they replace."""
        self._seeds: list[int] = [] if start.worker_seed is None else [start.worker_seed]
        self._script_loader = loader
        overrides: dict[str, Any] = {
            "dataset": reader,
            "batch_sampler": None,
            "collate_fn": _identity,
            "worker_init_fn": None,
        }
        self._inner = copy_loader(loader, **overrides, drop_last=False, _IterableDataset_len_called=None)
        self.loader = copy_loader(loader)
        """Loader to iterate over."""
        # Not a method: in a reference cycle, workers end only at a garbage collection.
        replace_iterator(self.loader, partial(_StreamIterator, self._inner, self.infos, self._seeds))

    def begin(self) -> None:
        """Record that an iteration begins."""
        self.infos.clear()
        self.iterations += 1

    def choose_generator(self, *, spare: bool) -> None:
        """Let torch draw the workers' seed from the script's generator, or from a spare one."""
        self._inner.generator = torch.Generator() if spare else self._script_loader.generator

    @property
    def worker_seed(self) -> int | None:
        """Return the seed that persistent workers share; None before it is drawn, and for other workers."""
        return self._seeds[0] if self._seeds and self._script_loader.persistent_workers else None


class _StreamIterator:
    """Iterator of torch whose items are split into batches and their descriptions.

    Args:
        loader: The loader that torch iterates over.
        infos: Receives the description of each batch.
        seeds: Receives the seed that its workers share.
    """

    _finished = False
    """Read by torchdata's StatefulDataLoader."""

    def __init__(self, loader: DataLoader[Any], infos: deque[WorkerBatch], seeds: list[int]) -> None:
        self._loader = loader
        self._inner: Any = iterator_function(loader)(loader)
        self._infos = infos
        self._ready: deque[tuple[WorkerBatch, Any]] = deque()
        seeds.append(int(self._inner._base_seed))  # noqa: SLF001

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._ready:
            if (item := next(self._inner)) is not None:
                info, batches = item
                self._ready.extend((info, batch) for batch in batches)
        info, batch = self._ready.popleft()
        self._infos.append(info)
        return batch

    def _reset(self, _: DataLoader[Any]) -> None:
        """Start a new iteration with the same workers."""
        self._ready.clear()
        self._inner._reset(self._loader)  # noqa: SLF001 - called by `DataLoader.__iter__`


class _StreamPosition:
    """Position of an iteration in its stream.

    Args:
        start: The state that the iteration began at.
        reading: The iteration.
        num_workers: The number of workers of the loader.
    """

    def __init__(self, start: StreamState, reading: _Reading, num_workers: int) -> None:
        self._start, self._reading = start, reading
        self._newest: WorkerBatch | None = None
        self._num_samples = 0
        self._readers = list(start.workers or [ReaderState()] * max(1, num_workers))

    def advance(self, info: WorkerBatch) -> None:
        """Advance by a batch that is returned or dropped."""
        self._newest = info
        self._num_samples += info.num_samples
        if info.worker is not None:
            self._readers[info.worker] = info.reader

    def state(self) -> StreamState:
        """Return the state after the newest batch."""
        info = self._newest
        if info is None:
            return self._start
        begun = replace(self._reading.begun, worker_seed=self._reading.stream.worker_seed)
        if info.worker is None:
            return replace(begun, offset=info.reader.offset, reader=info.reader)
        return replace(
            begun,
            offset=self._start_of_workers + self._num_samples,
            workers=tuple(self._readers),
            next_worker=(info.worker + 1) % len(self._readers),
        )

    @property
    def _start_of_workers(self) -> int:
        """Return the samples of all workers before the iteration; those of skipped steps are read and counted again."""
        return sum(reader.offset for reader in self._start.workers or ())


def _mark_last(steps: _Steps, num_workers: int) -> Iterator[tuple[WorkerBatch, list[Any], bool]]:
    """Add to each step if it is the last; if workers read their own parts, it is when all of them have ended."""
    num_open = max(1, num_workers)
    ahead = next(steps, None)
    while ahead is not None:
        info, batches = ahead
        if info.worker is None or not info.reader.ended:
            yield info, batches, info.reader.ended
            ahead = next(steps, None)
            continue
        num_open -= 1
        # A worker without a sample never reports its end.
        ahead = next(steps, None) if num_open else None
        yield info, batches, ahead is None


def _identity(item: Any) -> Any:
    return item
