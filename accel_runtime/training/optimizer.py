"""Prepared optimizer: steps at the end of an accumulation cycle, through the loss scaler if there is one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.foundation.prepared_object import PreparedObject
from accel_runtime.foundation.torch_internals import version_of
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.observe.call_sites import call_site
from accel_runtime.observe.heartbeat import heartbeat
from accel_runtime.observe.progress import Progress
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.loss_scaler import LossScaler

__all__ = ["AcceleratedOptimizer", "PreparedOptimizer", "can_skip_steps"]

_LOG = MultiProcessAdapter(logging.getLogger("accel_runtime.optimizer"))


class PreparedOptimizer(torch.optim.Optimizer, PreparedObject):  # type: ignore[misc] # of Any
    """Optimizer of torch whose `step` and `zero_grad` act only at the end of an accumulation cycle.

    Args:
        optimizer: The script's optimizer; all other attributes are read from it.
        accumulation: Counts accumulation cycles.
        scaler: The loss scaler, for formats that need one.
        strategy: Steps the optimizer and clears its gradients; None steps it directly.
        check: Called before the first step; may raise, and returns a context of that step.
        gather: Returns the objects of all ranks, for the losses of LBFGS; None on one process.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a step
        self,
        optimizer: torch.optim.Optimizer,
        accumulation: Accumulation,
        scaler: LossScaler | None,
        strategy: Strategy | None = None,
        check: Callable[[], AbstractContextManager[Any]] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        # Optimizer.__init__ is not called on purpose: groups and state are those of the wrapped optimizer.
        self.optimizer = optimizer
        """Optimizer of the script."""
        self.step_was_skipped = False
        """True if the last `step` was skipped because fp16 gradients had overflowed."""
        self.steps = 0
        """Number of accumulation cycles that ended, skipped steps included."""
        self._accumulation = accumulation
        self._scaler = scaler
        self._strategy = strategy
        self._stepped = None if strategy is None else strategy.backend.runtime.build_step_hook()
        self._strategy_skips = strategy is not None and strategy.scales_losses
        self._check = check
        self._gather = gather if isinstance(optimizer, torch.optim.LBFGS) else None
        self._in_closure = False
        self.is_stepping = False
        """True while the strategy steps the optimizer, which an engine does for each of its groups."""
        self._last_step = -1
        """Number of completed cycles at the newest step."""
        self._has_warned_of_clearing = False
        self._used_backward = 0
        self._progress = _find_progress()
        if scaler is not None:
            scaler.add_optimizer(optimizer)

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups, as the strategy trains them."""
        return [parameter for group in self.parameter_groups for parameter in group]

    @property
    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each group, as the strategy trains them."""
        if self._strategy is None:
            return [group["params"] for group in self.optimizer.param_groups]
        return self._strategy.list_parameter_groups(self.optimizer)

    @property
    @override
    def state(self) -> Any:  # type: ignore[override]
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    @override
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step if the accumulation cycle is complete.

        Before that, a closure adds the gradients of its micro-batch. The loss that a closure returns to LBFGS is averaged
        over the ranks, so that all choose the same step length and number of iterations.

        Raises:
            ValueError: If there is a closure with fp16, as the scaler cannot run it; or with a cycle of several micro-batches,
                and the optimizer runs it more than once, or after it has changed the weights.
        """
        accumulation = self._accumulation
        if closure is not None:
            if self._scaler is not None:
                raise ValueError(
                    "optimizer.step(closure) is not supported with mixed_precision fp16. Use bf16."
                )
            if not (accumulation.synced and accumulation.is_first):
                return self._run_closure_in_cycle(closure)
        if not accumulation.synced:
            return None
        accumulation.end_cycle()
        if closure is None:
            return self._run_step()
        if self._gather is not None:
            closure = self._average_loss(closure, self._gather)
        with self._enter_closure():
            return self._run_step(closure)

    def _run_step(self, closure: Callable[[], Any] | None = None) -> float | None:
        """Count a step, and run it through the scaler or the strategy."""
        accumulation, strategy = self._accumulation, self._strategy
        if self._check is not None:
            observed = self._check()
            self._check = None
            if closure is None:  # which would run the model inside
                with observed:
                    return self._run_step()
        self._used_backward = accumulation.num_backward
        self._last_step = accumulation.num_cycles
        self.steps += 1
        if self._progress is not None:
            self._progress.count_step(self.optimizer)
        if self._scaler is not None:
            if strategy is not None:
                strategy.gradients.finish()
            self.step_was_skipped = not self._scaler.step_unless_overflowed(self.optimizer)
            return None
        if strategy is None:
            loss: float | None = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            return loss
        self.is_stepping = True
        try:
            loss = strategy.step(self.optimizer, closure)
        finally:
            self.is_stepping = False
        if self._strategy_skips:
            self.step_was_skipped = strategy.overflowed(self.optimizer)
        if self._stepped is not None:
            self._stepped()
        return loss

    def _run_closure_in_cycle(self, closure: Callable[[], Any]) -> float | None:
        """Run a closure that adds the gradients of one of several micro-batches, and step if it is the last one.

        The closures of earlier micro-batches cannot run again, as their variables have other values now. So the optimizer
        must run the last one once, with the weights of the others.
        """
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self._refuse_closure()
        gradients = {} if self._accumulation.is_first else self._read_versions("grad")

        def check_gradients() -> None:
            if gradients and self._read_versions("grad") != gradients:
                raise ValueError(
                    "optimizer.step(closure) failed: the closure changed the gradients of the earlier micro-batches of the "
                    "accumulation cycle. Clear gradients with optimizer.zero_grad() only, which keeps them within a cycle."
                )

        def run() -> float | None:
            check = self._accumulation.check_before_backward(check_gradients)
            with check, torch.enable_grad(), self._enter_closure():
                loss: float | None = closure()
            return loss

        if not self._accumulation.synced:
            return run()
        # The closure adds to the gradients of the cycle, so its backward pass is not the first of another one.
        weights = self._read_versions()
        runs = 0

        def run_once() -> float | None:
            nonlocal runs
            runs += 1
            if runs > 1 or self._read_versions() != weights:
                self._refuse_closure()
            return run()

        loss = self._run_step(run_once)
        if not runs:
            self._refuse_closure()
        return loss

    def _refuse_closure(self) -> NoReturn:
        raise ValueError(
            f"optimizer.step(closure) failed: {type(self.optimizer).__name__} does not run its closure exactly once before it "
            f"changes the weights, so the gradients of a cycle of {self._accumulation.steps} micro-batches cannot be added up. "
            "Use gradient_accumulation_steps=1, and run the backward passes of all micro-batches inside the closure."
        )

    @contextmanager
    def _enter_closure(self) -> Iterator[None]:
        """Let `zero_grad` clear gradients in the first micro-batch of a cycle only."""
        before, self._in_closure = self._in_closure, True
        try:
            yield
        finally:
            self._in_closure = before

    def _read_versions(self, attribute: str | None = None) -> dict[Any, tuple[int, int]]:
        """Return the identity and version of the parameters, or of the tensors in one of their attributes."""
        tensors = {p: p if attribute is None else getattr(p, attribute) for p in self.parameters}
        return {p: (id(tensor), version_of(tensor)) for p, tensor in tensors.items() if tensor is not None}

    @staticmethod
    def _average_loss(closure: Callable[[], Any], gather: Callable[[Any], list[Any]]) -> Callable[[], Any]:
        """Return a closure whose loss is the mean over the ranks."""

        def average() -> Any:
            loss = closure()
            losses: list[float] = gather(loss.item() if isinstance(loss, torch.Tensor) else loss)
            mean = math.fsum(losses) / len(losses)
            return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

        return average

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients if the accumulation cycle is complete; in a closure, if it begins."""
        accumulation = self._accumulation
        if not (accumulation.is_first if self._in_closure else accumulation.synced):
            return
        if not (accumulation.is_first or accumulation.has_backward or self._has_warned_of_clearing):
            self._warn_of_clearing()
        if not accumulation.is_new_cycle:  # unless it has stepped before
            accumulation.end_cycle()
        self._used_backward = accumulation.num_backward
        if self._strategy is None:
            self.optimizer.zero_grad(set_to_none)
        else:
            self._strategy.zero_grad(self.optimizer, set_to_none=set_to_none)
        if self._scaler is not None:
            self._scaler.clear_gradients(self.optimizer)

    def _warn_of_clearing(self) -> None:
        """Warn once if the gradients of the earlier micro-batches of a cycle are cleared before its step."""
        if self._last_step == self._accumulation.num_cycles or not self._read_versions("grad"):
            return
        self._has_warned_of_clearing = True
        _LOG.warning(
            "optimizer.zero_grad() at %s discards the gradients of earlier micro-batches: it is called before the backward pass "
            "of the last micro-batch of an accumulation cycle, so the step uses this one only. Call it after optimizer.step().",
            call_site(),
        )

    @property
    def has_used_gradients(self) -> bool:
        """Return whether there was a step, or gradients were cleared, since the newest backward pass of any model."""
        return self._used_backward == self._accumulation.num_backward

    def restore_use(self, *, used: bool) -> None:
        """Restore `has_used_gradients` from a checkpoint."""
        self._used_backward = self._accumulation.num_backward if used else -1

    def train(self) -> None:
        """Switch an optimizer that has modes, such as a schedule-free one, to training."""
        self._set_mode("train")

    def eval(self) -> None:
        """Switch an optimizer that has modes to evaluation."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        if callable(method := getattr(self.optimizer, mode, None)):
            method()

    def unscale(self) -> None:
        """Unscale the gradients, once per step, so that they can be clipped or read."""
        if self._scaler is not None and self._accumulation.synced:
            self._scaler.unscale_once(self.optimizer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, loadable without accel; collective if it is sharded."""
        if self._strategy is None:
            return self.optimizer.state_dict()
        return self._strategy.open_state((), [self.optimizer]).optimizers[0].state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer; collective if it is sharded."""
        if self._strategy is None:
            self.optimizer.load_state_dict(state_dict)
            return
        view = self._strategy.open_state((), [self.optimizer])
        view.optimizers[0].load_state_dict(state_dict)
        view.write_back()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @override
    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    @override
    def __getstate__(self) -> dict[str, Any]:
        # A scheduler sets its own `step` on the instance, which cannot be pickled; the others belong to this process.
        transient = {"step", "_progress", "_strategy", "_stepped", "_check", "_gather"}
        return {name: value for name, value in vars(self).items() if name not in transient}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        connections = dict.fromkeys(("_strategy", "_stepped", "_check", "_gather"))
        self.__dict__.update(state, _progress=_find_progress(), **connections)


def can_skip_steps(optimizer: PreparedOptimizer) -> bool:
    """Return whether a step of the optimizer may be skipped, since losses are scaled."""
    return optimizer._scaler is not None or optimizer._strategy_skips  # noqa: SLF001 - its public names are those of scripts


def _find_progress() -> Progress | None:
    """Return the progress of this process if prepared optimizers count its steps."""
    progress = heartbeat()
    return None if progress is None or progress.counts_any_step else progress


AcceleratedOptimizer = PreparedOptimizer
"""Name in Accelerate, which scripts import for `isinstance`."""
