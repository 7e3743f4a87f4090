"""A model brought to a device that needs new tensors, with every parameter staying the object it is."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

__all__ = ["moved"]


@torch.no_grad()
def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself, on the device.

    `module.to` puts new parameters into the place of the old ones where a device has a tensor type of its own: tied
    weights come apart, and an optimizer made before goes on with weights nobody computes with. Swapped, a parameter
    stays the object that the other layer, the optimizer and the script hold.

    Raises:
        RuntimeError: Something else holds on to a parameter's memory, a graph or a weak reference.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device == device:
            continue
        grad, tensor.grad = tensor.grad, None
        there = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, requires_grad=tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, there)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                f"{name} cannot be brought to {device}, since something else holds on to it ({error}): call prepare() "
                "before the first forward pass, and before hooks are put on parameters"
            ) from error
        tensor.grad = None if grad is None else grad.to(device)
    return model
