"""The micro-batch that ends the script's loop over prepared loaders, which completes an accumulation cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from accel_runtime.data.active_loops import ActiveLoops, LoopRecord
from accel_runtime.observe.call_sites import CallSite, call_site
from accel_runtime.training.accumulation import Accumulation

__all__ = ["EpochEnds"]


class _Cut(NamedTuple):
    """A micro-batch that completes a cycle before its count."""

    num_cycles: int
    """Complete cycles before it."""
    site: CallSite
    models: frozenset[int]
    ended: list[LoopRecord]
    others: list[LoopRecord]
    """Other loops that count, also for the micro-batch before, as in `zip`; an evaluation may advance now and then."""
    is_ahead: bool
    """True if the loop had fewer micro-batches than batches."""


class EpochEnds:
    """Find the micro-batch that ends the script's loop over prepared loaders.

    The loops that count are those that advanced since the micro-batch before; of nested loops, the innermost. A micro-batch
    ends the loop if one of them has returned its last batch: of several micro-batches of each batch, the last. If the
    cycle was incomplete there, and the next micro-batch at the same line has a batch of another of these loops, or none at
    all, the end was wrong, which is an error. docs/design/accumulation.md has the reasons and a table.

    Args:
        loops: The loops over the loaders.
        counts: The micro-batches of the current cycle.
        report_tail: Called if a micro-batch continues the incomplete cycle of a loop that has ended or was left.
    """

    def __init__(self, loops: ActiveLoops, counts: Accumulation, report_tail: Callable[[], None]) -> None:
        self._loops, self._counts, self._report_tail = loops, counts, report_tail
        self._open = loops.open_records
        self._only: LoopRecord | None = None
        """The loop of the newest micro-batch, if no other one was running."""
        self._read: dict[LoopRecord, int] = {}
        """Running loops, with their number of batches at the newest micro-batch."""
        self._begun: dict[LoopRecord, tuple[int, Sequence[int]]] = {}
        """Running loops, with the step and the batch sizes of their first micro-batch."""
        self._group: list[LoopRecord] = []
        """Loops that count for the newest micro-batch."""
        self._calls, self._calls_of_last = 0, 1
        """Micro-batches of the newest batch so far, and those expected for the last one."""
        self._before = (0, 0)
        """Micro-batches in the cycle, and complete cycles, before the newest micro-batch."""
        self._cut: _Cut | None = None

    def is_end(self) -> bool:
        """Return whether the micro-batch that is about to begin ends its loop.

        Raises:
            ValueError: The loop goes on after the micro-batch that ended it within a cycle.
        """
        records = self._open
        if len(records) == 1 and (record := records[0]) is self._only and (loop := record.loop):
            step = loop.step_info
            if step is not None and not step.is_last:
                self._read[record] = loop.num_batches
                return False
        return self._find_end(self._loops.find_open())

    def _find_end(self, records: Sequence[LoopRecord]) -> bool:
        counts, previous = self._counts, self._group
        read, self._read = self._read, {each: each.loop.num_batches for each in records if each.loop}
        advanced = [each for each, number in self._read.items() if read.get(each) != number]
        self._check_cut(advanced)
        if advanced:
            if counts.count and previous and not any(each.is_open for each in previous):
                self._report_tail()
            self._group, self._calls = self._select(records, advanced), 1
        elif self._before != (counts.count, counts.num_cycles):  # otherwise it is tried again
            self._calls += 1
        self._before = (counts.count, counts.num_cycles)
        self._only = self._group[0] if self._group == list(self._read) and len(records) == 1 else None
        self._begun = {each: self._begun.get(each) or (counts.step, each.batch_sizes) for each in self._read}
        ended = [each for each in self._group if each.is_at_last and each in self._read]
        if not ended:
            return False
        if self._calls == 1:
            self._calls_of_last = self._count_calls_of_batch(ended[0])
        if self._calls < self._calls_of_last:
            return False
        if counts.count + 1 < counts.steps:
            others = [each for each in self._group if each in previous and each not in ended]
            num_batches = self._read[ended[0]] - ended[0].num_skipped
            is_ahead = counts.step - self._begun[ended[0]][0] + 1 < num_batches
            self._cut = _Cut(counts.num_cycles, call_site(), counts.models, ended, others, is_ahead)
        return True

    def _select(self, records: Sequence[LoopRecord], advanced: Sequence[LoopRecord]) -> list[LoopRecord]:
        """Return the loops whose end is that of the loop around `accumulate`."""
        group = self._group
        is_new = not any(each in group or any(each.is_inside(other) for other in group) for each in advanced)
        if is_new and any(each.is_open for each in group):
            return [records[-1]]  # loaders that are read in turn
        return [
            each for each in advanced if each in group or not any(other.is_inside(each) for other in advanced)
        ]

    def _count_calls_of_batch(self, loop: LoopRecord) -> int:
        """Return how many micro-batches each batch of the only loop had before the last; 1 if they or the batches differ."""
        step, sizes = self._begun[loop]
        num_calls, num_batches = self._counts.step - step, self._read[loop] - loop.num_skipped - 1
        is_same = loop is self._only and loop.batch_sizes == sizes
        if self._counts.has_mixed_models or not is_same or num_batches < 1 or num_calls % num_batches:
            return 1
        return max(1, num_calls // num_batches)

    def _check_cut(self, advanced: Sequence[LoopRecord]) -> None:
        """Raise ValueError if a loop goes on after the micro-batch that completed its last cycle before the count."""
        counts, (cut, self._cut) = self._counts, (self._cut, None)
        # A micro-batch that failed before its backward pass has completed no cycle.
        if cut is None or counts.num_cycles == cut.num_cycles or counts.models != cut.models:
            return
        if advanced:
            goes_on = any(each in advanced for each in cut.others)
        else:
            goes_on = cut.is_ahead or any(each.is_open for each in cut.ended)
        if goes_on and not counts.has_mixed_models and call_site() == cut.site:
            raise ValueError(
                f"accumulate() failed at {cut.site}: the end of this loop is unknown, since a loader ends before it does. Its last "
                "batch would complete an accumulation cycle too early, for example if a loader is repeated beside another one, read "
                "ahead of the training, or divided into several micro-batches. Count micro-batches only: "
                "Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps, sync_with_dataloader=False))."
            )
