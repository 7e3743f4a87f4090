"""Names that scripts import from `accelerate.utils`, including every name of `accel_runtime`."""

from __future__ import annotations

import importlib
from typing import Any

import accel_runtime
from accel_runtime.compat.accelerate_package import import_from_accelerate

_MODULES = {
    "accel_runtime.training.memory": ("clear_device_cache",),
    "accel_runtime.foundation.options": ("KwargsHandler",),
    "accel_runtime.training.compile": ("compile_regions", "has_compiled_regions", "is_compiled_module"),
    "accel_runtime.compat.environment": ("patch_environment",),
    "accel_runtime.compat.fsdp_utils": (
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "merge_fsdp_weights",
        "save_fsdp_model",
        "save_fsdp_optimizer",
    ),
    "accel_runtime.compat.launch": ("PrepareForLaunch", "write_basic_config"),
    "accel_runtime.compat.other": (
        "MegatronLMDummyScheduler",
        "load",
        "save",
    ),
    "accel_runtime.parallel.deepspeed.plugin": ("DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"),
    "accel_runtime.accelerator.operations": (
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "find_batch_size",
        "honor_type",
        "is_torch_tensor",
        "listify",
        "recursively_apply",
        "extract_model_from_parallel",
        "synchronize_rng_state",
        "wait_for_everyone",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = frozenset(
    {
        "constants",
        "dataclasses",
        "environment",
        "fsdp_utils",
        "imports",
        "launch",
        "memory",
        "modeling",
        "offload",
        "operations",
        "other",
        "random",
        "versions",
    }
)
"""The modules that `import accelerate` makes attributes of `accelerate.utils`."""
_CHECKS = "accel_runtime.compat.imports"
"""The module of the names with `is_`."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*accel_runtime.__all__, *_MODULE_OF, *importlib.import_module(_CHECKS).__all__})
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in accel_runtime.__all__:
        return getattr(accel_runtime, name)
    if name.startswith("is_") and hasattr(checks := importlib.import_module(_CHECKS), name):
        return getattr(checks, name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return import_from_accelerate(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), *_SUBMODULES})
