"""The samples of a stream as they pass by: read in order, from any position, under random states of their own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any

from accel_runtime.randomness import Apart, alike, in_force, portable, restore

__all__ = ["Samples"]

_Aside = Callable[[], AbstractContextManager[None]]
"""Puts random states in force."""


class Samples:
    """The samples of one walk over a dataset, from any position.

    Args:
        dataset: What is read.
        keep: How many samples of the start will be asked for at the end.
        apart: The random states to read under; None: those in force.
        replay: Those to read again under what had been read before.
        begin: Those under which the epoch was begun to read; by default `apart`.
    """

    def __init__(
        self,
        dataset: Any,
        keep: int,
        *,
        apart: Apart | None = None,
        replay: Apart | None = None,
        begin: Apart | None = None,
    ) -> None:
        self._dataset = dataset
        self._stateful = _stateful(dataset)
        self._keep = keep
        self._after: _Aside = nullcontext if apart is None else apart
        self._aside: _Aside = self._after if replay is None else replay
        self._again: _Aside = self._after if begin is None else begin
        self._begin: list[Any] = []
        self._initial: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._states: dict[str, Any] = {}

    def open(self, state: Any, reading: dict[str, Any] | None = None) -> None:
        """Begin to read, at a state of the dataset's or at the start; the first sample is fetched.

        Args:
            state: The dataset's.
            reading: The random states to go on under; None: those in force.
        """
        if state is not None:
            self._initial = copy.deepcopy(self._dataset.state_dict())
            self._dataset.load_state_dict(copy.deepcopy(state))
        with self._aside():
            self._states = in_force() if self._stateful else {}
            if reading is not None:
                restore(reading)
            iterator = iter(self._dataset)
            first = list(islice(iterator, 1))
        self._iterator = chain(first, iterator) if first else iter(())

    def replayed(self, beyond: int) -> None:
        """All before the position has been read again: so much was read beyond it, and the rest is read as it was."""
        if self._aside is not self._after:
            with self._aside():
                found = list(islice(self._iterator, beyond))
            self._iterator = chain(found, self._iterator) if len(found) == beyond else iter(found)
            self._aside = self._after

    def read(self, count: int, beyond: int) -> tuple[list[Any], Any, dict[str, Any] | None]:
        """So many more samples and some beyond, or what there is.

        Returns:
            The samples, and the dataset's state before those beyond, if it has one and there are to be any, with the
            random states it was taken under, unless they are those of the start.
        """
        state, reading = None, None
        with self._aside():
            found = list(islice(self._iterator, count))
            if self._stateful and beyond:
                state = copy.deepcopy(self._dataset.state_dict())
                reading = in_force()
            found += islice(self._iterator, beyond)
        if len(found) < count + beyond:
            self._iterator = iter(())
        if len(self._begin) < self._keep:
            self._begin += found[: self._keep - len(self._begin)]
        return found, state, None if reading is None or alike(reading, self._states) else portable(reading)

    def skip(self, count: int) -> None:
        """Read so many samples for nothing."""
        self.read(min(count, self._keep), 0)
        with self._aside():
            deque(islice(self._iterator, max(0, count - self._keep)), maxlen=0)

    def begin(self) -> list[Any]:
        """The first samples of the epoch, once all have been read."""
        if self._initial is not None:
            self._dataset.load_state_dict(copy.deepcopy(self._initial))
            with self._again():
                self._begin = list(islice(iter(self._dataset), self._keep))
        return self._begin

    def close(self) -> None:
        """Have the next walk begin at the start."""
        if self._initial is not None:
            self._dataset.load_state_dict(self._initial)


def _stateful(dataset: Any) -> bool:
    """Whether a dataset can say where it stands, and be put there."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
