"""Mixed precision: autocast of the forward pass, and scaling of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime import nested
from accel_runtime.env import MixedPrecision
from accel_runtime.nested import has_dtensor

__all__ = ["FORMATS", "AutocastForward", "LossScaler", "Precision"]


_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class PrecisionFormat:
    """Meaning of a `mixed_precision` value."""

    dtype: torch.dtype | None
    """Dtype of autocast; None computes in the dtype of the model."""
    scales_loss: bool
    """If true, the loss is scaled, so that small gradients do not underflow."""


FORMATS: dict[MixedPrecision, PrecisionFormat] = {
    "no": PrecisionFormat(dtype=None, scales_loss=False),
    "bf16": PrecisionFormat(dtype=torch.bfloat16, scales_loss=False),
    "fp16": PrecisionFormat(dtype=torch.float16, scales_loss=True),
}


class LossScaler(torch.amp.GradScaler):
    """GradScaler of torch, shared by optimizers that step separately.

    The scale may change only when all optimizers of an iteration have stepped. These are known once every optimizer
    has, or at the next backward pass.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
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
        if id(optimizer) not in self._unscaled | self._stepped:
            self.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step_unless_overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless the gradients have overflowed; return whether it did."""
        self.step(optimizer)
        found_infs = self._found_inf_per_device(optimizer) if self.is_enabled() else {}
        overflowed = any(bool(count) for count in found_infs.values())
        self._stepped.add(id(optimizer))
        if self._stepped >= self._optimizers:
            self.update()
        return not overflowed

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

        if not has_dtensor(p for group in optimizer.param_groups for p in group["params"]):
            return unscale(optimizer)
        from accel_runtime.parallel.grad_norm import unscale_gradients  # noqa: PLC0415 - its imports are slow

        if any(
            p.grad is not None and p.grad.is_cpu for group in optimizer.param_groups for p in group["params"]
        ):
            # GradScaler copies both to the CPU asynchronously, so offloaded gradients could be unscaled before the copy ends.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()

        return unscale_gradients(optimizer, unscale)

    @override
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self._unscaled.clear()
        self._stepped.clear()


class Precision:
    """Autocast and loss scaling on one device."""

    def __init__(
        self,
        mixed_precision: MixedPrecision,
        device: torch.device,
        autocast_options: dict[str, Any],
        scaler_options: dict[str, Any],
    ) -> None:
        self.format = FORMATS[mixed_precision]
        self.scaler = LossScaler(device.type, **scaler_options) if self.format.scales_loss else None
        """Loss scaler, or None if the format needs none."""
        self._device_type = device.type
        self.set_autocast(autocast_options)

    def set_autocast(self, options: Mapping[str, Any]) -> None:
        """Set the arguments for `torch.autocast`, also of models that are prepared already."""
        self._options = dict(options)
        self._fp32_outputs = bool(self._options.pop("fp32_outputs", True))

    @property
    def description(self) -> str:
        """Return the format as text."""
        if self.format.dtype is None:
            return "no: what the models have"
        scales_loss = ", the loss is scaled" if self.scaler is not None else ""
        return f"autocast to {str(self.format.dtype).removeprefix('torch.')}{scales_loss}"

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the format; `options` replace the arguments for `torch.autocast` of the run."""
        if self.format.dtype is None:
            return nullcontext()
        kwargs = (
            self._options if options is None else {k: v for k, v in options.items() if k != "fp32_outputs"}
        )
        return torch.autocast(self._device_type, dtype=self.format.dtype, **kwargs)

    def converts_outputs(self) -> bool:
        """Return whether outputs in half precision are converted to float32."""
        return self._fp32_outputs

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise ValueError if a trainable parameter is float16, as the loss scaler cannot unscale its gradients."""
        if self.scaler is None or not self.scaler.is_enabled():
            return
        if any(p.requires_grad and p.dtype == torch.float16 for p in parameters):
            raise ValueError(
                "mixed_precision fp16 cannot train float16 parameters: the loss is scaled, and their gradients cannot be unscaled. "
                "Keep the parameters in float32 (model.float(), or load with torch_dtype=torch.float32), as autocast computes in "
                "float16 anyway, or use mixed_precision bf16."
            )

    def wrap(self, model: nn.Module) -> None:
        """Make `model` compute in the format wherever it is called from; see `AutocastForward`."""
        forward = model.forward
        if isinstance(forward, AutocastForward):
            # Prepared before, maybe in another format.
            model.forward = forward.forward
        if self.format.dtype is not None:
            model.forward = AutocastForward(model.forward, self.autocast, self.converts_outputs)

    def backward(self, loss: torch.Tensor, options: Mapping[str, Any] = _NO_OPTIONS) -> None:
        """Run `loss.backward(**options)`, scaled if the format needs it."""
        if self.scaler is not None:
            self.scaler.begin_backward()
            loss = self.scaler.scale(loss)
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor scaled like gradients before they are unscaled."""
        return tensor if self.scaler is None else self.scaler.scale(tensor)


class AutocastForward:
    """Forward pass of a model under autocast.

    Half-precision outputs are converted to float32: a loss computed from them outside the model would otherwise be
    computed in half precision too.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        autocast: Callable[[], AbstractContextManager[Any]],
        converts_outputs: Callable[[], bool],
    ) -> None:
        self.forward = forward
        """Original forward pass."""
        self._autocast = autocast
        self._converts_outputs = converts_outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, and convert half-precision outputs to float32 unless that is disabled."""
        with self._autocast():
            outputs = self.forward(*args, **kwargs)
        return nested.map_tensors(_to_float32, outputs) if self._converts_outputs() else outputs


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
