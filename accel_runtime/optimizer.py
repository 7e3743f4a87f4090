"""The prepared optimizer: steps when a window is complete, and through the loss scaler where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from accel_runtime.accumulation import Accumulation
from accel_runtime.heartbeat import heartbeat
from accel_runtime.precision import LossScaler

__all__ = ["AcceleratedOptimizer", "PreparedOptimizer"]


class PreparedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose `step` and `zero_grad` wait for the end of the accumulation window.

    Args:
        optimizer: The script's optimizer; everything not named here is its own.
        accumulation: Says when a window is complete.
        scaler: The loss scaler, for formats that need one.
        stepped: Called after each step, where the device asks for it.
        check: Called before the first, second, fourth, eighth, ... step, until it returns True.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accumulation: Accumulation,
        scaler: LossScaler | None,
        stepped: Callable[[], None] | None = None,
        check: Callable[[], bool] | None = None,
    ) -> None:
        # Optimizer.__init__ is left out on purpose: groups and state stay those of the wrapped optimizer.
        self.optimizer = optimizer
        """The script's own optimizer."""
        self.step_was_skipped = False
        """Whether the last `step` was left out, because fp16 gradients had overflowed."""
        self.steps = 0
        """How many windows it has ended, those of which `step` was left out among them."""
        self._accumulation = accumulation
        self._scaler = scaler
        self._stepped = stepped
        self._check = check
        self._calls = 0
        self._beat = heartbeat()
        if scaler is not None:
            scaler.join(optimizer)

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    @override
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    @override
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step if the window is complete.

        Raises:
            ValueError: A closure together with fp16: the scaler cannot run it.
        """
        accumulation = self._accumulation
        if not accumulation.synced:
            return None
        if self._check is not None:
            self._calls += 1
            if not self._calls & (self._calls - 1) and self._check():
                self._check = None
        accumulation.fresh = True
        self.steps += 1
        if self._beat is not None:
            self._beat.step()
        if self._scaler is None:
            loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            if self._stepped is not None:
                self._stepped()
            return loss
        if closure is not None:
            raise ValueError("optimizer.step(closure) cannot be combined with mixed_precision fp16; use bf16")
        self.step_was_skipped = not self._scaler.attempt(self.optimizer)
        return None

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients if the window is complete."""
        accumulation = self._accumulation
        if accumulation.synced:
            accumulation.fresh = True
            self.optimizer.zero_grad(set_to_none)

    def train(self) -> None:
        """Tell an optimizer that has such a mode, as those without a schedule do, that training goes on."""
        self._tell("train")

    def eval(self) -> None:
        """Tell an optimizer that has such a mode that evaluation begins."""
        self._tell("eval")

    def _tell(self, mode: str) -> None:
        if callable(method := getattr(self.optimizer, mode, None)):
            method()

    def place(self) -> None:
        """Bring the state to where the parameters are now."""
        if self.optimizer.state:
            # torch knows which of a state's tensors stay on the CPU.
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def unscale(self) -> None:
        """Divide the scale out of the gradients, once a step, so that they can be clipped or read."""
        if self._scaler is not None and self._accumulation.synced:
            self._scaler.unscale_once(self.optimizer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, loadable without accel."""
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add to the wrapped optimizer."""
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
        # A scheduler built on this optimizer put its own `step` on the instance, which cannot be pickled.
        # The heartbeat is this process's own, and so is the device.
        own = {"step", "_beat", "_stepped", "_check"}
        return {name: value for name, value in vars(self).items() if name not in own}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _beat=heartbeat(), _stepped=None, _check=None)


AcceleratedOptimizer = PreparedOptimizer
"""Its name in Accelerate, which scripts import to ask what an object is."""
