"""Reader that batches a stream for some ranks, in a loader's worker or in the process itself."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from accel_runtime.backends.rng import IsolatedRNG, RandomStates
from accel_runtime.data.map_style import hash_seed, seed_worker
from accel_runtime.data.sharding import BatchSharding, batch_slices
from accel_runtime.data.state import ReaderState, StreamState
from accel_runtime.data.stream_reader import ReadingRNG, StreamReader, fingerprint_samples
from accel_runtime.foundation.torch_internals import generate_numpy_state, set_worker_info

__all__ = [
    "WorkerBatch",
    "WorkerReader",
    "WorkerTask",
    "build_worker_count_error",
]

_LOG = logging.getLogger("accel_runtime.data")


class WorkerBatch(NamedTuple):
    """Description of a global batch by its reader, sent with the batch."""

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
            source.finish_replay(self._lookahead)
            yield from self._read_batches(source, start, offset, reads_all=reads_all)
        finally:
            source.close()

    @property
    def _lookahead(self) -> int:
        """Return how many samples must follow a batch that is not the last."""
        sharding = self._task.sharding
        return sharding.padded_size if sharding.drop_last else 1

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
        size, lookahead = sharding.padded_size, self._lookahead
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
                info = WorkerBatch(len(batch), reader, worker, before, fingerprint)
                is_needed = reads_all or step * count + turn >= start.skipped_steps
                if is_needed and view is not None:
                    view.seed_batch(offset, self._task.ranks[0])  # for the script's collate_fn
                yield info, self._collate(batch, source) if is_needed else [None] * len(self._task.ranks)
            step += 1

    def _collate(self, batch: list[Any], source: StreamReader) -> list[Any]:
        """Return the batch of every rank from one global batch, with padding."""
        sharding, collate = self._task.sharding, self._task.collate
        info = sharding.step_info(len(batch), is_last=False)
        head = source.read_head() if info.num_padding and sharding.pad_last else []
        padded, slices = sharding.pad_last_batch(batch, info, head), batch_slices(info)
        local_batches = [padded[slices[rank]] for rank in self._task.ranks]
        return [collate(local[0] if self._task.single_samples else local) for local in local_batches]


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
