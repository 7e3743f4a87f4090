"""Gradients that `fully_shard` holds while it does not synchronise: whole on every rank, and of its own batches only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.parallel.gathering import parameter_groups, units

__all__ = ["hold", "unreduced"]


def unreduced(models: Iterable[nn.Module]) -> dict[nn.Parameter, torch.Tensor]:
    """What is held of which parameter, as plain tensors; ranks that divide a layer put it together for that.

    Raises:
        CheckpointError: What is held under tensor parallelism is a sum that is not complete.
    """
    found = {}
    for sharded in _sharded(models):
        gradient = sharded.unsharded_accumulated_grad
        if gradient is None and hasattr(sharded, "_unsharded_param"):
            gradient = sharded._unsharded_param.grad  # noqa: SLF001
        if gradient is not None:
            found[sharded.sharded_param] = _plain(gradient, str(sharded._param_fqn))  # noqa: SLF001
    return found


def hold(models: Iterable[nn.Module], gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Put back what `unreduced` gave, and nothing else; the next backward passes add to it.

    Args:
        models: Sharded models, at rest.
        gradients: By parameter; whole.
    """
    for sharded in _sharded(models):
        held = gradients.get(sharded.sharded_param)
        if hasattr(sharded, "_unsharded_param"):
            sharded._unsharded_param.grad = None  # noqa: SLF001
        sharded.unsharded_accumulated_grad = None if held is None else _placed(held, sharded)


def _sharded(models: Iterable[nn.Module]) -> Iterator[Any]:
    """Torch's own books of every sharded parameter; nothing public shows them (torch 2.13)."""
    for model in models:
        for unit in units(model):
            for group in parameter_groups(unit):
                yield from group.fsdp_params


def _plain(gradient: Any, name: str) -> torch.Tensor:
    if not hasattr(gradient, "device_mesh"):
        plain: torch.Tensor = gradient
        return plain
    if any(placement.is_partial() for placement in gradient.placements):
        raise CheckpointError(
            f"window: the gradient of {name} is held half-way through an accumulation window as a sum that tensor parallelism "
            "has not completed, and completing it now would round otherwise: save at the end of a window"
        )
    whole: torch.Tensor = gradient.full_tensor()
    return whole


def _placed(held: torch.Tensor, sharded: Any) -> torch.Tensor:
    own = held.to(sharded.device).clone()
    spec = sharded._unsharded_dtensor_spec  # noqa: SLF001
    if spec is None:
        return own
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - it is loaded where a model is sharded
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    sizes, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    for dimension, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
        own = own.narrow(dimension, begin, length)
    return DTensor.from_local(
        own.contiguous(), spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=held.stride()
    )
