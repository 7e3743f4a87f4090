"""Functions under the name of Accelerate's `utils.other`, and a placeholder for Megatron-LM."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from accel_runtime.accelerate.launch import write_basic_config
from accel_runtime.accelerate.operations import extract_model_from_parallel, wait_for_everyone
from accel_runtime.backends import current_backend
from accel_runtime.export.objects import load, write_object
from accel_runtime.training.compile import compile_regions, has_compiled_regions, is_compiled_module

__all__ = [
    "MegatronLMDummyScheduler",
    "compile_regions",
    "extract_model_from_parallel",
    "has_compiled_regions",
    "is_compiled_module",
    "load",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]


def save(
    obj: Any,
    f: str | os.PathLike[str] | BinaryIO,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object on the main process; a path is replaced atomically.

    Args:
        obj: An object that `torch.save` supports; tensors by name with `safe_serialization`.
        f: A path, or an open binary file.
        save_on_each_node: Write on the first process of every node.
        safe_serialization: Write safetensors; `f` must then be a path.
    """
    topology = current_backend().topology
    if (topology.local_rank if save_on_each_node else topology.rank) == 0:
        write_object(obj, f, safe_serialization=safe_serialization)


_SCHEDULER = "Create the scheduler in the script, such as torch.optim.lr_scheduler.LambdaLR(optimizer, ...), and pass it to prepare()"


class MegatronLMDummyScheduler:
    """Not supported: a scheduler of Megatron-LM."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"MegatronLMDummyScheduler(...) is not supported: accel does not use Megatron-LM. {_SCHEDULER}."
        )
