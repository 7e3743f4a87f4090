"""Progress of a process and its line in the user's code, in a mapped file that its launcher reads without a call."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from accel_runtime.observe.flops import StepFlops
    from accel_runtime.observe.torch_hooks import TorchHooks

__all__ = [
    "Heartbeat",
    "LoaderEpoch",
    "Progress",
    "ProgressCounts",
    "StepParts",
    "TorchEpoch",
    "disable_heartbeat",
    "enable_progress",
    "heartbeat",
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
    _ENDED_NS,
    _FAILED,
    _FLOPS,
    _PEAK_FLOPS,
    _STEP_PART,
    _ENTRIES,
    _THINNINGS,
    _SAMPLED_STEPS,
    _SAMPLED_NS,
    _OWN_NS,
    _DATA_NS,
    _FORWARD_NS,
    _BACKWARD_NS,
    _UPDATE_NS,
    _WAIT_NS,
    _SAMPLES,
    _TOKENS,
) = range(len(BEAT_NUMBERS))


class Part(IntEnum):
    """Part of a step, as the index of the number with its time."""

    REST = -1
    """From the end of a step to the next batch, which has no number."""
    DATA = _DATA_NS
    FORWARD = _FORWARD_NS
    BACKWARD = _BACKWARD_NS
    UPDATE = _UPDATE_NS
    """From a backward pass to the end of the step."""
    WAIT = _WAIT_NS


_TEXT_SIZE = BEAT_TEXT_RANGE.stop - BEAT_TEXT_RANGE.start
_FIRST_RECENT = BEAT_RECENT_RANGE.start // 8
_INTERVAL_S = 0.1
"""Time between two looks at the script: parts of at most ten steps a second are measured."""
_LONG_STEP_NS = 100_000_000
"""Time of a step from which each one is measured."""
_SPREAD = 8
"""Number of steps of which one is measured, so that a script which does something in every tenth step is measured fairly."""
_NUM_FIRST = 8
"""Number of first steps that are all measured."""


@dataclass(slots=True, eq=False)
class LoaderEpoch:
    """Epoch of a loader, which counts its batches in `returned`, `samples` and `tokens`."""

    number: int
    """Number of the epoch, from 0."""
    first: int
    """Number of batches that were skipped at its start."""
    length: int
    """Number of batches, skipped ones included; 0 if it is unknown."""
    returned: int = field(init=False)
    """Number of batches that were returned or skipped."""
    samples: int = field(default=0, init=False)
    """Samples of all ranks in the returned batches."""
    tokens: int = field(default=0, init=False)
    trained_samples: int = field(default=0, init=False)
    """Samples of batches that an optimizer step has followed."""
    trained_tokens: int = field(default=0, init=False)
    begin_ns: int = field(init=False)
    begin_counts: tuple[int, int] = field(default=(0, 0), init=False)
    """Steps and backward passes of the process at its begin."""
    is_over: bool = field(default=False, init=False)
    """True if the loader returns no more batches."""
    reported: int = field(init=False)
    """Number of batches that the launcher knows."""

    def __post_init__(self) -> None:
        self.returned = self.reported = self.first
        self.begin_ns = monotonic_ns()

    @property
    def is_prepared(self) -> bool:
        """Return whether it is that of a prepared loader, whose batches are counted on all ranks alike."""
        return True

    def refresh(self) -> None:
        """Update the counts, if the loader does not."""


@dataclass(slots=True, eq=False)
class TorchEpoch(LoaderEpoch):
    """Epoch of a loader of torch, whose iterator counts the batches."""

    state: Mapping[str, Any]
    """Attributes of the iterator, which may be deleted."""
    batch_size: int = field(default=0, init=False)
    """Samples of all ranks in a batch; 0 while each batch is looked at."""
    most_samples: int = field(default=0, init=False)
    """Samples of all ranks in the epoch."""

    @property
    @override
    def is_prepared(self) -> bool:
        return False

    @override
    def refresh(self) -> None:
        self.returned = self.state["_num_yielded"]
        if self.batch_size:
            self.samples = min(self.returned * self.batch_size, self.most_samples)

    def count_by_batches(self, batch_size: int, most_samples: int) -> None:
        """Compute the samples from the number of batches from now on."""
        self.batch_size, self.most_samples = batch_size, most_samples

    def is_finished(self) -> bool:
        """Return whether all batches were returned, as far as known."""
        self.refresh()
        return not self.length or self.returned >= self.length

    def release(self) -> None:
        """Keep the number of batches only of the iterator."""
        self.state = {"_num_yielded": self.returned}


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
    """Progress of this process, in numbers that its other threads may read.

    Prepared loaders count batches in the attributes of their epochs, and `Accelerator.backward` increments `backwards`. Prepared
    optimizers call `count_step`, unless hooks in torch do.
    """

    counts_any_step = False
    """True if hooks in torch call `count_step` for any optimizer."""

    def __init__(self) -> None:
        self.steps = self.backwards = self.collectives = 0
        self.samples = self.tokens = 0
        """Samples and tokens of all ranks that were trained on."""
        self._epochs: tuple[LoaderEpoch, ...] = ()
        """Running epochs, and those that are over while a step on their last batches may follow."""
        self._ended_batches = 0
        """Batches of prepared loaders in other epochs."""
        self.step_flops, self.peak_flops = 0, 0
        """Floating-point operations of a step of this rank, and those that its device can execute per second; 0 if unknown."""
        self.inside: tuple[str, CallSite] | None = None
        """Current collective of accel, and its line."""
        self.in_store: tuple[str, CallSite] | None = None
        """Current wait for a key that another rank sets, and its line."""
        self._base = self._previous_base = (0, 0, 0)
        """Backward passes, steps and batches at the last collective, and at the one before it."""
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
    def batches(self) -> int:
        """Return the number of batches that prepared loaders have returned."""
        return self._ended_batches + _count_batches(epoch for epoch in self._epochs if epoch.is_prepared)

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

    def count_step(self, optimizer: Any) -> None:
        """Count a call of an optimizer's `step`. Several that are called in turn, as in a GAN, make one step."""
        if self._epochs:
            self._count_trained()
        if self._begins_step(optimizer):
            self.steps += 1

    def _begins_step(self, optimizer: Any) -> bool:
        """Return whether a call of `step` begins another step: nothing is stepped twice in one."""
        stepped, others = _identify_step(optimizer), self._stepped
        begins = stepped in others or not others
        if begins:
            others.clear()
        others.add(stepped)
        return begins

    def _count_trained(self) -> None:
        """Count the samples of the batches that a step follows."""
        has_ended = False
        for epoch in self._epochs:
            epoch.refresh()
            if epoch.samples != epoch.trained_samples:
                self.samples += epoch.samples - epoch.trained_samples
                self.tokens += epoch.tokens - epoch.trained_tokens
                epoch.trained_samples, epoch.trained_tokens = epoch.samples, epoch.tokens
            has_ended = has_ended or epoch.is_over
        if has_ended:
            self._drop([epoch for epoch in self._epochs if epoch.is_over])

    def begin_epoch(self, epoch: LoaderEpoch) -> LoaderEpoch:
        """Count the batches of an epoch, and return it."""
        epoch.begin_counts = (self.steps, self.backwards)
        self._epochs = (*self._epochs, epoch)
        return epoch

    def end_epoch(self, epoch: LoaderEpoch, *, is_finished: bool) -> None:
        """Count no more batches of an epoch.

        Its last samples count once a step follows, unless it was an evaluation: all batches, without a backward pass.

        Args:
            epoch: The epoch.
            is_finished: True if all batches were returned.
        """
        epoch.refresh()
        epoch.is_over = True
        is_evaluation = is_finished and epoch.begin_counts == (self.steps, self.backwards)
        if is_evaluation or epoch.samples == epoch.trained_samples:
            self._drop([epoch])

    def _drop(self, dropped: Sequence[LoaderEpoch]) -> None:
        self._ended_batches += _count_batches(epoch for epoch in dropped if epoch.is_prepared)
        self._epochs = tuple(epoch for epoch in self._epochs if epoch not in dropped)

    def record_flops(self, flops: int, peak_flops: int) -> None:
        """Record the floating-point operations of a step of this rank, and those that its device can execute per second."""
        self.step_flops, self.peak_flops = flops, peak_flops

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


def _identify_step(optimizer: Any) -> int:
    """Return the id of the first parameter that a call of `step` changes.

    An engine may step the groups of its parameters one after the other, with one optimizer: they differ in their parameters.
    """
    for group in optimizer.param_groups:
        if parameters := group["params"]:
            return id(parameters[0])
    return id(optimizer)


def _count_batches(epochs: Iterable[LoaderEpoch]) -> int:
    return sum(epoch.returned - epoch.first for epoch in epochs)


class StepParts:
    """Times of the parts of one step, from the end of the step before it to its own.

    Args:
        now: The time of its begin, in ns.
        part: The part that it begins in.
        is_whole: False if it is measured from a later moment on, so that only the current part is known.
        is_backward: True in a backward pass whose end will be recorded.
    """

    def __init__(
        self, now: int, part: Part = Part.REST, *, is_whole: bool = True, is_backward: bool = False
    ) -> None:
        self.begin_ns = self.since_ns = now
        self.part, self.is_whole = part, is_whole
        self.times = dict.fromkeys(Part, 0)
        """Time of each part that has ended, in ns."""
        self.is_backward = is_backward
        self._num_waits, self._around_wait = 0, part

    def begin(self, part: Part) -> None:
        """Begin another part."""
        now = monotonic_ns()
        self.times[self.part] += now - self.since_ns
        self.since_ns, self.part = now, part

    def begin_backward(self) -> None:
        """Begin a backward pass."""
        self.is_backward = True
        if self.part is Part.REST:  # of a script that loads its data itself
            self.part = Part.FORWARD
        self.begin(Part.BACKWARD)

    def complete_gradients(self) -> None:
        """Record that the gradients of this rank are complete; the pass may wait for those of the other ranks."""
        if self.is_backward and self.part is Part.BACKWARD:
            self.begin(Part.WAIT)

    def end_backward(self) -> None:
        """End the backward pass."""
        self.is_backward = False
        self.begin(Part.UPDATE)

    def begin_wait(self) -> None:
        """Begin to wait for other ranks, within another part."""
        self._num_waits += 1
        if self._num_waits == 1:
            self._around_wait = self.part
            self.begin(Part.WAIT)

    def end_wait(self) -> None:
        """End the wait, and continue the part around it."""
        if self._num_waits:  # 0: it began before this step was measured
            self._num_waits -= 1
            if self._num_waits == 0:
                self.begin(self._around_wait)


class Heartbeat(Progress):
    """Progress of this process, also kept in a mapped file.

    Steps are written as they are counted. A thread looks at the script ten times a second: it writes the batches, and lets the
    parts of a step be measured, by hooks that are in torch for that step only. Steps between measured ones count as those do. Hooks
    stay in torch for the first steps, for steps that take longer than a look, and while there are no steps, as in an evaluation:
    all that they see is progress.

    Own time, by which the slowest of several ranks is found, is that in which a rank does not wait for others.

    Args:
        file: A new file; an existing one belongs to another process.

    Raises:
        OSError: The file exists, or cannot be created.
    """

    counts_any_step = True

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
        self._has_prepared_epochs = False
        self._last_ended: LoaderEpoch | None = None
        self._ended_torch_batches = 0
        """Batches of torch's loaders in epochs that are over."""
        self._flops: StepFlops | None = None
        self._hooks: TorchHooks | None = None
        self.parts: StepParts | None = None
        """The parts of the current step, while they are measured."""
        self._is_due = True
        """True if the end of the next step is more than a count: a measured step ends or begins."""
        self._skipped = 0
        """Number of steps before the measured one."""
        self._looked_steps = 0
        self._num_samples, self._samples_an_entry = 0, 1
        self._is_closed = False
        now, numbers = monotonic_ns(), self._numbers
        numbers[_STARTED_NS], numbers[_STARTED_EPOCH_NS], numbers[_CHANGED_NS] = now, time.time_ns(), now
        numbers[_STEP_PART] = Part.REST
        numbers[_PID] = os.getpid()
        atexit.register(self._record_end)

    def observe(self, hooks: TorchHooks, flops: StepFlops | None = None) -> None:
        """Look at the script from now on, in a thread.

        Args:
            hooks: The hooks in torch by which parts of a step are measured.
            flops: Counts the operations of one step.
        """
        self._hooks, self._flops = hooks, flops
        # Not a thread of `threading`: a script may join all that are listed there.
        _thread.start_new_thread(self._watch, ())

    def close(self) -> None:
        """Look at the script no more."""
        self._is_closed = True
        self._end_parts()

    # Steps

    @override
    def count_step(self, optimizer: Any) -> None:
        if self._epochs:
            self._count_trained()
        now, numbers = monotonic_ns(), self._numbers
        if not self._begins_step(optimizer):
            self._record_part(Part.REST)
            numbers[_CHANGED_NS] = now
            return
        steps = self.steps
        # Before the number of steps, by which a reader knows the slots that are filled.
        numbers[_FIRST_RECENT + steps % BEAT_RECENT] = now
        self.steps = steps + 1
        if self._is_due:
            self._end_step(now)
        numbers[_STEPS] = steps + 1

    def _end_step(self, now: int) -> None:
        """Add a measured step that ends to the totals, and begin to measure the next one if it is time."""
        hooks, parts = self._hooks, self.parts
        if self.steps == 1:
            if self._last_inside is None:
                self._write_text("step", call_site(*_get_torch()))
            if hooks is not None:
                hooks.follow_thread()
            self._add_entry(now)
        elif hooks is not None and not hooks.is_followed_thread():
            return
        if self._flops is not None and self._flops.check_step(self):
            self._flops = None
        if parts is not None and parts.is_whole:
            parts.begin(Part.REST)
            self._add_measured(parts, now)
        if parts is not None and self.steps > _NUM_FIRST and now - parts.begin_ns < _LONG_STEP_NS:
            self._end_parts()
        elif parts is None and self._skipped:
            self._skipped -= 1
        else:
            # Optimizers may step in a backward pass, in hooks of parameters.
            is_backward = parts is not None and parts.is_backward
            part = Part.BACKWARD if is_backward else Part.REST
            self._begin_parts(StepParts(now, part, is_backward=is_backward))

    def _begin_parts(self, parts: StepParts) -> None:
        self.parts, self._is_due = parts, True
        if self._hooks is not None:
            self._hooks.measure_parts()

    def _end_parts(self) -> None:
        self._is_due = False
        if self._hooks is not None:
            self._hooks.remove()
        self.parts = None
        self._numbers[_STEP_PART] = Part.REST

    def _add_measured(self, parts: StepParts, now: int) -> None:
        """Add the times of a measured step, also for the steps since the one before it, and an entry of the history."""
        numbers, length = self._numbers, max(1, now - parts.begin_ns)
        steps = self.steps - numbers[_SAMPLED_STEPS]
        # An evaluation in a measured step, or between two, is none of the steps between them.
        others = min(steps - 1, (now - numbers[_SAMPLED_NS] - length) / length)
        for part, elapsed in parts.times.items():
            if part is not Part.REST:
                numbers[part] += round((1 + others) * elapsed)
        numbers[_OWN_NS] += round((1 + others) * (length - parts.times[Part.WAIT]))
        self._num_samples += 1
        self._add_entry(now, is_kept=self._num_samples % self._samples_an_entry == 0)

    def _add_entry(self, now: int, *, is_kept: bool = True) -> None:
        """Write the totals at the end of a step, and add them to the history."""
        numbers, history, width = self._numbers, self._history, len(BEAT_ENTRY)
        numbers[_SAMPLES], numbers[_TOKENS] = self.samples, self.tokens
        numbers[_SAMPLED_STEPS], numbers[_SAMPLED_NS] = self.steps, now
        if not is_kept:
            return
        entries = numbers[_ENTRIES]
        if entries == BEAT_HISTORY:
            numbers[_THINNINGS] += 1
            entries //= 2
            for index in range(width):
                history[index : width * entries : width] = history[index : 2 * width * entries : 2 * width]
            numbers[_ENTRIES] = entries
            numbers[_THINNINGS] += 1
            self._samples_an_entry *= 2
        history[width * entries : width * (entries + 1)] = numbers[_SAMPLED_STEPS : _TOKENS + 1]
        numbers[_ENTRIES] = entries + 1

    # Parts of a step

    def _record_part(self, part: Part) -> None:
        """Begin a part of a measured step, and record it as progress."""
        if self.parts is not None:
            self.parts.begin(part)
            self._write_part(self.parts)

    def _write_part(self, parts: StepParts) -> None:
        self._numbers[_STEP_PART] = parts.part
        self._numbers[_CHANGED_NS] = parts.since_ns

    def request_batch(self) -> None:
        """Record that the script waits for a batch."""
        self._record_part(Part.DATA)

    def return_batch(self) -> None:
        """Record that the script has its batch."""
        self._record_part(Part.FORWARD)

    def end_loop(self) -> None:
        """Record that a loader has no more batches."""
        self._record_part(Part.REST)

    def begin_backward(self) -> bool:
        """Record a backward pass that begins; return False if it is a part of one, or no step is measured."""
        parts = self.parts
        if parts is None or parts.is_backward:
            return False
        parts.begin_backward()
        self._write_part(parts)
        return True

    def complete_gradients(self) -> None:
        """Record that the gradients of this rank are complete, in a backward pass that may wait for those of others."""
        if self.parts is not None:
            self.parts.complete_gradients()
            self._write_part(self.parts)

    def end_backward(self) -> None:
        """Record the end of the backward pass."""
        if self.parts is not None:
            self.parts.end_backward()
            self._write_part(self.parts)

    def begin_wait(self) -> None:
        """Record that the script waits for other ranks."""
        if self.parts is not None:
            self.parts.begin_wait()
            self._write_part(self.parts)

    def end_wait(self) -> None:
        """Record the end of the wait."""
        if self.parts is not None:
            self.parts.end_wait()
            self._write_part(self.parts)

    # Batches

    @override
    def begin_epoch(self, epoch: LoaderEpoch) -> LoaderEpoch:
        self._has_prepared_epochs = self._has_prepared_epochs or epoch.is_prepared
        return super().begin_epoch(epoch)

    @override
    def _drop(self, dropped: Sequence[LoaderEpoch]) -> None:
        super()._drop(dropped)
        self._ended_torch_batches += _count_batches(epoch for epoch in dropped if not epoch.is_prepared)
        for epoch in dropped:
            if epoch.is_prepared is self._has_prepared_epochs:
                self._last_ended = epoch

    def refresh(self) -> None:
        """Write the batches, and the epoch that has returned the last one.

        If loaders are prepared, only those count: they are the ones that loop on all ranks.
        """
        numbers, is_prepared = self._numbers, self._has_prepared_epochs
        ended = () if self._last_ended is None else (self._last_ended,)
        running = self._epochs
        for epoch in running:
            epoch.refresh()
        counted = [epoch for epoch in running if epoch.is_prepared is is_prepared]
        batches = _count_batches(counted) + (
            self._ended_batches if is_prepared else self._ended_torch_batches
        )
        moved = [epoch for epoch in (*ended, *counted) if epoch.returned != epoch.reported]
        for epoch in moved:
            epoch.reported = epoch.returned
            if epoch.is_prepared is is_prepared:
                numbers[_EPOCH], numbers[_EPOCH_LENGTH] = epoch.number, epoch.length
                numbers[_EPOCH_FIRST], numbers[_EPOCH_NS] = epoch.first, epoch.begin_ns
                numbers[_EPOCH_BASE] = batches - epoch.returned
        if batches != numbers[_BATCHES]:
            numbers[_BATCHES] = batches
            numbers[_CHANGED_NS] = monotonic_ns()

    def _watch(self) -> None:
        """Look at the script from time to time."""
        while not self._is_closed:
            self.look()
            time.sleep(_INTERVAL_S)

    def look(self) -> None:
        """Write the batches; let the next step be measured, or what happens until then if there was none since the last look."""
        self.refresh()
        passed, self._looked_steps = self.steps - self._looked_steps, self.steps
        if passed:
            if self.parts is None and not self._is_due:
                self._skipped = (monotonic_ns() >> 10) % min(_SPREAD, passed)
            self._is_due = True
        elif self.parts is None and self._hooks is not None:
            parts = StepParts(monotonic_ns(), self._hooks.find_part(), is_whole=False)
            self._begin_parts(parts)
            self._numbers[_STEP_PART] = parts.part

    # Collectives

    @override
    def record_flops(self, flops: int, peak_flops: int) -> None:
        super().record_flops(flops, peak_flops)
        self._numbers[_FLOPS], self._numbers[_PEAK_FLOPS] = flops, peak_flops

    @override
    def begin_collective(self) -> None:
        super().begin_collective()
        self.begin_wait()

    @override
    def end_collective(self) -> None:
        self.end_wait()

    @override
    def enter(self, operation: str, site: CallSite) -> None:
        super().enter(operation, site)
        if self.inside != self._last_inside:
            self._last_inside = self.inside
            self._write_text(operation, site)
        self._numbers[_INSIDE] = 1
        self._numbers[_CHANGED_NS] = monotonic_ns()

    def _write_text(self, operation: str, site: CallSite) -> None:
        text = encode_text(f"{operation} at {site}")[:_TEXT_SIZE]
        self._memory[BEAT_TEXT_RANGE] = text.ljust(_TEXT_SIZE, b"\0")

    @override
    def exit(self) -> None:
        numbers = self._numbers
        numbers[_COLLECTIVES] += 1
        numbers[_INSIDE] = 0
        self.end_wait()
        numbers[_CHANGED_NS] = monotonic_ns()
        self.inside = None

    def _record_end(self) -> None:
        """Record the exit of the interpreter; a process that the script has forked leaves the file alone."""
        if self._numbers[_PID] == os.getpid():
            self.refresh()
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


def _forget_parent() -> None:
    """Forget the progress of the process that has forked this one."""
    _create_progress.cache_clear()
    _LOCAL.progress = None


os.register_at_fork(after_in_child=_forget_parent)


@lru_cache(maxsize=1)
def _create_progress() -> Progress | None:
    folder = os.environ.get(RANK_FOLDER)
    progress = Progress() if os.environ.get("WORLD_SIZE", "1") != "1" else None
    if not folder:
        return progress
    from accel_runtime.observe.torch_hooks import observe  # noqa: PLC0415 - it creates this one at the first step

    try:
        created = Heartbeat(Path(folder) / BEAT)
    except OSError:
        return progress
    observe(created)
    return created
