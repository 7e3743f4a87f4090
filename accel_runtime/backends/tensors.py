"""Collectives over nested tensors: all tensors of a batch in one or two exchanges after a handshake."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar, cast

import torch

from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.collectives.handshake import PAYLOAD, CollectiveCall, build_writer, call_at_site
from accel_runtime.collectives.signatures import collective
from accel_runtime.foundation import nested
from accel_runtime.foundation.nested import FlattenedData, TensorSpec, flatten_data, list_locations

__all__ = [
    "broadcast",
    "check_rank",
    "find_cure",
    "gather",
    "gather_tensors",
    "pad_across_processes",
    "reduce",
    "replace_tensors",
]

_T = TypeVar("_T")


@collective("data", "backend")
def gather(data: _T, backend: Backend) -> _T:
    """Concatenate the tensors of all ranks along the first dimension, by rank.

    Args:
        data: A tensor, or tensors nested in dicts, lists, tuples and data objects. `[n, ...]` becomes `[sum of n, ...]`; `n` may differ
            between ranks. A scalar `[]` becomes `[world_size]`.
        backend: Connects the ranks.

    Returns:
        The same structure, without gradients; on one process `data` itself.

    Raises:
        TypeError: A leaf is not a dense tensor. Raised on every rank.
        MismatchError: Structure, dtype or other dimensions differ between ranks. Raised on every rank.
        StallError: A rank does not join.
    """
    flat = flatten_data(data)
    if backend.topology.world_size == 1:
        return refuse_non_tensors(flat, data)
    gathered = gather_tensors(call_at_site("gather", flat.structure, free="first"), flat, backend)
    return replace_tensors(data, gathered.tensors)


@collective("data", "backend", "compare_lines")
def reduce(
    data: _T, reduction: Reduction, backend: Backend, scale: float = 1.0, *, compare_lines: bool = True
) -> _T:
    """Reduce every tensor over the ranks, elementwise.

    Args:
        data: A tensor, or tensors nested in dicts, lists, tuples and data objects, of equal shape on all ranks.
        reduction: `sum`, `mean`, `max` or `min`. The mean of integers is float32, the sum of booleans int64; float8 is
            computed in float32, and rounded once.
        backend: Connects the ranks.
        scale: A factor for the result.
        compare_lines: Warn if ranks call from different lines.

    Returns:
        The same structure, of new tensors without gradients.

    Raises:
        ValueError: The reduction is unknown.
        TypeError: A leaf is not a dense tensor, or has a dtype without this reduction. Raised on every rank.
        MismatchError: Data or calls differ between ranks. Raised on every rank.
        StallError: A rank does not join.
    """
    if reduction not in {"sum", "mean", "max", "min"}:
        raise ValueError(f"Invalid reduction {reduction!r}: expected sum, mean, max or min.")
    flat = flatten_data(data)
    dtypes = [spec.dtype for spec in flat.specs]
    refusal = _find_refusal(flat, reduction)
    exact = [tensor.detach() if refusal else _widen(tensor.detach(), reduction) for tensor in flat.tensors]
    flat = flat._replace(
        tensors=exact, specs=tuple(TensorSpec(t.dtype, t.shape, t.device.type) for t in exact)
    )
    call = call_at_site("reduce", flat.structure, anywhere=not compare_lines)
    if backend.topology.world_size == 1:
        refuse_non_tensors(flat, data)
        if refusal:
            raise TypeError(refusal)
        totals = [tensor.clone() for tensor in exact]
    else:
        totals = _reduce(call, flat, reduction, backend, refusal)
    totals = [_narrow(total, dtype, reduction) for total, dtype in zip(totals, dtypes, strict=True)]
    return replace_tensors(data, totals if scale == 1 else [total * scale for total in totals])


@collective("data", "backend")
def broadcast(data: _T, backend: Backend, from_process: int = 0) -> _T:
    """Copy the tensors of one rank into those of all others; return `data`.

    Raises:
        ValueError: `from_process` is not a rank.
        TypeError: A leaf is not a dense tensor. Raised on every rank.
        MismatchError: Data or calls differ between ranks. Raised on every rank.
        StallError: A rank does not join.
    """
    check_rank(from_process, backend)
    flat = flatten_data(data)
    if backend.topology.world_size == 1:
        return refuse_non_tensors(flat, data)
    call = call_at_site("broadcast", flat.structure)
    _broadcast(call, flat, from_process, backend)
    return data


@collective("data", "backend")
def pad_across_processes(
    data: _T, backend: Backend, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> _T:
    """Pad tensors in one dimension to the largest size on any rank.

    Args:
        data: A tensor, or tensors nested in dicts, lists, tuples and data objects; tensors without `dim` are returned as they are.
        backend: Connects the ranks.
        dim: The dimension; negative values count from the last.
        pad_index: The value of the padding.
        pad_first: Pad before the data instead of after it.

    Returns:
        The same structure; tensors that need no padding are returned themselves.

    Raises:
        TypeError: A leaf is not a dense tensor. Raised on every rank.
        MismatchError: More than sizes differ between ranks. Raised on every rank.
        StallError: A rank does not join.
    """
    flat = flatten_data(data)
    if backend.topology.world_size == 1:
        return refuse_non_tensors(flat, data)
    call = call_at_site("pad_across_processes", flat.structure, free="sizes")
    sizes = [_size_of(tensor, dim) for tensor in flat.tensors]
    own = struct.pack(f"={len(sizes)}q", *sizes)
    result = backend.handshake.exchange(call, len(own), build_writer(own))
    refuse_non_tensors(flat, data)
    if result.identical or not sizes:
        return data
    sizes_by_rank = (struct.unpack(f"={len(sizes)}q", result.view(rank)) for rank in range(len(result.sizes)))
    longest = [max(of_each) for of_each in zip(*sizes_by_rank, strict=True)]
    padded = (
        _pad(tensor, dim, size, pad_index, pad_first=pad_first)
        for tensor, size in zip(flat.tensors, longest, strict=True)
    )
    return replace_tensors(data, padded)


class GatheredData(NamedTuple):
    """The tensors of all ranks, concatenated."""

    tensors: list[torch.Tensor]
    rows: Sequence[Sequence[int]]
    """By rank, the first dimension of each tensor it contributed; 1 for a scalar."""


def gather_tensors(call: CollectiveCall, flat: FlattenedData, backend: Backend) -> GatheredData:
    """Gather flattened tensors for a given call; their first dimensions may differ."""
    if flat.unsupported is not None:
        backend.handshake.exchange(call)
        refuse_non_tensors(flat, None)
    plan = _plan_transfer(flat.specs)
    indices, layout = plan.kinds["cpu"]
    start = len(plan.rows)

    def write(buffer: memoryview) -> None:
        buffer[:start] = plan.rows
        if plan.inline:
            pack_into_memory([flat.tensors[index] for index in indices], layout, buffer[start:])

    inline = layout.size if plan.inline else 0
    # Ranks whose shapes are equal know each other's numbers of rows.
    result = backend.handshake.exchange(call, start + inline, write, only_if_different=not inline)
    if not result.identical:
        return _gather_ragged(call, flat, plan, result.payloads, backend)
    payloads = result.payloads
    assert isinstance(payloads, torch.Tensor)
    return _gather_equal(call, flat, plan, payloads[:, start:], backend)


def refuse_non_tensors(flat: FlattenedData, data: _T) -> _T:
    """Return `data`; raise TypeError if it contains anything but dense tensors."""
    if flat.unsupported is None:
        return data
    location, leaf = next(
        (location, leaf)
        for location, leaf in list_locations(flat.structure)
        if not isinstance(leaf, TensorSpec)
    )
    raise TypeError(
        f"Cannot send data{location}, {leaf}: only dense tensors are supported. {find_cure(leaf)}"
    )


def find_cure(kind: str) -> str:
    """Return how to send a leaf of nested data that is not a dense tensor."""
    if kind == "nested tensor":
        return "Pass tensor.to_padded_tensor(0.0), or list(tensor.unbind()) to gather_for_metrics(use_gather_object=True)."
    if kind == "distributed tensor":
        return "Pass tensor.full_tensor()."
    if kind.endswith("quantized tensor"):
        return "Pass tensor.dequantize()."
    if kind.endswith(" tensor"):
        return f"Pass tensor.{'view(torch.uint8)' if 'int' in kind else 'to_dense()'}."
    return "Use gather_object or broadcast_object_list for other objects."


def replace_tensors(data: _T, tensors: Iterable[torch.Tensor]) -> _T:
    """Return the structure of `data` with other tensors, in the same order."""
    following = iter(tensors)
    return cast("_T", nested.map_leaves(lambda _: next(following), data))


def check_rank(rank: int, backend: Backend) -> None:
    """Raise ValueError if the rank does not exist."""
    if not 0 <= rank < backend.topology.world_size:
        raise ValueError(
            f"Invalid from_process {rank}: expected a rank from 0 to {backend.topology.world_size - 1}."
        )


# gloo cannot reduce these dtypes.
_GLOO_DTYPES = {torch.bool: torch.uint8, torch.int16: torch.int32}


_INTEGERS = frozenset({torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
                       torch.int64})  # fmt: skip
_WIDE = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.complex32: torch.complex64} | {
    getattr(torch, name): torch.float32
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
}
"""The dtype in which to compute for dtypes for which torch and gloo have no reduction."""
_SIGN = -(2**63)
_NUMBERS = _INTEGERS | _WIDE.keys() | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}  # fmt: skip


def _find_refusal(flat: FlattenedData, reduction: Reduction) -> str | None:
    """Return the reason why a tensor cannot be reduced, or None; the data contain dense tensors."""
    for location, spec in list_locations(flat.structure):
        if not isinstance(spec, TensorSpec):
            continue
        dtype = str(spec.dtype).removeprefix("torch.")
        if spec.dtype not in _NUMBERS:
            return f"Cannot reduce data{location}, {spec}: torch does not compute with {dtype}. Convert it to another dtype first."
        if spec.dtype.is_complex and reduction in {"max", "min"}:
            return (
                f"Cannot reduce data{location}, {spec}: complex numbers have no {reduction}. Reduce their absolute values, or "
                "the tensor of torch.view_as_real()."
            )
    return None


def _widen(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Convert a tensor to a dtype in which torch and gloo compute the reduction."""
    if tensor.dtype in _INTEGERS and reduction == "mean":
        return tensor.float()
    if tensor.dtype == torch.bool and reduction == "sum":
        return tensor.long()
    if tensor.dtype == torch.uint64:
        # The sum of the bits is the same, modulo 2**64; the order of numbers with and without a sign differs by the first bit.
        bits = tensor.view(torch.int64)
        return bits if reduction == "sum" else bits ^ _SIGN
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def _narrow(total: torch.Tensor, dtype: torch.dtype, reduction: Reduction) -> torch.Tensor:
    """Convert the result of a reduction back to the dtype of the tensors, undoing `_widen`."""
    if dtype in _INTEGERS and reduction == "mean":
        return total
    if dtype == torch.uint64:
        return (total if reduction == "sum" else total ^ _SIGN).view(torch.uint64)
    return total if dtype == torch.bool and reduction == "sum" else total.to(dtype)


def _reduce(
    call: CollectiveCall, flat: FlattenedData, reduction: Reduction, backend: Backend, refusal: str | None
) -> list[torch.Tensor]:
    on_cpu = [i for i, spec in enumerate(flat.specs) if spec.device == "cpu"]
    layout = build_layout(tuple(flat.specs[i] for i in on_cpu))
    inline = layout.size <= PAYLOAD
    pack = partial(pack_into_memory, [flat.tensors[i] for i in on_cpu], layout)
    result = backend.handshake.exchange(call, layout.size if inline else 0, pack)
    refuse_non_tensors(flat, None)
    if refusal:
        raise TypeError(refusal)
    reduced: dict[int, torch.Tensor] = {}
    if inline and on_cpu:
        rows = result.payloads
        assert isinstance(rows, torch.Tensor)
        totals = unpack_row(rows, layout, partial(_reduce_rows, reduction=reduction))
        reduced |= zip(on_cpu, totals, strict=True)
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for index, spec in enumerate(flat.specs):
        if index not in reduced:
            groups.setdefault((spec.device, spec.dtype), []).append(index)
    for (_, dtype), indices in groups.items():
        joined = torch.cat(
            [flat.tensors[index].reshape(-1) for index in indices]
        )  # the only copy, also of one tensor
        total = backend.all_reduce(joined.to(_GLOO_DTYPES.get(dtype, dtype)), reduction).to(dtype)
        parts = torch.split(total, [flat.tensors[i].numel() for i in indices])
        reduced |= {i: part.view(flat.specs[i].shape) for i, part in zip(indices, parts, strict=True)}
    return [reduced[index] for index in range(len(flat.tensors))]


def _reduce_rows(stack: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Reduce `[world_size, ...]` over the ranks."""
    if reduction == "sum":
        return stack.sum(0, dtype=stack.dtype)
    if reduction == "mean":
        return stack.mean(0)
    return stack.amax(0) if reduction == "max" else stack.amin(0)


def _broadcast(call: CollectiveCall, flat: FlattenedData, source: int, backend: Backend) -> None:
    on_cpu = [i for i, spec in enumerate(flat.specs) if spec.device == "cpu"]
    layout = build_layout(tuple(flat.specs[i] for i in on_cpu))
    cpu_tensors = [flat.tensors[i] for i in on_cpu]
    is_source = backend.topology.rank == source
    inline = layout.size <= PAYLOAD
    pack = partial(pack_into_memory, cpu_tensors, layout)
    result = backend.handshake.exchange(call, layout.size if inline and is_source else 0, pack)
    refuse_non_tensors(flat, None)
    row = result.payloads[source]
    if not inline:
        row = torch.empty(layout.size, dtype=torch.uint8, device="cpu")
        if is_source:
            pack_into(cpu_tensors, layout, row)
        backend.handshake.scatter_bytes([row] * backend.topology.world_size, row, source, call)
    if not is_source:
        _overwrite(cpu_tensors, unpack_row(row, layout))
    on_devices: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    for spec, tensor in zip(flat.specs, flat.tensors, strict=True):
        if spec.device != "cpu":
            on_devices.setdefault((spec.device, spec.dtype), []).append(tensor)
    for tensors in on_devices.values():
        joined = backend.broadcast(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), source)
        parts = torch.split(joined, [tensor.numel() for tensor in tensors])
        if not is_source:
            _overwrite(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


@torch.no_grad()
def _overwrite(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, new in zip(tensors, values, strict=True):
        tensor.copy_(new)


def _size_of(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else 0


def _pad(tensor: torch.Tensor, dim: int, size: int, pad_value: int, *, pad_first: bool) -> torch.Tensor:
    current = _size_of(tensor, dim)
    if current == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_full(shape, pad_value)
    padded.narrow(dim, size - current if pad_first else 0, current).copy_(tensor)
    return padded


class _TransferPlan(NamedTuple):
    """The layout in which tensors of given specs are sent."""

    rows: bytes
    """The first dimension of each tensor, as bytes."""
    counts: list[int]
    """The first dimension of each tensor."""
    kinds: dict[str, tuple[list[int], PackedLayout]]
    """By device type, the indices of the tensors and their layout in its buffer."""
    inline: bool
    """True if the CPU tensors fit into the handshake."""


@lru_cache(maxsize=256)
def _plan_transfer(specs: tuple[TensorSpec, ...]) -> _TransferPlan:
    counts = [spec.shape[0] if spec.shape else 1 for spec in specs]
    # A multiple of 16 bytes, to align the data that follow for any dtype.
    aligned = [*counts, *[0] * (len(counts) % 2)]
    rows = struct.pack(f"={len(aligned)}q", *aligned)
    kinds = {}
    for kind in sorted({"cpu", *(spec.device for spec in specs)}):
        indices = [index for index, spec in enumerate(specs) if spec.device == kind]
        kinds[kind] = indices, build_layout(tuple(specs[index] for index in indices))
    return _TransferPlan(rows, counts, kinds, len(rows) + kinds["cpu"][1].size <= PAYLOAD)


def _gather_equal(
    call: CollectiveCall, flat: FlattenedData, plan: _TransferPlan, inline: torch.Tensor, backend: Backend
) -> GatheredData:
    gathered: dict[int, torch.Tensor] = {}
    for kind, (indices, layout) in plan.kinds.items():
        if kind == "cpu" and plan.inline:
            rows_of_ranks = inline
        elif kind == "cpu":
            sizes = [layout.size] * backend.topology.world_size
            large = backend.handshake.all_gather_bytes(_pack_buffer(flat, indices, layout), sizes, call)
            assert isinstance(large, torch.Tensor)
            rows_of_ranks = large
        else:
            rows_of_ranks = backend.all_gather(_pack_buffer(flat, indices, layout))
        gathered |= zip(indices, unpack_rows(rows_of_ranks, layout), strict=True)
    tensors = [gathered[index] for index in range(len(gathered))]
    return GatheredData(tensors, [plan.counts] * backend.topology.world_size)


def _gather_ragged(
    call: CollectiveCall,
    flat: FlattenedData,
    plan: _TransferPlan,
    payloads: Sequence[torch.Tensor] | torch.Tensor,
    backend: Backend,
) -> GatheredData:
    start = len(plan.rows)
    rows = [blob[:start].view(torch.int64).tolist()[: len(flat.specs)] for blob in payloads]
    plans = [
        _plan_transfer(
            tuple(
                spec._replace(shape=(count, *spec.shape[1:])) if spec.shape else spec
                for spec, count in zip(flat.specs, counts, strict=True)
            )
        )
        for counts in rows
    ]
    pieces: list[list[torch.Tensor]] = [[] for _ in flat.specs]
    for kind, (indices, layout) in plan.kinds.items():
        layouts = [other.kinds[kind][1] for other in plans]
        if kind != "cpu":
            buffer = _pack_buffer(flat, indices, layout)
            # The collective needs equal shapes.
            padded = buffer.new_zeros(max(other_layout.size for other_layout in layouts))
            padded[: len(buffer)] = buffer
            pairs = zip(backend.all_gather(padded), layouts, strict=True)
            buffers = [row[: other_layout.size] for row, other_layout in pairs]
        else:
            # The tensors of ranks where they fit came with the handshake.
            sizes = [0 if other.inline else other.kinds[kind][1].size for other in plans]
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
            buffer = empty if plan.inline else _pack_buffer(flat, indices, layout)
            large = backend.handshake.all_gather_bytes(buffer, sizes, call) if any(sizes) else payloads
            buffers = [payloads[r][start:] if other.inline else large[r] for r, other in enumerate(plans)]
        for buffer, other_layout in zip(buffers, layouts, strict=True):
            for index, part in zip(indices, unpack_row(buffer, other_layout), strict=True):
                pieces[index].append(part if part.dim() else part.view(1))
    return GatheredData([torch.cat(each) for each in pieces], rows)


def _pack_buffer(flat: FlattenedData, indices: Sequence[int], layout: PackedLayout) -> torch.Tensor:
    """Return `[layout.size]` bytes of these tensors, without a copy if possible."""
    tensors = [flat.tensors[index].detach() for index in indices]
    if len(tensors) == 1 and tensors[0].is_contiguous() and not tensors[0].is_conj():
        return tensors[0].reshape(-1).view(torch.uint8)
    buffer = torch.empty(layout.size, dtype=torch.uint8, device=tensors[0].device if tensors else None)
    pack_into(tensors, layout, buffer)
    return buffer


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
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each tensor."""
    size: int
    """The number of bytes of a row."""


@lru_cache(maxsize=1024)
def build_layout(specs: tuple[TensorSpec, ...]) -> PackedLayout:
    """Return the layout for tensors of these dtypes and shapes, each dtype aligned."""
    indices: dict[torch.dtype, list[int]] = {}
    for index, spec in enumerate(specs):
        indices.setdefault(spec.dtype, []).append(index)
    groups, start, shapes = [], 0, tuple(tuple(spec.shape) for spec in specs)
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
    return PackedLayout(tuple(groups), shapes, -(-start // wide) * wide)


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


def pack_into_memory(tensors: Sequence[torch.Tensor], layout: PackedLayout, buffer: memoryview) -> None:
    """Write tensors into a buffer of `layout.size` bytes."""
    if layout.size:  # torch.frombuffer refuses an empty buffer
        pack_into(tensors, layout, torch.frombuffer(buffer, dtype=torch.uint8))


def unpack_rows(rows: torch.Tensor, layout: PackedLayout) -> list[torch.Tensor]:
    """Unpack `[world_size, layout.size]` bytes and concatenate each tensor over the ranks, in new memory.

    `[n, ...]` becomes `[world_size * n, ...]` and a scalar `[world_size]`.
    """
    world = len(rows)
    unpacked: dict[int, torch.Tensor] = {}
    for group in layout.groups:
        numbers = _group_values(rows, group)
        group_shapes = [layout.shapes[index] for index in group.indices]
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


def unpack_row(
    row: torch.Tensor, layout: PackedLayout, combine: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Unpack the row of one rank into views of it, or the rows of all, which `combine` reduces to `[n]`, into new memory."""
    unpacked: dict[int, torch.Tensor] = {}
    for group in layout.groups:
        values, counts = _group_values(row, group), list(group.counts)
        parts: Sequence[torch.Tensor] = (
            torch.split(values, counts)
            if combine is None
            else torch.split_with_sizes_copy(combine(values), counts)  # type: ignore[func-returns-value,assignment]
        )
        unpacked |= zip(group.indices, parts, strict=True)
    return [unpacked[index].view(shape) for index, shape in enumerate(layout.shapes)]


def _group_values(rows: torch.Tensor, group: _DtypeGroup) -> torch.Tensor:
    """Return the values of a dtype group, `[..., n]`, as a view."""
    if group.start == group.stop:
        return rows.new_empty((*rows.shape[:-1], 0), dtype=group.dtype)
    return rows[..., group.start : group.stop].view(group.dtype)
