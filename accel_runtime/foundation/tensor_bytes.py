"""Bytes of tensors on the CPU, and hashes of tensors, computed on their device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from typing import Any

import torch
import xxhash

from accel_runtime.foundation.torch_internals import local_tensor, storage_id

__all__ = ["copy_to_host", "hash_tensor", "hash_words", "memory_key", "remember_hashes", "tensor_bytes"]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; the view keeps the tensor alive."""
    if not tensor.nbytes:
        return memoryview(bytearray())  # views without elements cannot be cast
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tied tensors only: the same elements of the same memory, also after `detach`."""
    if hasattr(tensor, "device_mesh") or tensor.is_meta:
        # Without an address, as a shard that is empty on some ranks has none, and ties must be equal on all ranks.
        offset, placements = local_tensor(tensor).storage_offset(), getattr(tensor, "placements", None)
        return storage_id(tensor), offset, tensor.dtype, tuple(tensor.shape), tensor.stride(), placements
    if not tensor.numel() or not tensor.data_ptr():
        return id(tensor)
    layout = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return *layout, tensor.is_conj(), tensor.is_neg()


_BLOCK = 1 << 22
"""Elements that are hashed at a time on a device."""


def hash_tensor(tensor: torch.Tensor) -> int:
    """Return a 64-bit hash of dtype, shape and values.

    On the CPU it is XXH3. Elsewhere only the number leaves the device: a sum of 32-bit words times odd numbers
    that depend on their index, equal on equal devices only.
    """
    checksum = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.device.type == "cpu":
        checksum.update(tensor_bytes(tensor.detach().contiguous()))
    else:
        checksum.update(hash_words(tensor.detach()).to_bytes(8, "little"))
    return checksum.intdigest()


def remember_hashes() -> Callable[[torch.Tensor], int]:
    """Return `hash_tensor` for a time in which no tensor changes or is released: tensors in the same memory are hashed once."""
    known: dict[Any, int] = {}

    def hash_once(tensor: torch.Tensor) -> int:
        if not tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            return hash_tensor(tensor)
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        if key not in known:
            known[key] = hash_tensor(tensor)
        return known[key]

    return hash_once


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


def copy_to_host(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, copied if it is on a device, or not contiguous."""
    return tensor_bytes(tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous())
