"""Enumerations under the names scripts know; each member is also its own text."""

from __future__ import annotations

import enum

__all__ = ["DistributedType", "PrecisionType"]


class DistributedType(str, enum.Enum):
    """How processes work together. accel says `NO`, `MULTI_*` or `XLA`; the rest is there to compare with."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796 - another name of the same
    """What `XLA` was called in early versions."""
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class PrecisionType(str, enum.Enum):
    """Number formats; `FP8` is there to compare with."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
