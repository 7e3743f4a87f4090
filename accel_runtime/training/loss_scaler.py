"""Loss scaling for fp16."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from accel_runtime.parallel.strategy import UnscaleGradients, unscale_any

__all__ = ["LossScaler"]


class LossScaler(torch.amp.GradScaler):
    """GradScaler of torch, shared by optimizers that step separately.

    The scale may change only when all optimizers of an iteration have stepped. These are known once every optimizer
    has, or at the next backward pass.
    """

    def __init__(
        self, device: str, unscale_gradients: UnscaleGradients = unscale_any, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._unscale_gradients = unscale_gradients
        self._optimizers: set[int] = set()
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the scale only after steps of this optimizer too."""
        self._optimizers.add(id(optimizer))

    def begin_backward(self) -> None:
        """Update the scale if optimizers have stepped since the last backward pass."""
        if self._stepped:
            self.update()

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, unless that is done already."""
        self._check_scaled()
        if id(optimizer) not in self._unscaled | self._stepped:
            self.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step_unless_overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless the gradients have overflowed; return whether it did."""
        self._check_scaled()
        self.step(optimizer)
        found_infs = self._found_inf_per_device(optimizer) if self.is_enabled() else {}
        overflowed = any(bool(count) for count in found_infs.values())
        self._stepped.add(id(optimizer))
        if self._stepped >= self._optimizers:
            self.update()
        return not overflowed

    def _check_scaled(self) -> None:
        if self.is_enabled() and self._scale is None:
            raise RuntimeError(
                "The gradients cannot be unscaled: no loss was scaled for fp16. Call accelerator.backward(loss) in place of "
                "loss.backward()."
            )

    @override
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        def unscale(unscaled_optimizer: Any) -> dict[torch.device, torch.Tensor]:
            return super(LossScaler, self)._unscale_grads_(
                unscaled_optimizer, inv_scale, found_inf, allow_fp16
            )

        if any(
            p.grad is not None and p.grad.is_cpu for group in optimizer.param_groups for p in group["params"]
        ):
            # GradScaler copies both to the CPU asynchronously, so offloaded gradients could be unscaled before the copy ends.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()

        return self._unscale_gradients(optimizer, unscale)

    @override
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self._unscaled.clear()
        self._stepped.clear()
