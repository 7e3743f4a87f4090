"""The script's own module out of what `prepare` made of it."""

from __future__ import annotations

from torch import nn

from accel_runtime.backends.base import Backend
from accel_runtime.compilation import restore
from accel_runtime.precision import AutocastForward

__all__ = ["unwrapped"]


def unwrapped(model: nn.Module, backend: Backend, *, keep_autocast: bool, keep_compiled: bool) -> nn.Module:
    """The module that was prepared.

    Args:
        model: A prepared model, or any module.
        backend: Knows what it put around the module.
        keep_autocast: False also takes autocast off its forward pass.
        keep_compiled: False also takes `torch.compile` off it.
    """
    original = backend.original(model)
    if not keep_compiled:
        original = restore(original)
    forward = original.__dict__.get("forward")
    if not keep_autocast and isinstance(forward, AutocastForward):
        original.forward = forward.forward
    return original
