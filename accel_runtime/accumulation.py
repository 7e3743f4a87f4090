"""When gradients synchronise: the count of micro-batches in a window, and what counts as their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from typing_extensions import override

from accel_runtime.options import GradientAccumulationPlugin

__all__ = ["Accumulation", "MicroBatch"]


class Accumulation:
    """Counts the micro-batches of a window, and knows whether their losses have weights.

    Args:
        plugin: How long a window is and where it ends; a number is the micro-batches of a window.

    Raises:
        ValueError: A window of less than one micro-batch.
    """

    def __init__(self, plugin: GradientAccumulationPlugin | int) -> None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            plugin = GradientAccumulationPlugin(plugin)
        self.plugin = plugin
        """What the script asked for; a field that is assigned has an effect from the next micro-batch on."""
        self.synced = True
        """Whether the backward pass in hand completes a window, so that the optimizer steps after it."""
        self.held = 0
        """How many `no_sync` of the script are open: inside, no window is complete."""
        self.fresh = True
        """Whether the window in hand has had no backward pass yet."""
        self.weighted = False
        """Whether the newest loss had a weight."""
        self.passed = False
        """Whether the micro-batch in hand has had a backward pass."""
        self._step = self._count = 0

    @property
    def step(self) -> int:
        """Micro-batches since the end of an epoch."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be a whole number of at least 0; it is {step!r}")
        self._step, self._count = step, step % self.steps

    @property
    def steps(self) -> int:
        """Micro-batches a window."""
        return self.plugin.num_steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.plugin.num_steps = steps

    @property
    def complete(self) -> bool:
        """Whether gradients are whole after the backward pass in hand."""
        return self.synced and not self.held

    @property
    def weighting(self) -> str:
        """What the gradient of a window is the mean of, as the newest backward pass had it."""
        return "weights" if self.weighted else "mean of micro-batches"

    def describe(self, processes: int, *, split_batches: bool) -> str:
        """Return what the gradients of an optimizer step are the mean of.

        Args:
            processes: How many processes average their gradients.
            split_batches: Whether they divide the batches of the script, so that a sum differs from that of one process.
        """
        if processes == 1:
            return self.described
        part = (
            f": a loss that is a sum over the batch gives 1/{processes} of the gradient of one process"
            if split_batches
            else ""
        )
        return f"{self.described}; averaged over {processes} processes{part}"

    @property
    def described(self) -> str:
        """What an optimizer step is made of, for people."""
        if self.weighted:
            return f"the mean over all items of {self.steps} micro-batch(es), as backward(weight=...) counts them"
        each = f"each loss divided by {self.steps}" if self.steps > 1 else "losses as they are"
        return f"{self.steps} micro-batch(es) an optimizer step, {each} (unless backward() is given a weight)"

    def advance(self, *, last: bool) -> bool:
        """Enter the next micro-batch; the last of an epoch completes its window, unless the plugin says no.

        Returns:
            Whether it completes a window.
        """
        self.fresh = self.fresh or self._count == 0
        self._count += 1
        ends = last and self.plugin.sync_with_dataloader
        self._step = 0 if ends else self._step + 1
        self.synced = ends or self._count >= self.plugin.num_steps
        if self.synced:
            self._count = 0
        return self.synced

    def reset(self) -> None:
        """Begin a new window."""
        self._step = self._count = 0

    def begin(self, *, weighted: bool) -> None:
        """A backward pass begins.

        Raises:
            ValueError: Others of its window had weights and this one has none, or the other way round.
        """
        if not self.fresh and self.weighted is not weighted:
            raise ValueError(
                "backward() was called with a weight and without one for the same optimizer step: the mean of "
                "such losses is not defined. Give every backward() of an accumulation window a weight, or none."
            )
        self.weighted = weighted
        self.fresh = False
        self.passed = True

    def state_dict(self) -> dict[str, Any]:
        """Where the window in hand stands: numbers only, the same on all ranks."""
        return {
            "count": self._count,
            "step": self._step,
            "synced": self.synced,
            "fresh": self.fresh,
            "weighted": self.weighted,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the window that `state_dict` was taken in; how long windows are is left as it is."""
        self._count = int(state_dict["count"])
        self._step = int(state_dict.get("step", self._count))
        self.synced = bool(state_dict["synced"])
        self.fresh = bool(state_dict["fresh"])
        self.weighted = bool(state_dict["weighted"])

    def mark(self) -> tuple[int, int, bool, bool]:
        """Where the count stands, for `undo`."""
        self.passed = False
        return self._step, self._count, self.synced, self.fresh

    def undo(self, mark: tuple[int, int, bool, bool]) -> None:
        """Go back to `mark`, unless there was a backward pass since: what it added cannot be taken back."""
        if not self.passed:
            self._step, self._count, self.synced, self.fresh = mark


class MicroBatch(AbstractContextManager[None]):
    """One micro-batch: models keep their gradients to themselves unless it completes a window.

    A micro-batch that fails before its backward pass is not counted, so that the next takes its place.

    Args:
        accumulation: Counts it.
        last: Whether the epoch ends with it.
        no_sync: The context in which a model's backward passes stay local.
        models: The models at work.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        *,
        last: bool,
        no_sync: Callable[[Any], AbstractContextManager[None]],
        models: Iterable[Any],
    ) -> None:
        self._accumulation = accumulation
        self._last = last
        self._no_sync = no_sync
        self._models = models
        self._local = ExitStack()

    @override
    def __enter__(self) -> None:
        self._before = self._accumulation.mark()
        if self._accumulation.advance(last=self._last) or self._accumulation.plugin.sync_each_batch:
            return
        for model in self._models:
            self._local.enter_context(self._no_sync(model))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._local.close()
        if kind is not None:
            self._accumulation.undo(self._before)
