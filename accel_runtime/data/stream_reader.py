"""Reader of the samples of a stream, from any offset, and fingerprints of samples."""

from __future__ import annotations

import copy
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain, islice
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from accel_runtime.backends.rng import IsolatedRNG, RandomStates
from accel_runtime.data.state import DatasetState
from accel_runtime.environment.text import encode_text
from accel_runtime.foundation import nested

__all__ = ["ReadingRNG", "StreamReader", "combine_fingerprints", "fingerprint_samples"]

_LOG = logging.getLogger("accel_runtime.data")


class ReadingRNG(NamedTuple):
    """Random states that an iteration over a stream without workers reads under."""

    isolated: IsolatedRNG | None = None
    """States to read under; None uses the global ones."""
    replay: IsolatedRNG | None = None
    """States to replay samples before the saved offset under, and those read ahead of it; None uses `isolated`."""
    epoch_start: IsolatedRNG | None = None
    """States at the start of the epoch, if that was in another process; None uses `isolated`."""


_Context = Callable[[], AbstractContextManager[None]]
"""Creates a context with other random states."""
_NUM_VERIFIED = 16
"""Samples, at least, that are compared with those before a save when the own state of a dataset is loaded."""


class _DatasetMark:
    """A state of the dataset, and the samples that were read since."""

    def __init__(self, state: Any, offset: int, random: RandomStates | None) -> None:
        self._state, self._random = state, random
        self._offset = offset
        self.num_samples = self._fingerprint = 0

    def add(self, sample_hash: int) -> None:
        """Add a sample that was read after the state."""
        self.num_samples += 1
        self._fingerprint = combine_fingerprints(self._fingerprint, sample_hash)

    def build_state(self) -> DatasetState:
        """Return the state, with the fingerprint of the samples up to now."""
        return DatasetState(self._state, self._offset, self.num_samples, self._fingerprint, self._random)


class StreamReader:
    """Samples of one iteration over a dataset, from any offset.

    The own state of a dataset is used only if the samples that follow it are those that followed it before: a dataset may
    leave out a buffer, such as that of `shuffle(buffer_size=...)`. Therefore the state of some samples ago is saved, or the
    newest one if samples contain random numbers that the dataset and the script draw in turn.

    Args:
        dataset: The dataset to read.
        head_size: How many samples of the start may be requested at the end.
        rng: The random states to read under.
        keeps_state: If false, the own state of the dataset is ignored.
    """

    def __init__(self, dataset: Any, head_size: int, rng: ReadingRNG, *, keeps_state: bool = True) -> None:
        self._dataset = dataset
        self._has_state = keeps_state and all(
            callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
        )
        self._head_size = head_size
        self._final_context: _Context = rng.isolated or nullcontext
        self._context: _Context = rng.replay or self._final_context
        self._head_context: _Context = rng.epoch_start or self._final_context
        self._head: list[Any] = []
        self._has_head = True
        self._initial_state: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._initial_random: RandomStates | None = None
        self._marks: deque[_DatasetMark] = deque()
        self._offset = 0
        self._draws_in_turn = rng.isolated is None
        self._has_drawn = False

    def open(self, random: RandomStates | None = None) -> None:
        """Open the dataset, under random states if given, and fetch the first sample."""
        with self._context():
            self._initial_random = RandomStates.capture() if self._has_state else None
            if random is not None:
                random.restore()
            iterator = iter(self._dataset)
            first = list(islice(iterator, 1))
        self._iterator = chain(first, iterator) if first else iter(())

    def open_at(self, saved: DatasetState, offset: int) -> bool:
        """Load the saved state into the dataset and read up to `offset`; return False if the samples differ."""
        if not self._has_state:
            return False
        self._has_head = False
        attributes = dict(vars(self._dataset))
        try:
            self._initial_state = copy.deepcopy(self._dataset.state_dict())
            self._dataset.load_state_dict(copy.deepcopy(saved.state))
            self.open(saved.random)
            self._offset = saved.offset
            if self.verify(saved, offset):
                return True
        except Exception as error:  # noqa: BLE001 - the script's dataset; the stream is read from its start instead
            _LOG.debug("load_state_dict() of %s failed: %s", type(self._dataset).__name__, error)
        with suppress(Exception):  # the next comparison shows if the dataset is at its start
            self.close()
        # Such as the number of the epoch, if its state does not have it.
        vars(self._dataset).update(attributes)
        return False

    def verify(self, saved: DatasetState, offset: int) -> bool:
        """Read up to `offset`; return False if the samples after a saved state are not those of that time."""
        self.skip(saved.offset)
        mark = _DatasetMark(saved.state, saved.offset, saved.random)
        self._marks.append(mark)
        self.skip(offset)
        with self._context():
            ahead = list(islice(self._iterator, saved.offset + saved.num_samples - self._offset))
        self._iterator = chain(ahead, self._iterator)
        mark = copy.copy(mark)
        for sample in ahead:
            mark.add(_hash_sample(sample))
        return self._offset == offset and mark.build_state().fingerprint == saved.fingerprint

    def finish_replay(self, lookahead: int) -> None:
        """Replay the samples that were read ahead of the saved offset, then switch to the final random states."""
        if self._context is not self._final_context:
            with self._context():
                samples = list(islice(self._iterator, lookahead))
            self._iterator = chain(samples, self._iterator) if len(samples) == lookahead else iter(samples)
            self._context = self._final_context

    def read(self, count: int, lookahead: int) -> tuple[list[Any], DatasetState | None]:
        """Return up to `count + lookahead` samples, and the state of the dataset between the two parts.

        None if it has no state, if `lookahead` is 0, or if too few samples were read to verify one.
        """
        with self._context():
            is_tracked = self._has_state and self._draws_in_turn and not self._has_drawn
            before = RandomStates.capture() if is_tracked else None
            samples = list(islice(self._iterator, count))
            self._add(samples)
            if self._has_state and lookahead:
                random = RandomStates.capture()
                unchanged = random == self._initial_random
                self._mark(None if unchanged else random)
            ahead = list(islice(self._iterator, lookahead))
            self._add(ahead)
            self._has_drawn = self._has_drawn or (before is not None and before != RandomStates.capture())
        if len(samples) + len(ahead) < count + lookahead:
            self._iterator = iter(())
        return samples + ahead, self._select_state() if lookahead else None

    def _mark(self, random: RandomStates | None) -> None:
        """Record the state of the dataset, or that it has none of use."""
        try:
            state = copy.deepcopy(self._dataset.state_dict())
        except Exception as error:  # noqa: BLE001 - the script's dataset; a resume reads the stream from its start
            self._has_state = False
            self._marks.clear()
            if self._dataset not in _WARNED:
                _WARNED.add(self._dataset)
                name = type(self._dataset).__name__
                _LOG.warning(_NO_STATE, name, f"{type(error).__name__}: {error}")
        else:
            self._marks.append(_DatasetMark(state, self._offset, random))

    def _add(self, samples: list[Any]) -> None:
        """Record samples that were read."""
        self._offset += len(samples)
        if self._has_head and len(self._head) < self._head_size:
            self._head += samples[: self._head_size - len(self._head)]
        if self._marks:
            for sample in samples:
                sample_hash = _hash_sample(sample)
                for mark in self._marks:
                    mark.add(sample_hash)

    def _select_state(self) -> DatasetState | None:
        """Return the newest state that enough samples follow, and drop the older ones."""
        if self._has_drawn:
            # Between two batches the script draws too, so that a sample is not the same when it is read again.
            self._marks = deque(islice(reversed(self._marks), 1))
        while len(self._marks) > 1 and self._marks[1].num_samples >= _NUM_VERIFIED:
            self._marks.popleft()
        is_verifiable = self._marks and (self._has_drawn or self._marks[0].num_samples >= _NUM_VERIFIED)
        return self._marks[0].build_state() if is_verifiable else None

    def skip(self, offset: int) -> None:
        """Read samples up to an offset and drop them, except for the head."""
        while self._offset < offset:
            samples, _ = self.read(min(offset - self._offset, _MAX_SKIPPED), 0)
            if not samples:
                return

    def read_head(self) -> list[Any]:
        """Return the first samples of the epoch, once all have been read."""
        if not self._has_head:
            self._dataset.load_state_dict(copy.deepcopy(self._initial_state))
            with self._head_context():
                self._head = list(islice(iter(self._dataset), self._head_size))
        return self._head

    def close(self) -> None:
        """Reset the dataset, so that the next iteration begins at the start."""
        if not self._has_head:
            self._dataset.load_state_dict(self._initial_state)


_NO_STATE = (
    "state_dict() of the stream %s failed, so a resume reads it from its start and skips samples: %s. Return a state, or leave "
    "the method out."
)
_WARNED: WeakSet[Any] = WeakSet()
"""Datasets of this process whose state could not be read."""
_MAX_SKIPPED = 1024
"""Samples that are read at a time to skip them."""
_MAX_CHARS = 48
_NUM_ELEMENTS = 5


def _hash_sample(sample: Any) -> int:
    return zlib.crc32(encode_text(_describe_sample(sample, 2)))


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
    if isinstance(sample, (list, tuple)) and len(sample) > _NUM_ELEMENTS:
        # Of long lists, such as tokens, a few elements.
        chosen = sample[:: max(1, len(sample) // _NUM_ELEMENTS)]
        return f"{len(sample)}[{'|'.join(_describe_sample(each, depth) for each in chosen)}]"
    if isinstance(sample, dict):
        return "|".join(_describe_sample(each, depth) for each in sample.values())
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
