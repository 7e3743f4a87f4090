"""Progress of a prepared loader: its running iterations, and those that a loaded state continues."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accel_runtime.data.active_loops import ActiveLoops, EarlierLoops, LoopRecord, LoopStep
from accel_runtime.data.loop_statements import capture_stack, list_callers
from accel_runtime.data.state import IterationState, LoaderState, SourceState
from accel_runtime.foundation.epoch_progress import EpochProgress

__all__ = ["LoaderProgress"]


class LoaderProgress:
    """Progress of a loader, shared with its copies that leave out the first steps.

    docs/design/loader-state.md has the rules and their reasons.

    Args:
        loops: The loops over all loaders, which decide which loops a script continues.
    """

    def __init__(self, loops: ActiveLoops) -> None:
        self._loops = loops
        loops.loaders.add(self)
        self._next_epoch_number = 0
        self._next_epoch: SourceState | None = None
        """Loaded state in which the next epoch begins; None draws from the generators as they are."""
        self._running: list[LoopRecord] = []
        """Iterations that have not ended and that the script has not left, in the order in which they began."""
        self._claimed: list[tuple[weakref.ref[Iterator[Any]], IterationState]] = []
        """Iterators that continue a loaded iteration and that no batch was requested from yet, with its state."""
        self._loaded: tuple[IterationState, ...] = ()
        """Loaded iterations that no iterator continues yet."""
        self._left: _LeftIteration | None = None
        """The newest iteration that the script has left."""
        self._earlier = EarlierLoops()
        self.num_padding = 0
        """Number of padding samples in the last complete epoch, over all ranks. Only `mark_finished` assigns it."""

    @property
    def epoch(self) -> int:
        """Return the number of the running epoch or, between two, of the next."""
        self._drop_ended()
        epochs = [each.loop.epoch for each in self._running if each.loop is not None]
        epochs += [each.epoch for each in self._loaded]
        return epochs[-1] if epochs else self._next_epoch_number

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; the number of a loaded iteration continues it, and another one leaves it."""
        self._drop_ended()
        if self._loaded and epoch == self._loaded[0].epoch:
            return
        if self._loaded:
            self._loops.continue_loop(self._loaded[0].depth)
            self._loaded = ()
        self._next_epoch_number = epoch

    def restore(self, state: LoaderState) -> None:
        """Continue from a state."""
        self._next_epoch_number, self._next_epoch = state.epoch, state.next_epoch
        self._loaded = state.running
        self._running, self._claimed, self._left = [], [], None
        self._loops.forget_continued()

    def list_waiting(self) -> list[int]:
        """Return the depths of loaded iterations that no running one continues yet."""
        self._drop_ended()
        return [*(state.depth for _, state in self._claimed), *(each.depth for each in self._loaded)]

    def claim_loaded(self) -> IterationState | None:
        """Return the state of the loaded iteration that a new iterator continues; None if it begins an epoch."""
        self._drop_ended()
        if not self._loaded:
            return None
        claimed, *others = self._loaded
        self._loaded = tuple(others)
        return claimed

    def register(self, iterator: Iterator[Any], claimed: IterationState) -> None:
        """Record the iterator that continues an iteration once a batch is requested from it."""
        self._claimed.append((weakref.ref(iterator), claimed))

    def begin(self, claimed: IterationState | None) -> IterationState | None:
        """Record that an iteration begins; return the state that it continues, or None if it begins an epoch."""
        if claimed is not None and any(state is claimed for _, state in self._claimed):
            self._claimed = [each for each in self._claimed if each[1] is not claimed]
            self._loops.continue_loop(claimed.depth)
            # The next epoch draws from the generators as this iteration leaves them.
            self._next_epoch = None
            return claimed
        return None

    def begin_epoch(self) -> tuple[int, SourceState | None]:
        """Return the number of the next epoch, which begins now, and its loaded state, if there is one."""
        self._drop_ended()
        number, state, self._next_epoch = self._next_epoch_number, self._next_epoch, None
        self._next_epoch_number += 1
        self._loaded = ()
        return number, state

    def add(
        self, loop: EpochProgress, created_in: Sequence[LoopStep], depth: int, *, continued: bool
    ) -> LoopRecord:
        """Record an iteration that begins, called by its generator; the arguments are those of `LoopRecord`."""
        # Of the script, that requests the first batch from the generator of the loader.
        callers = list_callers(sys._getframe(2))  # noqa: SLF001 - as `inspect.currentframe`, which returns no caller
        record = LoopRecord(loop, created_in, depth, callers, self._earlier, continued=continued)
        self._running.append(record)
        return record

    def mark_finished(self, record: LoopRecord) -> None:
        """Record that an iteration has returned all batches."""
        self._left, self.num_padding = None, record.num_padding
        record.leave_advanced()
        self._remove(record, finished=True)

    def mark_left(self, record: LoopRecord, state: IterationState) -> None:
        """Record that the script has left an iteration in this state."""
        self._left = _LeftIteration(state)
        self._remove(record, finished=False)

    def _remove(self, record: LoopRecord, *, finished: bool) -> None:
        if record in self._running:  # else a state was loaded meanwhile
            self._running.remove(record)
        self._earlier.record(record, self._loops.open_records, finished=finished)

    def capture(
        self,
        next_epoch: Callable[[], SourceState],
        capture_iteration: Callable[[EpochProgress, int], IterationState],
        report_unknown: Callable[[str], None],
    ) -> LoaderState:
        """Return the state of the loader.

        Args:
            next_epoch: Returns the state in which the next epoch begins, unless it was loaded.
            capture_iteration: Returns the state of a running iteration of this depth.
            report_unknown: Called if it is unknown if an iterator goes on, with the time.
        """
        self._drop_ended()
        stack = capture_stack()
        running = []
        for record in self._running:
            nesting = record.find_nesting(stack)
            if nesting.unknown:
                report_unknown(nesting.unknown)
            if record.loop is not None and not nesting.has_ended:
                running.append(capture_iteration(record.loop, nesting.depth))
        running += [state for _, state in self._claimed]
        if self._left is not None and self._left.is_exception_handled():
            running.append(self._left.state)
        running += self._loaded
        state = next_epoch() if self._next_epoch is None else self._next_epoch
        if running:
            # The global generators will have advanced until then, and they differ between ranks.
            state = state.adapt_random(restored=True)
        return LoaderState(self._next_epoch_number, state, tuple(running))

    def _drop_ended(self) -> None:
        """Drop loaded iterations that the script does not continue.

        An iteration that was inside of another one has ended once the outer one continues.
        """
        self._claimed = [
            (iterator, state)
            for iterator, state in self._claimed
            if iterator() is not None and not self._loops.is_left(state.depth)
        ]
        self._loaded = tuple(each for each in self._loaded if not self._loops.is_left(each.depth))


class _LeftIteration:
    """An iteration that the script has left, by `break` or by an exception.

    After a `break`, the next epoch follows. A script that saves while it handles the exception, such as a
    `KeyboardInterrupt`, expects to continue after the last batch when it is started again.

    Args:
        state: The state of the iteration.
    """

    def __init__(self, state: IterationState) -> None:
        self.state = state
        """State of the iteration."""
        frame = inspect.currentframe()
        while frame is not None and (
            frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_globals is globals()
        ):
            frame = (
                frame.f_back
            )  # of this module, the generator of the loader, or one between, such as that of tqdm
        # Not the frame itself, which would keep the variables of the script.
        self._exit = None if frame is None else (id(frame), frame.f_code, frame.f_lineno)

    def is_exception_handled(self) -> bool:
        """Return whether the exception that ended the iteration is being handled now."""
        error = sys.exc_info()[1]
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                if (id(trace.tb_frame), trace.tb_frame.f_code, trace.tb_lineno) == self._exit:
                    return True
                trace = trace.tb_next
            error = error.__context__
        return False
