"""The checks of a run: of the first steps, of those after `prepare` and after a checkpoint is loaded, and two of all steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from accel_runtime.checks.averaging import AveragingCheck
from accel_runtime.checks.bypasses import BypassCheck
from accel_runtime.checks.inputs import FirstInput
from accel_runtime.checks.local_products import observe_products
from accel_runtime.checks.losses import LossCheck
from accel_runtime.checks.replicas import ReplicaCheck
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.precision import Precision
from accel_runtime.training.scheduler import PreparedScheduler

__all__ = ["NUM_STEPS", "Checks"]

NUM_STEPS = 100
"""The number of steps that are checked: backward passes, or optimizer steps if there are more of them."""
_MIN_OPTIMIZER_STEPS = 8
"""The least number of optimizer steps that are checked: a long accumulation cycle has many backward passes."""
_MAX_PASSES = 1000
"""The number of backward passes after which the checks end with fewer optimizer steps: those of compiled functions call no hook."""

_WATCHING: WeakSet[Checks] = WeakSet()
"""The runs that check the optimizer steps of this process."""
_HANDLES: list[RemovableHandle] = []
"""The handle of torch's hook of all optimizer steps, while it is registered."""


class Checks:
    """Checks of how the script of a run trains.

    The first process checks 100 steps after each `prepare` and after a checkpoint is loaded. Then all hooks are removed, and a step
    calls no function of this package. Two checks go on, at few passes: a loss may become NaN at any time, and weights of replicas may
    begin to differ. For both, `TrainingSteps` compares the number of backward passes with `next_pass`, in less than 50 ns. Different
    weights are also the effect of a mistake with gradients that a script makes later: each step is checked again then.

    docs/design/checks.md has the reasons.

    Args:
        strategy: Combines the gradients of the ranks.
        accumulation: Counts backward passes and accumulation cycles.
        precision: Autocast and loss scaling of the run.
        models: The prepared models; updated by the caller, as the following.
        optimizers: The prepared optimizers.
        schedulers: The prepared schedulers.
        loops: The loops over prepared loaders.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a run that a script can bypass
        self,
        strategy: Strategy,
        accumulation: Accumulation,
        precision: Precision,
        models: Sequence[nn.Module],
        optimizers: Sequence[PreparedOptimizer],
        schedulers: Sequence[PreparedScheduler],
        loops: ActiveLoops,
    ) -> None:
        topology = strategy.backend.topology
        self._is_first = topology.rank == 0
        self._is_replicated = topology.world_size > 1 and not strategy.shards_models
        self._accumulation, self._models, self._optimizers = accumulation, models, optimizers
        self._averaging = AveragingCheck(strategy, accumulation, models)
        self._bypasses = BypassCheck(accumulation, precision, models, schedulers)
        self._inputs = FirstInput(strategy.backend, lambda: loops.have_begun)
        self._losses = LossCheck(accumulation, is_active=strategy.has_losses)
        self.replicas = ReplicaCheck(
            strategy, accumulation, self._averaging.named_parameters, optimizers, self.watch
        )
        """Compares the weights of replicas; a save sends its hashes too."""
        self.is_active = self._is_first
        """True while each step is checked: `begin_backward` and `record_autocast` are called."""
        self.next_pass = 0
        """The number of the backward pass after which `end_backward` is called, and after each until it is larger."""
        self._start = 0
        """The number of backward passes before the steps that are checked."""
        self._min_optimizer_steps = 0
        """0 before the first `prepare`."""
        self._ending: RemovableHandle | None = None
        """The handle of the hook that ends the checks in a backward pass."""

    def add_model(self, prepared: nn.Module, *, is_trained: bool) -> None:
        """Check a prepared model that is not in `models` yet."""
        if self._is_replicated:
            if isinstance(prepared, DistributedDataParallel) and not any(
                isinstance(model, DistributedDataParallel) for model in self._models
            ):
                self._inputs.watch(prepared)
            self._averaging.add(prepared, averages=is_trained)
            self.replicas.restart()

    def watch_prepared(self, *, has_new: bool) -> None:
        """Check the steps after a `prepare` with new objects, or after the first one; not after that of a loader alone."""
        if has_new or not self._min_optimizer_steps:
            self.watch()

    def watch(self) -> None:
        """Check each of the next 100 steps."""
        if not self._is_first:
            return
        if not self.is_active:
            self._bypasses.forget_steps()
        self._cancel_ending()
        self._bypasses.begin()
        self._averaging.start()
        self._min_optimizer_steps = _MIN_OPTIMIZER_STEPS
        self._start = self._accumulation.num_backward
        self.is_active, self.next_pass = True, 0
        _WATCHING.add(self)
        if not _HANDLES:
            _HANDLES.append(register_optimizer_step_pre_hook(_check_step))

    def restart(self) -> None:
        """Check the steps after a checkpoint is loaded as the first ones, and compare the weights of replicas again."""
        self._bypasses.forget_steps()
        if self._is_replicated:
            self.replicas.restart()
            self.next_pass = 0
        self.watch()

    def clear(self) -> None:
        """Check no step until `watch`, and forget all models: the steps that follow are of another run."""
        self._averaging.clear()
        self._stop()

    def allow_different_weights(self) -> None:
        """Compare no weights of replicas any more."""
        self.replicas.disable()

    def expect_averaging(self, prepared: nn.Module) -> None:
        """Record that the next backward pass averages the gradients of a model, whatever its forward pass was."""
        self._averaging.expect_averaging(prepared)

    def record_autocast(self) -> None:
        """Record that the script itself uses the autocast context."""
        self._bypasses.record_autocast()

    def begin_backward(self) -> None:
        """Record the gradients before a backward pass."""
        self._averaging.begin_backward()

    def end_backward(self, loss: torch.Tensor | None, weight: float | torch.Tensor | None) -> None:
        """Check a backward pass, which is recorded in the counts already; `loss` is None on a rank without it."""
        number = self._accumulation.num_backward
        if self.is_active:
            self._averaging.end_backward()
            if self._is_over(number - self._start, self._bypasses.num_steps):
                self._stop()
        if number >= self._losses.next_pass:
            self._losses.sample(loss, weight)
        if number >= self.replicas.next_pass:
            self.replicas.compare_stored()
            if self._is_first:  # parameters that the script has added or unfrozen late are in no comparison
                for optimizer in self._optimizers:
                    self._averaging.check_optimizer(optimizer.optimizer)
        self._set_next_pass()

    def _is_over(self, passes: int, steps: int) -> bool:
        if passes < NUM_STEPS:
            return steps >= NUM_STEPS
        return steps >= self._min_optimizer_steps or passes >= _MAX_PASSES

    def _set_next_pass(self) -> None:
        self.next_pass = 0 if self.is_active else min(self._losses.next_pass, self.replicas.next_pass)

    def observe_first_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context of the first step of a prepared optimizer."""
        return observe_products(optimizer, self._models) if self._is_first else nullcontext()

    def check_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Check an optimizer of the process before its step; with a closure, the backward pass follows."""
        prepared = next((each for each in self._optimizers if each.optimizer is optimizer), None)
        self._bypasses.check_step(optimizer, prepared, has_closure=has_closure)
        if prepared is not None and self._is_replicated:
            self._averaging.check_optimizer(optimizer)
        if self._bypasses.num_steps >= NUM_STEPS:
            _WATCHING.discard(self)  # also if this run makes no backward pass any more
            self._stop_in_backward(optimizer)

    def _stop_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """End the checks in the next backward pass, which may be the script's own.

        torch does not allow to remove a hook of steps in a step.
        """
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        parameter = next((p for p in parameters if p.requires_grad and p.grad is not None), None)
        if parameter is not None:

            def stop(_: torch.Tensor) -> None:
                self._stop()

            stop.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save does not warn of it
            self._ending = parameter.register_hook(stop)

    def _cancel_ending(self) -> None:
        if self._ending is not None:
            self._ending.remove()
            self._ending = None

    def _stop(self) -> None:
        self._cancel_ending()
        self.is_active = False
        self._averaging.stop()
        self._inputs.stop()
        _WATCHING.discard(self)
        if not _WATCHING and _HANDLES:
            _HANDLES.pop().remove()
        self._set_next_pass()


def _check_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for checks in list(_WATCHING):
            checks.check_step(optimizer, has_closure=len(args) > 1 or bool(kwargs))
