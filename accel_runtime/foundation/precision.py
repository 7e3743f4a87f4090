"""The number formats of mixed precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel_runtime.environment.settings import MixedPrecision

__all__ = ["FORMATS", "PrecisionFormat", "name_dtype"]


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


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
