"""Prepared scheduler: advances with the samples that all processes have seen."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR
from typing_extensions import override

from accel_runtime.foundation.prepared_object import PreparedObject
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.observe.call_sites import call_site
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.optimizer import PreparedOptimizer, can_skip_steps

__all__ = ["AcceleratedScheduler", "PreparedScheduler"]

_MAX_METRICS = 8
"""The most metrics that a warning lists."""
_LOG = MultiProcessAdapter(logging.getLogger("accel_runtime.scheduler"))


class PreparedScheduler(LRScheduler, PreparedObject):  # type: ignore[misc] # of Any
    """Scheduler of torch that steps with its optimizer.

    A schedule written for one process counts batches of one process. `strides` of them are consumed in each step of the
    run, so the scheduler advances that often: the learning rate follows the samples seen.

    Args:
        scheduler: The script's scheduler; all other attributes are read from it.
        optimizers: Its optimizers; while they skip or wait, the scheduler waits.
        accumulation: Counts accumulation cycles.
        strides: Steps of the schedule per step of the run; 1 if the batch size is the global one.
        with_optimizer: If true, it steps with the optimizer; False leaves stepping to the script.
        gather: Returns the objects of all ranks, for the metrics of `ReduceLROnPlateau`; None on one process.
    """

    def __init__(  # noqa: PLR0913 - the parts of a step
        self,
        scheduler: LRScheduler,
        optimizers: list[PreparedOptimizer],
        accumulation: Accumulation,
        *,
        strides: int,
        with_optimizer: bool,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        # LRScheduler.__init__ is not called on purpose: it would take a first step.
        self.scheduler = scheduler
        """Scheduler of the script."""
        self._optimizers = optimizers
        self._accumulation = accumulation
        # ReduceLROnPlateau steps once per metric, not once per batch.
        self._strides = 1 if isinstance(scheduler, ReduceLROnPlateau) else strides
        self._end = _find_end(scheduler)
        self._with_optimizer = with_optimizer
        self._advances_always = (
            with_optimizer
            and self._end is None
            and not isinstance(scheduler, ReduceLROnPlateau)
            and not any(map(can_skip_steps, optimizers))
        )
        """True if a call at the end of a cycle advances by all strides, as nearly all do."""
        self._gather = gather if isinstance(scheduler, ReduceLROnPlateau) else None
        self._has_warned_of_metrics = False
        self.calls = 0
        """Number of calls of `step` so far."""
        self._cycles = 0
        """Number of completed cycles at the last call of `step`."""
        self._optimizer_steps: int | None = None
        """Number of steps of the first optimizer at the last call of `step`."""
        self._interval = 1
        """Optimizer steps between two calls of `step`, if there were several."""

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule by one step of the run; arguments are passed to the script's scheduler.

        Within an accumulation cycle, calls that follow each other do nothing, and a call after a completed cycle advances: it
        belongs to an epoch that ended within the next cycle. Outside of `accumulate`, each metric of `ReduceLROnPlateau`
        counts. A metric is averaged if it differs between ranks, so that all have one learning rate. The call is collective
        then.
        """
        self.calls += 1
        if not self._with_optimizer:
            self._step_by_script(args, kwargs)
        elif args or kwargs or not (self._advances_always and self._accumulation.synced):
            self._step_with_optimizer(args, kwargs)
        else:
            self._cycles = self._accumulation.num_cycles
            if self._strides > 1:
                self._warn_interval()
            for _ in range(self._strides):
                self.scheduler.step()

    def _step_by_script(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the script's scheduler."""
        args, kwargs = self._average_metric(args, kwargs)
        self.scheduler.step(*args, **kwargs)

    def _step_with_optimizer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Advance, unless the optimizer waits or has skipped its step."""
        scheduler = self.scheduler
        is_metric = isinstance(scheduler, ReduceLROnPlateau)
        if not self._is_due(is_metric=is_metric):
            if self._accumulation.plugin.adjust_scheduler and hasattr(scheduler, "_step_count"):
                scheduler._step_count += 1  # noqa: SLF001 - torch counts the calls in it
            return
        has_position = bool(args or kwargs)
        if self._strides > 1 and not has_position:
            self._warn_interval()
        for optimizer in self._optimizers:
            if optimizer.step_was_skipped and not is_metric:
                return
        if has_position:
            # A position or metric, which counts once. torch would multiply by some factors again.
            self._step_by_script(args, kwargs)
            return
        for _ in range(self._strides if self._end is None else self._limit_strides(self._end)):
            scheduler.step()

    def _is_due(self, *, is_metric: bool) -> bool:
        """Return whether the learning rate may change in this call."""
        accumulation = self._accumulation
        before, self._cycles = self._cycles, accumulation.num_cycles
        return accumulation.synced or self._cycles != before or (is_metric and not accumulation.num_open)

    def _average_metric(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace a metric that differs between ranks by their mean, so that all ranks choose the same learning rate."""
        if self._gather is None or not (args or "metrics" in kwargs):
            return args, kwargs
        own = float(args[0] if args else kwargs["metrics"])
        metrics: list[float] = self._gather(own)
        if all(metric == own or (math.isnan(metric) and math.isnan(own)) for metric in metrics):
            return args, kwargs
        if not self._has_warned_of_metrics:
            self._has_warned_of_metrics = True
            _LOG.warning(
                "ReduceLROnPlateau.step() got different metrics on the ranks at %s: %s. Their mean is used on all. Pass a metric "
                "of the whole dataset, such as one of gather_for_metrics() or reduce(), to make it exact.",
                call_site(),
                ", ".join(f"{metric:g}" for metric in metrics[:_MAX_METRICS])
                + ", ..." * (len(metrics) > _MAX_METRICS),
            )
        mean = math.fsum(metrics) / len(metrics)
        return ((mean, *args[1:]), kwargs) if args else (args, kwargs | {"metrics": mean})

    def _warn_interval(self) -> None:
        """Warn once if several optimizer steps lie between two calls: the schedule may count epochs instead of batches."""
        steps = self._optimizers[0].steps if self._optimizers else 0
        before, self._optimizer_steps = self._optimizer_steps, steps
        if before is None or steps <= before + 1 or self._interval > 1:
            return
        self._interval = steps - before
        _LOG.warning(
            "%s advances too fast if its steps are epochs: step() was called at %s, %d optimizer steps after the call before, "
            "and advances it by %d, one for each process, as is right for a schedule of batches. For a schedule of epochs leave "
            "the scheduler out of prepare(), or pass Accelerator(step_scheduler_with_optimizer=False).",
            type(self.scheduler).__name__,
            call_site(),
            self._interval,
            self._strides,
        )

    @property
    def advances(self) -> str:
        """Return how far a call of `step()` advances, as text."""
        if not self._with_optimizer:
            return "one step a call: it is left to the script"
        every = f", once in {self._interval} optimizer steps" if self._interval > 1 else ""
        return f"{self._strides} step(s) of the schedule a call of step(){every}"

    def _limit_strides(self, scheduler: Any) -> int:
        # OneCycleLR raises past its end, which several strides may reach in the middle of a step.
        rest: int = scheduler.total_steps - 1 - scheduler.last_epoch
        return max(min(self._strides, rest), 0)

    @override
    def get_last_lr(self) -> list[Any]:
        """Return the current learning rates."""
        return self.scheduler.get_last_lr()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state, loadable without accel."""
        return self.scheduler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler."""
        self._optimizer_steps = None
        self.scheduler.load_state_dict(state_dict)

    @override
    def get_lr(self) -> Any:
        """Return the learning rates that the wrapped scheduler computes."""
        return self.scheduler.get_lr()

    def __getstate__(self) -> dict[str, Any]:
        # The connection to other ranks belongs to this process.
        return vars(self) | {"_gather": None}

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _find_end(scheduler: Any) -> Any:
    """Return the scheduler with a fixed number of steps that ends a schedule first; None without an end."""
    if hasattr(scheduler, "total_steps"):
        return scheduler
    parts = getattr(scheduler, "_schedulers", ())
    if isinstance(scheduler, SequentialLR):
        # The last part counts from 0 at its milestone.
        parts = parts[-1:]
    ends = [end for part in parts if (end := _find_end(part)) is not None]
    return min(ends, key=lambda end: end.total_steps, default=None)


AcceleratedScheduler = PreparedScheduler
"""Name in Accelerate, which scripts import for `isinstance`."""
