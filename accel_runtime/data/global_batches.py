"""The micro-batches of global batches of a fixed number of samples, which loaders divide."""

from __future__ import annotations

import logging

from accel_runtime.data.active_loops import ActiveLoops, LoopRecord
from accel_runtime.foundation.epoch_progress import CyclePart, StepInfo
from accel_runtime.observe.call_sites import call_site
from accel_runtime.training.accumulation import Accumulation

__all__ = ["GlobalBatches"]

_LOG = logging.getLogger("accel_runtime.data")


class GlobalBatches:
    """Begin and end the accumulation cycles of global batches: each batch of a prepared loader is one micro-batch of a cycle.

    docs/design/global-batches.md has the reasons.

    Args:
        loops: The loops over the loaders.
        accumulation: Counts the cycles.
        rank: The rank of this process; the first one warns.
    """

    def __init__(self, loops: ActiveLoops, accumulation: Accumulation, rank: int) -> None:
        self._loops, self._accumulation, self._rank = loops, accumulation, rank
        self._has_warned = False
        self._trained: tuple[LoopRecord | None, int] = None, 0
        """Loop and number of the batch of the newest micro-batch outside of `accumulate`."""
        self._entered: tuple[LoopRecord | None, int, frozenset[int]] = None, 0, frozenset()
        """The same for `accumulate`, with the models."""
        self._backward_before = 0
        """Number of backward passes before the newest `accumulate`."""

    def is_end(self) -> bool:
        """Return whether the micro-batch that `accumulate` begins is the last of its global batch.

        Raises:
            ValueError: No loop over a prepared loader is running, its batch was used already, or loaders that advance together
                divide the global batch differently.
        """
        records, accumulation = self._loops.find_open(), self._accumulation
        record = records[-1] if records else None
        part = self._read_part(None if record is None else record.step_info, "accumulate()")
        assert record is not None
        assert record.loop is not None  # it has a step
        entered = record, record.loop.num_batches, accumulation.models
        if entered[:2] != self._entered[:2]:
            self._check_open(part)
        if entered == self._entered and accumulation.num_backward != self._backward_before:
            raise ValueError(
                f"accumulate() failed at {call_site()}: the batch was used by the micro-batch before it, so it is unknown which one ends "
                f"the global batch. {self._describe()} divides the batches itself: give the loader the batch size of a micro-batch."
            )
        self._entered, self._backward_before = entered, accumulation.num_backward
        for other in records[:-1]:
            info = other.step_info
            if info is None or info.cycle is None or record.is_inside(other):
                continue
            if info.cycle.ends != part.ends:
                raise ValueError(
                    f"accumulate() failed at {call_site()}: two loaders advance together, and the global batch of one ends before that of the "
                    f"other. With {self._describe()}, give them the same batch size and dataset length, or use gradient_accumulation_steps."
                )
        return part.ends

    def begin_backward(self) -> float:
        """Begin the micro-batch of a backward pass outside of `accumulate`, once for each batch; otherwise verify its end.

        Returns:
            The weight of this rank's mean loss.

        Raises:
            ValueError: The loss is not that of a batch of a prepared loader, or not of the batch that `accumulate` began.
        """
        accumulation, step = self._accumulation, self._loops.find_trained_step()
        part, loss_scale = self._read_part(step, "backward()"), 1.0 if step is None else step.loss_scale
        if accumulation.num_open:
            if accumulation.synced is not part.ends:
                raise ValueError(
                    f"backward() failed at {call_site()}: the loss is that of another batch than the newest one, which accumulate() counts. "
                    "Leave out accumulate(), so that backward() counts batches, or read no batch ahead of the training."
                )
            return loss_scale
        records = self._loops.find_open()
        loop = records[-1].loop if records else None
        trained = (records[-1], loop.num_batches) if loop is not None else (None, 0)
        if trained != self._trained:
            self._trained = trained
            self._check_open(part)
            accumulation.advance(is_last=part.ends)
        return loss_scale

    def _check_open(self, part: CyclePart) -> None:
        """Begin another cycle at the first micro-batch of a global batch, and warn once if the one before is incomplete."""
        if not (part.begins and self._accumulation.count):
            return
        count = self._accumulation.count
        self._accumulation.reset()
        if not self._has_warned and self._rank == 0:
            self._has_warned = True
            _LOG.warning(
                "The gradients of %d micro-batches at %s become part of the next optimizer step, which is then not exact: the loop before was "
                "left within a global batch, or its last micro-batch had no backward pass. Leave a loop after an optimizer step, and "
                "call backward() for each batch.",
                count,
                call_site(),
            )

    def _read_part(self, step: StepInfo | None, call: str) -> CyclePart:
        if step is None or step.cycle is None:
            raise ValueError(
                f"{call} failed at {call_site()}: no loop over a prepared loader is running, and {self._describe()} counts the samples of "
                "its batches. Call it in such a loop, or use gradient_accumulation_steps."
            )
        return step.cycle

    def _describe(self) -> str:
        return f"global_batch_size={self._accumulation.global_batch_size}"
