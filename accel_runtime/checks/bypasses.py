"""Check that optimizer steps go through the prepared objects and `Accelerator.backward`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.foundation.torch_internals import TORCH
from accel_runtime.observe.call_sites import call_site
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.precision import Precision
from accel_runtime.training.scheduler import PreparedScheduler

__all__ = ["BypassCheck"]

_LOG = logging.getLogger("accel_runtime.checks.bypasses")
_NUM_ALIKE = 2
"""The number of steps in a row that show a mistake; the end of an epoch may look like one of them."""


class _Seen(NamedTuple):
    """What the newest step of an optimizer has shown."""

    cycles: int = 0
    """Cycles of the optimizer so far."""
    passes: int = 0
    """Backward passes so far."""
    singles: int = 0
    """Steps in a row that followed one backward pass each."""
    unrelated: int = 0
    """Steps in a row without a gradient, of parameters in no prepared model."""


class BypassCheck:
    """Warn once for each kind of call that bypasses accel, if that changes the training.

    Every line that a script changes for accel can be forgotten: `backward`, an object in `prepare`, or the use of the
    object that it returned. Without accumulation and loss scaling most of it has no effect, and is not reported.

    Args:
        accumulation: Counts accumulation cycles.
        precision: Autocast and loss scaling of the run.
        models: The prepared models; updated by the caller, as the following.
        schedulers: The prepared schedulers.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        precision: Precision,
        models: Sequence[nn.Module],
        schedulers: Sequence[PreparedScheduler],
    ) -> None:
        self._accumulation, self._precision = accumulation, precision
        self._models, self._schedulers = models, schedulers
        self._steps = 0
        self._uses_autocast = False
        self._seen: WeakKeyDictionary[PreparedOptimizer, _Seen] = WeakKeyDictionary()
        """What the newest step of each prepared optimizer has shown."""
        self._counts: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
        """Steps of the schedulers that are not prepared, at the newest step of their optimizer."""
        self._searched: WeakSet[PreparedOptimizer] = WeakSet()
        """The prepared optimizers whose schedulers were searched for."""
        self._positions: WeakKeyDictionary[PreparedScheduler, tuple[int, int]] = WeakKeyDictionary()
        """Positions and calls of the prepared schedulers, at the newest step of an optimizer."""
        self._warned: set[str] = set()

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps since `begin`."""
        return self._steps

    def begin(self) -> None:
        """Count steps from 0."""
        self._steps = 0

    def forget_steps(self) -> None:
        """Compare the next step with none before: those since the newest checked step, and counts that were loaded, are unknown."""
        self._seen.clear()
        self._positions.clear()
        for scheduler in list(self._counts):
            self._counts[scheduler] = scheduler.last_epoch

    def record_autocast(self) -> None:
        """Record that the script itself uses the autocast context."""
        self._uses_autocast = True

    def check_step(
        self, optimizer: torch.optim.Optimizer, prepared: PreparedOptimizer | None, *, has_closure: bool
    ) -> None:
        """Check an optimizer before its step; `prepared` is the one that `prepare` returned for it."""
        kind = type(optimizer).__name__
        if (
            prepared is not None
            and prepared.is_stepping
            and self._seen.get(prepared, _Seen()).cycles == prepared.steps
        ):
            return  # another group of the same step
        self._steps += 1
        if not (self._models or self._uses_autocast or self._precision.format.dtype is None):
            self._warn(
                "model",
                f"mixed precision has no effect on the step of {kind}",
                "no model is prepared",
                "Give the model to prepare(), or use accelerator.autocast()",
            )
        if prepared is None:
            if self._trains_prepared_model(p for group in optimizer.param_groups for p in group["params"]):
                self._warn_of_optimizer(kind, "it is not prepared", "Give it to prepare()")
            return
        before, passes = self._seen.get(prepared, _Seen()), self._accumulation.num_backward
        self._seen[prepared] = seen = _Seen(
            prepared.steps,
            passes,
            before.singles + 1 if passes == before.passes + 1 else 0,
            before.unrelated + 1 if passes and not has_closure and self._is_unrelated(prepared) else 0,
        )
        if prepared.steps == before.cycles:
            self._warn_of_optimizer(
                kind, "its own step() is called", "Call that of the optimizer that prepare() returned"
            )
        elif passes == before.passes and not has_closure and _has_gradients(optimizer):
            self._warn_of_backward(kind)
        elif seen.singles == _NUM_ALIKE and not self._accumulation.is_controlled:
            self._warn_of_missing_cycles(kind)
        elif seen.unrelated == _NUM_ALIKE and self._models:
            self._warn(
                "unrelated",
                f"the steps of {kind} change nothing",
                "its parameters have no gradients and belong to no prepared model, so they are those of a copy, or of a model that "
                "was replaced after the optimizer was created",
                "Create the optimizer from the parameters of the model that is trained, and give both to prepare()",
            )
        self._check_schedulers(prepared)

    def _trains_prepared_model(self, parameters: Iterable[torch.Tensor]) -> bool:
        trained = {parameter for model in self._models for parameter in model.parameters()}
        return any(parameter in trained for parameter in parameters)

    def _is_unrelated(self, prepared: PreparedOptimizer) -> bool:
        """Return whether no parameter of a prepared optimizer has a gradient, or belongs to a prepared model."""
        parameters = prepared.parameters
        # Sharded parameters are replaced while they are gathered; the strategy that shards refuses others itself.
        return not (
            _has_gradients(prepared) or has_dtensor(parameters) or self._trains_prepared_model(parameters)
        )

    def _warn_of_optimizer(self, kind: str, how: str, cure: str) -> None:
        effects = []
        if self._accumulation.has_several:
            effects.append(f"in every micro-batch, not once in {self._accumulation.length}")
        if self._precision.scaler is not None:
            effects.append("with gradients of the scaled loss")
        if effects:
            self._warn("optimizer", f"{kind} steps {' and '.join(effects)}", how, cure)

    def _warn_of_backward(self, kind: str) -> None:
        steps, effects = self._accumulation.steps, []
        if self._accumulation.global_batch_size is not None:
            effects.append("not the mean over the samples of the global batch")
        if steps > 1:
            effects.append(f"{steps} times too large, unless the script divides the loss itself")
        if self._precision.scaler is not None:
            effects.append("unscaled as those of a scaled loss, which this one is not")
        if effects:
            self._warn(
                "backward",
                f"the gradients in the step of {kind} are {', and '.join(effects)}",
                "accelerator.backward() did not compute them",
                "Call accelerator.backward(loss) in place of loss.backward()",
            )

    def _warn_of_missing_cycles(self, kind: str) -> None:
        """Warn if a script requests accumulation, and steps after each backward pass without a word about cycles."""
        if (steps := self._accumulation.steps) > 1:
            part = "" if self._accumulation.weighted else f", with 1/{steps} of its gradients"
            self._warn(
                "cycles",
                f"{kind} steps in every micro-batch, not once in {steps}{part}",
                f"gradient_accumulation_steps is {steps}, but no accumulate() marks the micro-batches",
                "Run each training step inside `with accelerator.accumulate(model):`, or remove gradient_accumulation_steps",
            )

    def _check_schedulers(self, prepared: PreparedOptimizer) -> None:
        """Warn if a scheduler that is not prepared has counted the micro-batches between two steps of its optimizer."""
        if not self._accumulation.has_several or "scheduler" in self._warned:
            return
        least = max(2, self._accumulation.steps)
        for each in self._schedulers:
            position, calls = self._positions.get(each, (each.scheduler.last_epoch, each.calls))
            self._positions[each] = each.scheduler.last_epoch, each.calls
            if each.calls == calls and each.scheduler.last_epoch - position >= least:
                self._warn_of_scheduler(each.scheduler, "its own step() is called")
        known = [each.scheduler for each in self._schedulers]
        if prepared not in self._searched:
            # Once: with millions of objects it takes seconds.
            self._searched.add(prepared)
            for scheduler in _find_schedulers(prepared):
                if not any(scheduler is each for each in known):
                    self._counts[scheduler] = scheduler.last_epoch
            return
        for scheduler, count in list(self._counts.items()):
            self._counts[scheduler] = scheduler.last_epoch
            if scheduler.last_epoch - count >= least:
                self._warn_of_scheduler(scheduler, "it is not prepared")

    def _warn_of_scheduler(self, scheduler: LRScheduler, reason: str) -> None:
        self._warn(
            "scheduler",
            f"{type(scheduler).__name__} advances in every micro-batch, not once in {self._accumulation.length}",
            reason,
            "Give it to prepare(), and step the scheduler that prepare() returned",
        )

    def _warn(self, kind: str, effect: str, reason: str, cure: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _LOG.warning("%s, at %s: %s. %s.", effect[0].upper() + effect[1:], call_site(TORCH), reason, cure)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
    )


def _find_schedulers(prepared: PreparedOptimizer) -> Iterator[LRScheduler]:
    """Yield the schedulers of an optimizer, which keeps no reference to them."""
    optimizers = (prepared, prepared.optimizer)
    # torch marks `step` when a scheduler is made.
    if any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in optimizers):
        for item in gc.get_objects():
            if issubclass(type(item), LRScheduler) and any(
                vars(item).get("optimizer") is optimizer for optimizer in optimizers
            ):
                yield item
