"""Source for iterable datasets (streams), and checks that ranks and workers read the same stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import (
    IsolatedRNG,
    broadcast_from_first,
    capture_states,
    fingerprint_states,
    restore_states,
    to_serializable,
)
from accel_runtime.backends.single import Single
from accel_runtime.data.iterable_worker import (
    ReadingRNG,
    WorkerBatch,
    WorkerReader,
    WorkerTask,
    build_worker_count_error,
    combine_fingerprints,
)
from accel_runtime.data.sharding import BatchSharding
from accel_runtime.data.source import Source, is_inside_epoch, mark_skipped
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.steps import EpochIterator
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


class IterableSource(Source):
    """Global batches of a stream that every rank reads completely.

    The script's loader is copied, not rebuilt, so workers, pinning, collating and the iterator of a subclass stay as they
    are. Only its dataset is replaced by a `WorkerReader`.

    Args:
        loader: The script's loader over an IterableDataset.
        backend: Exchanges random states and fingerprints between the ranks.
        sharding: The sharding of the samples.
        all_ranks: Read the batches of all ranks, in rank order in every step, without communication.
    """

    kind = "Stream"

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

    @override
    def iterate(self, loop: EpochIterator, start: dict[str, Any]) -> Iterator[Any]:
        self.check(start)
        if "random" in start:
            restore_states({"generators": start["random"]["generators"]}, self._generators)
        local_states = capture_states(self._generators)
        epoch_states = self._epoch_states(start, local_states)
        progress = _StreamProgress(start, epoch_states, self._loader.num_workers)
        loop.read_states_from(lambda _: progress.state_dict())
        steps = self._read_steps(start, epoch_states, local_states, progress)
        marked = _mark_last(steps, self._loader.num_workers)
        for info, batches, is_last in _check_ranks(marked, self._backend):
            progress.advance(info)
            loop.advance(self.sharding.step_info(info.num_samples, is_last=is_last))
            yield from batches

    def _epoch_states(self, start: dict[str, Any], local_states: dict[str, Any]) -> dict[str, Any]:
        """Return the random states at the start of the epoch; `local_states` itself if all ranks have the same."""
        if is_inside_epoch(start):
            return dict(start["random"])
        # Nothing has been drawn between two epochs, and every rank has saved its own states.
        saved = local_states | start.get("random", {})
        unchanged = fingerprint_states(saved) == fingerprint_states(local_states)
        return broadcast_from_first(local_states if unchanged else saved, self._backend)

    @override
    def num_steps(self) -> int:
        if not hasattr(self._loader.dataset, "__len__"):
            kind = type(self._loader.dataset).__name__
            raise TypeError(
                f"The number of steps is unknown: the stream {kind} has no length. Add __len__, or count the steps."
            )
        return self.sharding.num_steps(len(self._loader.dataset), self.sharding.padded_size)

    @override
    def skip_steps(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        if not steps:
            return start
        offset = start.get("position", 0) + steps * self.sharding.padded_size
        skip = start.get("skip", 0) + steps
        return start | {"position": offset, "skip": skip} | mark_skipped(steps, start)

    @override
    def next_epoch(self) -> dict[str, Any]:
        worker_keys = self._persistent.worker_keys(self._persistent.iterations) if self._persistent else {}
        return {"random": capture_states(self._generators)} | worker_keys

    @override
    def check(self, start: dict[str, Any]) -> None:
        worker_states = start.get("workers")
        if worker_states is not None and len(worker_states) != self._loader.num_workers:
            raise build_worker_count_error(len(worker_states))

    def _read_steps(
        self,
        start: dict[str, Any],
        epoch_states: dict[str, Any],
        local_states: dict[str, Any],
        progress: _StreamProgress,
    ) -> _Steps:
        """Yield all steps; the first is read under random states that are the same on all ranks."""
        is_local = epoch_states is local_states
        if not is_local:
            restore_states({"generators": epoch_states["generators"]}, self._generators)
        resumed, no_workers = is_inside_epoch(start), self._loader.num_workers == 0
        is_first = (
            self._backend.data_rank.rank == 0
            and not resumed
            and fingerprint_states(epoch_states) == fingerprint_states(local_states)
        )
        rng, live_key = ReadingRNG(), {}
        context: AbstractContextManager[None] = nullcontext()
        if no_workers:
            # A live epoch is read from the global generators, in turn with the script's own draws.
            live = bool(start.get("live") and start.get("restored")) if resumed else is_local
            live_key = {"live": True} if live else {}
            rng = self._build_reading_rng(start, epoch_states, live=live)
        elif not (is_local or is_first):
            context = IsolatedRNG(epoch_states)()  # only the workers' seed is drawn in this process
        stream = None if start else self._persistent  # until a state is loaded
        if stream is None:
            stream = _StreamLoader(self._loader, WorkerReader(self._task, start, rng), start)
            self._persistent = stream if self._loader.persistent_workers else None
        iterations = stream.iterations
        progress.epoch_keys = lambda: live_key | stream.worker_keys(iterations)
        # Inside an epoch the seed for workers has been drawn before, and the generator restored is past that draw.
        stream.choose_generator(
            spare=bool(start.get("walks")) or (no_workers and resumed and not self._generators)
        )
        steps = self._group_by_step(stream, start.get("skip", 0), progress)
        with context:
            first = next(steps, None)
        if rng.isolated is not None and is_first:
            rng.isolated.take_over()  # on the first data rank, global states advance as on one process
        if first is not None:
            yield first
            yield from steps

    def _build_reading_rng(
        self, start: dict[str, Any], epoch_states: dict[str, Any], *, live: bool
    ) -> ReadingRNG:
        """Return the random states that a loader without workers reads an epoch under."""

        def build() -> IsolatedRNG:
            reading = IsolatedRNG(epoch_states)
            if not self._generators:
                with reading():  # torch draws a seed for workers even without workers
                    torch.empty((), dtype=torch.int64).random_()
            return reading

        resumed = is_inside_epoch(start)
        # A live epoch is replayed under its own states up to the saved offset, and continues live from there.
        return ReadingRNG(
            None if live else build(),
            build() if resumed and live and start.get("position") else None,
            build() if resumed else None,
        )

    def _group_by_step(self, stream: _StreamLoader, skip: int, progress: _StreamProgress) -> _Steps:
        """Yield all steps after the first `skip`; workers that read the whole stream skip them themselves.

        Raises StreamsDifferError if such workers have read different samples.
        """
        num_others = len(self._task.ranks) - 1
        stream.infos.clear()
        stream.iterations += 1
        fingerprint: int | None = None
        batches = iter(stream.loader)
        for number, batch in enumerate(batches):
            step = [batch, *islice(batches, num_others)]
            info, *_ = [stream.infos.popleft() for _ in step]
            if info.worker is not None and number < skip:
                progress.advance(info)
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


class _StreamLoader:
    """Copy of the script's loader that yields plain batches and queues the workers' descriptions of them."""

    def __init__(self, loader: DataLoader[Any], reader: WorkerReader, start: dict[str, Any]) -> None:
        self.infos: deque[WorkerBatch] = deque()
        self.iterations: int = start.get("walks", 0)
        """Number of iterations begun by its workers, or by the workers that they replace."""
        self._seeds: list[int] = [start["base"]] if "base" in start else []
        self._script_loader = loader
        overrides: dict[str, Any] = {
            "dataset": reader,
            "batch_sampler": None,
            "collate_fn": _identity,
            "worker_init_fn": None,
        }
        self._inner = copy_loader(loader, **overrides, drop_last=False, _IterableDataset_len_called=None)
        self.loader = copy_loader(loader)
        # Not a method: in a reference cycle, workers end only at a garbage collection.
        replace_iterator(self.loader, partial(_StreamIterator, self._inner, self.infos, self._seeds))

    def choose_generator(self, *, spare: bool) -> None:
        """Let torch draw the workers' seed from the script's generator, or from a spare one."""
        self._inner.generator = torch.Generator() if spare else self._script_loader.generator

    def worker_keys(self, iterations: int) -> dict[str, Any]:
        """Return the state of persistent workers' random numbers: their first seed and number of iterations before."""
        if not self._script_loader.persistent_workers:
            return {}
        return {"walks": iterations} | ({"base": self._seeds[0]} if self._seeds else {})


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
        if not self._ready:
            info, batches = next(self._inner)
            self._ready.extend((info, batch) for batch in batches)
        info, batch = self._ready.popleft()
        self._infos.append(info)
        return batch

    def _reset(self, _: DataLoader[Any]) -> None:
        """Start a new iteration with the same workers."""
        self._ready.clear()
        self._inner._reset(self._loader)  # noqa: SLF001 - called by `DataLoader.__iter__`


class _StreamProgress:
    """Offset of an iteration in its stream.

    Args:
        start: The state it began at.
        epoch_states: The random states of the epoch.
        num_workers: The number of workers of the loader.
    """

    def __init__(self, start: dict[str, Any], epoch_states: dict[str, Any], num_workers: int) -> None:
        self._start = start
        self._epoch_states = epoch_states
        self._last: WorkerBatch | None = None
        self._offset: int = start.get("position", 0)
        self._worker_states: list[dict[str, Any] | WorkerBatch] = start.get("workers") or [
            {"position": 0}
        ] * max(1, num_workers)
        self.epoch_keys: Callable[[], dict[str, Any]] = dict
        """Returns the keys of the state that hold for the epoch, except for its random states."""

    def advance(self, info: WorkerBatch) -> None:
        """Advance by a batch that is returned or dropped."""
        self._last = info
        self._offset += info.num_samples
        if info.worker is not None:
            self._worker_states = [
                info if worker == info.worker else state for worker, state in enumerate(self._worker_states)
            ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch."""
        info = self._last
        if info is None:
            return self._start
        epoch = {"random": self._epoch_states} | self.epoch_keys()
        if info.worker is None:
            return epoch | {"whole": True} | _reader_state(info)
        turn = (info.worker + 1) % len(self._worker_states)
        states = [_reader_state(s) if isinstance(s, WorkerBatch) else s for s in self._worker_states]
        return epoch | {"position": self._offset, "workers": states, "turn": turn}


def _reader_state(info: WorkerBatch) -> dict[str, Any]:
    if info.is_last:  # a dataset may have reset its state already
        return {"position": info.offset, "ended": True}
    state = {} if info.dataset_state is None else {"state": info.dataset_state, "state_at": info.offset}
    reading = {} if info.rng_states is None else {"reading": to_serializable(info.rng_states)}
    return {"position": info.offset} | state | reading


def _mark_last(steps: _Steps, num_workers: int) -> Iterator[tuple[WorkerBatch, list[Any], bool]]:
    """Add to each step if it is the last; if workers read their own parts, it is when all of them have ended."""
    num_open = max(1, num_workers)
    ahead = next(steps, None)
    while ahead is not None:
        info, batches = ahead
        if info.worker is None or not info.is_last:
            yield info, batches, info.is_last
            ahead = next(steps, None)
            continue
        num_open -= 1
        # A worker without a sample never reports its end.
        ahead = next(steps, None) if num_open else None
        yield info, batches, ahead is None


def _identity(item: Any) -> Any:
    return item
