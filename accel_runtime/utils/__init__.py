"""Names that scripts import from `accelerate.utils`, including every name of `accel_runtime`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import accel_runtime
from accel_runtime.accelerate.package import import_from_accelerate

# Type checkers execute these imports; at run time the table below has the module of each name.
if TYPE_CHECKING:
    from accel_runtime import *  # noqa: F403
    from accel_runtime.accelerate.environment import patch_environment as patch_environment
    from accel_runtime.accelerate.fsdp_utils import load_fsdp_model as load_fsdp_model
    from accel_runtime.accelerate.fsdp_utils import load_fsdp_optimizer as load_fsdp_optimizer
    from accel_runtime.accelerate.fsdp_utils import merge_fsdp_weights as merge_fsdp_weights
    from accel_runtime.accelerate.fsdp_utils import save_fsdp_model as save_fsdp_model
    from accel_runtime.accelerate.fsdp_utils import save_fsdp_optimizer as save_fsdp_optimizer
    from accel_runtime.accelerate.imports import *  # noqa: F403
    from accel_runtime.accelerate.launch import PrepareForLaunch as PrepareForLaunch
    from accel_runtime.accelerate.launch import write_basic_config as write_basic_config
    from accel_runtime.accelerate.operations import concatenate as concatenate
    from accel_runtime.accelerate.operations import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_runtime.accelerate.operations import convert_to_fp32 as convert_to_fp32
    from accel_runtime.accelerate.operations import (
        extract_model_from_parallel as extract_model_from_parallel,
    )
    from accel_runtime.accelerate.operations import find_batch_size as find_batch_size
    from accel_runtime.accelerate.operations import honor_type as honor_type
    from accel_runtime.accelerate.operations import is_torch_tensor as is_torch_tensor
    from accel_runtime.accelerate.operations import listify as listify
    from accel_runtime.accelerate.operations import recursively_apply as recursively_apply
    from accel_runtime.accelerate.operations import synchronize_rng_state as synchronize_rng_state
    from accel_runtime.accelerate.operations import wait_for_everyone as wait_for_everyone
    from accel_runtime.accelerate.other import MegatronLMDummyScheduler as MegatronLMDummyScheduler
    from accel_runtime.accelerate.other import load as load
    from accel_runtime.accelerate.other import save as save
    from accel_runtime.extensions.deepspeed.plugin import DummyOptim as DummyOptim
    from accel_runtime.extensions.deepspeed.plugin import DummyScheduler as DummyScheduler
    from accel_runtime.extensions.deepspeed.plugin import HfDeepSpeedConfig as HfDeepSpeedConfig
    from accel_runtime.foundation.options import KwargsHandler as KwargsHandler
    from accel_runtime.training.compile import compile_regions as compile_regions
    from accel_runtime.training.compile import has_compiled_regions as has_compiled_regions
    from accel_runtime.training.compile import is_compiled_module as is_compiled_module
    from accel_runtime.training.memory import clear_device_cache as clear_device_cache

_MODULES = {
    "accel_runtime.training.memory": ("clear_device_cache",),
    "accel_runtime.foundation.options": ("KwargsHandler",),
    "accel_runtime.training.compile": ("compile_regions", "has_compiled_regions", "is_compiled_module"),
    "accel_runtime.accelerate.environment": ("patch_environment",),
    "accel_runtime.accelerate.fsdp_utils": (
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "merge_fsdp_weights",
        "save_fsdp_model",
        "save_fsdp_optimizer",
    ),
    "accel_runtime.accelerate.launch": ("PrepareForLaunch", "write_basic_config"),
    "accel_runtime.accelerate.other": (
        "MegatronLMDummyScheduler",
        "load",
        "save",
    ),
    "accel_runtime.extensions.deepspeed.plugin": ("DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"),
    "accel_runtime.accelerate.operations": (
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
_CHECKS = "accel_runtime.accelerate.imports"
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
