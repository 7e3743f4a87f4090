"""Names that scripts import from `accelerate.utils`, including every name of `accel_runtime`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import accel_runtime
from accel_runtime.accelerate.package import import_from_accelerate

# Type checkers execute these imports; at run time the table below has the module of each name.
if TYPE_CHECKING:
    from accel_runtime import *  # noqa: F403
    from accel_runtime.accelerate.environment import *  # noqa: F403
    from accel_runtime.accelerate.fsdp_utils import *  # noqa: F403
    from accel_runtime.accelerate.imports import *  # noqa: F403
    from accel_runtime.accelerate.launch import *  # noqa: F403
    from accel_runtime.accelerate.operations import *  # noqa: F403
    from accel_runtime.accelerate.operations import synchronize_rng_state as synchronize_rng_state
    from accel_runtime.accelerate.other import *  # noqa: F403
    from accel_runtime.extensions.deepspeed.plugin import DummyOptim as DummyOptim
    from accel_runtime.extensions.deepspeed.plugin import DummyScheduler as DummyScheduler
    from accel_runtime.extensions.deepspeed.plugin import HfDeepSpeedConfig as HfDeepSpeedConfig
    from accel_runtime.foundation.options import KwargsHandler as KwargsHandler
    from accel_runtime.training.memory import clear_device_cache as clear_device_cache

_EXPORTS = {
    "accelerate.environment": "patch_environment",
    "accelerate.fsdp_utils": (
        "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    "accelerate.launch": "PrepareForLaunch write_basic_config",
    "accelerate.operations": (
        "concatenate convert_outputs_to_fp32 convert_to_fp32 extract_model_from_parallel find_batch_size honor_type"
        " is_torch_tensor listify recursively_apply synchronize_rng_state wait_for_everyone"
    ),
    "accelerate.other": "MegatronLMDummyScheduler load save",
    "extensions.deepspeed.plugin": "DummyOptim DummyScheduler HfDeepSpeedConfig",
    "foundation.options": "KwargsHandler",
    "training.compile": "compile_regions has_compiled_regions is_compiled_module",
    "training.memory": "clear_device_cache",
}
"""The names of each module that are not in `accel_runtime`."""
_MODULES = {name: f"accel_runtime.{module}" for module, names in _EXPORTS.items() for name in names.split()}
_SUBMODULES = "constants dataclasses environment fsdp_utils imports launch memory modeling offload operations other random versions"
"""The modules that `import accelerate` makes attributes of `accelerate.utils`."""
_CHECKS = "accel_runtime.accelerate.imports"
"""The module of the names with `is_`."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*accel_runtime.__all__, *_MODULES, *importlib.import_module(_CHECKS).__all__})
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in accel_runtime.__all__:
        return getattr(accel_runtime, name)
    if name.startswith("is_") and hasattr(checks := importlib.import_module(_CHECKS), name):
        return getattr(checks, name)
    if name in _SUBMODULES.split():
        return importlib.import_module(f"{__name__}.{name}")
    return import_from_accelerate(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), *_SUBMODULES.split()})
