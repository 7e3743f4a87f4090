"""Source for iterable datasets (streams), its reader in a loader's worker, and checks that ranks and workers read the same stream."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import IsolatedRNG, RandomStates, broadcast_from_first
from accel_runtime.backends.single import Single
from accel_runtime.data.map_style import hash_seed, seed_worker
from accel_runtime.data.sharding import BatchSharding, batch_slices
from accel_runtime.data.source import Source, len_or_none
from accel_runtime.data.state import ReaderState, StreamState
from accel_runtime.data.stream_reader import (
    ReadingRNG,
    StreamReader,
    combine_fingerprints,
    fingerprint_samples,
)
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import CyclePart, EpochProgress, StepInfo
from accel_runtime.foundation.torch_internals import (
    copy_loader,
    generate_numpy_state,
    iterator_function,
    replace_iterator,
    set_worker_info,
)

__all__ = ["IterableSource", "StreamsDifferError"]


_LOG = logging.getLogger("accel_runtime.data")


class WorkerBatch(NamedTuple):
    """Description of a global batch, or of the whole of a cycle of several, by its reader, sent with the batch."""

    num_samples: int
    """Number of samples, without padding."""
    reader: ReaderState
    """State of the reader at its end."""
    worker: int | None
    """Worker whose part of the stream it comes from; None if every worker reads the whole stream."""
    fingerprint_before: int
    """Fingerprint of the samples read before it."""
    fingerprint_after: int
    """Fingerprint of the samples read up to its end."""
    num_steps: int = 1
    """Steps that its samples are divided into."""


@dataclass(frozen=True)
class WorkerTask:
    """Dataset to read, and the batches to make of it."""

    dataset: Any
    collate: Callable[[Any], Any]
    worker_init: Callable[[int], Any] | None
    sharding: BatchSharding
    ranks: tuple[int, ...]
    """Ranks whose batches are made."""
    single_samples: bool = False
    """True if a batch is one sample (`batch_size=None`)."""
    compare_ranks: bool = False
    """True if ranks compare fingerprints of their samples."""

    @property
    def size(self) -> int:
        """Return the samples that are read at a time: of a step, or of a cycle of steps."""
        return self.sharding.cycle_size or self.sharding.padded_size

    @property
    def head_size(self) -> int:
        """Return how many samples of the start of an epoch may be needed as padding."""
        return self.sharding.padded_size if self.sharding.pads_to_full_size else 0


class WorkerReader(IterableDataset["tuple[WorkerBatch, list[Any]] | None"]):
    """Dataset that replaces a stream and yields, for every global batch, the batches of some ranks.

    A dataset that splits itself among the workers (it calls `torch.utils.data.get_worker_info()`, or its
    `worker_init_fn` changes it) keeps its split: each worker batches its own part. Any other stream is read completely
    by every worker, and each makes every num_workers-th batch, so that torch's round robin returns them in order.

    Args:
        task: The dataset and the batches to make of it.
        start: The state to begin at, in the first iteration; the next ones begin at the start.
        rng: The random states of the first iteration without workers; the next ones read under `isolated`.
    """

    def __init__(self, task: WorkerTask, start: StreamState, rng: ReadingRNG) -> None:
        self._task = task
        self._start = start
        self._rng = rng
        self._view: _WorkerView | None = None
        self._epoch: torch.Tensor | None = None
        """Number of the epoch: `[]`, in memory that persistent workers share; None if the dataset does not ask for it."""
        self._begun_epoch: int | None = None
        """Number of the epoch of this worker's newest iteration."""

    def set_epoch(self, epoch: int) -> None:
        """Let an iteration that begins be of an epoch, also in workers that have a copy of the dataset since an earlier one."""
        if callable(getattr(self._task.dataset, "set_epoch", None)):
            if self._epoch is None:
                self._epoch = torch.empty((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
            self._epoch.fill_(epoch)

    def _begin_epoch(self) -> None:
        """Pass the number of a later epoch on to this worker's copy of the dataset; the first is that of the process it is a copy of."""
        epoch = None if self._epoch is None else int(self._epoch)
        if self._begun_epoch not in {None, epoch}:
            self._task.dataset.set_epoch(epoch)
        self._begun_epoch = epoch

    @override
    def __iter__(self) -> Iterator[tuple[WorkerBatch, list[Any]] | None]:
        if get_worker_info() is not None:
            self._begin_epoch()
        start, self._start = self._start, StreamState()
        rng, self._rng = self._rng, ReadingRNG(self._rng.isolated)
        view = self._begin_view(start)
        if start.workers is not None and (view is None or len(start.workers) != view.count):
            raise build_worker_count_error(len(start.workers))
        is_split = start.workers is not None
        if start.workers is not None and view is not None:
            position = start.workers[view.index]
        else:
            position = replace(start.reader or ReaderState(), offset=start.offset)
        if position.ended:
            return
        if is_split and view is not None and view.index < start.next_worker:
            yield None  # torch begins with worker 0, and the next batch is that of `next_worker`
        source = self._open_source(position, view, rng, is_split=is_split)
        try:
            reads_all = view is None or not view.is_split()
            if reads_all and start.workers is not None:
                raise build_worker_count_error(len(start.workers))
            if not reads_all and start.reader is not None:
                raise build_worker_count_error(0)
            offset = position.offset if reads_all or is_split else 0
            source.skip(offset)
            # Within a cycle, all of its samples were read before the save.
            source.finish_replay(self._lookahead + (self._task.size if start.cycle_offset else 0))
            yield from self._read_batches(source, start, offset, reads_all=reads_all)
        finally:
            source.close()

    @property
    def _lookahead(self) -> int:
        """Return how many samples must follow a batch that is not the last."""
        return self._task.size if self._task.sharding.drop_last else 1

    def _begin_view(self, start: StreamState) -> _WorkerView | None:
        """Return this worker's view after seeding it for a new iteration; None without workers."""
        init = None
        if self._view is None:
            info = get_worker_info()
            if info is None:
                return None
            self._view = _WorkerView(info, self._task.dataset, start)
            set_worker_info(self._view)
            init = self._task.worker_init
        view = self._view
        view.seed_as(view.index)
        view.run_init(init, view.index)
        view.own_rng = None if view.is_aware else IsolatedRNG()
        if view.index and not view.is_aware:
            # A stream that all workers read completely is read as by the first of them.
            view.seed_as(0)
            view.run_init(init, 0)
        view.iteration += 1
        return view

    def _open_source(
        self, position: ReaderState, view: _WorkerView | None, rng: ReadingRNG, *, is_split: bool
    ) -> StreamReader:
        """Return the reader of the dataset, at a state of the dataset that is verified, or at its start."""
        own = None if view is None else view.own_rng
        # The states at the start are needed again if the state of the dataset turns out to be of no use.
        initial = RandomStates.capture()

        def build_rng() -> ReadingRNG:
            if view is None:
                return ReadingRNG(*map(copy.copy, rng))
            view.own_rng = copy.copy(own)
            # Another one for the start, as reading goes on with the first.
            epoch_start = copy.copy(own) if is_split and own is not None else IsolatedRNG(initial)
            return ReadingRNG(IsolatedRNG(initial), None, epoch_start)

        dataset, head_size = self._task.dataset, self._task.head_size
        if position.dataset is not None:
            source = StreamReader(dataset, head_size, build_rng())
            if view is not None and position.dataset.random is not None:
                view.own_rng = None  # the state has the random states to read under
            if source.open_at(position.dataset, position.offset):
                return source
            _LOG.warning(_UNUSABLE_STATE, _describe_stream(dataset, view), position.offset)
            initial.restore()
        # A state that was of no use is not saved again.
        keeps_state = position.dataset is None
        source = StreamReader(
            dataset, head_size, rng if view is None else build_rng(), keeps_state=keeps_state
        )
        source.open()
        # In turn with the script, a stream drew other numbers than it does at once.
        if (
            position.dataset is not None
            and rng.replay is None
            and not source.verify(position.dataset, position.offset)
        ):
            _LOG.warning(_OTHER_SAMPLES, _describe_stream(dataset, view))
        return source

    def _read_batches(
        self, source: StreamReader, start: StreamState, offset: int, *, reads_all: bool
    ) -> Iterator[tuple[WorkerBatch, list[Any]]]:
        """Yield this reader's batches from `offset`."""
        view, sharding = self._view, self._task.sharding
        count, turn = (
            (view.count, (view.index - start.next_worker) % view.count) if view is not None else (1, 0)
        )
        size, lookahead = self._task.size, self._lookahead
        pending: list[Any] = []
        fingerprint, step = 0, 0
        # Without workers, a rank that reads for all has no fingerprints to compare with.
        is_compared = self._task.compare_ranks or view is not None
        while True:
            is_own = not reads_all or step % count == turn
            samples, dataset_state = source.read(size - len(pending), lookahead if is_own else 0)
            pending += samples
            batch, pending = pending[:size], pending[size:]
            if not batch or (sharding.drop_last and len(batch) < size):
                return
            offset += len(batch)
            before = fingerprint
            if is_compared:
                fingerprint = fingerprint_samples(batch, fingerprint)
            if is_own:
                ended = len(pending) < lookahead
                # A dataset may have reset its state at its end already.
                reader = ReaderState(offset, ended, None if ended else dataset_state)
                worker = None if reads_all or view is None else view.index
                number = step if reads_all else step * count + turn
                is_first = number == (0 if reads_all else start.skipped_steps)
                steps = self._divide(len(batch), start.cycle_offset if is_first else 0)
                info = WorkerBatch(len(batch), reader, worker, before, fingerprint, len(steps))
                is_needed = reads_all or number >= start.skipped_steps
                if is_needed and view is not None:
                    view.seed_batch(offset, self._task.ranks[0])  # for the script's collate_fn
                if is_needed:
                    yield info, self._collate(batch, steps, source)
                else:
                    yield info, [None] * (len(self._task.ranks) * len(steps))
            step += 1

    def _divide(self, num_samples: int, num_before: int) -> list[StepInfo]:
        """Return the steps of a global batch, or of a cycle after the samples that were returned before a save."""
        sharding = self._task.sharding
        if sharding.cycle_size is None:
            return [sharding.step_info(num_samples, is_last=False)]
        return list(sharding.split_cycle(num_samples - num_before, num_before, is_last=False))

    def _collate(self, batch: list[Any], steps: list[StepInfo], source: StreamReader) -> list[Any]:
        """Return the batches of the ranks in each step, with padding; samples before the first step are left out."""
        task, batches = self._task, []
        end = len(batch) - sum(sum(info.num_valid) for info in steps)
        for info in steps:
            begin, end = end, end + sum(info.num_valid)
            samples = batch[begin:end]
            head = source.read_head() if info.num_padding and task.sharding.pad_last else []
            padded, slices = task.sharding.pad_last_batch(samples, info, head), batch_slices(info)
            batches += [padded[slices[rank]] for rank in task.ranks]
        return [task.collate(local[0] if task.single_samples else local) for local in batches]


class _WorkerView:
    """Worker info as a dataset sees it; records whether the dataset asks which worker it is in.

    Args:
        info: The worker info of torch.
        dataset: The script's dataset.
        start: The state, which has the seed and the iterations of persistent workers.
    """

    def __init__(self, info: Any, dataset: Any, start: StreamState) -> None:
        self.index: int = info.id
        self.count: int = info.num_workers
        self.is_aware = False
        """True if the dataset or its init function depends on the worker."""
        self.iteration: int = start.worker_iterations
        self.own_rng: IsolatedRNG | None = None
        """Random states of this worker, for a dataset that asks which worker it is in."""
        self._base: int = info.seed - info.id if start.worker_seed is None else start.worker_seed
        self._info: Any = info
        self._dataset: Any = dataset
        self._shown_index: int = self.index
        self._was_asked = self._was_touched = False

    @property
    def id(self) -> int:
        self._record_question()
        return self._shown_index

    @property
    def num_workers(self) -> int:
        self._record_question()
        return self.count

    @property
    def seed(self) -> int:
        return self._base + self._shown_index

    @property
    def dataset(self) -> Any:
        self._was_touched = True
        return self._dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)

    def _record_question(self) -> None:
        if self.own_rng is not None and not self._was_asked:
            self.own_rng.take_over()
        self._was_asked = True

    def run_init(self, init: Callable[[int], Any] | None, index: int) -> None:
        """Call the script's `worker_init_fn` as worker `index`."""
        if init is None:
            return
        self._shown_index, self._was_touched = index, False
        init(index)
        # Many functions only seed by the worker's index; a function that splits accesses the dataset.
        self.is_aware |= self._was_touched
        self._shown_index, self._was_asked = self.index, False

    def is_split(self) -> bool:
        """Return whether the dataset splits itself among workers; known once its first sample has been read."""
        self.is_aware |= self._was_asked
        self.own_rng = None
        return self.is_aware and self.count > 1

    def seed_batch(self, offset: int, rank: int) -> None:
        """Seed a batch independently of those before it."""
        index = self.index if self.is_aware else -1
        seed_worker(hash_seed(self._base, self.iteration, rank, index, offset))

    def seed_as(self, index: int) -> None:
        """Seed as torch seeds worker `index`; later iterations of the same process differ."""
        base = (self._base + self.iteration * 2**32) % 2**63
        random.seed(base + index)
        torch.manual_seed(base + index)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(generate_numpy_state(base, index))


def build_worker_count_error(num_workers: int) -> ValueError:
    """Return the error for a state that was saved with another number of workers."""
    return ValueError(
        "Cannot resume this loader: its dataset splits itself among the workers, so its state is valid for the same number of "
        f"workers only. Resume with num_workers={num_workers}."
    )


_UNUSABLE_STATE = (
    "The stream %s is read from its start, and %d samples are skipped: after its own state come other samples than before the "
    "save. state_dict() leaves something out, such as the buffer of shuffle(buffer_size=...). If this takes too long, save at "
    "the end of an epoch, or shuffle the data beforehand."
)
_OTHER_SAMPLES = (
    "The stream %s cannot be continued exactly: from its start, it yields other samples than before the save. Samples may be "
    "repeated or left out. Make its order depend on the seed and the epoch only."
)


def _describe_stream(dataset: Any, view: _WorkerView | None) -> str:
    return type(dataset).__name__ + ("" if view is None else f" (worker {view.index})")


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
    def skip(self, state: StreamState, steps: int) -> StreamState:
        size = self.sharding.cycle_size
        if size is None:
            return state.skip(steps, self.stride)
        cycles, within = divmod(self.sharding.find_offset(steps, len_or_none(self._loader.dataset)), size)
        return replace(state.skip(cycles, size), cycle_offset=within, cycle_size=size if within else 0)

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
            if self.sharding.cycle_size is not None:
                yield from self._iterate_cycle(info, batches, position, progress, is_last=is_last)
                continue
            position.advance(info)
            progress.advance(self.sharding.step_info(info.num_samples, is_last=is_last))
            yield from batches

    def _iterate_cycle(
        self,
        info: WorkerBatch,
        batches: list[Any],
        position: _StreamPosition,
        progress: EpochProgress,
        *,
        is_last: bool,
    ) -> Iterator[Any]:
        """Yield the batches of a cycle step by step."""
        num_before, remaining = position.cycle_offset, iter(batches)
        for step in self.sharding.split_cycle(info.num_samples - num_before, num_before, is_last=is_last):
            position.enter_cycle(sum(step.num_valid), step.cycle)
            if step.cycle is not None and step.cycle.ends:
                position.advance(info)
            progress.advance(step)
            yield from islice(remaining, len(self._task.ranks))

    def _find_states(self, start: StreamState, current: RandomStates) -> RandomStates:
        """Return the random states at the start of the epoch; `current` itself if all ranks have the same."""
        if start.begun:
            return start.random or current
        # Nothing has been drawn between two epochs, and every rank has saved its own states.
        saved = current if start.random is None else current.update(start.random)
        return broadcast_from_first(current if saved == current else saved, self._backend)

    @override
    def num_steps(self, epoch: int) -> int:
        if not hasattr(self._loader.dataset, "__len__"):
            kind = type(self._loader.dataset).__name__
            raise TypeError(
                f"The number of steps is unknown: the stream {kind} has no length. Add __len__, or count the steps."
            )
        return self.sharding.num_steps(len(self._loader.dataset), self.stride)

    @override
    def next_epoch(self) -> StreamState:
        stream, random = self._persistent, RandomStates.capture(self._generators)
        if stream is None:
            return StreamState(random=random)
        return StreamState(random=random, worker_seed=stream.worker_seed, worker_iterations=stream.iterations)

    @override
    def check(self, start: StreamState) -> None:
        start.check_cycle(self.sharding.cycle_size)
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
            build() if start.begun and draws_in_turn and not start.is_at_start else None,
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
        num_ranks = len(self._task.ranks)
        stream.begin()
        fingerprint: int | None = None
        batches = iter(stream.loader)
        for number, batch in enumerate(batches):
            step = [batch, *islice(batches, num_ranks * stream.infos[0].num_steps - 1)]
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
        self.cycle_offset = start.cycle_offset
        """Samples that were returned of the cycle that is running; 0 between two. Only `enter_cycle` assigns it."""
        self._cycle: CyclePart | None = None
        self._readers = list(start.workers or [ReaderState()] * max(1, num_workers))

    def advance(self, info: WorkerBatch) -> None:
        """Advance by a batch, or the rest of a cycle, that is returned or dropped."""
        self._newest = info
        self._num_samples += info.num_samples
        if info.worker is not None:
            self._readers[info.worker] = info.reader

    def enter_cycle(self, num_samples: int, cycle: CyclePart | None) -> None:
        """Advance by some samples of a cycle."""
        self.cycle_offset = 0 if cycle is None or cycle.ends else self.cycle_offset + num_samples
        self._cycle = cycle

    def state(self) -> StreamState:
        """Return the state after the newest batch."""
        info, start = self._newest, self._start
        if info is None and self._cycle is None:
            return start
        begun = replace(self._reading.begun, worker_seed=self._reading.stream.worker_seed)
        begun = begun.enter_cycle(self.cycle_offset, self._cycle)
        if info is None:  # within the first cycle
            position = {
                name: getattr(start, name)
                for name in ("offset", "skipped_steps", "reader", "workers", "next_worker")
            }
            return replace(begun, **position)
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
