"""Single files: what `accelerator.save` writes and `accelerator.load` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parsed
from safetensors.torch import load_file, save_file

from accel_runtime import tree
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.exporting.unpickling import read_pickle
from accel_runtime.exporting.whole import whole

__all__ = ["load", "refuse_divided", "write"]


def refuse_divided(obj: Any) -> None:
    """Refuse tensors of which this process has but a part: the others' parts would be missing.

    Raises:
        ValueError: There is one in `obj`.
    """
    divided = next((leaf for leaf in tree.leaves(obj) if hasattr(leaf, "device_mesh")), None)
    if divided is not None:
        raise ValueError(
            f"save() was given a tensor of shape {list(divided.shape)} that is divided among processes, and it writes what one "
            "process has. accelerator.save_model(model, directory) and accelerator.save(accelerator.get_state_dict(model), "
            "file) write whole weights, accelerator.save_state(directory) everything"
        )


def write(obj: Any, f: str | os.PathLike[str] | BinaryIO, *, safe_serialization: bool) -> None:
    """Write an object; a file appears whole or not at all.

    Args:
        obj: What `torch.save` can write; tensors by name with `safe_serialization`.
        f: A path, or an open binary file.
        safe_serialization: Write safetensors; `f` must then be a path.
    """
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
        return
    with whole(Path(f)) as scratch:
        save_file(_apart(obj), scratch, {"format": "pt"}) if safe_serialization else torch.save(obj, scratch)


def load(
    f: str | os.PathLike[str] | BinaryIO,
    map_location: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool = False,
) -> Any:
    """What `save` has written, in either format; nothing in the file runs.

    Args:
        f: A path, or an open binary file.
        map_location: The device for tensors, or what else `torch.load` takes. None is the CPU, wherever the tensors
            were, so that a file from a GPU loads on every machine.
        weights_only: True, and no other.
        mmap: Read the tensors of a file when they are used. Those of a safetensors file always are.

    Raises:
        CheckpointError: The file is not there, is damaged, or holds objects that only their own code can make; the
            message says how to convert it.
        ValueError: `weights_only=False`, which would run code in the file.
        TypeError: A `map_location` for a safetensors file that is not one device.
    """
    if not weights_only:
        raise ValueError(
            "load reads with weights_only=True only, so that nothing in the file runs; where you know who wrote the "
            "file, torch.load(..., weights_only=False) reads it"
        )
    where = "cpu" if map_location is None else map_location
    if not _is_safetensors(f):
        return read_pickle(f, where, mmap=mmap)
    if not isinstance(where, (str, int, torch.device)):
        raise TypeError(f"map_location of a safetensors file is one device; it is {map_location!r}")
    return _tensors(f, torch.device(where))


def _tensors(f: str | os.PathLike[str] | BinaryIO, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        found = load_file(f) if isinstance(f, (str, os.PathLike)) else parsed(f.read())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{f} cannot be read: {error}") from error
    return {name: tensor.to(device) for name, tensor in found.items()}


def _is_safetensors(f: str | os.PathLike[str] | BinaryIO) -> bool:
    """By the name, or by the first bytes: the length of a JSON text, and its brace."""
    if isinstance(f, (str, os.PathLike)):
        path = Path(f)
        if path.suffix == ".safetensors" or not path.is_file():
            return path.suffix == ".safetensors"
        with path.open("rb") as file:
            return _begins_like_safetensors(file.read(9))
    place = f.tell()
    begin = f.read(9)
    f.seek(place)
    return _begins_like_safetensors(begin)


def _begins_like_safetensors(begin: bytes) -> bool:
    return begin[8:] == b"{"


def _apart(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as safetensors takes them: contiguous, and no two in one memory."""
    seen: set[int] = set()

    def alone(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return tensor
        memory = tensor.untyped_storage().data_ptr()
        tied = bool(memory) and memory in seen
        seen.add(memory)
        return tensor.clone(memory_format=torch.contiguous_format) if tied else tensor.contiguous()

    return {name: alone(tensor) for name, tensor in tensors.items()}
