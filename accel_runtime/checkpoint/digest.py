"""Eight bytes that tell whether tensors are equal, without moving them off their device."""

from __future__ import annotations

import torch
import xxhash

from accel_runtime.checkpoint.datafile import bytes_of

__all__ = ["digest"]

_BLOCK = 1 << 22
"""Elements that are mixed at a time on a device."""


def digest(tensor: torch.Tensor) -> int:
    """A number that differs, but for an accident in 2**64, where dtype, shape or values differ.

    On the CPU it is XXH3. Elsewhere it is a sum over the 32-bit words, each times an odd number of its place, mod
    2**64, so that only the number travels; it is equal on equal devices only, and ranks have equal ones.
    """
    said = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.device.type == "cpu":
        said.update(bytes_of(tensor.detach().contiguous()))
    else:
        said.update(mixed(tensor.detach()).to_bytes(8, "little"))
    return said.intdigest()


def mixed(tensor: torch.Tensor) -> int:
    """The sum of all words, each times an odd number of its place, mod 2**64."""
    # A dimension of one element may have any stride, and `view` wants the last to be 1.
    data = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(start, start + len(block), dtype=torch.int64, device=tensor.device)
        # Multiplying by odd numbers and shifting keeps every word's bits apart from those of its neighbours.
        factor = (place * 2 + 1) * -7046029254386353131
        factor ^= factor >> 29
        total += ((block + 0x5BD1E995) * (factor | 1)).sum()
    return int(total.item()) & (2**64 - 1)
