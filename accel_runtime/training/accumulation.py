"""Gradient accumulation: the count of micro-batches in an accumulation cycle, and what their gradients average."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from typing_extensions import override

from accel_runtime.options import GradientAccumulationPlugin

__all__ = ["Accumulation", "MicroBatch"]


class Accumulation:
    """Count of the micro-batches in an accumulation cycle, and whether their losses have weights.

    Args:
        plugin: Length and end of a cycle; a number is the micro-batches of a cycle.

    Raises:
        ValueError: A cycle of less than one micro-batch.
    """

    def __init__(self, plugin: GradientAccumulationPlugin | int) -> None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            plugin = GradientAccumulationPlugin(plugin)
        self.plugin = plugin
        """Options of the script; an assigned field takes effect from the next micro-batch on."""
        self.synced = True
        """True if the current backward pass completes a cycle, so that the optimizer steps after it."""
        self.no_sync_depth = 0
        """Number of open `no_sync` contexts of the script, in which no cycle is complete."""
        self.is_new_cycle = True
        """True until the first backward pass of the current cycle."""
        self.weighted = False
        """True if the newest loss had a weight."""
        self.num_backward = 0
        """Number of backward passes so far."""
        self._step = self._count = 0

    @property
    def step(self) -> int:
        """Return the number of micro-batches since the end of an epoch."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if type(step) is not int or step < 0:
            raise ValueError(f"Invalid step {step!r}: expected a whole number of at least 0.")
        self._step, self._count = step, step % self.steps

    @property
    def steps(self) -> int:
        """Return the number of micro-batches in a cycle."""
        return self.plugin.num_steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.plugin.num_steps = steps

    @property
    def syncs_gradients(self) -> bool:
        """Return whether the current backward pass completes the gradients of a cycle."""
        return self.synced and not self.no_sync_depth

    @property
    def weighting(self) -> str:
        """Return what the gradient of a cycle averages, as of the newest backward pass."""
        return "weights" if self.weighted else "mean of micro-batches"

    def describe(self, processes: int, *, split_batches: bool) -> str:
        """Return what the gradients of an optimizer step average, over `processes` processes.

        With `split_batches`, processes split the script's batches, so a sum differs from that of one process.
        """
        if self.weighted:
            text = f"the mean over all items of {self.steps} micro-batch(es), as backward(weight=...) counts them"
        else:
            loss = f"each loss divided by {self.steps}" if self.steps > 1 else "losses as they are"
            text = f"{self.steps} micro-batch(es) an optimizer step, {loss} (unless backward() is given a weight)"
        if processes == 1:
            return text
        sums = f": a loss that is a sum over the batch gives 1/{processes} of the gradient of one process"
        return f"{text}; averaged over {processes} processes{sums if split_batches else ''}"

    def advance(self, *, is_last: bool) -> bool:
        """Start the next micro-batch, and return whether it completes a cycle.

        The last one of an epoch does, unless the plugin disables it.
        """
        self.is_new_cycle = self.is_new_cycle or self._count == 0
        self._count += 1
        ends_cycle = is_last and self.plugin.sync_with_dataloader
        self._step = 0 if ends_cycle else self._step + 1
        self.synced = ends_cycle or self._count >= self.plugin.num_steps
        if self.synced:
            self._count = 0
        return self.synced

    def reset(self) -> None:
        """Start a new cycle."""
        self._step = self._count = 0

    def begin_backward(self, *, weighted: bool) -> None:
        """Record a backward pass; raise ValueError if only some losses of its cycle have weights."""
        if not self.is_new_cycle and self.weighted is not weighted:
            raise ValueError(
                "backward() was called with a weight and without one for the same optimizer step: the mean of such losses is "
                "not defined. Pass a weight to every backward() of an accumulation cycle, or to none."
            )
        self.weighted = weighted
        self.is_new_cycle = False
        self.num_backward += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current cycle: numbers only, the same on all ranks."""
        return {
            "count": self._count,
            "step": self._step,
            "synced": self.synced,
            "fresh": self.is_new_cycle,
            "weighted": self.weighted,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the cycle that `state_dict` was saved in; the length of cycles does not change."""
        self._count = int(state_dict["count"])
        self._step = int(state_dict.get("step", self._count))
        self.synced = bool(state_dict["synced"])
        self.is_new_cycle = bool(state_dict["fresh"])
        self.weighted = bool(state_dict["weighted"])

    def save_counts(self) -> tuple[int, int, int, bool, bool]:
        """Return the counts, for `restore_counts`."""
        return self.num_backward, self._step, self._count, self.synced, self.is_new_cycle

    def restore_counts(self, counts: tuple[int, int, int, bool, bool]) -> None:
        """Restore counts, unless there was a backward pass since: its gradients cannot be removed."""
        if self.num_backward == counts[0]:
            _, self._step, self._count, self.synced, self.is_new_cycle = counts


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
        models: Iterable[Any],
    ) -> None:
        self._accumulation = accumulation
        self._is_last = is_last
        self._no_sync = no_sync
        self._models = models
        self._contexts = ExitStack()

    @override
    def __enter__(self) -> None:
        self._counts = self._accumulation.save_counts()
        if self._accumulation.advance(is_last=self._is_last) or self._accumulation.plugin.sync_each_batch:
            return
        for model in self._models:
            self._contexts.enter_context(self._no_sync(model))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.close()
        if kind is not None:
            self._accumulation.restore_counts(self._counts)
