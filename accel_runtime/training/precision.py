"""The number format of a run: autocast in the forward passes of prepared models, and loss scaling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsIndex

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.foundation import nested
from accel_runtime.foundation.precision import FORMATS, PrecisionFormat
from accel_runtime.parallel.pickled_models import warn_of_saved_model
from accel_runtime.training.loss_scaler import LossScaler

__all__ = [
    "Autocast",
    "AutocastForward",
    "Precision",
]


class Precision:
    """Autocast and loss scaling on one device.

    Args:
        mixed_precision: The number format.
        device: The device of the run.
        autocast_options: Fields of `AutocastKwargs`.
        scaler: The loss scaler; None if the format or the strategy needs none.
    """

    def __init__(
        self,
        mixed_precision: MixedPrecision,
        device: torch.device,
        autocast_options: dict[str, Any],
        scaler: LossScaler | None = None,
    ) -> None:
        self.format = FORMATS[mixed_precision]
        self._autocast = Autocast(self.format, device.type, autocast_options)
        self.scaler = scaler
        """Loss scaler, or None if the format needs none."""

    def set_autocast(self, options: Mapping[str, Any]) -> None:
        """Set the arguments for `torch.autocast`, also of models that are prepared already."""
        self._autocast.set_options(options)

    @property
    def description(self) -> str:
        """Return the format as text."""
        if self.format.dtype is None:
            return "no: what the models have"
        scales_loss = ", the loss is scaled" if self.scaler is not None else ""
        return f"autocast to {str(self.format.dtype).removeprefix('torch.')}{scales_loss}"

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the format; `options` replace the arguments for `torch.autocast` of the run."""
        return self._autocast.enter(options)

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
            model.forward = AutocastForward(model.forward, self._autocast)

    def begin_backward(self) -> None:
        """Prepare gradients that exist for those of a scaled loss, which are added to them."""
        if self.scaler is not None:
            self.scaler.begin_backward()

    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, such as a loss, scaled like gradients before they are unscaled."""
        return tensor if self.scaler is None else self.scaler.scale(tensor)


class Autocast:
    """Autocast of a number format on one device; copies of a model have copies of it.

    Args:
        number_format: The number format.
        device_type: The device type of the run.
        options: Fields of `AutocastKwargs`.
    """

    def __init__(self, number_format: PrecisionFormat, device_type: str, options: Mapping[str, Any]) -> None:
        self._dtype, self._device_type = number_format.dtype, device_type
        self.set_options(options)

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Set the arguments for `torch.autocast`."""
        self._options = dict(options)
        self.converts_outputs = bool(self._options.pop("fp32_outputs", True))
        """True if outputs in half precision are converted to float32."""

    def enter(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """Return the context; `options` replace the arguments for `torch.autocast` of the run."""
        if self._dtype is None:
            return nullcontext()
        kwargs = (
            self._options if options is None else {k: v for k, v in options.items() if k != "fp32_outputs"}
        )
        return torch.autocast(self._device_type, dtype=self._dtype, **kwargs)


class AutocastForward:
    """Forward pass of a model under autocast.

    Half-precision outputs are converted to float32: a loss computed from them outside the model would otherwise be
    computed in half precision too.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        autocast: Autocast,
    ) -> None:
        self.forward = forward
        """Original forward pass."""
        self._autocast = autocast

    @override
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> str | tuple[Any, ...]:
        warn_of_saved_model()
        return super().__reduce_ex__(protocol)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, and convert half-precision outputs to float32 unless that is disabled."""
        with self._autocast.enter():
            outputs = self.forward(*args, **kwargs)
        return nested.map_leaves(_to_float32, outputs) if self._autocast.converts_outputs else outputs


_LOG = logging.getLogger("accel_runtime.training.precision")
_HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
_reported_types: set[type] = set()
"""Types of which a warning was written."""


def _to_float32(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.float() if leaf.dtype in _HALF_DTYPES else leaf
    if leaf is not None and type(leaf) not in _reported_types:
        _report_unconverted(leaf)
    return leaf


def _report_unconverted(leaf: Any) -> None:
    """Warn once for each type whose tensors stay in half precision."""
    if isinstance(leaf, Iterator):
        _reported_types.add(type(leaf))
        _LOG.warning(
            "The outputs of a model contain an object of %s: it computes after the forward pass, without mixed precision. Return a list.",
            type(leaf).__name__,
        )
    elif any(tensor.dtype in _HALF_DTYPES for tensor in nested.iterate_hidden_tensors(leaf)):
        _reported_types.add(type(leaf))
        _LOG.warning(
            "The outputs of a model contain an object of %s, in which tensors stay in half precision, as it has more than data (a "
            "module, other state, or a reference to itself). Return tensors in a dict, list, tuple or dataclass, or call float() "
            "on them.",
            type(leaf).__name__,
        )
