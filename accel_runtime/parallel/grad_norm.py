"""Norms and clipping of sharded gradients, mixed with plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from accel_runtime.torch_internals import foreach_norm, local_tensor

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
    "unscale_gradients",
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


def max_over_shards(value: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the maximum of a scalar over all ranks that have a shard of the tensors; collective."""
    shards = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    sent = value[None].to(shards[0].device_mesh.device_type)
    meshes = dict.fromkeys(tensor.device_mesh for tensor in shards)
    groups = (
        [None] if _spans_all(shards) else [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
    )
    return _all_reduce(sent, _Order(math.inf), groups)[0].to(value.device)


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


@dataclass(frozen=True)
class _Order:
    """The arithmetic of norms of an order."""

    p: float

    @property
    def is_extreme(self) -> bool:
        """Return whether the norm is a maximum or minimum."""
        return math.isinf(self.p)

    @property
    def empty_norm(self) -> float:
        """The norm of an empty tensor."""
        return math.inf if self.p < 0 else 0.0

    @property
    def reduction(self) -> dist.ReduceOp.RedOpType:
        if not self.is_extreme:
            return dist.ReduceOp.SUM
        return dist.ReduceOp.MAX if self.p > 0 else dist.ReduceOp.MIN

    def summand(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the summand of each norm; a norm of order 0 is a count already."""
        return norms if self.is_extreme or self.p == 0 else norms.pow(self.p)

    def norm(self, sums: torch.Tensor) -> torch.Tensor:
        return sums if self.is_extreme or self.p == 0 else sums.pow(1 / self.p)


@torch.no_grad()
def _compute_total(tensors: list[torch.Tensor | None], p: float) -> torch.Tensor:
    present = [t for t in tensors if t is not None]
    if not present:
        return torch.tensor(0.0)
    order, device = _Order(p), local_tensor(present[0]).device
    dtype = torch.float32 if all(t.dtype != torch.float64 for t in present) else torch.float64
    single_group = _spans_all(present)
    owned = [t is not None and _owns(t, single_group=single_group) for t in tensors]
    shards = [
        local_tensor(t) if is_owned and t is not None else None
        for t, is_owned in zip(tensors, owned, strict=True)
    ]
    summands = order.summand(_local_norms(shards, order, device))
    summands = _reduce_norms(summands, tensors, order, single_group=single_group)
    total: torch.Tensor = torch.linalg.vector_norm(order.norm(summands), p).to(dtype)
    return total


def _local_norms(parts: Sequence[torch.Tensor | None], order: _Order, device: torch.device) -> torch.Tensor:
    """Return the norm of each shard; missing and empty ones get the norm of an empty tensor."""
    # Sums of squares over many ranks are inaccurate in float32.
    accumulation_dtype = torch.float32 if device.type == "mps" else torch.float64
    empty = torch.full((), order.empty_norm, dtype=accumulation_dtype, device=device)
    norms = [empty] * len(parts)
    indices = {id(part): index for index, part in enumerate(parts) if part is not None}
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        if part is not None and part.numel():
            groups.setdefault((part.device, part.dtype), []).append(part)
    for group in groups.values():
        dtype = torch.promote_types(group[0].dtype, torch.float32)
        group_norms = foreach_norm(group, order.p, dtype)
        for part, norm in zip(group, group_norms, strict=True):
            norms[indices[id(part)]] = norm.to(device, accumulation_dtype)
    return torch.stack(norms)


def _reduce_norms(
    parts: torch.Tensor, tensors: Sequence[torch.Tensor | None], order: _Order, *, single_group: bool
) -> torch.Tensor:
    """Reduce the norms over all ranks: in one collective, or in one per dimension of each mesh."""
    sharded = [(index, t) for index, t in enumerate(tensors) if isinstance(t, DTensor)]
    if not sharded:
        return parts
    device_type = sharded[0][1].device_mesh.device_type
    # Gradients may be offloaded to the host, but collectives need the device.
    sent = parts.to(device_type)
    if single_group:
        return _all_reduce(sent, order, [None]).to(parts.device)
    for mesh in dict.fromkeys(t.device_mesh for _, t in sharded):
        selected = torch.tensor([index for index, t in sharded if t.device_mesh == mesh], device=sent.device)
        sent[selected] = _all_reduce(
            sent[selected], order, [mesh.get_group(index) for index in range(mesh.ndim)]
        )
    return sent.to(parts.device)


def _all_reduce(
    parts: torch.Tensor, order: _Order, groups: Sequence[dist.ProcessGroup | None]
) -> torch.Tensor:
    if not order.is_extreme:
        for group in groups:
            dist.all_reduce(parts, order.reduction, group=group)
        return parts
    # A maximum may drop NaN, so NaNs are reduced in a second row.
    sign = 1 if order.p > 0 else -1
    values_and_nans = torch.stack(
        [parts.nan_to_num(nan=order.empty_norm, posinf=math.inf), sign * parts.isnan().to(parts.dtype)]
    )
    for group in groups:
        dist.all_reduce(values_and_nans, order.reduction, group=group)
    return torch.where(values_and_nans[1] == 0, values_and_nans[0], math.nan)


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
def unscale_gradients(optimizer: torch.optim.Optimizer, unscale: Callable[[Any], _FoundInf]) -> _FoundInf:
    """Unscale this rank's shards, and return by device whether any rank had an overflow.

    Args:
        optimizer: An optimizer with sharded parameters.
        unscale: Unscales the gradients of an optimizer; torch's function does not support sharded and plain ones together.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    reduce_partial_gradients(parameters)
    shards = []
    for parameter in parameters:
        shards.append(local_tensor(parameter).detach())
        if parameter.grad is not None:
            shards[-1].grad = local_tensor(parameter.grad)
    found_inf = unscale(SimpleNamespace(param_groups=[{"params": shards}]))
    if not found_inf:
        return found_inf
    device_ = next(iter(found_inf))
    overflow = max_over_shards(
        torch.stack([value.to(device_) for value in found_inf.values()]).amax(), parameters
    )
    return {device: overflow.to(device) for device in found_inf}
