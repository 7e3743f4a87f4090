"""Models made on another device, or on none: their shapes without their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

__all__ = ["init_empty_weights", "init_on_device"]


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Inside, the parameters of new modules are on the meta device: they have a shape and no memory.

    Args:
        include_buffers: Their buffers too; by default buffers are computed and kept, and each parameter is
            made in memory before it is let go, one at a time.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Inside, the parameters of new modules are on `device`.

    Args:
        device: Where to.
        include_buffers: Everything new, buffers too; by default buffers stay where the module makes them.
    """
    device = torch.device(device)
    if include_buffers:
        with device:
            yield
        return

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # A parameter that is there already stays the same object: another module may share it.
        if parameter is None or parameter.device == device or nn.parameter.is_lazy(parameter):
            return None
        kind = type(parameter)
        there: nn.Parameter = kind(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        vars(there).update(vars(parameter))
        return there

    handle = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
