"""The module `hooks` of Accelerate, whose names are not here: importing one is an error that tells what to do."""

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
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # An ImportError, since the text of an AttributeError is lost in `from accel_runtime.hooks import ...`.
    raise ImportError(
        f"cannot import {name!r} from {__name__!r}: Accelerate's hooks move the weights of big models between devices for "
        "inference, which is not part of accel. Use `from accelerate.hooks import ...` for that, or shard the model over "
        "the processes with ParallelismConfig(dp_shard_size=...)."
    )
