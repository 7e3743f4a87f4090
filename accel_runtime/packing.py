"""Many tensors as one row of bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["Layout", "layout", "pack", "unpack", "unpack_each"]


class _Group(NamedTuple):
    """Tensors of one dtype, one after the other."""

    dtype: torch.dtype
    indices: tuple[int, ...]
    counts: tuple[int, ...]
    start: int
    stop: int
    flat: bool
    alike: bool


class Layout(NamedTuple):
    """Where the numbers of each tensor lie."""

    groups: tuple[_Group, ...]
    size: int
    """Bytes of the row."""


@lru_cache(maxsize=1024)
def layout(dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout for tensors of these dtypes and shapes; every number begins where its dtype may."""
    indices: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        indices.setdefault(dtype, []).append(index)
    groups, start = [], 0
    for dtype in sorted(indices, key=lambda dtype: (-dtype.itemsize, str(dtype))):
        own = indices[dtype]
        counts = tuple(math.prod(shapes[index]) for index in own)
        stop = start + sum(counts) * dtype.itemsize
        alike = all(shapes[index] == shapes[own[0]] for index in own)
        flat = all(len(shapes[index]) == 1 for index in own)
        groups.append(_Group(dtype, tuple(own), counts, start, stop, flat, alike))
        start = stop
    return Layout(tuple(groups), start)


@torch.no_grad()
def pack(tensors: Sequence[torch.Tensor], plan: Layout, row: torch.Tensor) -> None:
    """Write tensors into a row of `plan.size` bytes."""
    for group in plan.groups:
        room = row[group.start : group.stop].view(group.dtype)
        own = [tensors[index] for index in group.indices]
        if len(own) == 1:
            room.view(own[0].shape).copy_(own[0])
        else:
            torch.cat(own if group.flat else [tensor.reshape(-1) for tensor in own], out=room)


def unpack(
    rows: torch.Tensor, plan: Layout, shapes: Sequence[tuple[int, ...]], *, stacked: bool = False
) -> list[torch.Tensor]:
    """What several ranks packed in the same layout, tensor by tensor.

    Args:
        rows: `[world_size, plan.size]` bytes, a row a rank.
        plan: The layout.
        shapes: Of each tensor.
        stacked: Whether ranks become a dimension of their own.

    Returns:
        `[n, ...]` becomes `[world_size * n, ...]` and a scalar `[world_size]`; with `stacked` any shape
        `[world_size, *shape]`. No two tensors share memory.
    """
    world = len(rows)
    found: dict[int, torch.Tensor] = {}
    for group in plan.groups:
        numbers = rows[:, group.start : group.stop].view(group.dtype)
        own = [shapes[index] for index in group.indices]
        wanted = [
            (world, *shape) if stacked or not shape else (world * shape[0], *shape[1:]) for shape in own
        ]
        if len(own) > 1 and group.alike:
            # One pass over all of them, since a pass over each costs more than the numbers themselves.
            apart = numbers.view(world, len(own), group.counts[0])
            together = apart.transpose(0, 1).reshape(len(own), *wanted[0])
            parts: Sequence[torch.Tensor] = torch.unbind_copy(together)  # type: ignore[func-returns-value,assignment]
        else:
            columns = torch.split(numbers, list(group.counts), 1)
            parts = [column.reshape(shape) for column, shape in zip(columns, wanted, strict=True)]
        found |= zip(group.indices, parts, strict=True)
    return [found[index] for index in range(len(found))]


def unpack_each(row: torch.Tensor, plan: Layout, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """What one rank packed: views into its row."""
    found: dict[int, torch.Tensor] = {}
    for group in plan.groups:
        parts = torch.split(row[group.start : group.stop].view(group.dtype), list(group.counts))
        found |= zip(group.indices, parts, strict=True)
    return [found[index].view(shape) for index, shape in enumerate(shapes)]
