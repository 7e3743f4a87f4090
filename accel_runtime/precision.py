"""Mixed precision from one table: what the forward pass computes in, and whether the loss is scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime import tree
from accel_runtime.divided import any_divided
from accel_runtime.env import MixedPrecision

__all__ = ["FORMATS", "AutocastForward", "Format", "LossScaler", "Precision"]


_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Format:
    """What a `mixed_precision` value means."""

    dtype: torch.dtype | None
    """What autocast computes in; None computes in whatever the model has."""
    scaled: bool
    """Whether the loss is scaled, so that small gradients do not vanish."""


FORMATS: dict[MixedPrecision, Format] = {
    "no": Format(dtype=None, scaled=False),
    "bf16": Format(dtype=torch.bfloat16, scaled=False),
    "fp16": Format(dtype=torch.float16, scaled=True),
}


class LossScaler(torch.amp.GradScaler):
    """torch's scaler, shared by optimizers that each step by themselves.

    The scale may change only when all optimizers of an iteration have stepped. Which those are is known
    once every optimizer has, or with the next backward pass.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._known: set[int] = set()
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the steps of this optimizer too."""
        self._known.add(id(optimizer))

    def begin(self) -> None:
        """A backward pass begins: what has stepped by now were the optimizers of the last iteration."""
        if self._stepped:
            self.update()

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the scale out of the gradients, unless that is done already."""
        if id(optimizer) not in self._unscaled | self._stepped:
            self.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def attempt(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless the gradients have overflowed; whether it did."""
        self.step(optimizer)
        found = self._found_inf_per_device(optimizer) if self.is_enabled() else {}
        overflowed = any(bool(count) for count in found.values())
        self._stepped.add(id(optimizer))
        if self._stepped >= self._known:
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
        def unscale(of: Any) -> dict[torch.device, torch.Tensor]:
            return super(LossScaler, self)._unscale_grads_(of, inv_scale, found_inf, allow_fp16)

        if not any_divided(p for group in optimizer.param_groups for p in group["params"]):
            return unscale(optimizer)
        from accel_runtime.parallel.unscaling import unscaled  # noqa: PLC0415 - its imports take seconds

        if any(
            p.grad is not None and p.grad.is_cpu for group in optimizer.param_groups for p in group["params"]
        ):
            # GradScaler copies both to the CPU without waiting: offloaded gradients would be unscaled by whatever was there.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()

        return unscaled(optimizer, unscale)

    @override
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self._unscaled.clear()
        self._stepped.clear()


class Precision:
    """Autocast and loss scaling on one device.

    Args:
        mixed_precision: A key of `FORMATS`.
        device: Where the computation runs.
        autocast_options: Arguments for `torch.autocast`.
        scaler_options: Arguments for `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        mixed_precision: MixedPrecision,
        device: torch.device,
        autocast_options: dict[str, Any],
        scaler_options: dict[str, Any],
    ) -> None:
        self.format = FORMATS[mixed_precision]
        self.scaler = LossScaler(device.type, **scaler_options) if self.format.scaled else None
        """The loss scaler, or None where the format needs none."""
        self._device_type = device.type
        self.set_autocast(autocast_options)

    def set_autocast(self, options: Mapping[str, Any]) -> None:
        """Set the arguments for `torch.autocast`, also of models that are prepared."""
        self._options = dict(options)
        self._convert = bool(self._options.pop("fp32_outputs", True))

    @property
    def described(self) -> str:
        """The format, for people."""
        if self.format.dtype is None:
            return "no: what the models have"
        scaled = ", the loss is scaled" if self.scaler is not None else ""
        return f"autocast to {str(self.format.dtype).removeprefix('torch.')}{scaled}"

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """The context in which operations run in the chosen format.

        Args:
            options: Arguments for `torch.autocast` in place of those of the run.
        """
        if self.format.dtype is None:
            return nullcontext()
        chosen = (
            self._options if options is None else {k: v for k, v in options.items() if k != "fp32_outputs"}
        )
        return torch.autocast(self._device_type, dtype=self.format.dtype, **chosen)

    def converts(self) -> bool:
        """Return whether outputs in half precision become float32."""
        return self._convert

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse what the loss scaler cannot train.

        Raises:
            ValueError: A trainable parameter in float16, whose gradients cannot be unscaled.
        """
        if self.scaler is None or not self.scaler.is_enabled():
            return
        if any(p.requires_grad and p.dtype == torch.float16 for p in parameters):
            raise ValueError(
                "mixed_precision fp16 scales the loss, and gradients of float16 parameters cannot be unscaled. "
                "Keep the parameters in float32 (model.float(), or load with torch_dtype=torch.float32): autocast "
                "computes in float16 by itself. Or use mixed_precision bf16."
            )

    def wrap(self, model: nn.Module) -> None:
        """Make `model` compute in the chosen format wherever it is called from; see `AutocastForward`."""
        before = model.forward
        if isinstance(before, AutocastForward):
            # Prepared before, perhaps in another format.
            model.forward = before.forward
        if self.format.dtype is not None:
            model.forward = AutocastForward(model.forward, self.autocast, self.converts)

    def backward(self, loss: torch.Tensor, options: Mapping[str, Any] = _NONE) -> None:
        """`loss.backward(**options)`, scaled where the format asks for it."""
        if self.scaler is not None:
            self.scaler.begin()
            loss = self.scaler.scale(loss)
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as much larger as gradients are before they are unscaled."""
        return tensor if self.scaler is None else self.scaler.scale(tensor)


class AutocastForward:
    """A model's forward pass under autocast.

    Half-precision outputs come back as float32: a loss computed from them outside the model would
    otherwise be computed in half precision too.

    Args:
        forward: The forward pass as it was.
        autocast: Makes the context.
        converts: Tells whether halves become float32; else they are left as they are.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        autocast: Callable[[], AbstractContextManager[Any]],
        converts: Callable[[], bool],
    ) -> None:
        self.forward = forward
        """The forward pass as it was."""
        self._autocast = autocast
        self._converts = converts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; halves come back as float32, unless that is switched off."""
        with self._autocast():
            outputs = self.forward(*args, **kwargs)
        return tree.map_tensors(_float32, outputs) if self._converts() else outputs


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
