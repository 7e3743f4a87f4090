"""Models brought to a device that needs new tensors, and state fetched from there, with what is one staying one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

import torch
from torch import nn

from accel_runtime import tree

__all__ = ["hosted", "moved"]

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps what a script has registered on a tensor; they belong to the memory, which is swapped."""


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
        hooks = {name: getattr(tensor, name) for name in _HOOKS}
        there = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, requires_grad=tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, there)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                f"{name} cannot be brought to {device}, since something else holds on to it ({error}): call prepare() "
                "before the first forward pass"
            ) from error
        tensor.grad = None if grad is None else grad.to(device)
        for kind, own in hooks.items():
            if own:
                setattr(tensor, kind, own)
    return model


def hosted(
    state: Any,
    identity: Callable[[torch.Tensor], Hashable],
    fetch: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Any:
    """The state with its tensors on the CPU.

    Args:
        state: Nested in any way.
        identity: The same for tensors that are one on the device.
        fetch: Brings all of them at once.
    """

    def lazy(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"

    known = {identity(leaf): leaf.detach() for leaf in tree.leaves(state) if lazy(leaf)}
    here = dict(zip(known, fetch(list(known.values())), strict=True))
    return tree.map_leaves(lambda leaf: here[identity(leaf)] if lazy(leaf) else leaf, state)
