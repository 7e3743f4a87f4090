"""The names scripts import from `accelerate.utils`: what is here, and every name of `accel_runtime`."""

from __future__ import annotations

import importlib
from typing import Any

import accel_runtime

_ROOMS = {
    "accel_runtime.memory": ("clear_device_cache",),
    "accel_runtime.options": ("KwargsHandler",),
    "accel_runtime.utils.deepspeed": ("DummyOptim", "DummyScheduler", "MegatronLMDummyScheduler"),
    "accel_runtime.utils.saving": ("load", "save"),
    "accel_runtime.utils.between": (
        "extract_model_from_parallel",
        "synchronize_rng_state",
        "wait_for_everyone",
    ),
    "accel_runtime.utils.nested": (
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "find_batch_size",
        "honor_type",
        "is_torch_tensor",
        "listify",
        "recursively_apply",
    ),
    "accel_runtime.utils.available": (
        "is_bf16_available",
        "is_bnb_available",
        "is_cuda_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_mps_available",
        "is_npu_available",
        "is_peft_available",
        "is_tensorboard_available",
        "is_torch_xla_available",
        "is_torchvision_available",
        "is_transformers_available",
        "is_wandb_available",
        "is_xpu_available",
    ),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted([*accel_runtime.__all__, *_HOMES])  # noqa: PLE0605 - it is a list of names


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in accel_runtime.__all__:
        return getattr(accel_runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
