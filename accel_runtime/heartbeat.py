"""The heartbeat: what a process leaves for its launcher to see how far it is, without a call or a thread."""

from __future__ import annotations

import mmap
import os
import threading
import time
from functools import lru_cache
from pathlib import Path

from accel_runtime.env import BEAT, BEAT_NUMBERS, BEAT_SIZE, RANK_FOLDER
from accel_runtime.exchange.callsite import CallSite

__all__ = ["Heartbeat", "heartbeat", "keep_still"]

_HERE = threading.local()

_PID, _STEPS, _BATCHES, _COLLECTIVES, _INSIDE, _NEWS = range(len(BEAT_NUMBERS))
_TEXT = 8 * len(BEAT_NUMBERS)


class Heartbeat:
    """How far this process is, kept in a mapped file.

    Args:
        file: A new file; what is there already is another process's.

    Raises:
        OSError: It is there, or cannot be made.
    """

    def __init__(self, file: Path) -> None:
        with file.open("xb+") as opened:
            # On a full disk a hole in the file would end the process by SIGBUS at the first store.
            opened.write(bytes(BEAT_SIZE))
            opened.flush()
            self._memory = mmap.mmap(opened.fileno(), BEAT_SIZE)
        self._numbers = memoryview(self._memory)[:_TEXT].cast("q")
        self._place: tuple[str, CallSite] | None = None
        self._numbers[_PID] = os.getpid()
        self._numbers[_NEWS] = time.monotonic_ns()

    def step(self) -> None:
        """An optimizer has stepped."""
        self._numbers[_STEPS] += 1
        self._numbers[_NEWS] = time.monotonic_ns()

    def batch(self) -> None:
        """A loader hands out a batch."""
        self._numbers[_BATCHES] += 1
        self._numbers[_NEWS] = time.monotonic_ns()

    def enter(self, operation: str, site: CallSite) -> None:
        """A collective begins."""
        if (operation, site) != self._place:
            self._place = (operation, site)
            text = f"{operation} at {site}".encode()[: BEAT_SIZE - _TEXT]
            self._memory[_TEXT:] = text.ljust(BEAT_SIZE - _TEXT, b"\0")
        self._numbers[_INSIDE] = 1
        self._numbers[_NEWS] = time.monotonic_ns()

    def leave(self) -> None:
        """The collective is over."""
        self._numbers[_COLLECTIVES] += 1
        self._numbers[_INSIDE] = 0
        self._numbers[_NEWS] = time.monotonic_ns()


def heartbeat() -> Heartbeat | None:
    """This process's; None where no launcher watches it, or where it was started by one that is watched.

    A replica that keeps still has none either.
    """
    return None if getattr(_HERE, "still", False) else _of_process()


def keep_still() -> None:
    """Leave the heartbeat to others: this thread is one of several replicas of a process."""
    _HERE.still = True


@lru_cache(maxsize=1)
def _of_process() -> Heartbeat | None:
    folder = os.environ.get(RANK_FOLDER)
    if not folder:
        return None
    try:
        return Heartbeat(Path(folder) / BEAT)
    except OSError:
        return None
