"""Loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from typing_extensions import override

from accel_runtime.parallel.strategy import UnscaleGradients, scale_any, unscale_any

__all__ = ["LossScaler"]


@dataclass
class _Gradients:
    """State of the gradients of one optimizer."""

    is_unscaled: bool = False
    """True if they do not contain the scale; a backward pass would add to them gradients that do."""
    is_examined: bool = False
    """True if they were searched for an overflow since the newest update of the scale."""
    is_finished: bool = False
    """True if they were applied or cleared since the newest update of the scale."""


class LossScaler(torch.amp.GradScaler):
    """GradScaler of torch, shared by optimizers that step separately, and may leave out steps.

    The state of torch's belongs to an iteration, which its `update` ends. Here it belongs to the gradients: it ends when
    they are cleared, and a backward pass adds to gradients of its own scale, even if they were unscaled, or the scale has
    changed since.

    The scale may change only when all optimizers of an iteration have stepped, or left out the step. These are known once
    every optimizer has, or at the next backward pass.

    Args:
        device: The device type.
        unscale_gradients: Unscales the gradients of an optimizer.
        options: Arguments of torch's GradScaler.
    """

    def __init__(
        self, device: str, unscale_gradients: UnscaleGradients = unscale_any, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._unscale_gradients = unscale_gradients
        self._gradients: WeakKeyDictionary[torch.optim.Optimizer, _Gradients] = WeakKeyDictionary()
        """The optimizers after whose steps the scale is updated, in the order of preparation."""

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the scale only after steps of this optimizer too."""
        self._gradients[optimizer] = _Gradients()

    def begin_backward(self) -> None:
        """Update the scale if it is due, and multiply unscaled gradients by it, since scaled ones are added to them."""
        # A rank without losses gets gradients of losses that other ranks have scaled.
        if self.is_enabled() and self._scale is None:
            self.scale(torch.ones((), device=self._device))
        if any(state.is_examined for state in self._gradients.values()):
            self._update_if_examined()
        unscaled = [optimizer for optimizer, state in self._gradients.items() if state.is_unscaled]
        for optimizer in unscaled:
            self._gradients[optimizer].is_unscaled = False
        if (parameters := list(_parameters_with_gradients(unscaled))) and self._scale is not None:
            scale_any(parameters, self._scale)

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, unless that is done already."""
        self._check_scaled()
        if not self._gradients[optimizer].is_unscaled:
            self.unscale_(optimizer)

    def step_unless_overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless the gradients have overflowed; return whether it did."""
        if not self.is_enabled():
            optimizer.step()
            return True
        self._check_scaled()
        state = self._gradients[optimizer]
        if next(_parameters_with_gradients([optimizer]), None) is None:
            optimizer.step()  # nothing to unscale, for which torch has an error
            self._finish(state)
            return True
        if state.is_finished:  # a second step with the same gradients
            self._update_if_examined()
        if state.is_unscaled and not state.is_examined:
            self.unscale_(optimizer)
        self.step(optimizer)
        overflowed = any(bool(count) for count in self._found_inf_per_device(optimizer).values())
        state.is_unscaled = state.is_examined = True
        self._finish(state)
        return not overflowed

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the gradients were cleared; if their step was left out, the scale is updated by them all the same."""
        state = self._gradients[optimizer]
        if any(other.is_examined for other in self._gradients.values()):
            self._finish(state)
        state.is_unscaled = state.is_examined  # torch's has its own state until the update

    def _finish(self, state: _Gradients) -> None:
        """Record that gradients were applied or cleared, and update the scale if those of all optimizers were."""
        state.is_finished = True
        if all(other.is_finished for other in self._gradients.values()):
            self._update_if_examined()

    def _update_if_examined(self) -> None:
        """Update the scale; without any gradient, for which torch has an error, it stays as it is."""
        if any(self._found_inf_per_device(optimizer) for optimizer in self._gradients):
            self.update()
        else:
            self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._per_optimizer_states.clear()
        for state in self._gradients.values():
            state.is_examined = state.is_finished = False

    def _check_scaled(self) -> None:
        if self.is_enabled() and self._scale is None:
            raise RuntimeError(
                "The gradients cannot be unscaled: no loss was scaled for fp16. Call accelerator.backward(loss) in place of "
                "loss.backward()."
            )

    @override
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled() and (state := self._gradients.get(optimizer)) is not None:
            state.is_unscaled = state.is_examined = True

    @override
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if (state := self._gradients.get(optimizer)) is not None and state.is_unscaled:
            inv_scale = torch.ones_like(inv_scale)

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
        if not self.is_enabled():
            return
        scaled = [optimizer for optimizer, state in self._gradients.items() if not state.is_unscaled]
        # Of optimizers that step less often than others.
        parameters = list(_parameters_with_gradients(scaled))
        before = self._scale.clone() if parameters and self._scale is not None else None
        super().update(new_scale)
        self._begin_iteration()
        if before is not None and self._scale is not None:
            scale_any(parameters, self._scale / before)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, and which gradients are unscaled, if there are some."""
        unscaled = [state.is_unscaled for state in self._gradients.values()]
        return super().state_dict() | ({"unscaled": unscaled} if any(unscaled) else {})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, also of torch's GradScaler; the gradients are those of the state."""
        super().load_state_dict(state_dict)
        if not self.is_enabled():
            return
        self._begin_iteration()
        unscaled = state_dict.get("unscaled", ())
        for index, state in enumerate(self._gradients.values()):
            state.is_unscaled = index < len(unscaled) and unscaled[index]
        if any(unscaled) and self._scale is None:
            self.scale(torch.ones((), device=self._device))  # creates the scale


def _parameters_with_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.nn.Parameter]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)
