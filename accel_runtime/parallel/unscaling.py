"""The scale taken out of gradients that are divided over processes; all ranks learn of an overflow on one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from accel_runtime.parallel.norms import agreed, local, settle

__all__ = ["unscaled"]

_Found = dict[torch.device, torch.Tensor]


@torch.no_grad()
def unscaled(optimizer: torch.optim.Optimizer, unscale: Callable[[Any], _Found]) -> _Found:
    """Unscale this rank's parts, and agree on whether there was an overflow.

    Args:
        optimizer: Has divided parameters, and perhaps plain ones.
        unscale: Unscales the gradients of an optimizer; torch's operation takes no mixture of both.

    Returns:
        By device, whether there was an overflow: the same on every rank.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    settle(parameters)
    found = unscale(SimpleNamespace(param_groups=[{"params": [_part(p) for p in parameters]}]))
    if not found:
        return found
    first = next(iter(found))
    worst = agreed(torch.stack([one.to(first) for one in found.values()]).amax(), parameters)
    return {device: worst.to(device) for device in found}


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter, with what it has of the gradient."""
    part = local(parameter).detach()
    if parameter.grad is not None:
        part.grad = local(parameter.grad)
    return part
