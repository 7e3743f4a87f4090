"""Norms and clipping of sharded gradients, mixed with plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from accel_runtime.foundation.torch_internals import foreach_norm, local_tensor

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
    "unscale_shards",
]


def get_total_norm(
    tensors: Iterable[torch.Tensor | None], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Return the norm of tensors as one vector, equal on every rank; each element counts once.

    The call is collective. Plain tensors are read from the first rank.

    Args:
        tensors: Sharded or plain tensors; None is skipped.
        norm_type: The order.
        error_if_nonfinite: Raise RuntimeError if the norm is not finite.

    Returns:
        A plain scalar in float32, or in float64 if a tensor is float64.
    """
    total = _compute_total([None if t is None else _reduce_partial(t) for t in tensors], float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"Cannot clip gradients: their total norm of order {norm_type} is {total.item()}. Pass error_if_nonfinite=False to clip "
            "anyway."
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
    """Run `torch.nn.utils.clip_grad_norm_` for sharded parameters; see `get_total_norm`."""
    params = list(parameters)
    total = get_total_norm(reduce_partial_gradients(params), norm_type, error_if_nonfinite=error_if_nonfinite)
    nn.utils.clip_grads_with_norm_(_local_gradients(params), max_norm, total)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Run `torch.nn.utils.clip_grad_value_` for sharded parameters."""
    params = list(parameters)
    reduce_partial_gradients(params)
    nn.utils.clip_grad_value_(_local_gradients(params), clip_value)


def _local_gradients(parameters: Sequence[torch.Tensor]) -> Any:
    """Return objects with this rank's shard of each gradient, for torch's functions that clip."""
    return [SimpleNamespace(grad=local_tensor(p.grad)) for p in parameters if p.grad is not None]


def reduce_partial_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients; partial sums are reduced and replaced."""
    for parameter in parameters:
        if (
            parameter.grad is not None
            and (reduced := _reduce_partial(parameter.grad, parameter)) is not parameter.grad
        ):
            parameter.grad = reduced
    return [parameter.grad for parameter in parameters]


def _reduce_partial(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor with partial sums reduced, with the placements of `like` if it is on the same mesh."""
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    placements: Sequence[Placement]
    if isinstance(like, DTensor) and like.device_mesh == tensor.device_mesh:
        placements = like.placements
    else:
        placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


@torch.no_grad()
def _compute_total(tensors: list[torch.Tensor | None], p: float) -> torch.Tensor:
    present = [t for t in tensors if t is not None]
    if not present:
        return torch.tensor(0.0)
    single_group = _spans_all(present)
    norms = _local_norms(tensors, p, local_tensor(present[0]).device, single_group=single_group)
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor, norm in zip(tensors, norms, strict=True):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) and not single_group else None
        by_mesh.setdefault(mesh, []).append(norm)
    device_type = next((t.device_mesh.device_type for t in present if isinstance(t, DTensor)), "")
    parts = []
    for mesh, members in by_mesh.items():
        part = torch.stack(members)
        if p != 0:  # the norm of order 0 counts tensors
            part = torch.linalg.vector_norm(part, p, keepdim=True)
        if single_group or mesh is not None:
            groups = [mesh.get_group(index) for index in range(mesh.ndim)] if mesh is not None else [None]
            part = _combine_over_ranks(part, p, groups, device_type)
        parts.append(part)
    dtype = torch.float32 if all(t.dtype != torch.float64 for t in present) else torch.float64
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(parts), p).to(dtype)
    return total


def _local_norms(
    tensors: Sequence[torch.Tensor | None], p: float, device: torch.device, *, single_group: bool
) -> list[torch.Tensor]:
    """Return the norm of each shard that counts on this rank; others get the norm of an empty tensor."""
    # Sums of squares over many ranks are inaccurate in float32.
    accumulation_dtype = torch.float32 if device.type == "mps" else torch.float64
    empty = torch.full((), math.inf if p < 0 else 0.0, dtype=accumulation_dtype, device=device)
    norms = [empty] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and _owns(tensor, single_group=single_group):
            shard = local_tensor(tensor)
            if shard.numel():
                groups.setdefault((shard.device, shard.dtype), {})[index] = shard
    for (_, dtype), shards in groups.items():
        group_norms = foreach_norm(list(shards.values()), p, torch.promote_types(dtype, torch.float32))
        for index, norm in zip(shards, group_norms, strict=True):
            norms[index] = norm.to(device, accumulation_dtype)
    return norms


def _combine_over_ranks(
    norms: torch.Tensor, p: float, groups: Sequence[dist.ProcessGroup | None], device_type: str
) -> torch.Tensor:
    """Return the norms over the shards of all ranks of the groups."""
    # Gradients may be offloaded to the host, but collectives need the device.
    combined = norms.to(device_type)
    for group in groups:
        gathered = [torch.empty_like(combined) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, combined, group=group)
        # A norm of order 0 is a count.
        combined = torch.linalg.vector_norm(torch.stack(gathered), p or 1.0, dim=0)
    return combined.to(norms.device)


def _spans_all(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether every mesh is a slice of a mesh of all processes, so that one collective is enough."""
    meshes = {t.device_mesh for t in tensors if isinstance(t, DTensor)}
    # Private in torch 2.13; without it, there is one collective per mesh dimension.
    roots = [getattr(mesh, "_get_root_mesh", lambda: None)() for mesh in meshes]
    return bool(roots) and all(root is not None and root.size() == dist.get_world_size() for root in roots)


def _owns(tensor: torch.Tensor, *, single_group: bool) -> bool:
    """Return whether this rank counts its shard, of all ranks with the same one.

    Args:
        tensor: A sharded or plain tensor.
        single_group: True if all processes reduce together; otherwise each mesh does, and plain tensors count on every rank.
    """
    if not isinstance(tensor, DTensor):
        return not single_group or dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or (single_group and 0 not in tensor.device_mesh.mesh):
        return False
    return all(index == 0 for index, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate())


_FoundInf = dict[torch.device, torch.Tensor]


@torch.no_grad()
def unscale_shards(optimizer: torch.optim.Optimizer, unscale: Callable[[Any], _FoundInf]) -> _FoundInf:
    """Unscale this rank's shards, and return by device whether any rank had an overflow.

    Args:
        optimizer: An optimizer with sharded parameters.
        unscale: Unscales the gradients of an optimizer; torch's function does not support sharded and plain ones together.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    reduce_partial_gradients(parameters)
    local = [local_tensor(parameter).detach() for parameter in parameters]
    for shard, parameter in zip(local, parameters, strict=True):
        shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
    found_inf = unscale(SimpleNamespace(param_groups=[{"params": local}]))
    if not found_inf:
        return found_inf
    shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    overflow = torch.stack(
        [value.to(shards[0].device_mesh.device_type) for value in found_inf.values()]
    ).amax()
    meshes = dict.fromkeys(shard.device_mesh for shard in shards)
    groups = [mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)]
    for group in [None] if _spans_all(shards) else groups:
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)
    return {device: overflow.to(device) for device in found_inf}
