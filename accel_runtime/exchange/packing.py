"""Many tensors as one row of bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["Layout", "layout", "pack", "packing", "unpack", "unpack_combined", "unpack_each"]


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
    # A row after another begins where the widest dtype may.
    wide = max((dtype.itemsize for dtype in indices), default=1)
    return Layout(tuple(groups), -(-start // wide) * wide)


@torch.no_grad()
def pack(tensors: Sequence[torch.Tensor], plan: Layout, row: torch.Tensor) -> None:
    """Write tensors into a row of `plan.size` bytes."""
    for group in plan.groups:
        room = _numbers(row, group)
        own = [tensors[index] for index in group.indices]
        if len(own) == 1:
            room.view(own[0].shape).copy_(own[0])
        else:
            torch.cat(own if group.flat else [tensor.reshape(-1) for tensor in own], out=room)


def packing(tensors: Sequence[torch.Tensor], plan: Layout) -> Callable[[memoryview], None]:
    """What packs tensors into `plan.size` bytes."""

    def write(room: memoryview) -> None:
        if plan.size:
            pack(tensors, plan, torch.frombuffer(room, dtype=torch.uint8))

    return write


def unpack(rows: torch.Tensor, plan: Layout, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """What several ranks packed in the same layout, tensor by tensor.

    Args:
        rows: `[world_size, plan.size]` bytes, a row a rank.
        plan: The layout.
        shapes: Of each tensor.

    Returns:
        `[n, ...]` becomes `[world_size * n, ...]` and a scalar `[world_size]`. No two tensors share memory.
    """
    world = len(rows)
    found: dict[int, torch.Tensor] = {}
    for group in plan.groups:
        numbers = _numbers(rows, group)
        own = [shapes[index] for index in group.indices]
        wanted = [(world * shape[0], *shape[1:]) if shape else (world,) for shape in own]
        parts: Sequence[torch.Tensor]
        if len(own) > 1 and group.alike:
            # One pass over all of them, since a pass over each costs more than the numbers themselves.
            apart = numbers.view(world, len(own), group.counts[0]).transpose(0, 1)
            parts = torch.unbind_copy(apart.reshape(len(own), *wanted[0]))  # type: ignore[func-returns-value,assignment]
        else:
            columns = torch.split(numbers, list(group.counts), 1)
            parts = [column.reshape(shape) for column, shape in zip(columns, wanted, strict=True)]
        found |= zip(group.indices, parts, strict=True)
    return [found[index] for index in range(len(found))]


def unpack_combined(
    rows: torch.Tensor,
    plan: Layout,
    shapes: Sequence[tuple[int, ...]],
    combine: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """What several ranks packed in the same layout, made one by `combine`, `[world_size, n]` to `[n]`."""
    found: dict[int, torch.Tensor] = {}
    for group in plan.groups:
        total = combine(_numbers(rows, group))
        parts: Sequence[torch.Tensor] = torch.split_with_sizes_copy(total, list(group.counts))  # type: ignore[func-returns-value,assignment]
        found |= zip(group.indices, parts, strict=True)
    return [found[index].view(shape) for index, shape in enumerate(shapes)]


def unpack_each(row: torch.Tensor, plan: Layout, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """What one rank packed: views into its row."""
    found: dict[int, torch.Tensor] = {}
    for group in plan.groups:
        parts = torch.split(_numbers(row, group), list(group.counts))
        found |= zip(group.indices, parts, strict=True)
    return [found[index].view(shape) for index, shape in enumerate(shapes)]


def _numbers(rows: torch.Tensor, group: _Group) -> torch.Tensor:
    """`[..., n]` of a group: a view."""
    if group.start == group.stop:
        return rows.new_empty((*rows.shape[:-1], 0), dtype=group.dtype)
    return rows[..., group.start : group.stop].view(group.dtype)
