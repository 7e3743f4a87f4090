"""Progress of a prepared loader: its running iterations, and those that a loaded state continues."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.state import IterationState, LoaderState, SourceState
from accel_runtime.foundation.steps import EpochProgress

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
        self._running: list[EpochProgress] = []
        """Iterations that have not ended and that the script has not left, in the order in which they began."""
        self._claimed: list[tuple[weakref.ref[Iterator[Any]], IterationState]] = []
        """Iterators that continue a loaded iteration and that no batch was requested from yet, with its state."""
        self._loaded: tuple[IterationState, ...] = ()
        """Loaded iterations that no iterator continues yet."""
        self._left: _LeftIteration | None = None
        """The newest iteration that the script has left."""
        self.num_padding = 0
        """Number of padding samples in the last complete epoch, over all ranks. Only `mark_finished` assigns it."""

    @property
    def epoch(self) -> int:
        """Return the number of the running epoch or, between two, of the next."""
        self._drop_ended()
        epochs = [*(each.epoch for each in self._running), *(each.epoch for each in self._loaded)]
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

    def add(self, running: EpochProgress) -> None:
        """Record an iteration that is running."""
        self._running.append(running)

    def mark_finished(self, running: EpochProgress, num_padding: int) -> None:
        """Record that an iteration has returned all batches, with this number of padding samples over all ranks."""
        self._left, self.num_padding = None, num_padding
        self._remove(running)

    def mark_left(self, running: EpochProgress, state: IterationState) -> None:
        """Record that the script has left an iteration in this state."""
        self._left = _LeftIteration(state)
        self._remove(running)

    def _remove(self, running: EpochProgress) -> None:
        if running in self._running:  # else a state was loaded meanwhile
            self._running.remove(running)
        running.end()

    def capture(
        self,
        next_epoch: Callable[[], SourceState],
        capture_iteration: Callable[[EpochProgress], IterationState],
    ) -> LoaderState:
        """Return the state of the loader.

        Args:
            next_epoch: Returns the state in which the next epoch begins, unless it was loaded.
            capture_iteration: Returns the state of a running iteration.
        """
        self._drop_ended()
        running = [capture_iteration(each) for each in self._running]
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
