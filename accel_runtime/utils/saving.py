"""Single files, written and read by functions that are not told the backend: they use the current one."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from accel_runtime.current import current_backend
from accel_runtime.exporting.objects import load, write

__all__ = ["load", "save"]


def save(
    obj: Any,
    f: str | os.PathLike[str] | BinaryIO,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object once, from the main process; a file appears whole or not at all.

    Args:
        obj: What `torch.save` can write; tensors by name with `safe_serialization`.
        f: A path, or an open binary file.
        save_on_each_node: Write it from the first process of every machine.
        safe_serialization: Write safetensors; `f` must then be a path.
    """
    topology = current_backend().topology
    if (topology.local_rank if save_on_each_node else topology.rank) == 0:
        write(obj, f, safe_serialization=safe_serialization)
