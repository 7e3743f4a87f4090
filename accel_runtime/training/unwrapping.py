"""Unwrapping of prepared models."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_runtime.backends.base import Backend
from accel_runtime.training.compilation import uncompile, uncompiled_module
from accel_runtime.training.precision import AutocastForward

__all__ = ["unwrap", "unwrap_submodules"]

_WRAPPERS = (DataParallel, DistributedDataParallel)
"""Wrappers of torch that replicate a module, and have it as `module`."""


def unwrap(model: nn.Module, backend: Backend, *, keep_autocast: bool, keep_compiled: bool) -> nn.Module:
    """Return the module that was prepared, without the wrappers of accel and of the script that replicate it.

    A wrapper that was compiled is removed with its compilation. Without `keep_autocast`, autocast of the forward pass
    is removed too, without `keep_compiled` also `torch.compile`. Raises TypeError if `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unwrap_model() failed: {model!r} is not a torch.nn.Module. Pass a model.")
    original = _strip_wrappers(backend.unwrap_model(model))
    if not keep_compiled:
        original = uncompile(original)
    forward = original.__dict__.get("forward")
    if not keep_autocast and isinstance(forward, AutocastForward):
        original.forward = forward.forward
    return original


def unwrap_submodules(model: nn.Module) -> nn.Module:
    """Replace wrapped modules inside a model by the modules in them, and return the model."""
    for name, child in list(model.named_children()):
        if (inner := unwrap_submodules(_strip_wrappers(child))) is not child:
            setattr(model, name, inner)
    return model


def _strip_wrappers(model: nn.Module) -> nn.Module:
    while isinstance(wrapper := uncompiled_module(model), _WRAPPERS):
        model = wrapper.module
    return model
