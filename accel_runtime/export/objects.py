"""Save and load single files, for `accelerator.save` and `accelerator.load`."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file

from accel_runtime import nested
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import open_atomically
from accel_runtime.export.safe_unpickler import read_pickle

__all__ = ["load", "refuse_sharded", "rewrite_file", "write_object"]


def refuse_sharded(obj: Any) -> None:
    """Raise `ValueError` if an object contains a sharded tensor, since the other shards would be missing."""
    sharded = next((leaf for leaf in nested.leaves(obj) if hasattr(leaf, "device_mesh")), None)
    if sharded is not None:
        raise ValueError(
            f"save() cannot write a sharded tensor (shape {list(sharded.shape)}): it writes the data of one process. Use "
            "accelerator.save_model(model, directory) or accelerator.save(accelerator.get_state_dict(model), file) for "
            "weights, and accelerator.save_state(directory) for everything."
        )


def write_object(obj: Any, f: str | os.PathLike[str] | BinaryIO, *, safe_serialization: bool) -> None:
    """Write an object to a path, atomically, or to an open file.

    With `safe_serialization`, tensors by name are written to a path as safetensors.
    """
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
        return
    with open_atomically(Path(f)) as scratch:
        save_file(_unshare(obj), scratch, {"format": "pt"}) if safe_serialization else torch.save(
            obj, scratch
        )


def load(
    f: str | os.PathLike[str] | BinaryIO,
    map_location: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool = False,
) -> Any:
    """Return what `save` has written, in either format; no code in the file is run.

    Args:
        f: A path, or an open binary file.
        map_location: Device for the tensors, or another argument of `torch.load`. None is the CPU, wherever the
        tensors
            were, so that a file from a GPU loads on every node.
        weights_only: Must be True.
        mmap: Read tensors when they are used. Tensors of a safetensors file always are.

    Raises:
        CheckpointError: The file does not exist, is damaged, or contains objects that need their own code; the
        message
            tells how to convert it.
        ValueError: `weights_only=False`, which would run code in the file.
        TypeError: A `map_location` for a safetensors file that is not one device.
    """
    if not weights_only:
        raise ValueError(
            "load supports weights_only=True only, so that no code in the file is run. If you trust the file, use "
            "torch.load(..., weights_only=False)."
        )
    device = "cpu" if map_location is None else map_location
    if not _is_safetensors(f):
        return read_pickle(f, device, mmap=mmap)
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"Invalid map_location {map_location!r} for a safetensors file: expected one device.")
    return _load_safetensors(f, torch.device(device))


def _load_safetensors(f: str | os.PathLike[str] | BinaryIO, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        tensors = load_file(f) if isinstance(f, (str, os.PathLike)) else load_bytes(f.read())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{f} cannot be read: {error}") from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _is_safetensors(f: str | os.PathLike[str] | BinaryIO) -> bool:
    """Return whether a file is safetensors, by its name or its first bytes (a length and a brace)."""
    if isinstance(f, (str, os.PathLike)):
        path = Path(f)
        if path.suffix == ".safetensors" or not path.is_file():
            return path.suffix == ".safetensors"
        with path.open("rb") as file:
            return _starts_like_safetensors(file.read(9))
    position = f.tell()
    start = f.read(9)
    f.seek(position)
    return _starts_like_safetensors(start)


def _starts_like_safetensors(start: bytes) -> bool:
    return start[8:] == b"{"


def _unshare(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as safetensors requires them: contiguous, without shared memory."""
    seen: set[int] = set()

    def copy_if_shared(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return tensor
        memory = tensor.untyped_storage().data_ptr()
        shared = bool(memory) and memory in seen
        seen.add(memory)
        return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()

    return {name: copy_if_shared(tensor) for name, tensor in tensors.items()}


_SCALARS: tuple[type[Any], ...] = (bool, int, float, complex, str, bytes)
_NUMPY_NUMBERS, _NUMPY_OBJECTS = frozenset("biufc"), frozenset("OSU")
"""Kinds of NumPy dtypes that are converted."""


def rewrite_file(path: str | os.PathLike[str], read: Any) -> None:
    """Replace a file of `torch.save` by one with the same content as numbers, text and tensors.

    `read` is the result of `torch.load`. The old file is kept until the new one is complete and readable.
    """
    converted = _to_plain(read, "it")
    with open_atomically(Path(path)) as scratch:
        torch.save(converted, scratch)
        read_pickle(scratch)


def _to_plain(item: Any, path: str) -> Any:
    if item is None or isinstance(item, (torch.Tensor, torch.dtype, torch.device)):
        return item
    if isinstance(item, (enum.Enum, PurePath)):
        return _to_plain(item.value if isinstance(item, enum.Enum) else str(item), path)
    for kind in _SCALARS:
        if isinstance(item, kind):
            return kind(item)
    if isinstance(item, Mapping):
        return {_to_plain(key, path): _to_plain(value, f"{path}[{key!r}]") for key, value in item.items()}
    if isinstance(item, (list, tuple, set, frozenset)):
        values = [_to_plain(value, f"{path}[{index}]") for index, value in enumerate(item)]
        return values if isinstance(item, list) else tuple(values) if isinstance(item, tuple) else set(values)
    return _convert_numpy(item, path)


def _convert_numpy(item: Any, path: str) -> Any:
    """Convert an array or number of NumPy."""
    kind = item.dtype.kind if type(item).__module__ == "numpy" and hasattr(item, "dtype") else "none"
    if kind in _NUMPY_NUMBERS:
        # In native byte order.
        return torch.from_numpy(item.astype(item.dtype.newbyteorder("="))) if item.shape else item.item()
    if kind in _NUMPY_OBJECTS:
        return _to_plain(item.tolist(), path)
    raise CheckpointError(
        f"{path} is a {type(item).__module__}.{type(item).__qualname__}: change the saved state to numbers, text and "
        "tensors, or remove this value before the file is rewritten."
    )
