"""Pack tensors on the CPU into bytes.

Right after a send or receive every torch operation passes the GIL to gloo's threads and back, which takes ten times as
long as the operation itself on a few bytes, so small data are copied without torch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

__all__ = [
    "ContainerSpec",
    "FlattenedData",
    "PackedLayout",
    "TensorSpec",
    "build_layout",
    "build_packer",
    "describe_structure",
    "flatten_data",
    "list_locations",
    "memory_of",
    "pack_into",
    "unpack_combined",
    "unpack_row",
    "unpack_rows",
]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; the view keeps the tensor alive."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


class _DtypeGroup(NamedTuple):
    """Tensors of one dtype, stored contiguously."""

    dtype: torch.dtype
    indices: tuple[int, ...]
    counts: tuple[int, ...]
    start: int
    stop: int
    flat: bool
    equal_shapes: bool


class PackedLayout(NamedTuple):
    """The offset of each tensor in a row of bytes."""

    groups: tuple[_DtypeGroup, ...]
    size: int
    """The number of bytes of a row."""


@lru_cache(maxsize=1024)
def build_layout(dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]) -> PackedLayout:
    """Return the layout for tensors of these dtypes and shapes, each dtype aligned."""
    indices: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        indices.setdefault(dtype, []).append(index)
    groups, start = [], 0
    for dtype in sorted(indices, key=lambda dtype: (-dtype.itemsize, str(dtype))):
        members = indices[dtype]
        counts = tuple(math.prod(shapes[index]) for index in members)
        stop = start + sum(counts) * dtype.itemsize
        equal_shapes = all(shapes[index] == shapes[members[0]] for index in members)
        flat = all(len(shapes[index]) == 1 for index in members)
        groups.append(_DtypeGroup(dtype, tuple(members), counts, start, stop, flat, equal_shapes))
        start = stop
    # Rows follow each other, aligned for the widest dtype.
    wide = max((dtype.itemsize for dtype in indices), default=1)
    return PackedLayout(tuple(groups), -(-start // wide) * wide)


@torch.no_grad()
def pack_into(tensors: Sequence[torch.Tensor], layout: PackedLayout, row: torch.Tensor) -> None:
    """Write tensors into a row of `layout.size` bytes."""
    for group in layout.groups:
        out = _group_values(row, group)
        members = [tensors[index] for index in group.indices]
        if len(members) == 1:
            out.view(members[0].shape).copy_(members[0])
        else:
            torch.cat(members if group.flat else [tensor.reshape(-1) for tensor in members], out=out)


def build_packer(tensors: Sequence[torch.Tensor], layout: PackedLayout) -> Callable[[memoryview], None]:
    """Return a function that packs tensors into a buffer of `layout.size` bytes."""

    def write(buffer: memoryview) -> None:
        if layout.size:
            pack_into(tensors, layout, torch.frombuffer(buffer, dtype=torch.uint8))

    return write


def unpack_rows(
    rows: torch.Tensor, layout: PackedLayout, shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Unpack `[world_size, layout.size]` bytes and concatenate each tensor over the ranks, in new memory.

    `[n, ...]` becomes `[world_size * n, ...]` and a scalar `[world_size]`.
    """
    world = len(rows)
    unpacked: dict[int, torch.Tensor] = {}
    for group in layout.groups:
        numbers = _group_values(rows, group)
        group_shapes = [shapes[index] for index in group.indices]
        gathered_shapes = [(world * shape[0], *shape[1:]) if shape else (world,) for shape in group_shapes]
        parts: Sequence[torch.Tensor]
        if len(group_shapes) > 1 and group.equal_shapes:
            # A single copy of all tensors: the overhead of a copy per tensor exceeds the time for the values.
            by_tensor = numbers.view(world, len(group_shapes), group.counts[0]).transpose(0, 1)
            parts = torch.unbind_copy(by_tensor.reshape(len(group_shapes), *gathered_shapes[0]))  # type: ignore[func-returns-value,assignment]
        else:
            columns = torch.split(numbers, list(group.counts), 1)
            parts = [column.reshape(shape) for column, shape in zip(columns, gathered_shapes, strict=True)]
        unpacked |= zip(group.indices, parts, strict=True)
    return [unpacked[index] for index in range(len(unpacked))]


def unpack_combined(
    rows: torch.Tensor,
    layout: PackedLayout,
    shapes: Sequence[tuple[int, ...]],
    combine: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Unpack the rows of all ranks, reduced by `combine` from `[world_size, n]` to `[n]`."""
    unpacked: dict[int, torch.Tensor] = {}
    for group in layout.groups:
        total = combine(_group_values(rows, group))
        parts: Sequence[torch.Tensor] = torch.split_with_sizes_copy(total, list(group.counts))  # type: ignore[func-returns-value,assignment]
        unpacked |= zip(group.indices, parts, strict=True)
    return [unpacked[index].view(shape) for index, shape in enumerate(shapes)]


def unpack_row(
    row: torch.Tensor, layout: PackedLayout, shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Unpack the row of one rank into views of it."""
    unpacked: dict[int, torch.Tensor] = {}
    for group in layout.groups:
        parts = torch.split(_group_values(row, group), list(group.counts))
        unpacked |= zip(group.indices, parts, strict=True)
    return [unpacked[index].view(shape) for index, shape in enumerate(shapes)]


def _group_values(rows: torch.Tensor, group: _DtypeGroup) -> torch.Tensor:
    """Return the values of a dtype group, `[..., n]`, as a view."""
    if group.start == group.stop:
        return rows.new_empty((*rows.shape[:-1], 0), dtype=group.dtype)
    return rows[..., group.start : group.stop].view(group.dtype)


class TensorSpec(NamedTuple):
    """Dtype, shape and device type of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    def with_free_dimensions(self, free: str) -> TensorSpec:
        """Return the spec with -1 for dimensions that may differ: the `first`, or all `sizes`."""
        count = len(self.shape) if free == "sizes" else 1
        return self._replace(shape=(-1,) * min(count, len(self.shape)) + tuple(self.shape[count:]))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


class ContainerSpec(NamedTuple):
    """Type and keys of a container."""

    kind: str
    keys_: int | tuple[Any, ...]
    """The keys of a mapping, or the length of a sequence."""

    def __repr__(self) -> str:
        keys = self.keys_ if isinstance(self.keys_, int) else ", ".join(map(_format_key, self.keys_))
        return f"{self.kind}({keys})"


class FlattenedData(NamedTuple):
    """Nested data, flattened."""

    structure: tuple[Any, ...]
    """Containers, each followed by its items; specs of tensors; type names of other leaves."""
    tensors: list[torch.Tensor]
    """The tensors in the order of `nested.map_leaves`."""
    specs: tuple[TensorSpec, ...]
    """The specs of the tensors."""
    unsupported: str | None
    """The type of the first leaf that is not a dense tensor."""


def flatten_data(data: Any) -> FlattenedData:
    """Flatten nested data."""
    structure: list[Any] = []
    tensors: list[torch.Tensor] = []
    unsupported: list[str] = []
    _flatten_into(data, structure, tensors, unsupported)
    specs = tuple(item for item in structure if type(item) is TensorSpec)
    return FlattenedData(tuple(structure), tensors, specs, unsupported[0] if unsupported else None)


def _flatten_into(
    data: Any, structure: list[Any], tensors: list[torch.Tensor], unsupported: list[str]
) -> None:
    if (
        isinstance(data, torch.Tensor)
        and data.layout is torch.strided
        and not (data.is_quantized or data.is_nested)
    ):
        structure.append(TensorSpec(data.dtype, data.shape, data.device.type))
        tensors.append(data)
    elif isinstance(data, (list, tuple)):
        structure.append(ContainerSpec(type(data).__name__, len(data)))
        for item in data:
            _flatten_into(item, structure, tensors, unsupported)
    elif isinstance(data, Mapping):
        # `keys()`, since a mapping may iterate over something else: a TensorDict iterates over rows.
        structure.append(ContainerSpec(type(data).__name__, tuple(data.keys())))
        for value in data.values():
            _flatten_into(value, structure, tensors, unsupported)
    else:
        # Other layouts, such as sparse, cannot be packed.
        if not isinstance(data, torch.Tensor):
            structure.append(type(data).__name__)
        elif data.is_nested and data.layout is torch.strided:
            structure.append("nested tensor")
        else:
            structure.append(f"{str(data.layout).removeprefix('torch.')} tensor")
        unsupported.append(structure[-1])


def describe_structure(structure: tuple[Any, ...]) -> str:
    """Return a structure as text, such as `['x'][0]: float32[3] on cpu`."""
    return ", ".join(
        f"{location}: {leaf}" if location else str(leaf) for location, leaf in list_locations(structure)
    )


def list_locations(structure: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return every leaf with its location in Python syntax."""
    return list(_iterate_locations(iter(structure), "")) if structure else []


def _iterate_locations(items: Iterator[Any], location: str) -> Iterator[tuple[str, Any]]:
    item = next(items)
    if not isinstance(item, ContainerSpec):
        yield location, item
        return
    if not item.keys_:
        yield location, f"empty {item.kind}"
    for key in range(item.keys_) if isinstance(item.keys_, int) else item.keys_:
        yield from _iterate_locations(items, f"{location}[{_format_key(key)}]")


def _format_key(key: Any) -> str:
    """Return the repr of a key if it is the same in every process, else its type."""
    return repr(key) if isinstance(key, (str, int, float, tuple, bytes)) else type(key).__name__
