"""Models on the meta device: creation, checks, and memory for their values; named as Accelerate's `big_modeling`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accel_runtime.foundation.module_names import script_names
from accel_runtime.foundation.torch_internals import (
    gradient_hooks,
    is_compiled,
    list_buffers,
    list_tensors,
    set_gradient_hooks,
    version_of,
)
from accel_runtime.storage.errors import format_names

__all__ = [
    "MetaModels",
    "compute_buffers",
    "describe_dispatch",
    "init_empty_weights",
    "init_on_device",
    "list_meta_tensors",
    "refuse_forward_on_meta",
    "refuse_meta_model",
]


_CURE = (
    "Load values with accelerator.load_model(model, path), or call model.to_empty(device=accelerator.device) and initialize "
    "the model."
)


def list_meta_tensors(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers on the meta device."""
    if not any(tensor.is_meta for tensor in list_tensors(model)):
        return []  # without names it takes a fifth of the time
    named = (*model.named_parameters(), *model.named_buffers())
    return list(script_names(model, [name for name, tensor in named if tensor.is_meta]).values())


def refuse_meta_model(model: nn.Module) -> None:
    """Raise ValueError for a model on the meta device if nothing would materialize it."""
    if names := list_meta_tensors(model):
        raise ValueError(
            f"Cannot prepare a model on the meta device ({format_names(names)}) without sharding. Set parallel: dp_shard: auto in "
            "the profile (or Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=...))), or create the model outside "
            "of init_empty_weights() and torch.device('meta')."
        )


def describe_dispatch(model: nn.Module) -> str:
    """Return where Accelerate or transformers has dispatched the parts of a model to; an empty text if it is on one device.

    `from_pretrained(device_map="auto")` and `dispatch_model` leave a map of devices, `cpu_offload` only hooks, and offloaded
    parameters on the meta device.
    """
    # Both are attributes of the module itself; `getattr` would also search its parameters, buffers and modules.
    attributes = [vars(module) for module in model.modules()]
    devices = {str(device) for own in attributes for device in own.get("hf_device_map", {}).values()}
    if len(devices) > 1:
        return f"on several devices ({', '.join(sorted(devices))})"
    is_offloaded = any("_hf_hook" in own for own in attributes) and list_meta_tensors(model)
    return "offloaded to the host or disk" if is_offloaded else ""


class _MetaForwardGuard:
    """Raise in forward passes of a model without values."""

    def __init__(self, model: nn.Module) -> None:
        disabled: Any = torch.compiler.disable
        check = disabled(self._check) if is_compiled(model) else self._check
        # Before the hooks of fully_shard, which would raise a less helpful error.
        self.handle = model.register_forward_pre_hook(check, prepend=True)

    def _check(self, model: nn.Module, _: Any) -> None:
        if names := list_meta_tensors(model):
            raise RuntimeError(
                f"Cannot run the model: {format_names(names)} {'are' if len(names) > 1 else 'is'} on the meta device. {_CURE}"
            )
        self.handle.remove()


def refuse_forward_on_meta(model: nn.Module) -> None:
    """Make the forward pass of a model without values raise an error that names the cure."""
    if list_meta_tensors(model):
        _MetaForwardGuard(model)


@dataclass(frozen=True)
class MetaModels:
    """The devices on which models are materialized."""

    device: torch.device
    """The device of the computation."""
    parameter_device: torch.device
    """The device of sharded parameters, which is the host if they are offloaded."""

    def materialize(self, model: nn.Module) -> None:
        """Allocate parameters and buffers on the meta device in place; modules that share one share the new one."""
        buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The old buffers, so that no other has the id of one, and the new ones."""

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta:
                return tensor
            device = self.parameter_device if hasattr(tensor, "device_mesh") else self.device
            if isinstance(tensor, nn.Parameter):
                return torch.empty_like(tensor, device=device)
            if id(tensor) not in buffers:
                buffers[id(tensor)] = tensor, torch.empty_like(tensor, device=device)
            return buffers[id(tensor)][1]

        # to_empty() would drop existing values.
        apply: Any = model._apply  # noqa: SLF001
        # Otherwise torch replaces the parameters, and optimizers keep the old ones.
        previous = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        attributes = {parameter: dict(vars(parameter)) for parameter in model.parameters()}
        try:
            apply(allocate)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(previous)
        for parameter in model.parameters():
            vars(parameter).update(attributes[parameter])
            set_gradient_hooks(parameter, gradient_hooks(parameter))


@contextmanager
def compute_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute non-persistent buffers on the meta device; move them back if the body fails.

    A module computes its own in `reset_buffers()`, `reset_parameters()` or `init_weights()`, or a parent does in
    `_init_weights(module)`, as in transformers: the first of these that writes each buffer. Parameters stay on the meta device
    meanwhile.

    Raises:
        ValueError: Nothing computes a buffer; the message names all of them, and all are restored.
    """
    missing = []
    for path, module in model.named_modules():
        tables = list_buffers(module, persistent=False)
        if buffers := {name: getattr(module, name) for name in tables if _is_meta(getattr(module, name))}:
            missing.append((path, module, buffers))
    not_computed = []
    try:
        # Random numbers drawn here must not change those of the script.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for path, module, names in missing:
                not_computed += [
                    f"{path}.{name}" if path else name
                    for name in _compute_buffers(model, path, module, names, device)
                ]
        _check_computed(not_computed)
        yield
    except BaseException:
        for _, module, names in missing:
            for name, buffer in names.items():
                setattr(module, name, buffer.to("meta"))
        raise


def _check_computed(names: list[str]) -> None:
    if names:
        raise ValueError(
            f"Cannot compute {format_names(names)}: on the meta device and in no file (persistent=False). Add a method "
            "reset_buffers() to the module that computes it, or create the model in init_empty_weights(), which does not move "
            "buffers."
        )


def _set_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)


def _is_meta(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta


def _compute_buffers(
    model: nn.Module, path: str, module: nn.Module, buffers: dict[str, torch.Tensor], device: torch.device
) -> list[str]:
    """Compute the buffers of a module; return the names of those that were not written."""
    remaining = dict(buffers)
    for compute in _initializers(model, path, module):
        allocated = {name: torch.empty_like(buffer, device=device) for name, buffer in remaining.items()}
        versions = {name: version_of(tensor) for name, tensor in allocated.items()}
        _set_buffers(module, allocated)
        with torch.device(device):
            compute()
        for name, tensor in allocated.items():
            current = getattr(module, name)
            if (
                current is not None
                and not current.is_meta
                and (current is not tensor or version_of(current) > versions[name])
            ):
                setattr(module, name, current.to(device))
                del remaining[name]
        if not remaining:
            break
    _set_buffers(module, remaining)
    return list(remaining)


def _initializers(model: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    methods = [getattr(module, "reset_buffers", None)]
    if all(parameter.is_meta for parameter in module.parameters()):
        methods += [getattr(module, name, None) for name in ("reset_parameters", "init_weights")]
    yield from (method for method in methods if callable(method))
    parts = path.split(".") if path else []
    for length in reversed(range(len(parts) + 1)):
        init_weights = getattr(model.get_submodule(".".join(parts[:length])), "_init_weights", None)
        if callable(init_weights) and all(parameter.is_meta for parameter in module.parameters()):
            yield lambda init_weights=init_weights: init_weights(module)  # type: ignore[misc]


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Create the parameters of new modules on the meta device, without memory.

    Args:
        include_buffers: Create buffers there too. By default buffers are computed and kept, and each parameter is allocated
            before it is dropped, one at a time.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Create the parameters of new modules on `device`.

    Args:
        device: The device.
        include_buffers: Create all new tensors there, buffers too. By default buffers stay on the device of the module.
    """
    device = torch.device(device)
    if include_buffers:
        with device:
            yield
        return

    def move_parameter(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # A parameter on the device stays the same object, since another module may share it.
        if parameter is None or parameter.device == device or nn.parameter.is_lazy(parameter):
            return None
        parameter_type = type(parameter)
        moved_parameter: nn.Parameter = parameter_type(
            parameter.detach().to(device), requires_grad=parameter.requires_grad
        )
        vars(moved_parameter).update(vars(parameter))
        return moved_parameter

    handle = register_module_parameter_registration_hook(move_parameter)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
