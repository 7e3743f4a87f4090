"""Activations that are computed again in the backward pass, so that they need not be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_runtime.parallel.wrapping import Units

__all__ = ["CheckpointedForward", "apply", "chosen", "is_checkpointed"]


class CheckpointedForward:
    """A module's forward pass of which only the inputs are kept.

    It stands inside of the module: names, hooks and classes stay what they are, `fully_shard` has gathered the
    parameters when it runs again, and torch.compile knows torch's function. Dropout falls alike both times.

    Args:
        forward: The forward pass as it was.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        """The forward pass as it was."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; without gradients there is nothing to keep either way."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def apply(model: nn.Module, units: Units) -> None:
    """Have the innermost of these modules keep their inputs only.

    Args:
        model: The script's model, before it is sharded.
        units: The modules that are gathered as a whole.

    Raises:
        ValueError: There is no such module, or the model does this by itself already.
    """
    if not units:
        raise ValueError(
            f"fully_shard.activation_checkpointing: {type(model).__name__} has no module to compute again, since "
            "fully_shard.wrap chooses none; name a class, such as wrap: Block"
        )
    if getattr(model, "is_gradient_checkpointing", False):
        raise ValueError(
            f"fully_shard.activation_checkpointing: {type(model).__name__} computes its activations again already, by its "
            "gradient_checkpointing_enable(); keep one of them"
        )
    for _, module in chosen(units):
        if not is_checkpointed(module):
            module.forward = CheckpointedForward(module.forward)


def chosen(units: Units) -> Units:
    """The modules that hold no other one of them: what is inside twice would be computed three times."""
    every = {id(module) for _, module in units}
    return [
        (name, module)
        for name, module in units
        if not any(id(inner) in every for inner in module.modules() if inner is not module)
    ]


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module keeps its inputs only."""
    return isinstance(module.forward, CheckpointedForward)
