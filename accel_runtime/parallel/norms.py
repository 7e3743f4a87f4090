"""Norms and clipping of gradients that are divided over processes, in any mixture with plain ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

__all__ = ["agreed", "clip_grad_norm_", "clip_grad_value_", "get_total_norm", "local", "settle"]


def get_total_norm(
    tensors: Iterable[torch.Tensor | None], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """The norm of tensors as of one vector, the same on every rank; each counts once, however many ranks have it.

    All ranks call it together. A plain tensor is what the first rank has of it.

    Args:
        tensors: Divided or plain; None counts nothing.
        norm_type: The order.
        error_if_nonfinite: Whether a norm that is no number is an error.

    Returns:
        A plain scalar in float32, or in float64 for tensors in that.

    Raises:
        RuntimeError: The norm is infinite or no number.
    """
    total = _total([None if t is None else _settled(t) for t in tensors], float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is {total.item()}, so they cannot be clipped; with "
            "error_if_nonfinite=False they are multiplied all the same"
        )
    return total


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters that are divided; see `get_total_norm`."""
    every = list(parameters)
    total = get_total_norm(settle(every), norm_type, error_if_nonfinite=error_if_nonfinite)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for alike in _alike([local(p.grad) for p in every if p.grad is not None]):
        # As torch does: to multiply by 1 is cheaper than to ask the device whether to.
        torch._foreach_mul_(alike, factor.to(alike[0].device))
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """`torch.nn.utils.clip_grad_value_` for parameters that are divided."""
    limit = float(clip_value)
    gradients = settle(list(parameters))
    for alike in _alike([local(gradient) for gradient in gradients if gradient is not None]):
        torch._foreach_clamp_min_(alike, -limit)
        torch._foreach_clamp_max_(alike, limit)


def agreed(value: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest that a number is on any rank that has a part of the tensors; all ranks call it together."""
    own = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    sent = value[None].to(own[0].device_mesh.device_type)
    meshes = dict.fromkeys(tensor.device_mesh for tensor in own)
    groups = [None] if _spans_all(own) else [mesh.get_group(at) for mesh in meshes for at in range(mesh.ndim)]
    return _reduced(sent, _Order(math.inf), groups)[0].to(value.device)


def settle(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients; those whose parts are still to be added up are replaced."""
    for parameter in parameters:
        if (
            parameter.grad is not None
            and (settled := _settled(parameter.grad, parameter)) is not parameter.grad
        ):
            parameter.grad = settled
    return [parameter.grad for parameter in parameters]


def _settled(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor with its parts added up, laid out as `like` where that is divided over the same ranks."""
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    wanted: Sequence[Placement]
    if isinstance(like, DTensor) and like.device_mesh == tensor.device_mesh:
        wanted = like.placements
    else:
        wanted = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=wanted)


@dataclass(frozen=True)
class _Order:
    """How norms of this order are put together from parts."""

    p: float

    @property
    def largest(self) -> bool:
        """Whether it is an extreme rather than a sum."""
        return math.isinf(self.p)

    @property
    def nothing(self) -> float:
        """The norm of what counts nothing."""
        return math.inf if self.p < 0 else 0.0

    @property
    def reduction(self) -> dist.ReduceOp.RedOpType:
        if not self.largest:
            return dist.ReduceOp.SUM
        return dist.ReduceOp.MAX if self.p > 0 else dist.ReduceOp.MIN

    def summand(self, norms: torch.Tensor) -> torch.Tensor:
        """What of each norm is added up; a norm of order 0 counts elements already."""
        return norms if self.largest or self.p == 0 else norms.pow(self.p)

    def norm(self, sums: torch.Tensor) -> torch.Tensor:
        return sums if self.largest or self.p == 0 else sums.pow(1 / self.p)


@torch.no_grad()
def _total(tensors: list[torch.Tensor | None], p: float) -> torch.Tensor:
    there = [t for t in tensors if t is not None]
    if not there:
        return torch.tensor(0.0)
    order, device = _Order(p), local(there[0]).device
    dtype = torch.float32 if all(t.dtype != torch.float64 for t in there) else torch.float64
    together = _spans_all(there)
    owned = [t is not None and _owns(t, together=together) for t in tensors]
    mine = [local(t) if own and t is not None else None for t, own in zip(tensors, owned, strict=True)]
    parts = order.summand(_norms(mine, order, device))
    parts = _combined(parts, tensors, order, together=together)
    total: torch.Tensor = torch.linalg.vector_norm(order.norm(parts), p).to(dtype)
    return total


def _norms(parts: Sequence[torch.Tensor | None], order: _Order, device: torch.device) -> torch.Tensor:
    """The norm of each part; of what is not here or empty, the one that counts nothing."""
    # Sums of squares over many ranks lose digits in float32.
    wide = torch.float32 if device.type == "mps" else torch.float64
    nothing = torch.full((), order.nothing, dtype=wide, device=device)
    norms = [nothing] * len(parts)
    places = {id(part): at for at, part in enumerate(parts) if part is not None}
    for alike in _alike([part for part in parts if part is not None and part.numel()]):
        exact = torch.promote_types(alike[0].dtype, torch.float32)
        found = torch._foreach_norm(alike, order.p, dtype=exact)  # noqa: SLF001 - torch's own clipping uses it
        for part, norm in zip(alike, found, strict=True):
            norms[places[id(part)]] = norm.to(device, wide)
    return torch.stack(norms)


def _combined(
    parts: torch.Tensor, tensors: Sequence[torch.Tensor | None], order: _Order, *, together: bool
) -> torch.Tensor:
    """The parts of all ranks put together: one collective, or one for each dimension of each mesh."""
    divided = [(at, t) for at, t in enumerate(tensors) if isinstance(t, DTensor)]
    if not divided:
        return parts
    carrier = divided[0][1].device_mesh.device_type
    # The gradients may be in host memory, and the ranks talk over devices.
    sent = parts.to(carrier)
    if together:
        return _reduced(sent, order, [None]).to(parts.device)
    for mesh in dict.fromkeys(t.device_mesh for _, t in divided):
        here = torch.tensor([at for at, t in divided if t.device_mesh == mesh], device=sent.device)
        sent[here] = _reduced(sent[here], order, [mesh.get_group(at) for at in range(mesh.ndim)])
    return sent.to(parts.device)


def _reduced(parts: torch.Tensor, order: _Order, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    if not order.largest:
        for group in groups:
            dist.all_reduce(parts, order.reduction, group=group)
        return parts
    # The larger of two may lose what is no number: that travels beside.
    sign = 1 if order.p > 0 else -1
    both = torch.stack(
        [parts.nan_to_num(nan=order.nothing, posinf=math.inf), sign * parts.isnan().to(parts.dtype)]
    )
    for group in groups:
        dist.all_reduce(both, order.reduction, group=group)
    return torch.where(both[1] == 0, both[0], math.nan)


def _spans_all(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every mesh is cut from all processes: then one collective among all of them does."""
    meshes = {t.device_mesh for t in tensors if isinstance(t, DTensor)}
    # No public name says it; where this one is gone, there are more collectives.
    roots = [getattr(mesh, "_get_root_mesh", lambda: None)() for mesh in meshes]
    return bool(roots) and all(root is not None and root.size() == dist.get_world_size() for root in roots)


def _owns(tensor: torch.Tensor, *, together: bool) -> bool:
    """Whether this rank counts its part of the tensor, of all that have the same one.

    Args:
        tensor: Divided or plain.
        together: Whether all processes count together; else those of each mesh do, and plain ones everywhere.
    """
    if not isinstance(tensor, DTensor):
        return not together or dist.get_rank() == 0
    place = tensor.device_mesh.get_coordinate()
    if place is None or (together and not _first(tensor.device_mesh)):
        return False
    return all(at == 0 for at, p in zip(place, tensor.placements, strict=True) if p.is_replicate())


def _first(mesh: DeviceMesh) -> bool:
    """Whether the mesh is the one with the first process, of all that were cut alike."""
    return bool((mesh.mesh == 0).any())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: its own memory, to be changed in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors by device and dtype: torch's operations on lists want them alike."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())
