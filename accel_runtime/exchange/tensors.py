"""Collectives over nested tensors: every tensor of a batch in one or two exchanges, agreed on before they are sent."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from accel_runtime import tree
from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.exchange.agreement import ROOM, Call, filled, here
from accel_runtime.exchange.packing import layout, pack, packing, unpack_combined, unpack_each
from accel_runtime.exchange.structure import Spec, Survey, places, survey
from accel_runtime.exchange.transport import Everyone, everyones

__all__ = [
    "Gathered",
    "broadcast",
    "gather",
    "gather_tensors",
    "known_rank",
    "only_tensors",
    "pad_across_processes",
    "reduce",
    "replaced",
]


def gather(data: Any, backend: Backend) -> Any:
    """Every rank's tensors, concatenated along the first dimension in rank order.

    Args:
        data: A tensor, or tensors nested in dicts, lists and tuples: `[n, ...]` becomes `[sum of n, ...]`,
            where every rank may have another `n`, and a scalar `[]` becomes `[world_size]`.
        backend: Carries it.

    Returns:
        The same structure, without gradients; on one process `data` itself.

    Raises:
        TypeError: Something in `data` is no (dense) tensor. Raised on every rank.
        MismatchError: The ranks' data differ in structure, dtype or the other dimensions, or the ranks call
            from different lines. Raised on every rank.
        StallError: A rank does not come.
    """
    found = survey(data)
    if backend.topology.world_size == 1:
        return only_tensors(found, data)
    gathered = gather_tensors(here("gather", found.structure, free="first"), found, backend)
    return replaced(data, gathered.tensors)


def reduce(
    data: Any, reduction: Reduction, backend: Backend, scale: float = 1.0, *, compare_lines: bool = True
) -> Any:
    """Every tensor combined over the ranks, element by element.

    Args:
        data: A tensor, or tensors nested in dicts, lists and tuples, of equal shape on all ranks.
        reduction: `sum`, `mean`, `max` or `min`. The mean of whole numbers is a float32 tensor; the sum of
            truth values is how many are true.
        backend: Carries it.
        scale: What the result is multiplied by.
        compare_lines: Refuse ranks that call from different lines.

    Returns:
        The same structure, of new tensors without gradients.

    Raises:
        ValueError: An unknown reduction.
        TypeError: Something in `data` is no (dense) tensor. Raised on every rank.
        MismatchError: The ranks' data or calls differ. Raised on every rank.
        StallError: A rank does not come.
    """
    if reduction not in {"sum", "mean", "max", "min"}:
        raise ValueError(f"reduction must be sum, mean, max or min; it is {reduction!r}")
    found = survey(data)
    exact = [_exact(tensor.detach(), reduction) for tensor in found.tensors]
    found = found._replace(tensors=exact, specs=tuple(Spec(t.dtype, t.shape, t.device.type) for t in exact))
    operation = f"reduce {reduction} scale {scale}"
    call = here(operation, found.structure, anywhere=not compare_lines)
    if backend.topology.world_size == 1:
        only_tensors(found, data)
        totals = [tensor.clone() for tensor in exact]
    else:
        totals = _reduced(call, found, reduction, backend)
    return replaced(data, totals if scale == 1 else [total * scale for total in totals])


def broadcast(data: Any, backend: Backend, from_process: int = 0) -> Any:
    """The tensors of one rank, written into those of all others.

    Args:
        data: A tensor, or tensors nested in dicts, lists and tuples, of equal structure, shapes and dtypes on
            all ranks.
        backend: Carries it.
        from_process: The rank whose numbers they are.

    Returns:
        `data` itself.

    Raises:
        ValueError: There is no such rank.
        TypeError: Something in `data` is no (dense) tensor. Raised on every rank.
        MismatchError: The ranks' data or calls differ. Raised on every rank.
        StallError: A rank does not come.
    """
    known_rank(from_process, backend)
    found = survey(data)
    if backend.topology.world_size == 1:
        return only_tensors(found, data)
    call = here(f"broadcast from rank {from_process}", found.structure)
    _broadcast(call, found, from_process, backend)
    return data


def pad_across_processes(
    data: Any, backend: Backend, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    """Tensors made as long in one dimension as the longest of all ranks.

    Args:
        data: A tensor, or tensors nested in dicts, lists and tuples, of as many dimensions on all ranks;
            those that do not have `dim` stay as they are.
        backend: Carries the sizes.
        dim: The dimension; negative ones count from the last.
        pad_index: What they are filled up with.
        pad_first: Fill up before what is there, instead of behind it.

    Returns:
        The same structure; tensors that are long enough come back themselves.

    Raises:
        TypeError: Something in `data` is no (dense) tensor. Raised on every rank.
        MismatchError: The ranks' data differ in more than sizes, or the ranks call from different lines.
        StallError: A rank does not come.
    """
    found = survey(data)
    if backend.topology.world_size == 1:
        return only_tensors(found, data)
    call = here(f"pad_across_processes of dimension {dim}", found.structure, free="sizes")
    sizes = [_size(tensor, dim) for tensor in found.tensors]
    own = struct.pack(f"={len(sizes)}q", *sizes)
    met = backend.agreement.exchange(call, len(own), filled(own))
    only_tensors(found, data)
    if met.same or not sizes:
        return data
    everyones = (struct.unpack(f"={len(sizes)}q", met.view(rank)) for rank in range(len(met.sizes)))
    longest = [max(of_each) for of_each in zip(*everyones, strict=True)]
    padded = (
        _padded(tensor, dim, size, pad_index, first=pad_first)
        for tensor, size in zip(found.tensors, longest, strict=True)
    )
    return replaced(data, padded)


# Shared with the other collectives -----------------------------------------------------


class Gathered(NamedTuple):
    """Every rank's tensors, joined."""

    tensors: list[torch.Tensor]
    rows: Sequence[Sequence[int]]
    """For every rank, how many rows of each tensor are its own; 1 for a scalar."""


def gather_tensors(call: Call, found: Survey, backend: Backend) -> Gathered:
    """What `gather` does once it is known what is called."""
    if found.stranger is not None:
        backend.agreement.exchange(call)
        only_tensors(found, None)
    everyone: Everyone = everyones(call, found, backend)
    return Gathered(everyone.joined(), everyone.rows)


def only_tensors(found: Survey, data: Any) -> Any:
    """`data`, if it holds nothing else.

    Raises:
        TypeError: It does.
    """
    if found.stranger is None:
        return data
    place, leaf = next((place, leaf) for place, leaf in places(found.structure) if not isinstance(leaf, Spec))
    raise TypeError(
        f"only dense tensors can travel here; data{place} is {leaf}. "
        "For other objects there are gather_object and broadcast_object_list."
    )


def replaced(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The structure of `data` with other tensors, in the order of its own."""
    following = iter(tensors)
    return tree.map_leaves(lambda _: next(following), data)


def known_rank(rank: int, backend: Backend) -> None:
    """See to it that there is such a rank.

    Raises:
        ValueError: There is not.
    """
    if not 0 <= rank < backend.topology.world_size:
        raise ValueError(
            f"from_process must be a rank from 0 to {backend.topology.world_size - 1}; it is {rank}"
        )


# One by one ----------------------------------------------------------------------------


def _exact(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if reduction == "mean" and whole:
        return tensor.float()
    return tensor.long() if reduction == "sum" and tensor.dtype == torch.bool else tensor


def _reduced(call: Call, found: Survey, reduction: Reduction, backend: Backend) -> list[torch.Tensor]:
    near = [i for i, spec in enumerate(found.specs) if spec.device == "cpu"]
    plan = layout(tuple(found.specs[i].dtype for i in near), tuple(tuple(found.specs[i].shape) for i in near))
    inline = plan.size <= ROOM
    own = [found.tensors[i] for i in near]
    met = backend.agreement.exchange(call, plan.size if inline else 0, packing(own, plan))
    only_tensors(found, None)
    done: dict[int, torch.Tensor] = {}
    if inline and near:
        blobs = met.blobs
        assert isinstance(blobs, torch.Tensor)
        shapes = [found.specs[index].shape for index in near]
        totals = unpack_combined(blobs, plan, shapes, lambda rows: _combined(rows, reduction))
        done |= zip(near, totals, strict=True)
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for index, spec in enumerate(found.specs):
        if index not in done:
            groups.setdefault((spec.device, spec.dtype), []).append(index)
    for indices in groups.values():
        flat = torch.cat([found.tensors[index].reshape(-1) for index in indices])
        parts = torch.split(
            _all_reduced(flat, reduction, backend), [found.tensors[i].numel() for i in indices]
        )
        done |= {i: part.view(found.specs[i].shape) for i, part in zip(indices, parts, strict=True)}
    return [done[index] for index in range(len(found.tensors))]


def _combined(stack: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """`[world_size, ...]` over the ranks."""
    if reduction == "sum":
        return stack.sum(0, dtype=stack.dtype)
    if reduction == "mean":
        return stack.mean(0)
    return stack.amax(0) if reduction == "max" else stack.amin(0)


_NARROW = {torch.bool: torch.uint8, torch.int16: torch.int32}


def _all_reduced(flat: torch.Tensor, reduction: Reduction, backend: Backend) -> torch.Tensor:
    # gloo cannot reduce these.
    dtype = flat.dtype
    return backend.all_reduce(flat.to(_NARROW.get(dtype, dtype)), reduction).to(dtype)


def _broadcast(call: Call, found: Survey, source: int, backend: Backend) -> None:
    near = [i for i, spec in enumerate(found.specs) if spec.device == "cpu"]
    shapes = tuple(tuple(found.specs[i].shape) for i in near)
    plan = layout(tuple(found.specs[i].dtype for i in near), shapes)
    own = [found.tensors[i] for i in near]
    sends = backend.topology.rank == source
    inline = plan.size <= ROOM
    met = backend.agreement.exchange(call, plan.size if inline and sends else 0, packing(own, plan))
    only_tensors(found, None)
    row = met.blobs[source]
    if not inline:
        row = torch.empty(plan.size, dtype=torch.uint8, device="cpu")
        if sends:
            pack(own, plan, row)
        backend.agreement.deal([row] * backend.topology.world_size, row, source, call)
    if not sends:
        _overwrite(own, unpack_each(row, plan, shapes))
    far: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    for spec, tensor in zip(found.specs, found.tensors, strict=True):
        if spec.device != "cpu":
            far.setdefault((spec.device, spec.dtype), []).append(tensor)
    for tensors in far.values():
        flat = backend.broadcast(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), source)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        if not sends:
            _overwrite(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


@torch.no_grad()
def _overwrite(tensors: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> None:
    for tensor, new in zip(tensors, numbers, strict=True):
        tensor.copy_(new)


def _size(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else 0


def _padded(tensor: torch.Tensor, dim: int, size: int, filler: int, *, first: bool) -> torch.Tensor:
    own = _size(tensor, dim)
    if own == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_full(shape, filler)
    padded.narrow(dim, size - own if first else 0, own).copy_(tensor)
    return padded
