"""What a person has read out of a file they trust, written again so that it can be read without trust."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.exporting.unpickling import read_pickle
from accel_runtime.exporting.whole import whole

__all__ = ["rewrite"]

_SCALARS: tuple[type[Any], ...] = (bool, int, float, complex, str, bytes)
_NUMBERS, _OBJECTS = frozenset("biufc"), frozenset("OSU")
"""What an array of NumPy holds, in its letters."""


def rewrite(path: str | os.PathLike[str], read: Any) -> None:
    """Replace a file of `torch.save` by one that holds the same as numbers, text and tensors.

    Args:
        path: The file. It is kept until the new one is whole and has been read.
        read: What `torch.load` gave of it.

    Raises:
        CheckpointError: Something in it has no such form; the message says where it stands.
    """
    plain = _plain(read, "it")
    with whole(Path(path)) as scratch:
        torch.save(plain, scratch)
        read_pickle(scratch)


def _plain(item: Any, path: str) -> Any:
    if item is None or isinstance(item, (torch.Tensor, torch.dtype, torch.device)):
        return item
    if isinstance(item, (enum.Enum, PurePath)):
        return _plain(item.value if isinstance(item, enum.Enum) else str(item), path)
    for kind in _SCALARS:
        if isinstance(item, kind):
            return kind(item)
    if isinstance(item, Mapping):
        return {_plain(key, path): _plain(value, f"{path}[{key!r}]") for key, value in item.items()}
    if isinstance(item, (list, tuple, set, frozenset)):
        made = [_plain(value, f"{path}[{index}]") for index, value in enumerate(item)]
        return made if isinstance(item, list) else tuple(made) if isinstance(item, tuple) else set(made)
    return _numbers(item, path)


def _numbers(item: Any, path: str) -> Any:
    """An array or a number of NumPy."""
    content = item.dtype.kind if type(item).__module__ == "numpy" and hasattr(item, "dtype") else "none"
    if content in _NUMBERS:
        # The copy is in the byte order of this machine.
        return torch.from_numpy(item.astype(item.dtype.newbyteorder("="))) if item.shape else item.item()
    if content in _OBJECTS:
        return _plain(item.tolist(), path)
    raise CheckpointError(
        f"{path} is a {type(item).__module__}.{type(item).__qualname__}: change the state that is saved so that it "
        "holds numbers, text and tensors, or drop it from what was read before it is written again"
    )
