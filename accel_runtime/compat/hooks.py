"""The module `hooks` of Accelerate: importing one of its names raises an ImportError with the alternative."""

from __future__ import annotations

from typing import NoReturn

__all__: list[str] = []

_ABSENT = frozenset(
    {
        "AlignDevicesHook",
        "CpuOffload",
        "LayerwiseCastingHook",
        "ModelHook",
        "SequentialHook",
        "UserCpuOffloadHook",
        "add_hook_to_module",
        "attach_align_device_hook",
        "attach_align_device_hook_on_blocks",
        "attach_execution_device_hook",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
    }
)


def __getattr__(name: str) -> NoReturn:
    if name not in _ABSENT:
        raise AttributeError(f"module 'accel_runtime.hooks' has no attribute {name!r}")
    # Not an AttributeError: `from accel_runtime.hooks import ...` would drop its text.
    raise ImportError(
        f"Cannot import {name!r} from 'accel_runtime.hooks': accel does not support the hooks of Accelerate, which move weights "
        "between devices for inference. Import them from accelerate.hooks, or shard the model over the processes with "
        "ParallelismConfig(dp_shard_size=...)."
    )
