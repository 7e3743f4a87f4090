"""The micro-batch that ends the script's loop over prepared loaders, which completes an accumulation cycle."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from threading import get_ident
from typing import NamedTuple, NoReturn

from accel_runtime.data.active_loops import ActiveLoops, LoopRecord
from accel_runtime.foundation.call_stacks import (
    CallStack,
    find_generator_loops,
    is_in_body,
    is_same_place,
    read_call_stack,
)
from accel_runtime.foundation.heartbeat import call_site

__all__ = ["EpochEnd", "EpochEnds"]


def _restarts(loop: LoopRecord, other: LoopRecord) -> bool:
    """Return whether a loader is repeated, so that its end is not that of the loop over it and another loader."""
    return any(each.repeats for each in find_generator_loops(loop.reader, other.reader))


def _is_new_epoch(loop: LoopRecord, ended: Collection[LoopRecord]) -> bool:
    """Return whether the script began a loop again, as opposed to a generator that repeats a loader."""
    repeats = any(each.may_repeat for each in find_generator_loops(loop.reader, ()))
    return not repeats and any(is_same_place(loop.reader, each.reader) for each in ended)


class EpochEnd(NamedTuple):
    """Position of a micro-batch in its loop."""

    is_last: bool
    """True if it ends the loop."""
    follows_tail: bool
    """True if it continues the incomplete cycle of another loop, which has ended or was left."""


_INNER = EpochEnd(is_last=False, follows_tail=False)


class EpochEnds:
    """Find the micro-batch that ends the script's loop over prepared loaders.

    Its batch is the last one of the loader. If several loaders are read in one loop, the first that ends, other than
    those that are repeated. docs/design/accumulation.md has the reasons and a table.

    Args:
        loops: The loops over the loaders.
    """

    def __init__(self, loops: ActiveLoops) -> None:
        self._loops = loops
        self._num_calls = 0
        self._read: dict[LoopRecord, tuple[int, int]] = {}
        """For each open loop: its number of batches at the newest micro-batch, and the number of that micro-batch."""
        self._group: tuple[LoopRecord, ...] = ()
        """Loops whose end ends the loop that the newest micro-batch was in."""
        self._ended: tuple[LoopRecord, ...] = ()
        """Loops that had returned their last batch then."""
        self._place: CallStack = ()
        """Call of `accumulate` for the last batch."""
        self._cut_at = -1
        """Number of complete cycles before the one that the last batch completed before its count; -1 if it did not."""
        self._calls_of_loop = self._calls_of_batch = self._calls_of_previous_batch = 0
        self._before = (-1, -1)
        """Micro-batches in the cycle, and complete cycles, before the newest micro-batch."""
        self._sizes: tuple[int, ...] = ()
        self._other: LoopRecord | None = None
        """Newest loop of another thread."""
        self._calls_before_other = 0
        self._models: frozenset[int] = frozenset()
        self._alternates = False
        """True if the script calls `accumulate` for several models in turn."""

    def find_end(self, count: int, num_steps: int, num_cycles: int, models: frozenset[int]) -> EpochEnd:
        """Return whether a micro-batch that is about to begin ends the loop that it is in.

        Args:
            count: Micro-batches in the current cycle so far.
            num_steps: Micro-batches in a complete cycle.
            num_cycles: Complete cycles so far.
            models: Identities of the models of the micro-batch.

        Raises:
            ValueError: The end is unknown, or the loop goes on after the micro-batch that was its end.
        """
        loops = self._loops.open_records
        if len(loops) == 1 and self._is_inner(loops[0], models):
            self._num_calls += 1
            is_counted = self._before != (count, num_cycles)
            self._calls_of_previous_batch, self._calls_of_batch = self._calls_of_batch - (not is_counted), 1
            self._calls_of_loop += is_counted
            self._before = (count, num_cycles)
            self._read[loops[0]] = (loops[0].num_batches, self._num_calls)
            return _INNER
        self._num_calls += 1
        self._alternates |= bool(self._models) and models != self._models
        self._models = models
        is_cut = self._cut_at >= 0 and num_cycles > self._cut_at
        if self._before == (count, num_cycles):  # it failed before its backward pass, and is not counted
            self._calls_of_batch -= 1
            self._calls_of_loop -= 1
        self._before = (count, num_cycles)
        thread, read = get_ident(), self._read
        if loops and any(each.thread != thread for each in loops):
            loops = [each for each in loops if each.thread == thread]
        is_outside = not loops
        if is_outside:  # the script may have read beyond the last batch before it trains on it
            loops = [each for each in self._group if each.has_last and each.thread == thread and each in read]
        advanced = [each for each in loops if each not in read or read[each][0] != each.num_batches]
        if not advanced:
            if is_outside:
                self._check_threads(thread, count, num_steps)
            is_end, is_tail = self._find_end_without_batch(is_cut), False
        else:
            is_tail = count > 0 and self._has_left(advanced)
            is_end = self._find_end_of_batch(loops, advanced, is_cut)
            self._read = {
                each: (each.num_batches, self._num_calls) if each in advanced else read[each]
                for each in loops
                if each in advanced or each in read
            }
        if is_end:
            self._place = read_call_stack(1)
        self._cut_at = num_cycles if is_end and count + 1 < num_steps else -1
        return EpochEnd(is_end, is_tail) if is_end or is_tail else _INNER

    def _is_inner(self, loop: LoopRecord, models: frozenset[int]) -> bool:
        """Return whether a micro-batch is on the next batch of the only loop, which is not its last; true for most."""
        return (
            len(self._group) == 1
            and loop is self._group[0]
            and not loop.has_last
            and loop in self._read
            and self._read[loop][0] != loop.num_batches
            and models == self._models
            and loop.thread == get_ident()
        )

    def _find_end_of_batch(
        self, loops: Sequence[LoopRecord], advanced: Sequence[LoopRecord], is_cut: bool
    ) -> bool:
        """Return whether a micro-batch on new batches ends the loop."""
        has_last = any(each.has_last for each in loops)
        if is_cut and not self._alternates:
            self._check_going_on(advanced)
        group = tuple(loops)
        if len(loops) > 1:
            group = self._select(loops, advanced, read_call_stack(2) if has_last else None)
        if not any(each in self._group for each in group):
            self._calls_of_loop = 0
        self._calls_of_previous_batch, self._calls_of_batch = self._calls_of_batch, 1
        self._calls_of_loop += 1
        sizes, self._sizes = self._sizes, group[-1].batch_sizes
        self._group, self._ended = group, ()
        if not has_last or not self._is_at_end(group, advanced):
            return False
        self._ended = tuple(each for each in group if each.has_last)
        # The micro-batches of a batch are as many as those of the batch before, if both have the same size.
        is_divided = self._calls_of_previous_batch > 1 and sizes == self._sizes
        return self._alternates or not is_divided

    def _find_end_without_batch(self, is_cut: bool) -> bool:
        """Return whether a micro-batch ends the loop that begins without a new batch."""
        self._calls_of_batch += 1
        self._calls_of_loop += 1
        if not self._ended:
            return False
        is_open = any(each.is_open for each in self._ended)
        if self._alternates:
            return is_open
        goes_on = is_open or is_same_place(read_call_stack(2), self._place)
        if is_cut and goes_on:
            _reject()
        if is_open:
            return self._calls_of_batch >= self._calls_of_previous_batch
        return goes_on and self._calls_of_loop == min(each.num_batches for each in self._ended)

    def _select(
        self, loops: Sequence[LoopRecord], advanced: Sequence[LoopRecord], call: CallStack | None
    ) -> tuple[LoopRecord, ...]:
        """Return the loops whose end may be that of the loop that `accumulate` stands in."""
        recent = [
            each
            for each in loops
            if each in advanced or self._num_calls - self._read.get(each, (0, 0))[1] < len(loops)
        ]
        if call is None or len(recent) == 1:
            return tuple(recent)
        dropped = []
        for inner, outer in itertools.permutations(recent, 2):
            if is_in_body(inner.reader, outer.reader):
                dropped.append(outer if is_in_body(call, inner.reader) else inner)
        return tuple(each for each in recent if each not in dropped) or tuple(recent)

    def _is_at_end(self, group: Sequence[LoopRecord], advanced: Sequence[LoopRecord]) -> bool:
        """Return whether a loop over several loaders is at its end."""
        if len(group) == 1 or any(each not in advanced for each in group):
            return group[-1].has_last
        for each in group:
            if not each.has_last:
                continue
            others = [other for other in group if other is not each and _restarts(each, other)]
            if not others:
                return True
            if any(_restarts(other, each) for other in others):
                _reject()
        return False

    def _check_going_on(self, advanced: Sequence[LoopRecord]) -> None:
        """Raise ValueError if the loop that a loader ended goes on with another one."""
        others = [each for each in self._group if each not in self._ended and each in advanced]
        new = [each for each in advanced if each not in self._read]
        is_new = any(_is_new_epoch(each, self._ended) for each in new)
        if others and not is_new and is_same_place(read_call_stack(3), self._place):
            _reject()

    def _has_left(self, advanced: Sequence[LoopRecord]) -> bool:
        """Return whether the loop of the newest micro-batch has ended or was left, and another one began."""
        is_left = bool(self._group) and not any(each.is_open for each in self._group)
        return is_left and not any(each in self._group for each in advanced)

    def _check_threads(self, thread: int, count: int, num_steps: int) -> None:
        """Raise ValueError if the batches come from another thread, which has reached the end of its loader."""
        loop = self._loops.newest
        if loop is None or loop.thread == thread:
            return
        if loop is not self._other:
            self._other, self._calls_before_other = loop, self._num_calls - 1
        if loop.has_last:
            rest = loop.num_batches - (self._num_calls - 1 - self._calls_before_other)
            if (count + rest) % num_steps:
                _reject()


def _reject() -> NoReturn:
    raise ValueError(
        f"accumulate() failed at {call_site()}: the end of this loop is unknown, since a loader ends before it does. Its last "
        "batch would complete an accumulation cycle too early, for example if a loader is repeated beside another one, read "
        "ahead of the training, or divided into several micro-batches. Count micro-batches only: "
        "Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps, sync_with_dataloader=False))."
    )
