"""Progress of a process and its line in the user's code, in a mapped file that its launcher reads without a call."""

from __future__ import annotations

import _thread
import atexit
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from time import monotonic_ns
from typing import Any

from typing_extensions import override

from accel_runtime.environment.layouts import read_switch
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
    variable_name,
)
from accel_runtime.environment.text import encode_text
from accel_runtime.observe import torch_hooks
from accel_runtime.observe.call_sites import CallSite, call_site
from accel_runtime.observe.flops import StepFlops
from accel_runtime.observe.progress import (
    LoaderEpoch,
    MeasuredProgress,
    Progress,
    StepPart,
    StepParts,
    count_batches,
)

__all__ = ["Heartbeat", "disable_heartbeat", "enable_progress", "heartbeat"]

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
    _FIRST_BATCH_NS,
    _ENDED_NS,
    _FAILED,
    _FLOPS,
    _PEAK_FLOPS,
    _STEP_PART,
    _TIMED_STEPS,
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


_NUMBERS_BY_PART = {
    StepPart.DATA: _DATA_NS,
    StepPart.FORWARD: _FORWARD_NS,
    StepPart.BACKWARD: _BACKWARD_NS,
    StepPart.UPDATE: _UPDATE_NS,
    StepPart.WAIT: _WAIT_NS,
}
_NO_PART = -1
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


class Heartbeat(MeasuredProgress):
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
        self._hooks: torch_hooks.TorchHooks | None = None
        self._is_compiling: Callable[[], bool] = bool
        self._is_due = True
        """True if the end of the next step is more than a count: a measured step ends or begins."""
        self._skipped = 0
        """Number of steps before the measured one."""
        self._looked_steps = 0
        self._num_samples, self._samples_an_entry = 0, 1
        self._is_closed = self._misses_replays = False
        now, numbers = monotonic_ns(), self._numbers
        numbers[_STARTED_NS], numbers[_STARTED_EPOCH_NS], numbers[_CHANGED_NS] = now, time.time_ns(), now
        numbers[_STEP_PART] = _NO_PART
        numbers[_PID] = os.getpid()
        atexit.register(self._record_end)

    def observe(self, hooks: torch_hooks.TorchHooks) -> None:
        """Look at the script from now on, in a thread.

        Args:
            hooks: The hooks in torch by which parts of a step are measured.
        """
        self._hooks, self._is_compiling = hooks, hooks.is_compiling
        variable = variable_name("measure_flops")
        if read_switch(variable, os.environ.get(variable, "")):
            self._flops = StepFlops()
        replays = os.environ.get(variable_name("check_replay"), "")
        self._misses_replays = replays not in {"", "never"} and os.environ.get("RANK", "0") == "0"
        # Not a thread of `threading`: a script may join all that are listed there.
        _thread.start_new_thread(self._watch, ())

    def confirm_replays(self) -> None:
        """Leave out the message that no pass is replayed, since an Accelerator has prepared a model."""
        self._misses_replays = False

    def close(self) -> None:
        """Look at the script no more."""
        self._is_closed = True
        if self.parts is not None:
            self._end_parts()

    # Steps

    @override
    def count_step(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        # torch calls it after each step. One function that does not read the clock: each call and each read take as long as
        # the rest of it.
        if self._is_compiling():  # it would break the graph of torch.compile
            return
        for epoch in self._epochs:
            epoch.mark_trained()
        stepped, others = id(optimizer), self._stepped
        for group in optimizer.param_groups:
            if parameters := group["params"]:
                stepped = id(parameters[0])
                break
        if stepped not in others:
            others.add(stepped)
            if len(others) > 1:
                self.begin_part(StepPart.REST)
                return
        elif len(others) > 1:
            others.clear()
            others.add(stepped)
        self.steps += 1
        self._numbers[_STEPS] = self.steps
        if self._has_ended_epochs:
            self._drop_ended()
        if self._is_due:
            self._end_step(monotonic_ns())

    def _end_step(self, now: int) -> None:
        """Add a measured step that ends to the totals, and begin to measure the next one if it is time."""
        hooks, parts = self._hooks, self.parts
        if self.steps == 1:
            if self._last_inside is None:
                self._write_text("step", call_site(*_get_torch()))
            if hooks is not None:
                hooks.follow_thread()
            self._add_entry(now)
            self._numbers[_FIRST_RECENT] = now
            self._numbers[_TIMED_STEPS] = 1
        elif hooks is not None and not hooks.is_followed_thread():
            return
        if self._flops is not None and self._flops.check_step(self):
            self._flops = None
        if parts is not None and parts.is_whole:
            parts.begin(StepPart.REST)
            self._add_measured(parts, now)
        if parts is not None and self.steps > _NUM_FIRST and now - parts.begin_ns < _LONG_STEP_NS:
            self._end_parts()
        elif parts is None and self._skipped:
            self._skipped -= 1
        else:
            # Optimizers may step in a backward pass, in hooks of parameters.
            is_backward = parts is not None and parts.is_backward
            part = StepPart.BACKWARD if is_backward else StepPart.REST
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
        self._numbers[_STEP_PART] = _NO_PART

    def _add_measured(self, parts: StepParts, now: int) -> None:
        """Add the times of a measured step, also for the steps since the one before it, and an entry of the history."""
        numbers, length = self._numbers, max(1, now - parts.begin_ns)
        steps = self.steps - numbers[_SAMPLED_STEPS]
        # An evaluation in a measured step, or between two, is none of the steps between them.
        others = min(steps - 1, (now - numbers[_SAMPLED_NS] - length) / length)
        for part, number in _NUMBERS_BY_PART.items():
            numbers[number] += round((1 + others) * parts.times[part])
        numbers[_OWN_NS] += round((1 + others) * (length - parts.times[StepPart.WAIT]))
        self._num_samples += 1
        self._add_entry(now, is_kept=self._num_samples % self._samples_an_entry == 0)

    def _add_entry(self, now: int, *, is_kept: bool = True) -> None:
        """Write the totals at the end of a step, and add them to the history."""
        numbers, history, width = self._numbers, self._history, len(BEAT_ENTRY)
        numbers[_SAMPLES], numbers[_TOKENS] = self.count_trained()
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

    @override
    def _record(self, parts: StepParts) -> None:
        self._numbers[_STEP_PART] = _NUMBERS_BY_PART.get(parts.part, _NO_PART)
        self._numbers[_CHANGED_NS] = parts.since_ns

    # Batches

    @override
    def begin_epoch(self, epoch: LoaderEpoch) -> LoaderEpoch:
        self._has_prepared_epochs = self._has_prepared_epochs or epoch.is_prepared
        return super().begin_epoch(epoch)

    @override
    def _drop(self, dropped: Sequence[LoaderEpoch]) -> None:
        super()._drop(dropped)
        self._ended_torch_batches += count_batches(epoch for epoch in dropped if not epoch.is_prepared)
        for epoch in dropped:
            if epoch.is_prepared is self._has_prepared_epochs:
                self._last_ended = epoch

    def refresh(self) -> None:
        """Write what has changed since the last look: the times of steps, and the batches."""
        self._write_times()
        self._write_batches()

    def _write_times(self) -> None:
        """Write the times of the last steps."""
        numbers, steps = self._numbers, self.steps
        timed = numbers[_TIMED_STEPS]
        if not 0 < timed < steps:
            return
        now = numbers[_SAMPLED_NS] if numbers[_SAMPLED_STEPS] == steps else monotonic_ns()
        before = numbers[_FIRST_RECENT + (timed - 1) % BEAT_RECENT]
        for step in range(max(timed, steps - BEAT_RECENT), steps):
            elapsed = (now - before) * (step + 1 - timed) // (steps - timed)
            numbers[_FIRST_RECENT + step % BEAT_RECENT] = before + elapsed
        # After the slots, which a reader knows to be filled by this number.
        numbers[_TIMED_STEPS] = steps

    def _write_batches(self) -> None:
        """Write the number of batches, and the epoch that has returned the last one.

        If loaders are prepared, only those count: they are the ones that loop on all ranks.
        """
        numbers, is_prepared = self._numbers, self._has_prepared_epochs
        ended = () if self._last_ended is None else (self._last_ended,)
        running = self._epochs
        for epoch in running:
            epoch.refresh()
        counted = [epoch for epoch in running if epoch.is_prepared is is_prepared]
        batches = count_batches(counted) + (self._ended_batches if is_prepared else self._ended_torch_batches)
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
            numbers[_FIRST_BATCH_NS] = numbers[_FIRST_BATCH_NS] or numbers[_CHANGED_NS]

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
            self._numbers[_STEP_PART] = _NUMBERS_BY_PART.get(parts.part, _NO_PART)

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
            self.close()
            self.refresh()
            if self._misses_replays:
                print(  # noqa: T201 - a message of the launcher
                    "accel: check_replay has no effect: no Accelerator of the script has prepared a model. Record two runs, and compare them.",
                    file=sys.stderr,
                )
            if self._hooks is not None:
                self._hooks.forget()
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
    try:
        created = Heartbeat(Path(folder) / BEAT)
    except OSError:
        return progress
    created.observe(torch_hooks.observe(created))
    return created
