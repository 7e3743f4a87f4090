"""Reader that batches a stream for some ranks, in a loader's worker or in the process itself."""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from accel_runtime.backends.rng import IsolatedRNG, are_equal, current_states, restore_states, to_bytes
from accel_runtime.data.map_style import hash_seed, seed_worker
from accel_runtime.data.sharding import BatchSharding, batch_slices
from accel_runtime.environment.text import encode_text
from accel_runtime.foundation import nested
from accel_runtime.foundation.torch_internals import generate_numpy_state, set_worker_info

__all__ = [
    "ReadingRNG",
    "WorkerBatch",
    "WorkerReader",
    "WorkerTask",
    "build_worker_count_error",
    "combine_fingerprints",
    "fingerprint_samples",
]


class WorkerBatch(NamedTuple):
    """Description of a global batch by its reader, sent with the batch."""

    num_samples: int
    """Number of samples, without padding."""
    offset: int
    """Offset of its end in the samples of this reader."""
    is_last: bool
    """True for the last batch of this reader."""
    worker: int | None
    """Worker whose part of the stream it comes from; None if every worker reads the whole stream."""
    fingerprint_before: int
    """Fingerprint of the samples read before it."""
    fingerprint_after: int
    """Fingerprint of the samples read up to its end."""
    dataset_state: Any
    """State of the dataset at its end, or None."""
    rng_states: dict[str, Any] | None
    """Random states of the dataset state; None if there is none, or if they are those the reader began with."""


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


class ReadingRNG(NamedTuple):
    """Random states that an iteration over a stream without workers reads under."""

    isolated: IsolatedRNG | None = None
    """States to read under; None uses the global ones."""
    replay: IsolatedRNG | None = None
    """States to replay samples before the saved offset under, and those read ahead of it; None uses `isolated`."""
    epoch_start: IsolatedRNG | None = None
    """States at the start of the epoch, if that was in another process; None uses `isolated`."""


class WorkerReader(IterableDataset[tuple[WorkerBatch, list[Any]]]):
    """Dataset that replaces a stream and yields, for every global batch, the batches of some ranks.

    A dataset that splits itself among the workers (it calls `torch.utils.data.get_worker_info()`, or its
    `worker_init_fn` changes it) keeps its split: each worker batches its own part. Any other stream is read completely
    by every worker, and each makes every num_workers-th batch, so that torch's round robin returns them in order.

    Args:
        task: The dataset and the batches to make of it.
        start: The state to begin at, in the first iteration; the next ones begin at the start.
        rng: The random states of the first iteration without workers; the next ones read under `isolated`.
    """

    def __init__(self, task: WorkerTask, start: dict[str, Any], rng: ReadingRNG) -> None:
        self._task = task
        self._start = start
        self._rng = rng
        self._view: _WorkerView | None = None

    @override
    def __iter__(self) -> Iterator[tuple[WorkerBatch, list[Any]]]:
        start, self._start = self._start, {}
        rng, self._rng = self._rng, ReadingRNG(self._rng.isolated)
        view = self._begin_view(start)
        worker_states = start.get("workers")
        if worker_states is not None and (view is None or len(worker_states) != view.count):
            raise build_worker_count_error(len(worker_states))
        state = start if worker_states is None or view is None else worker_states[view.index]
        if state.get("ended"):
            return
        if view is not None:
            own = view.own_rng
            # Another one for the start, as reading goes on with the first.
            epoch_start = IsolatedRNG() if worker_states is None or own is None else copy.copy(own)
            rng = ReadingRNG(IsolatedRNG(), None, epoch_start)
            if "reading" in state:
                view.own_rng = None  # the state has the random states to read under
        source = StreamReader(self._task.dataset, self._task.head_size, rng)
        try:
            source.open(state.get("state"), state.get("reading"))
            reads_all = view is None or not view.is_split()
            if reads_all and worker_states is not None:
                raise build_worker_count_error(len(worker_states))
            if not reads_all and start.get("whole"):
                raise build_worker_count_error(0)
            offset = state.get("position", 0) if reads_all or worker_states is not None else 0
            source.skip(offset - state.get("state_at", 0))
            source.finish_replay(self._lookahead)
            yield from self._read_batches(source, offset, start.get("skip", 0), reads_all=reads_all)
        finally:
            source.close()

    @property
    def _lookahead(self) -> int:
        """Return how many samples must follow a batch that is not the last."""
        sharding = self._task.sharding
        return sharding.padded_size if sharding.drop_last else 1

    def _begin_view(self, start: dict[str, Any]) -> _WorkerView | None:
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

    def _read_batches(
        self, source: StreamReader, offset: int, skip: int, *, reads_all: bool
    ) -> Iterator[tuple[WorkerBatch, list[Any]]]:
        """Yield this reader's batches from `offset`; `skip` counts steps of all workers that are left empty."""
        view, sharding = self._view, self._task.sharding
        count, turn = (view.count, view.turn) if view is not None else (1, 0)
        size, lookahead = sharding.padded_size, self._lookahead
        pending: list[Any] = []
        fingerprint, step = 0, 0
        # Without workers, a rank that reads for all has no fingerprints to compare with.
        is_compared = self._task.compare_ranks or view is not None
        while True:
            is_own = not reads_all or step % count == turn
            samples, dataset_state, rng_states = source.read(size - len(pending), lookahead if is_own else 0)
            pending += samples
            batch, pending = pending[:size], pending[size:]
            if not batch or (sharding.drop_last and len(batch) < size):
                return
            offset += len(batch)
            before = fingerprint
            if is_compared:
                fingerprint = fingerprint_samples(batch, fingerprint)
            if is_own:
                info = WorkerBatch(
                    len(batch),
                    offset,
                    len(pending) < lookahead,
                    None if reads_all or view is None else view.index,
                    before,
                    fingerprint,
                    dataset_state,
                    rng_states,
                )
                is_needed = reads_all or step * count + turn >= skip
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
        start: The state. Its `turn` is the worker whose batch comes next: the indices of all workers are rotated by it, so
            that torch's round robin, which begins with the first process, continues there. Its `base` and `walks` are those
            of persistent workers.
    """

    def __init__(self, info: Any, dataset: Any, start: dict[str, Any]) -> None:
        turn: int = start.get("turn", 0)
        self.turn: int = info.id
        self.count: int = info.num_workers
        self.index: int = (info.id + turn) % info.num_workers
        self.is_aware = False
        """True if the dataset or its init function depends on the worker."""
        self.iteration: int = start.get("walks", 0)
        self.own_rng: IsolatedRNG | None = None
        """Random states of this worker, for a dataset that asks which worker it is in."""
        self._base: int = start.get("base", info.seed - info.id)
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


_Context = Callable[[], AbstractContextManager[None]]
"""Creates a context with other random states."""


class StreamReader:
    """Samples of one iteration over a dataset, from any offset.

    Args:
        dataset: The dataset to read.
        head_size: How many samples of the start may be requested at the end.
        rng: The random states to read under.
    """

    def __init__(self, dataset: Any, head_size: int, rng: ReadingRNG) -> None:
        self._dataset = dataset
        self._has_state = all(
            callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
        )
        self._head_size = head_size
        self._final_context: _Context = rng.isolated or nullcontext
        self._context: _Context = rng.replay or self._final_context
        self._head_context: _Context = rng.epoch_start or self._final_context
        self._head: list[Any] = []
        self._initial_state: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._rng_states: dict[str, Any] = {}

    def open(self, state: Any, rng_states: dict[str, Any] | None = None) -> None:
        """Open the dataset at a state of it or at the start, under `rng_states` if given, and fetch the first sample."""
        if state is not None:
            self._initial_state = copy.deepcopy(self._dataset.state_dict())
            self._dataset.load_state_dict(copy.deepcopy(state))
        with self._context():
            self._rng_states = current_states() if self._has_state else {}
            if rng_states is not None:
                restore_states(rng_states)
            iterator = iter(self._dataset)
            first = list(islice(iterator, 1))
        self._iterator = chain(first, iterator) if first else iter(())

    def finish_replay(self, lookahead: int) -> None:
        """Replay the samples that were read ahead of the saved offset, then switch to the final random states."""
        if self._context is not self._final_context:
            with self._context():
                samples = list(islice(self._iterator, lookahead))
            self._iterator = chain(samples, self._iterator) if len(samples) == lookahead else iter(samples)
            self._context = self._final_context

    def read(self, count: int, lookahead: int) -> tuple[list[Any], Any, dict[str, Any] | None]:
        """Return up to `count + lookahead` samples, and the states between the two parts.

        These are the dataset's own state, if it has one and `lookahead` is not 0, and the random states it was taken under,
        unless they are those of the start.
        """
        state, rng_states = None, None
        with self._context():
            samples = list(islice(self._iterator, count))
            if self._has_state and lookahead:
                state = copy.deepcopy(self._dataset.state_dict())
                rng_states = current_states()
            samples += islice(self._iterator, lookahead)
        if len(samples) < count + lookahead:
            self._iterator = iter(())
        if len(self._head) < self._head_size:
            self._head += samples[: self._head_size - len(self._head)]
        unchanged = rng_states is None or are_equal(rng_states, self._rng_states)
        return samples, state, None if rng_states is None or unchanged else to_bytes(rng_states)

    def skip(self, count: int) -> None:
        """Read samples and drop them, except for the head."""
        self.read(min(count, self._head_size), 0)
        with self._context():
            deque(islice(self._iterator, max(0, count - self._head_size)), maxlen=0)

    def read_head(self) -> list[Any]:
        """Return the first samples of the epoch, once all have been read."""
        if self._initial_state is not None:
            self._dataset.load_state_dict(copy.deepcopy(self._initial_state))
            with self._head_context():
                self._head = list(islice(iter(self._dataset), self._head_size))
        return self._head

    def close(self) -> None:
        """Reset the dataset, so that the next iteration begins at the start."""
        if self._initial_state is not None:
            self._dataset.load_state_dict(self._initial_state)


_MAX_CHARS = 48
_NUM_ELEMENTS = 5


def fingerprint_samples(samples: list[Any], fingerprint: int) -> int:
    """Return the fingerprint of a stream after one more batch.

    Only a few elements of the first and the last sample are read, so that the cost does not grow with the batch. Another
    order, or a sample more or less, still changes it: all samples that follow are shifted.
    """
    text = f"{len(samples)} {_describe_sample(samples[0], 2)} {_describe_sample(samples[-1], 2)}"
    return zlib.crc32(encode_text(text), fingerprint)


def combine_fingerprints(first: int, second: int) -> int:
    """Return one fingerprint of two, in this order."""
    return zlib.crc32(second.to_bytes(4, "little"), first)


def _describe_sample(sample: Any, depth: int) -> str:
    return "|".join(_describe_leaf(leaf, depth) for leaf in nested.leaves(sample, objects=False))


def _describe_leaf(leaf: Any, depth: int) -> str:
    if isinstance(leaf, (str, bytes)):
        return f"{len(leaf)}{leaf[:_MAX_CHARS]!r}"
    if leaf is None or isinstance(leaf, (int, float, complex)):
        return repr(leaf)
    if isinstance(leaf, torch.Tensor) or hasattr(leaf, "__array__"):
        return _describe_array(leaf)
    attributes = getattr(leaf, "__dict__", None) or {}
    if depth and isinstance(attributes, dict):
        return type(leaf).__name__ + _describe_sample(list(attributes.values()), depth - 1)
    return type(leaf).__name__


def _describe_array(array: Any) -> str:
    """Return the shape and some elements of a tensor or array; only the shape if elements cannot be indexed."""
    try:
        flat = array.reshape(-1)
        elements = flat[:: max(1, len(flat) // _NUM_ELEMENTS)].tolist()
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        elements = []
    return f"{getattr(array, 'shape', '')}{elements[: _NUM_ELEMENTS + 1]}"
