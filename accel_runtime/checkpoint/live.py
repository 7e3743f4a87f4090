"""Live tensors beside saved ones: which belong together, whether they are alike, and how one takes the other over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_runtime.checkpoint.manifest import Stored
from accel_runtime.parallel.boxes import part_of

__all__ = [
    "fitting",
    "has_memory",
    "is_sharded",
    "is_tensor",
    "memory",
    "name_of",
    "named",
    "some",
    "unlike",
    "write",
]

_SHOWN = 3
"""So many names of a kind stand in a message."""


def named(text: Any, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Live tensors by the names of the saved ones in their places."""
    found: dict[str, torch.Tensor] = {}
    for key, value in text.items():
        if name_of(value) and is_tensor(state.get(key)):
            found.setdefault(name_of(value), state[key])
    return found


def name_of(text: Any) -> str:
    """The name of the tensor that a piece of JSON stands for, or nothing."""
    return str(text["name"]) if isinstance(text, dict) and text.get("$") == "tensor" else ""


def fitting(live: Mapping[str, torch.Tensor], tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Those that saved ones can be read into, by the names of these."""
    return {
        name: tensor.detach()
        for name, tensor in live.items()
        if name in tensors and tuple(tensor.shape) == tensors[name].shape and has_memory(tensor)
    }


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether threads can fill it part by part; on a lazy device it stands for what will have been computed."""
    return is_sharded(tensor) or not tensor.numel() or tensor.data_ptr() != 0


def memory(tensor: torch.Tensor) -> int:
    """What a tensor has in common with those that begin where it does."""
    return tensor.data_ptr() or tensor.untyped_storage()._cdata  # noqa: SLF001 - without an address, the storage itself


def unlike(told: Stored, live: torch.Tensor) -> str:
    """How a saved tensor differs in form from the one that is there."""
    if told.shape != tuple(live.shape):
        return f"{list(told.shape)} in the checkpoint and {list(live.shape)} here"
    dtype = str(live.dtype).removeprefix("torch.")
    same = dtype == told.dtype
    return (
        "" if same else f"{told.dtype} in the checkpoint and {dtype} here, to which strict=False converts it"
    )


def write(value: Any, live: Any) -> None:
    """Copy into a live tensor what was read elsewhere, where it fits."""
    if not is_tensor(live) or not is_tensor(value) or live.shape != value.shape:
        return
    if is_sharded(live) and not is_sharded(value):
        value = part_of(value, live, "the tensor")
    if not _same_memory(live, value):
        live.detach().copy_(value)


def is_tensor(value: Any) -> bool:
    """Whether it is one, sharded or not."""
    return isinstance(value, torch.Tensor)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    return memory(one) == memory(other) and one.stride() == other.stride()


def is_sharded(tensor: Any) -> bool:
    """Whether this rank has but a part of it."""
    return hasattr(tensor, "device_mesh")


def some(names: Sequence[str]) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
