"""Progress of a process and its line in the user's code, in a mapped file that its launcher reads without a call."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple
from weakref import WeakSet

from typing_extensions import override

from accel_runtime.environment.call_sites import CallSite
from accel_runtime.environment.settings import (
    BEAT,
    BEAT_HISTORY,
    BEAT_HISTORY_RANGE,
    BEAT_NUMBERS,
    BEAT_RECENT,
    BEAT_RECENT_RANGE,
    BEAT_SIZE,
    BEAT_TEXT_RANGE,
    RANK_FOLDER,
)
from accel_runtime.environment.text import encode_text

__all__ = [
    "Heartbeat",
    "LoaderEpoch",
    "Progress",
    "ProgressCounts",
    "disable_heartbeat",
    "heartbeat",
    "reset_heartbeat",
]

_LOCAL = threading.local()

(
    _PID,
    _STEPS,
    _BATCHES,
    _COLLECTIVES,
    _INSIDE,
    _CHANGED_NS,
    _STARTED_NS,
    _STARTED_EPOCH_NS,
    _BUSY_NS,
    _EPOCH,
    _EPOCH_LENGTH,
    _EPOCH_FIRST,
    _EPOCH_BASE,
    _EPOCH_NS,
    _STRIDE,
    _ENDED_NS,
    _FAILED,
) = range(len(BEAT_NUMBERS))
_TEXT_SIZE = BEAT_TEXT_RANGE.stop - BEAT_TEXT_RANGE.start
_FIRST_RECENT = BEAT_RECENT_RANGE.start // 8


@dataclass(slots=True)
class LoaderEpoch:
    """Epoch of a loader whose batches are counted."""

    number: int
    """Number of the epoch, from 0."""
    first: int
    """Number of batches that were skipped at its start."""
    length: int
    """Number of batches, skipped ones included; 0 if it is unknown."""
    batches: int = field(init=False)
    """Number of batches that were returned or skipped when the last batch was of another epoch."""
    begin_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.batches = self.first
        self.begin_ns = monotonic_ns()


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
        self.in_store: tuple[str, CallSite] | None = None
        """Current wait for a key that another rank sets, and its line."""
        self._base = self._previous_base = (0, 0, 0)
        """Backward passes, steps and batches at the last collective, and at the one before it."""
        self._counted: WeakSet[Any] = WeakSet()
        """The optimizers of torch that prepared ones step."""
        self._stepped: set[int] = set()
        """The ids of what was stepped in the newest step."""
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")

    @property
    def has_failed(self) -> bool:
        """Return whether the script has ended with an exception, as far as known when the interpreter exits.

        Without a launcher's worker, a SystemExit is not known: Python clears it before the functions of `atexit`.
        """
        # A launcher's worker writes the file and ends the interpreter as if nothing had been raised.
        return hasattr(sys, "last_value") or (bool(self._error_file) and Path(self._error_file).exists())

    @property
    def counts(self) -> ProgressCounts:
        """Return the counts that are compared with other ranks."""
        backwards, steps, batches = self._base
        return ProgressCounts(
            self.collectives, self.backwards - backwards, self.steps - steps, self.batches - batches
        )

    @property
    def counts_before_collective(self) -> ProgressCounts:
        """Return the counts with which this process entered its current collective."""
        backwards, steps, batches = (
            last - previous for last, previous in zip(self._base, self._previous_base, strict=True)
        )
        return ProgressCounts(self.collectives - 1, backwards, steps, batches)

    def restart_counts(self) -> None:
        """Restart the counts of backward passes, steps and batches; ranks may have had different numbers of them."""
        self._base = (self.backwards, self.steps, self.batches)

    def claim_optimizer(self, optimizer: Any) -> None:
        """Let `observe_step` leave out the steps of an optimizer, which `count_step` counts."""
        self._counted.add(optimizer)

    def count_step(self, optimizer: Any) -> None:
        """Count a step of a prepared optimizer."""
        self._step(id(optimizer))

    def observe_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer of torch, unless a prepared one has counted it.

        An engine may step the groups of its parameters one after the other, with one optimizer: they differ in their parameters.
        """
        if optimizer not in self._counted:
            first = next((group["params"][0] for group in optimizer.param_groups if group["params"]), None)
            self._step(id(optimizer) if first is None else id(first))

    def _step(self, stepped: int) -> None:
        """Count a step of what an id names. Several optimizers that step in turn, as in a GAN, make one step."""
        if self._begins_step(stepped):
            self.steps += 1

    def _begins_step(self, stepped: int) -> bool:
        """Return whether a step begins: nothing is stepped twice in one."""
        begins = stepped in self._stepped or not self._stepped
        if begins:
            self._stepped.clear()
        self._stepped.add(stepped)
        return begins

    def batch(self, epoch: LoaderEpoch | None = None) -> None:  # noqa: ARG002 - for the heartbeat
        """Count a batch that a loader returns in an epoch."""
        self.batches += 1

    def record_activity(self) -> None:
        """Record that the script goes on without a step or batch, as in an evaluation."""

    def backward(self, averages: bool = True) -> None:  # noqa: ARG002 - for the heartbeat
        """Count a backward pass that begins; one that averages gradients waits for the other ranks."""
        self.backwards += 1

    def restart_own_time(self) -> None:
        """Record the end of a backward pass that averages gradients, or of a collective without a handshake."""

    def collective(self) -> None:
        """Count a collective of torch that accel makes on all ranks."""
        self.collectives += 1
        self._previous_base = self._base
        self.restart_counts()

    def enter(self, operation: str, site: CallSite) -> None:
        """Count and record a collective with a handshake."""
        self.collective()
        self.inside = (operation, site)

    def exit(self) -> None:
        """Record the end of the collective."""
        self.inside = None

    @contextlib.contextmanager
    def wait_in_store(self, operation: str, site: CallSite) -> Iterator[None]:
        """Record a wait for a key that another rank sets, inside the context."""
        self.in_store = (operation, site)
        try:
            yield
        finally:
            self.in_store = None


class Heartbeat(Progress):
    """Progress of this process, also kept in a mapped file.

    Own time, by which the slowest of several ranks is found, begins with the first step. It is measured from a step, from
    the end of a collective and from the end of a backward pass that averages gradients, to the next collective or such
    pass. It counts once a pass has begun, so the time between a pass and its step, in which ranks may wait for each other,
    does not.

    Args:
        file: A new file; an existing one belongs to another process.

    Raises:
        OSError: The file exists, or cannot be created.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.folder = file.parent
        """Folder of this process in the run folder of the launcher."""
        with file.open("xb+") as opened:
            # On a full disk a hole in the file would end the process by SIGBUS at the first store.
            opened.write(bytes(BEAT_SIZE))
            opened.flush()
            self._memory = mmap.mmap(opened.fileno(), BEAT_SIZE)
        self._numbers = memoryview(self._memory).cast("q")
        self._history = self._numbers[BEAT_HISTORY_RANGE.start // 8 :]
        self._last_inside: tuple[str, CallSite] | None = None
        self._epoch: LoaderEpoch | None = None
        self._busy = self._pending = 0
        """Own time, and that which counts when a backward pass that averages begins."""
        self._stride = self._next_entry = 1
        now = self._own_since = monotonic_ns()
        numbers = self._numbers
        numbers[_STARTED_NS], numbers[_STARTED_EPOCH_NS], numbers[_CHANGED_NS] = now, time.time_ns(), now
        numbers[_STRIDE] = 1
        numbers[_PID] = os.getpid()
        atexit.register(self._record_end)

    @override
    def _step(self, stepped: int) -> None:
        now = self._own_since = monotonic_ns()
        self._pending = 0
        numbers, steps = self._numbers, self.steps
        if not self._begins_step(stepped):
            numbers[_CHANGED_NS] = now
            return
        # Before `steps`, by which a reader knows the slots that are filled.
        numbers[_FIRST_RECENT + steps % BEAT_RECENT] = now
        steps = self.steps = steps + 1
        if steps == self._next_entry:
            self._add_to_history(now)
        numbers[_STEPS] = steps

    def _add_to_history(self, now: int) -> None:
        """Add an entry, and keep every second one of a full history."""
        if self.steps == 1:
            # The time before it is that of the start of the script.
            self._busy = self._numbers[_BUSY_NS] = 0
        history, stride = self._history, self._stride
        entry = self.steps // stride
        history[2 * entry - 2], history[2 * entry - 1] = now, self._busy
        if entry == BEAT_HISTORY:
            self._numbers[_STRIDE] = 0
            for part in range(2):
                history[part:BEAT_HISTORY:2] = history[part + 2 :: 4]
            stride = self._stride = self._numbers[_STRIDE] = 2 * stride
        self._next_entry += stride

    @override
    def batch(self, epoch: LoaderEpoch | None = None) -> None:
        if epoch is not self._epoch:
            self._set_epoch(epoch)
        batches = self.batches = self.batches + 1
        numbers = self._numbers
        numbers[_BATCHES] = batches
        numbers[_CHANGED_NS] = monotonic_ns()

    @override
    def record_activity(self) -> None:
        self._numbers[_CHANGED_NS] = monotonic_ns()

    def _set_epoch(self, epoch: LoaderEpoch | None) -> None:
        """Describe the epoch of the next batch; loops over other loaders may still be running."""
        numbers = self._numbers
        if self._epoch is not None:
            self._epoch.batches = self.batches - numbers[_EPOCH_BASE]
        self._epoch = epoch
        if epoch is not None:
            numbers[_EPOCH], numbers[_EPOCH_LENGTH] = epoch.number, epoch.length
            numbers[_EPOCH_FIRST], numbers[_EPOCH_NS] = epoch.first, epoch.begin_ns
            numbers[_EPOCH_BASE] = self.batches - epoch.batches

    @override
    def backward(self, averages: bool = True) -> None:
        self.backwards += 1
        if averages:
            self._busy += self._pending + monotonic_ns() - self._own_since
            self._pending = 0
            self._numbers[_BUSY_NS] = self._busy

    @override
    def restart_own_time(self) -> None:
        self._own_since = monotonic_ns()

    @override
    def collective(self) -> None:
        super().collective()
        now = monotonic_ns()
        self._pending += now - self._own_since
        self._own_since = now

    @override
    def enter(self, operation: str, site: CallSite) -> None:
        super().enter(operation, site)
        if self.inside != self._last_inside:
            self._last_inside = self.inside
            text = encode_text(f"{operation} at {site}")[:_TEXT_SIZE]
            self._memory[BEAT_TEXT_RANGE] = text.ljust(_TEXT_SIZE, b"\0")
        self._numbers[_INSIDE] = 1
        self._numbers[_CHANGED_NS] = self._own_since

    @override
    def exit(self) -> None:
        numbers = self._numbers
        numbers[_COLLECTIVES] += 1
        numbers[_INSIDE] = 0
        numbers[_CHANGED_NS] = self._own_since = monotonic_ns()
        self.inside = None

    def _record_end(self) -> None:
        """Record the exit of the interpreter; a process that the script has forked leaves the file alone."""
        if self._numbers[_PID] == os.getpid():
            self._numbers[_FAILED] = int(self.has_failed)
            self._numbers[_ENDED_NS] = monotonic_ns()


def heartbeat() -> Progress | None:
    """Return the progress of this process; None if neither a launcher nor another rank reads it.

    A launcher watches one process; its children keep no heartbeat, and neither does a replica that has disabled it.
    """
    return None if getattr(_LOCAL, "is_disabled", False) else _create_progress()


def disable_heartbeat() -> None:
    """Disable the heartbeat of this thread, one of several replicas of a process."""
    _LOCAL.is_disabled = True


def reset_heartbeat() -> None:
    """Forget the progress of the parent process, in a process that it has forked."""
    _create_progress.cache_clear()


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
