"""The script's own module out of what `prepare` made of it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_runtime.backends.base import Backend
from accel_runtime.compilation import plain, restore
from accel_runtime.precision import AutocastForward

__all__ = ["unwrap_parts", "unwrapped"]

_WRAPPERS = (DataParallel, DistributedDataParallel)
"""Wrappers of torch that replicate a module, and have it as `module`."""


def unwrapped(model: nn.Module, backend: Backend, *, keep_autocast: bool, keep_compiled: bool) -> nn.Module:
    """The module that was prepared, without wrappers that replicate it, of accel and of the script.

    A wrapper that was compiled is taken off with its compilation.

    Args:
        model: A prepared model, or any module.
        backend: Knows what it put around the module.
        keep_autocast: False also takes autocast off its forward pass.
        keep_compiled: False also takes `torch.compile` off it.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unwrap_model() failed: {model!r} is no torch.nn.Module. Pass a model.")
    original = _without_wrappers(backend.original(model))
    if not keep_compiled:
        original = restore(original)
    forward = original.__dict__.get("forward")
    if not keep_autocast and isinstance(forward, AutocastForward):
        original.forward = forward.forward
    return original


def unwrap_parts(model: nn.Module) -> nn.Module:
    """Replace wrapped modules inside a model by the modules in them, and return the model."""
    for name, child in list(model.named_children()):
        if (inner := unwrap_parts(_without_wrappers(child))) is not child:
            setattr(model, name, inner)
    return model


def _without_wrappers(model: nn.Module) -> nn.Module:
    while isinstance(wrapper := plain(model), _WRAPPERS):
        model = wrapper.module
    return model
