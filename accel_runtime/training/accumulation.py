"""Gradient accumulation: the micro-batches of a cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import override

from accel_runtime.foundation.options import GradientAccumulationPlugin
from accel_runtime.storage.schema import Count

__all__ = ["Accumulation", "CycleState", "MicroBatch"]

_Counts = tuple[int, int, int, int, bool, bool, bool]


@dataclass(frozen=True)
class CycleState:
    """State of an accumulation cycle, as checkpoints hold it."""

    micro_batches: Count
    """Number of micro-batches of the cycle so far."""
    step: Count
    """Number of micro-batches since the end of an epoch."""
    synced: bool
    """True if the newest micro-batch completes the cycle."""
    is_new: bool
    """True until the first backward pass of the cycle."""
    weighted: bool
    """True if the newest loss had a weight."""


class Accumulation:
    """Count of the micro-batches in an accumulation cycle, and whether their losses have weights.

    Others read its attributes, which are plain since each step reads them; only its methods assign them.

    Args:
        plugin: Length and end of a cycle; a number is the micro-batches of a cycle.
        global_batch_size: The samples of a cycle, whose micro-batches the loaders count; None counts micro-batches.

    Raises:
        ValueError: A cycle of less than one micro-batch.
    """

    def __init__(
        self, plugin: GradientAccumulationPlugin | int, global_batch_size: int | None = None
    ) -> None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            plugin = GradientAccumulationPlugin(plugin)
        self.plugin = plugin
        """Options of the script; an assigned field takes effect from the next micro-batch on."""
        self.global_batch_size = global_batch_size
        """The samples of a cycle; None if it has a number of micro-batches."""
        self.synced = True
        """True if the current backward pass completes a cycle, so that the optimizer steps after it."""
        self.is_new_cycle = True
        """True until the first backward pass of the current cycle."""
        self.weighted = False
        """True if the newest loss had a weight."""
        self.num_backward = 0
        """Number of backward passes so far."""
        self.is_first = True
        """True if the current micro-batch is the first of its cycle."""
        self.num_cycles = 0
        """Number of micro-batches so far that completed a cycle."""
        self.num_open = 0
        """Number of `accumulate` contexts that are open."""
        self.is_controlled = False
        """True once the script has used `accumulate` or `no_sync`, or set if gradients are synchronized."""
        self._no_sync_depth = 0
        """Number of calls of `suspend_sync` that have not ended."""
        self._check: Callable[[], None] | None = None
        """Called before the next backward pass."""
        self._backward_before = 0
        self._step = self._count = 0
        self._models: frozenset[int] = frozenset()
        self._mixed_models = False

    @property
    def step(self) -> int:
        """Return the number of micro-batches since the end of an epoch."""
        return self._step

    @property
    def count(self) -> int:
        """Return the number of micro-batches so far in the current cycle."""
        return self._count

    @property
    def models(self) -> frozenset[int]:
        """Return the identities of the models of the newest micro-batch."""
        return self._models

    @property
    def has_mixed_models(self) -> bool:
        """Return whether a cycle had micro-batches with different models."""
        return self._mixed_models

    def set_step(self, step: int) -> None:
        """Continue as after `step` micro-batches; raise ValueError if there is no such number."""
        if type(step) is not int or step < 0:
            raise ValueError(f"Invalid step {step!r}: expected a whole number of at least 0.")
        self._step, self._count = step, step % self.steps

    @property
    def steps(self) -> int:
        """Return the number of micro-batches in a cycle that a loss is divided by; 1 if its samples are counted."""
        return self.plugin.num_steps

    @property
    def has_several(self) -> bool:
        """Return whether a cycle may have several micro-batches."""
        return self.global_batch_size is not None or self.plugin.num_steps > 1

    @property
    def length(self) -> str:
        """Return the length of a cycle, as text."""
        if self.global_batch_size is None:
            return str(self.plugin.num_steps)
        return f"{self.global_batch_size} samples"

    def set_steps(self, steps: int) -> None:
        """Set the number of micro-batches in a cycle, also in the script's plugin; raise ValueError if it is below 1 or unused."""
        if self.global_batch_size is not None:
            raise ValueError(
                f"Cannot set gradient_accumulation_steps={steps}: with global_batch_size={self.global_batch_size}, the batch size of the "
                "loader and the number of processes determine it. Leave out one of the two."
            )
        self.plugin.num_steps = steps

    def set_synced(self, synced: bool) -> None:
        """Override whether the current backward pass completes a cycle, until the next micro-batch."""
        self.synced, self.is_controlled = synced, True

    @property
    def syncs_gradients(self) -> bool:
        """Return whether the current backward pass completes the gradients of a cycle."""
        return self.synced and not self._no_sync_depth

    @property
    def has_backward(self) -> bool:
        """Return whether there was a backward pass in the current micro-batch."""
        return self.num_backward != self._backward_before

    def describe(self, processes: int, *, split_batches: bool) -> str:
        """Return what the gradients of an optimizer step average, over `processes` processes.

        With `split_batches`, processes split the script's batches, so a sum differs from that of one process.
        """
        counted = f"a global batch of {self.global_batch_size} samples"
        if self.weighted:
            part = counted if self.global_batch_size else f"{self.steps} micro-batch(es)"
            text = f"the mean over all items of {part}, as backward(weight=...) counts them"
        elif self.global_batch_size is not None:
            return f"the mean over the samples of {counted}, of all processes and micro-batches"
        else:
            loss = f"each loss divided by {self.steps}" if self.steps > 1 else "losses as they are"
            text = f"{self.steps} micro-batch(es) an optimizer step, {loss} (unless backward() is given a weight)"
        if processes == 1:
            return text
        sums = f": a loss that is a sum over the batch gives 1/{processes} of the gradient of one process"
        return f"{text}; averaged over {processes} processes{sums if split_batches else ''}"

    def advance(self, *, is_last: bool) -> bool:
        """Start the next micro-batch, and return whether it completes a cycle.

        The last one of an epoch does, unless the plugin disables it; of counted samples, the last one of a cycle.
        """
        self.is_first = self._count == 0
        self.is_new_cycle = self.is_new_cycle or self.is_first
        self._backward_before = self.num_backward
        self._count += 1
        ends_cycle = is_last and self.plugin.sync_with_dataloader
        self._step = 0 if ends_cycle else self._step + 1
        self.synced = ends_cycle or (self.global_batch_size is None and self._count >= self.plugin.num_steps)
        if self.synced:
            self._count = 0
            self.num_cycles += 1
        return self.synced

    def record_models(self, models: Iterable[Any]) -> bool:
        """Record the models of a micro-batch; return True the first time that they differ within a cycle."""
        previous, self._models = self._models, frozenset(map(id, models))
        is_mixed = self._count > 0 and bool(previous) and previous != self._models
        is_first = is_mixed and not self._mixed_models
        self._mixed_models = self._mixed_models or is_mixed
        return is_first

    def reset(self) -> None:
        """Start a new cycle."""
        self._step = self._count = 0

    def begin_plain_backward(self) -> bool:
        """Record a backward pass without a weight; return False, and record none, if more has to be checked before it.

        Nearly all training steps call it.
        """
        if (self.is_new_cycle or not self.weighted) and self._check is None:
            self.is_new_cycle = self.weighted = False
            self.num_backward += 1
            return True
        return False

    def begin_backward(self, *, weighted: bool) -> None:
        """Record a backward pass; raise ValueError if only some losses of its cycle have weights."""
        if self._check is not None:
            check, self._check = self._check, None
            check()
        if not self.is_new_cycle and self.weighted is not weighted:
            raise ValueError(
                "backward() was called with a weight and without one for the same optimizer step: the mean of such losses is "
                "not defined. Pass a weight to every backward() of an accumulation cycle, or to none."
            )
        self.weighted = weighted
        self.is_new_cycle = False
        self.num_backward += 1

    def end_cycle(self) -> None:
        """Record that the gradients of the cycle were applied or cleared: the next backward pass begins another one."""
        self.is_new_cycle = True

    def suspend_sync(self) -> None:
        """Complete no cycle, and average no gradients, until `resume_sync`; calls may be nested."""
        self._no_sync_depth += 1
        self.is_controlled = True

    def resume_sync(self) -> None:
        """End the innermost `suspend_sync`."""
        self._no_sync_depth -= 1

    @contextmanager
    def check_before_backward(self, check: Callable[[], None]) -> Iterator[None]:
        """Call a function before the first backward pass inside the context."""
        self._check = check
        try:
            yield
        finally:
            self._check = None

    def capture_cycle(self) -> CycleState:
        """Return the state of the current cycle, the same on all ranks."""
        return CycleState(self._count, self._step, self.synced, self.is_new_cycle, self.weighted)

    def restore_cycle(self, state: CycleState) -> None:
        """Continue in the cycle of a saved state; the length of cycles does not change."""
        self._count, self._step = state.micro_batches, state.step
        self.synced, self.is_new_cycle, self.weighted = state.synced, state.is_new, state.weighted
        self._models = frozenset()

    def open(self) -> _Counts:
        """Record an `accumulate` context that begins; return the counts before it, for `close`."""
        self.num_open += 1
        self.is_controlled = True
        flags = self.synced, self.is_new_cycle, self.is_first
        return self.num_backward, self._step, self._count, self.num_cycles, *flags

    def close(self, counts: _Counts | None = None) -> None:
        """Record an `accumulate` context that ends; if it failed, restore the counts before it.

        They stay after a backward pass, whose gradients cannot be removed.
        """
        self.num_open -= 1
        if counts is not None and self.num_backward == counts[0]:
            _, self._step, self._count, self.num_cycles, *flags = counts
            self.synced, self.is_new_cycle, self.is_first = flags


class MicroBatch(AbstractContextManager[None]):
    """Context of one micro-batch: gradients stay local unless it completes a cycle.

    A micro-batch that fails before its backward pass is not counted.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        *,
        is_last: bool,
        no_sync: Callable[[Any], AbstractContextManager[None]],
        models: Sequence[Any],
    ) -> None:
        self._accumulation = accumulation
        self._is_last = is_last
        self._no_sync = no_sync
        self._models = models
        self._contexts: ExitStack | None = None

    @override
    def __enter__(self) -> None:
        self._counts = self._accumulation.open()
        if self._accumulation.advance(is_last=self._is_last) or self._accumulation.plugin.sync_each_batch:
            return
        if self._models:
            self._contexts = ExitStack()
            for model in self._models:
                self._contexts.enter_context(self._no_sync(model))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accumulation.close(None if kind is None else self._counts)
        if self._contexts is not None:
            self._contexts.close()
