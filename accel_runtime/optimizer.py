"""Prepared optimizer: steps at the end of an accumulation cycle, through the loss scaler if there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from accel_runtime.heartbeat import heartbeat
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.forward import LossScaler

__all__ = ["AcceleratedOptimizer", "PreparedOptimizer"]


class PreparedOptimizer(torch.optim.Optimizer):
    """Optimizer of torch whose `step` and `zero_grad` act only at the end of an accumulation cycle.

    Args:
        optimizer: The script's optimizer; all other attributes are read from it.
        accumulation: Counts accumulation cycles.
        scaler: The loss scaler, for formats that need one.
        stepped: Called after each step, on devices that need it.
        check: Called before the first, second, fourth, eighth, ... step, until it returns True.
        gather: Returns the objects of all ranks, for the losses of LBFGS; None on one process.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a step
        self,
        optimizer: torch.optim.Optimizer,
        accumulation: Accumulation,
        scaler: LossScaler | None,
        stepped: Callable[[], None] | None = None,
        check: Callable[[], bool] | None = None,
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
        self._stepped = stepped
        self._check = check
        self._gather = gather if isinstance(optimizer, torch.optim.LBFGS) else None
        self._calls = 0
        self._used_backward = 0
        self._beat = heartbeat()
        if scaler is not None:
            scaler.add_optimizer(optimizer)

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

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

        The loss that a closure returns to LBFGS is averaged over the ranks, so that all choose the same step length and
        number of iterations.

        Raises:
            ValueError: A closure with fp16, as the scaler cannot run it.
        """
        accumulation = self._accumulation
        if not accumulation.synced:
            return None
        if self._check is not None:
            self._calls += 1
            if not self._calls & (self._calls - 1) and self._check():
                self._check = None
        accumulation.is_new_cycle = True
        self._used_backward = accumulation.num_backward
        self.steps += 1
        if self._beat is not None:
            self._beat.step()
        if self._scaler is None:
            if closure is not None and self._gather is not None:
                closure = self._average_loss(closure, self._gather)
            loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            if self._stepped is not None:
                self._stepped()
            return loss
        if closure is not None:
            raise ValueError("optimizer.step(closure) is not supported with mixed_precision fp16. Use bf16.")
        self.step_was_skipped = not self._scaler.step_unless_overflowed(self.optimizer)
        return None

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
        """Clear the gradients if the accumulation cycle is complete."""
        accumulation = self._accumulation
        if accumulation.synced:
            accumulation.is_new_cycle = True
            self._used_backward = accumulation.num_backward
            self.optimizer.zero_grad(set_to_none)

    @property
    def has_used_gradients(self) -> bool:
        """Return whether there was a step, or gradients were cleared, since the newest backward pass of any model."""
        return self._used_backward == self._accumulation.num_backward

    @has_used_gradients.setter
    def has_used_gradients(self, used: bool) -> None:
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

    def place(self) -> None:
        """Move the state to the devices of the parameters."""
        if self.optimizer.state:
            # torch keeps the tensors on the CPU that belong there.
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def unscale(self) -> None:
        """Unscale the gradients, once per step, so that they can be clipped or read."""
        if self._scaler is not None and self._accumulation.synced:
            self._scaler.unscale_once(self.optimizer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, loadable without accel."""
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

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
        transient = {"step", "_beat", "_stepped", "_check", "_gather"}
        return {name: value for name, value in vars(self).items() if name not in transient}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _beat=heartbeat(), _stepped=None, _check=None, _gather=None)


AcceleratedOptimizer = PreparedOptimizer
"""Name in Accelerate, which scripts import for `isinstance`."""
