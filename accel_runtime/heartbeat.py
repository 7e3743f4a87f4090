"""Progress of a process and its line in the user's code, in a mapped file that its launcher reads without a call."""

from __future__ import annotations

import contextlib
import inspect
import mmap
import os
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from typing_extensions import override

from accel_runtime.env import BEAT, BEAT_NUMBERS, BEAT_SIZE, RANK_FOLDER

__all__ = [
    "TORCH",
    "CallSite",
    "Heartbeat",
    "Progress",
    "ProgressCounts",
    "call_site",
    "call_site_of_frame",
    "heartbeat",
    "keep_still",
    "user_call_sites",
]

_IGNORED = (f"{Path(__file__).parent}/", contextlib.__file__)
"""accel, and the module between a context manager of accel and the script."""
TORCH = f"{Path(torch.__file__).parent}/"
"""Directory of torch, for `call_site` to leave out."""


class CallSite(NamedTuple):
    """Line of code, without its directory, so that nodes with other paths have equal ones."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def call_site(*libraries: str) -> CallSite:
    """Return the innermost line outside of accel, and of the directories of other libraries."""
    return call_site_of_frame(inspect.currentframe(), *libraries)


def call_site_of_frame(frame: FrameType | None, *libraries: str) -> CallSite:
    """Return the innermost line of a stack outside of accel, and of the directories of other libraries."""
    while frame is not None and frame.f_code.co_filename.startswith((*_IGNORED, *libraries)):
        frame = frame.f_back
    if frame is None:
        return CallSite("?", 0, "?")
    return _build_site(frame)


def user_call_sites() -> tuple[CallSite, ...]:
    """Return all lines outside of accel that led to this call, innermost first."""
    frame, sites = inspect.currentframe(), []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_IGNORED):
            sites.append(_build_site(frame))
        frame = frame.f_back
    return tuple(sites)


def _build_site(frame: FrameType) -> CallSite:
    path = frame.f_code.co_filename
    return CallSite(path[path.rfind("/") + 1 :], frame.f_lineno, frame.f_code.co_name)


_LOCAL = threading.local()

_PID, _STEPS, _BATCHES, _COLLECTIVES, _INSIDE, _CHANGED_NS = range(len(BEAT_NUMBERS))
_TEXT = 8 * len(BEAT_NUMBERS)


class ProgressCounts(NamedTuple):
    """Progress of a process since the last collective, comparable between ranks that run the same program."""

    collectives: int
    """Number of collectives of accel entered since the start."""
    backwards: int
    """Number of backward passes begun since the last of these collectives."""
    steps: int
    """Number of optimizer steps since then."""
    batches: int
    """Number of batches returned since then."""

    def is_beyond(self, other: ProgressCounts) -> bool:
        """Return whether these counts are ahead of the others in any number."""
        if self.collectives != other.collectives:
            return self.collectives > other.collectives
        return any(own > others for own, others in zip(self, other, strict=True))


class Progress:
    """Progress of this process, in numbers that its other threads may read."""

    def __init__(self) -> None:
        self.steps = self.batches = self.backwards = self.collectives = 0
        self.inside: tuple[str, CallSite] | None = None
        """Current collective of accel, and its line."""
        self._base = (0, 0, 0)
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")

    @property
    def has_failed(self) -> bool:
        """Return whether the script has ended with an exception, as far as known when the interpreter exits."""
        # A launcher's worker writes the file and ends the interpreter as if nothing had been raised.
        return hasattr(sys, "last_value") or (bool(self._error_file) and Path(self._error_file).exists())

    @property
    def counts(self) -> ProgressCounts:
        """Return the counts that are compared with other ranks."""
        backwards, steps, batches = self._base
        return ProgressCounts(
            self.collectives, self.backwards - backwards, self.steps - steps, self.batches - batches
        )

    def level(self) -> None:
        """Restart the counts of backward passes, steps and batches; ranks may have had different numbers of them."""
        self._base = (self.backwards, self.steps, self.batches)

    def step(self) -> None:
        """Count an optimizer step."""
        self.steps += 1

    def batch(self) -> None:
        """Count a batch that a loader returns."""
        self.batches += 1

    def backward(self) -> None:
        """Count a backward pass."""
        self.backwards += 1

    def collective(self) -> None:
        """Count a collective of torch that accel makes on all ranks."""
        self.collectives += 1
        self.level()

    def enter(self, operation: str, site: CallSite) -> None:
        """Count and record a collective with a handshake."""
        self.collective()
        self.inside = (operation, site)

    def exit(self) -> None:
        """Record the end of the collective."""
        self.inside = None


class Heartbeat(Progress):
    """Progress of this process, also kept in a mapped file.

    Args:
        file: A new file; an existing one belongs to another process.

    Raises:
        OSError: The file exists, or cannot be created.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        with file.open("xb+") as opened:
            # On a full disk a hole in the file would end the process by SIGBUS at the first store.
            opened.write(bytes(BEAT_SIZE))
            opened.flush()
            self._memory = mmap.mmap(opened.fileno(), BEAT_SIZE)
        self._numbers = memoryview(self._memory)[:_TEXT].cast("q")
        self._last_inside: tuple[str, CallSite] | None = None
        self._numbers[_PID] = os.getpid()
        self._numbers[_CHANGED_NS] = time.monotonic_ns()

    @override
    def step(self) -> None:
        self.steps += 1
        self._numbers[_STEPS] = self.steps
        self._numbers[_CHANGED_NS] = time.monotonic_ns()

    @override
    def batch(self) -> None:
        self.batches += 1
        self._numbers[_BATCHES] = self.batches
        self._numbers[_CHANGED_NS] = time.monotonic_ns()

    @override
    def enter(self, operation: str, site: CallSite) -> None:
        super().enter(operation, site)
        if self.inside != self._last_inside:
            self._last_inside = self.inside
            text = f"{operation} at {site}".encode()[: BEAT_SIZE - _TEXT]
            self._memory[_TEXT:] = text.ljust(BEAT_SIZE - _TEXT, b"\0")
        self._numbers[_INSIDE] = 1
        self._numbers[_CHANGED_NS] = time.monotonic_ns()

    @override
    def exit(self) -> None:
        self._numbers[_COLLECTIVES] += 1
        self._numbers[_INSIDE] = 0
        self._numbers[_CHANGED_NS] = time.monotonic_ns()
        self.inside = None


def heartbeat() -> Progress | None:
    """Return the progress of this process; None if neither a launcher nor another rank reads it.

    A launcher watches one process; its children keep no heartbeat, and neither does a replica that has disabled it.
    """
    return None if getattr(_LOCAL, "still", False) else _create_progress()


def keep_still() -> None:
    """Disable the heartbeat of this thread, one of several replicas of a process."""
    _LOCAL.still = True


@lru_cache(maxsize=1)
def _create_progress() -> Progress | None:
    folder = os.environ.get(RANK_FOLDER)
    progress = Progress() if os.environ.get("WORLD_SIZE", "1") != "1" else None
    if not folder:
        return progress
    try:
        return Heartbeat(Path(folder) / BEAT)
    except OSError:
        return progress
