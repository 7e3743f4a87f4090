"""The heartbeat: what a process leaves for its launcher to see how far it is, without a call or a thread."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from accel_runtime.env import BEAT, BEAT_NUMBERS, BEAT_SIZE, RANK_FOLDER
from accel_runtime.exchange.callsite import CallSite

__all__ = ["Counts", "Heartbeat", "Progress", "heartbeat", "keep_still"]

_HERE = threading.local()

_PID, _STEPS, _BATCHES, _COLLECTIVES, _INSIDE, _NEWS = range(len(BEAT_NUMBERS))
_TEXT = 8 * len(BEAT_NUMBERS)


class Counts(NamedTuple):
    """How far a process has come since the ranks last met, comparable between ranks that run one program."""

    collectives: int
    """Collectives of accel that it has entered, since it started."""
    backwards: int
    """Backward passes begun since the last of these collectives."""
    steps: int
    """Optimizer steps since then."""
    batches: int
    """Batches handed out since then."""

    def is_beyond(self, other: Counts) -> bool:
        """Return whether a process with these counts has begun something that one with the others has not."""
        if self.collectives != other.collectives:
            return self.collectives > other.collectives
        return any(mine > its for mine, its in zip(self, other, strict=True))


class Progress:
    """How far this process is, in numbers that its other threads may read."""

    def __init__(self) -> None:
        self.steps = self.batches = self.backwards = self.collectives = 0
        self.inside: tuple[str, CallSite] | None = None
        """The collective of accel that this process is in, and its line."""
        self._base = (0, 0, 0)
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")

    @property
    def has_failed(self) -> bool:
        """Whether the script has ended with an exception, as far as can be told when the interpreter ends."""
        # A launcher's worker writes the file and ends the interpreter as if nothing had been raised.
        return hasattr(sys, "last_value") or (bool(self._error_file) and Path(self._error_file).exists())

    @property
    def counts(self) -> Counts:
        """What other ranks compare with theirs."""
        backwards, steps, batches = self._base
        return Counts(
            self.collectives, self.backwards - backwards, self.steps - steps, self.batches - batches
        )

    def level(self) -> None:
        """Count backward passes, steps and batches from here: the ranks may have had different numbers of them."""
        self._base = (self.backwards, self.steps, self.batches)

    def step(self) -> None:
        """An optimizer has stepped."""
        self.steps += 1

    def batch(self) -> None:
        """A loader hands out a batch."""
        self.batches += 1

    def backward(self) -> None:
        """A backward pass begins."""
        self.backwards += 1

    def collective(self) -> None:
        """A collective of torch that accel makes on all ranks begins."""
        self.collectives += 1
        self.level()

    def enter(self, operation: str, site: CallSite) -> None:
        """A collective with an agreement begins."""
        self.collective()
        self.inside = (operation, site)

    def leave(self) -> None:
        """The collective is over."""
        self.inside = None


class Heartbeat(Progress):
    """How far this process is, kept in a mapped file too.

    Args:
        file: A new file; what is there already is another process's.

    Raises:
        OSError: It is there, or cannot be made.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        with file.open("xb+") as opened:
            # On a full disk a hole in the file would end the process by SIGBUS at the first store.
            opened.write(bytes(BEAT_SIZE))
            opened.flush()
            self._memory = mmap.mmap(opened.fileno(), BEAT_SIZE)
        self._numbers = memoryview(self._memory)[:_TEXT].cast("q")
        self._place: tuple[str, CallSite] | None = None
        self._numbers[_PID] = os.getpid()
        self._numbers[_NEWS] = time.monotonic_ns()

    @override
    def step(self) -> None:
        self.steps += 1
        self._numbers[_STEPS] = self.steps
        self._numbers[_NEWS] = time.monotonic_ns()

    @override
    def batch(self) -> None:
        self.batches += 1
        self._numbers[_BATCHES] = self.batches
        self._numbers[_NEWS] = time.monotonic_ns()

    @override
    def enter(self, operation: str, site: CallSite) -> None:
        super().enter(operation, site)
        if self.inside != self._place:
            self._place = self.inside
            text = f"{operation} at {site}".encode()[: BEAT_SIZE - _TEXT]
            self._memory[_TEXT:] = text.ljust(BEAT_SIZE - _TEXT, b"\0")
        self._numbers[_INSIDE] = 1
        self._numbers[_NEWS] = time.monotonic_ns()

    @override
    def leave(self) -> None:
        self._numbers[_COLLECTIVES] += 1
        self._numbers[_INSIDE] = 0
        self._numbers[_NEWS] = time.monotonic_ns()
        self.inside = None


def heartbeat() -> Progress | None:
    """Return the progress of this process; None where neither a launcher nor another rank looks at it.

    A launcher watches one process; what that starts keeps none. A replica that keeps still has none either.
    """
    return None if getattr(_HERE, "still", False) else _of_process()


def keep_still() -> None:
    """Leave the heartbeat to others: this thread is one of several replicas of a process."""
    _HERE.still = True


@lru_cache(maxsize=1)
def _of_process() -> Progress | None:
    folder = os.environ.get(RANK_FOLDER)
    beside = Progress() if os.environ.get("WORLD_SIZE", "1") != "1" else None
    if not folder:
        return beside
    try:
        return Heartbeat(Path(folder) / BEAT)
    except OSError:
        return beside
