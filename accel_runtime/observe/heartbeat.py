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

from accel_runtime.environment.settings import (
    BEAT,
    BEAT_ENTRY,
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
from accel_runtime.observe.call_sites import CallSite, call_site

__all__ = [
    "Heartbeat",
    "LoaderEpoch",
    "Progress",
    "ProgressCounts",
    "disable_heartbeat",
    "enable_progress",
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
    _EPOCH,
    _EPOCH_LENGTH,
    _EPOCH_FIRST,
    _EPOCH_BASE,
    _EPOCH_NS,
    _STRIDE,
    _ENDED_NS,
    _FAILED,
    _OWN_NS,
    _DATA_NS,
    _FORWARD_NS,
    _BACKWARD_NS,
    _WAIT_NS,
    _SAMPLES,
    _TOKENS,
    _FLOPS,
    _PEAK_FLOPS,
    _STEP_PART,
) = range(len(BEAT_NUMBERS))
_OTHER = -1
"""Part of a step that has no number: the optimizer step, and what follows it."""
_PARTS = (_DATA_NS, _FORWARD_NS, _BACKWARD_NS, _WAIT_NS)
_TEXT_SIZE = BEAT_TEXT_RANGE.stop - BEAT_TEXT_RANGE.start
_FIRST_RECENT = BEAT_RECENT_RANGE.start // 8


@dataclass(slots=True, eq=False)
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
    returned: int = 0
    """Number of batches that a loader of torch has returned."""
    samples: int = 0
    """Samples of all ranks in batches that no backward pass has followed yet."""
    tokens: int = 0

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
        self.samples = self.tokens = 0
        """Samples and tokens of all ranks that were trained on."""
        self._untrained: set[LoaderEpoch] = set()
        """Epochs with samples that no backward pass or step has followed yet."""
        self.step_flops, self.peak_flops = 0, 0
        """Floating-point operations of a step of this rank, and those that its device can execute per second; 0 if unknown."""
        self.inside: tuple[str, CallSite] | None = None
        """Current collective of accel, and its line."""
        self.in_store: tuple[str, CallSite] | None = None
        """Current wait for a key that another rank sets, and its line."""
        self._base = self._previous_base = (0, 0, 0)
        """Backward passes, steps and batches at the last collective, and at the one before it."""
        self._counted: WeakSet[Any] = WeakSet()
        """The optimizers of torch that prepared ones step."""
        self._has_claimed = False
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
        self._has_claimed = True

    def count_step(self, optimizer: Any) -> None:
        """Count a step of a prepared optimizer."""
        self._step(id(optimizer))

    def observe_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer of torch, unless a prepared one has counted it.

        An engine may step the groups of its parameters one after the other, with one optimizer: they differ in their parameters.
        """
        if self._has_claimed and optimizer in self._counted:
            return
        for group in optimizer.param_groups:
            if group["params"]:
                self._step(id(group["params"][0]))
                return
        self._step(id(optimizer))

    def _step(self, stepped: int) -> None:
        """Count a step of what an id names. Several optimizers that step in turn, as in a GAN, make one step."""
        self._count_trained()
        if self._begins_step(stepped):
            self.steps += 1

    def _begins_step(self, stepped: int) -> bool:
        """Return whether a step begins: nothing is stepped twice in one."""
        begins = stepped in self._stepped or not self._stepped
        if begins:
            self._stepped.clear()
        self._stepped.add(stepped)
        return begins

    def request_batch(self) -> None:
        """Record that the script waits for a batch of a loader that counts its batches."""

    def batch(self, epoch: LoaderEpoch | None = None) -> None:  # noqa: ARG002 - for the heartbeat
        """Count a batch that a loader returns in an epoch."""
        self.batches += 1

    def add_samples(self, epoch: LoaderEpoch, samples: int, tokens: int) -> None:
        """Add the samples and tokens of all ranks in a batch, which count once a backward pass or a step follows."""
        epoch.samples += samples
        epoch.tokens += tokens
        self._untrained.add(epoch)

    def _count_trained(self) -> None:
        for epoch in self._untrained:
            self.samples += epoch.samples
            self.tokens += epoch.tokens
            epoch.samples = epoch.tokens = 0
        self._untrained.clear()

    def end_epoch(self, epoch: LoaderEpoch) -> None:
        """Record that a loader has no more batches; those that were not trained on, as in an evaluation, do not count."""
        self._untrained.discard(epoch)

    def record_flops(self, flops: int, peak_flops: int) -> None:
        """Record the floating-point operations of a step of this rank, and those that its device can execute per second."""
        self.step_flops, self.peak_flops = flops, peak_flops

    def claim_batches(self) -> None:
        """Leave out the batches of torch's loaders, which the caller counts by `batch`."""

    def record_activity(self) -> None:
        """Record activity of the script other than steps and batches, as in an evaluation."""

    def begin_backward(self, averages: bool = True) -> None:  # noqa: ARG002 - for the heartbeat
        """Count a backward pass that begins; one that averages gradients waits for the other ranks."""
        self.backwards += 1

    def end_backward(self) -> None:
        """Record the end of the backward pass."""

    def begin_collective(self) -> None:
        """Count a collective of torch that accel makes on all ranks."""
        self.collectives += 1
        self._previous_base = self._base
        self.restart_counts()

    def end_collective(self) -> None:
        """Record the end of a collective without a handshake."""

    def enter(self, operation: str, site: CallSite) -> None:
        """Count and record a collective with a handshake."""
        self.begin_collective()
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

    All time since the first step belongs to a part of a step: waiting for data, the forward pass, the backward pass, waiting for
    other ranks, and the rest.

    Own time, by which the slowest of several ranks is found, is that in which a rank does not wait for others: a backward pass
    that averages gradients until those of this rank are complete, and everything before it up to the last step. The time between such
    a pass and its step, in which ranks may wait for each other, does not count.

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
        self._returned = 0
        """Number of batches, those of loaders that do not count them included."""
        self._counts_epochs = False
        """True if a loader or a callback counts the batches, so that those of torch's loaders are not counted again."""
        self._is_loading = False
        """True while a loader that counts its batches loads one, with a loader of torch."""
        self._is_backward, self._averages = False, False
        self._is_observed = self._is_counted = False
        """True in a backward pass of torch, and if it is one of an Accelerator, which ends it."""
        self._own = self._pending = 0
        """Own time, and that which counts when a backward pass that averages begins."""
        self._stride = self._next_entry = 1
        self._part = self._outer_part = _OTHER
        """Current part of the step, and the part around the current collective."""
        now = self._since = monotonic_ns()
        numbers = self._numbers
        numbers[_STARTED_NS], numbers[_STARTED_EPOCH_NS], numbers[_CHANGED_NS] = now, time.time_ns(), now
        numbers[_STRIDE] = 1
        numbers[_PID] = os.getpid()
        atexit.register(self._record_end)

    @override
    def _step(self, stepped: int) -> None:
        now = self._begin_part(_OTHER)
        self._pending = 0
        self._count_trained()
        numbers, steps = self._numbers, self.steps
        if not self._begins_step(stepped):
            numbers[_CHANGED_NS] = now
            return
        # Before `steps`, by which a reader knows the slots that are filled.
        numbers[_FIRST_RECENT + steps % BEAT_RECENT] = now
        steps = self.steps = steps + 1
        if steps == self._next_entry:
            self._add_to_history(now)
        if steps == 1 and self._last_inside is None:
            self._write_text("step", call_site(*_get_torch()))
        numbers[_STEPS] = steps

    def _add_to_history(self, now: int) -> None:
        """Add an entry, and keep every second one of a full history."""
        numbers = self._numbers
        if self.steps == 1:
            # The time before it is that of the start of the script.
            self._own = 0
            for number in (_OWN_NS, _DATA_NS, _FORWARD_NS, _BACKWARD_NS, _WAIT_NS):
                numbers[number] = 0
        history, stride, width = self._history, self._stride, len(BEAT_ENTRY)
        entry = self.steps // stride
        first = width * (entry - 1)
        history[first] = now
        history[first + 1 : first + width] = numbers[_OWN_NS : _TOKENS + 1]
        if entry == BEAT_HISTORY:
            numbers[_STRIDE] = 0
            for index in range(width):
                history[index : width * BEAT_HISTORY // 2 : width] = history[index + width :: 2 * width]
            stride = self._stride = numbers[_STRIDE] = 2 * stride
        self._next_entry += stride

    def _begin_part(self, part: int) -> int:
        """Add the time since the last event to the part of the step that ends, begin another one, and return the time."""
        now = monotonic_ns()
        elapsed, ended = now - self._since, self._part
        self._since = now
        self._part = self._numbers[_STEP_PART] = part
        if ended != _OTHER:
            self._numbers[ended] += elapsed
        if ended != _WAIT_NS:
            self._pending += elapsed
        return now

    @override
    def request_batch(self) -> None:
        self._is_loading = self._counts_epochs = True
        self._begin_part(_DATA_NS)

    @override
    def batch(self, epoch: LoaderEpoch | None = None) -> None:
        self.batches += 1
        if self._is_loading:
            self._is_loading = False
            now = self._begin_part(_FORWARD_NS)
        else:
            now = monotonic_ns()
        self._return_batch(epoch, now)

    @override
    def record_flops(self, flops: int, peak_flops: int) -> None:
        super().record_flops(flops, peak_flops)
        self._numbers[_FLOPS], self._numbers[_PEAK_FLOPS] = flops, peak_flops

    @override
    def claim_batches(self) -> None:
        self._counts_epochs = True

    def observe_request(self) -> bool:
        """Record that the script waits for a batch of a loader of torch; return False if another loader uses that one."""
        if not self._is_loading:
            self._begin_part(_DATA_NS)
        return not self._is_loading

    def observe_batch(self, epoch: LoaderEpoch) -> None:
        """Record a batch that a loader of torch returns, and count it unless a loader or callback of accel does."""
        now = self._begin_part(_FORWARD_NS)
        if self._counts_epochs:
            self._numbers[_CHANGED_NS] = now
        else:
            self._return_batch(epoch, now)

    @override
    def end_epoch(self, epoch: LoaderEpoch) -> None:
        super().end_epoch(epoch)
        self._is_loading = False
        self._begin_part(_OTHER)

    @override
    def _count_trained(self) -> None:
        if self._untrained:
            super()._count_trained()
            self._numbers[_SAMPLES], self._numbers[_TOKENS] = self.samples, self.tokens

    def _return_batch(self, epoch: LoaderEpoch | None, now: int) -> None:
        if epoch is not self._epoch:
            self._set_epoch(epoch)
        returned = self._returned = self._returned + 1
        numbers = self._numbers
        numbers[_BATCHES] = returned
        numbers[_CHANGED_NS] = now

    @override
    def record_activity(self) -> None:
        self._numbers[_CHANGED_NS] = monotonic_ns()

    def _set_epoch(self, epoch: LoaderEpoch | None) -> None:
        """Describe the epoch of the next batch; loops over other loaders may still be running."""
        numbers = self._numbers
        if self._epoch is not None:
            self._epoch.batches = self._returned - numbers[_EPOCH_BASE]
        self._epoch = epoch
        if epoch is not None:
            numbers[_EPOCH], numbers[_EPOCH_LENGTH] = epoch.number, epoch.length
            numbers[_EPOCH_FIRST], numbers[_EPOCH_NS] = epoch.first, epoch.begin_ns
            numbers[_EPOCH_BASE] = self._returned - epoch.batches

    @override
    def begin_backward(self, averages: bool = True) -> None:
        self.backwards += 1
        self._begin_backward(averages)

    def _begin_backward(self, averages: bool) -> None:
        self._is_backward, self._averages = True, averages
        if self._part == _OTHER:  # of a script that loads its data itself
            self._part = _FORWARD_NS
        self._begin_part(_BACKWARD_NS)
        self._count_trained()
        if averages:
            self._add_own_time()

    def observe_backward(self, averages: bool) -> bool:
        """Record a backward pass of torch that begins; return False if it is a part of one, such as a computation again."""
        if self._is_observed:
            return False
        self._is_observed = True
        self._is_counted = self._is_backward
        if not self._is_backward:
            self._begin_backward(averages)
        return True

    def observe_backward_end(self) -> None:
        """Record the end of the backward pass for which `observe_backward` has returned True."""
        self._is_observed = False
        if not self._is_counted:
            self.end_backward()

    def complete_gradients(self) -> None:
        """Record that the gradients of this rank are complete; the pass may wait for those of the other ranks."""
        if self._is_backward and self._averages and self._part == _BACKWARD_NS:
            self._begin_part(_WAIT_NS)

    @override
    def end_backward(self) -> None:
        is_waiting = self._part == _WAIT_NS
        self._begin_part(_OTHER)
        if self._averages:
            if is_waiting:
                self._add_own_time()
            # Without the moment at which this rank was complete, the whole pass may be a wait.
            self._pending = 0
        self._is_backward = False

    def _add_own_time(self) -> None:
        self._own += self._pending
        self._pending = 0
        self._numbers[_OWN_NS] = self._own

    @override
    def begin_collective(self) -> None:
        super().begin_collective()
        if self._part != _WAIT_NS:
            self._outer_part = self._part
        self._begin_part(_WAIT_NS)

    @override
    def end_collective(self) -> None:
        self._begin_part(self._outer_part)

    @override
    def enter(self, operation: str, site: CallSite) -> None:
        super().enter(operation, site)
        if self.inside != self._last_inside:
            self._last_inside = self.inside
            self._write_text(operation, site)
        self._numbers[_INSIDE] = 1
        self._numbers[_CHANGED_NS] = self._since

    def _write_text(self, operation: str, site: CallSite) -> None:
        text = encode_text(f"{operation} at {site}")[:_TEXT_SIZE]
        self._memory[BEAT_TEXT_RANGE] = text.ljust(_TEXT_SIZE, b"\0")

    @override
    def exit(self) -> None:
        numbers = self._numbers
        numbers[_COLLECTIVES] += 1
        numbers[_INSIDE] = 0
        self.end_collective()
        numbers[_CHANGED_NS] = self._since
        self.inside = None

    def _record_end(self) -> None:
        """Record the exit of the interpreter; a process that the script has forked leaves the file alone."""
        if self._numbers[_PID] == os.getpid():
            self._numbers[_FAILED] = int(self.has_failed)
            self._numbers[_ENDED_NS] = monotonic_ns()


def _get_torch() -> tuple[str, ...]:
    """Return the folder of torch, whose frames are not those of the script."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return (f"{Path(file).parent}/",) if file else ()


def heartbeat() -> Progress | None:
    """Return the progress of this process; None if neither a launcher nor another rank reads it, unless it is enabled.

    A launcher watches one process; its children keep no heartbeat, and neither does a replica that has disabled it.
    """
    if getattr(_LOCAL, "is_disabled", False):
        return None
    return _create_progress() or getattr(_LOCAL, "progress", None)


def disable_heartbeat() -> None:
    """Disable the heartbeat of this thread, one of several replicas of a process."""
    _LOCAL.is_disabled = True


def enable_progress() -> None:
    """Record the progress of this process also if only the script reads it."""
    if heartbeat() is None:
        _LOCAL.progress = Progress()


def reset_heartbeat() -> None:
    """Forget the progress of the parent process, in a process that it has forked."""
    _create_progress.cache_clear()
    _LOCAL.progress = None


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
