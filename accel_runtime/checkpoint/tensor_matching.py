"""Match live tensors with saved ones, compare them, and copy between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from accel_runtime.checkpoint.manifest import TensorEntry
from accel_runtime.checkpoint.safetensors_file import tensor_bytes
from accel_runtime.parallel.dtensor import shard_like

__all__ = [
    "copy_into",
    "describe_mismatch",
    "format_names",
    "has_host_memory",
    "hash_tensor",
    "is_sharded",
    "is_tensor",
    "match_tensors",
    "select_matching",
    "storage_key",
    "tensor_name_of",
]


def match_tensors(text: Any, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return live tensors by the names of the saved ones at the same keys."""
    matches: dict[str, torch.Tensor] = {}
    for key, value in text.items():
        if tensor_name_of(value) and is_tensor(state.get(key)):
            matches.setdefault(tensor_name_of(value), state[key])
    return matches


def tensor_name_of(text: Any) -> str:
    """Return the name of the tensor that JSON represents, or an empty string."""
    return str(text["name"]) if isinstance(text, dict) and text.get("$") == "tensor" else ""


def select_matching(
    live: Mapping[str, torch.Tensor], tensors: Mapping[str, TensorEntry]
) -> dict[str, torch.Tensor]:
    """Return the live tensors that saved ones can be read into, by name."""
    return {
        name: tensor.detach()
        for name, tensor in live.items()
        if name in tensors and tuple(tensor.shape) == tensors[name].shape and has_host_memory(tensor)
    }


def has_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether threads can fill a tensor; on a lazy device it only represents a computation."""
    return is_sharded(tensor) or not tensor.numel() or tensor.data_ptr() != 0


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that start at the same memory."""
    return tensor.data_ptr() or tensor.untyped_storage()._cdata  # noqa: SLF001 - without an address, the storage itself


def describe_mismatch(entry: TensorEntry, live: torch.Tensor) -> str:
    """Describe how shape or dtype of a saved and a live tensor differ; empty if they are equal."""
    if entry.shape != tuple(live.shape):
        return f"{list(entry.shape)} in the checkpoint and {list(live.shape)} here"
    dtype = str(live.dtype).removeprefix("torch.")
    if dtype == entry.dtype:
        return ""
    return f"{entry.dtype} in the checkpoint and {dtype} here (strict=False converts it)"


def copy_into(value: Any, live: Any) -> None:
    """Copy a tensor into a live one of the same shape."""
    if not is_tensor(live) or not is_tensor(value) or live.shape != value.shape:
        return
    if is_sharded(live) and not is_sharded(value):
        value = shard_like(value, live, "the tensor")
    if not _same_memory(live, value):
        live.detach().copy_(value)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, sharded or not."""
    return isinstance(value, torch.Tensor)


def _same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = getattr(first, "_local_tensor", first), getattr(second, "_local_tensor", second)
    return storage_key(first) == storage_key(second) and first.stride() == second.stride()


def is_sharded(tensor: Any) -> bool:
    """Return whether this rank has only a shard of a tensor."""
    return hasattr(tensor, "device_mesh")


def format_names(names: Sequence[str], limit: int = 3) -> str:
    """Format the first names of a list, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


_BLOCK = 1 << 22
"""Elements that are hashed at a time on a device."""


def hash_tensor(tensor: torch.Tensor) -> int:
    """Return a 64-bit hash of dtype, shape and values.

    On the CPU it is XXH3. Elsewhere only the number leaves the device: a sum of 32-bit words times odd numbers that
    depend on
    their index, equal on equal devices only.
    """
    checksum = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.device.type == "cpu":
        checksum.update(tensor_bytes(tensor.detach().contiguous()))
    else:
        checksum.update(hash_words(tensor.detach()).to_bytes(8, "little"))
    return checksum.intdigest()


def hash_words(tensor: torch.Tensor) -> int:
    """Return the sum of all 32-bit words, each times an odd number that depends on its index, modulo 2**64."""
    # A dimension of one element may have any stride, and `view` needs 1 for the last.
    data = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        index = torch.arange(start, start + len(block), dtype=torch.int64, device=tensor.device)
        # Odd factors with shifted bits keep neighbouring words from cancelling.
        factor = (index * 2 + 1) * -7046029254386353131
        factor ^= factor >> 29
        total += ((block + 0x5BD1E995) * (factor | 1)).sum()
    return int(total.item()) & (2**64 - 1)
