"""Models on the meta device, which have shapes and no memory: refused, guarded, and given memory for their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_runtime.checkpoint.live import some

__all__ = ["Memory", "empty", "guard", "refuse", "with_buffers"]

_CURE = (
    "accelerator.load_model(model, path) gives it those of a safetensors file; for new ones, call "
    "model.to_empty(device=accelerator.device) and initialise it"
)


def empty(model: nn.Module) -> list[str]:
    """The names of parameters and buffers on the meta device."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor.is_meta]


def refuse(model: nn.Module) -> None:
    """Refuse a model on the meta device where nothing would give it memory.

    Raises:
        ValueError: It has parameters or buffers there.
    """
    if names := empty(model):
        raise ValueError(
            f"the model is on the meta device, where {some(names)} {_has(names)} a shape and no memory, and only "
            "sharded models can be prepared so: set parallel: dp_shard: auto in the profile (or "
            "Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=...))), or make the model outside of "
            "init_empty_weights() and torch.device('meta')"
        )


class _Guard:
    """Refuses forward passes of a model that has no values."""

    def __init__(self, model: nn.Module) -> None:
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        disabled: Any = torch.compiler.disable
        check = disabled(self._check) if compiled else self._check
        # Before the hooks of fully_shard, which would say it in other words.
        self.handle = model.register_forward_pre_hook(check, prepend=True)

    def _check(self, model: nn.Module, _: Any) -> None:
        if names := empty(model):
            raise RuntimeError(
                f"the model has no values yet: {some(names)} {_is(names)} on the meta device. {_CURE}"
            )
        self.handle.remove()


def guard(model: nn.Module) -> None:
    """See to it that a forward pass of a model without values ends in a message that says what to do.

    Args:
        model: A sharded model; nothing is done where it has values.
    """
    if empty(model):
        _Guard(model)


@dataclass(frozen=True)
class Memory:
    """Where models that have none get theirs."""

    device: torch.device
    """What is computed on."""
    home: torch.device
    """Where sharded parameters rest: that, or the host."""

    def materialize(self, model: nn.Module) -> None:
        """Give memory to parameters and buffers that have none; every parameter stays the object it is.

        Args:
            model: A model, sharded or not. What has memory keeps it.
        """

        def made(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta:
                return tensor
            where = self.home if hasattr(tensor, "device_mesh") else self.device
            return torch.empty_like(tensor, device=where)

        # to_empty() would take away the values that there are.
        apply: Any = model._apply  # noqa: SLF001
        # Without, torch puts new parameters in the places of the old, and optimizers have the old.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            apply(made)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        for parameter in model.parameters():
            _hooked_again(parameter)


def _hooked_again(parameter: nn.Parameter) -> None:
    """Have hooks on a parameter called again: torch swaps its list of them, and leaves what calls them behind."""
    own: Any = parameter
    for name in ("_post_accumulate_grad_hooks", "_backward_hooks"):
        if hooks := getattr(own, name):
            setattr(own, name, hooks)


@contextmanager
def with_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute the buffers that no file has, and that are on the meta device; leave them so where all goes well.

    A module computes its own in `reset_buffers()`, `reset_parameters()` or `init_weights()`, or a module around it does
    in `_init_weights(module)`, as in the transformers library: the first of these that it has and that gives each
    buffer a value. Parameters are on the meta device meanwhile, so that those are as they were.

    Args:
        model: A model.
        device: Where the buffers go.

    Raises:
        ValueError: There is one that nothing computes; the message names all, and they are as they were.
    """
    found = list(_missing(model))
    wrong = []
    try:
        # What is drawn here is replaced or thrown away, and the script's random numbers go on as if it was not.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for path, module, names in found:
                wrong += [_path(path, name) for name in _computed(model, path, module, names, device)]
        _refuse_unknown(wrong)
        yield
    except BaseException:
        for _, module, names in found:
            for name, buffer in names.items():
                module._buffers[name] = buffer.to("meta")  # noqa: SLF001
        raise


def _refuse_unknown(names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{some(names)} {_is(names)} on the meta device and in no file (persistent=False), and nothing computes it: "
            "give the module that has it a method reset_buffers() that does, or make the model in init_empty_weights(), "
            "which leaves buffers where they are made"
        )


def _missing(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    for path, module in model.named_modules():
        loose = module._non_persistent_buffers_set  # noqa: SLF001 - nothing public tells
        buffers = {
            name: buffer
            for name, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None and buffer.is_meta and name in loose
        }
        if buffers:
            yield path, module, buffers


def _computed(
    model: nn.Module, path: str, module: nn.Module, buffers: dict[str, torch.Tensor], device: torch.device
) -> list[str]:
    """Compute a module's buffers; the names of those that got no value."""
    left = dict(buffers)
    for compute in _ways(model, path, module):
        rooms = {name: torch.empty_like(buffer, device=device) for name, buffer in left.items()}
        versions = {name: room._version for name, room in rooms.items()}  # noqa: SLF001 - tells whether it is written
        module._buffers.update(rooms)  # noqa: SLF001
        with torch.device(device):
            compute()
        for name, room in rooms.items():
            now = module._buffers[name]  # noqa: SLF001
            if now is not None and not now.is_meta and (now is not room or now._version > versions[name]):  # noqa: SLF001
                module._buffers[name] = now.to(device)  # noqa: SLF001
                del left[name]
        if not left:
            break
    module._buffers.update(left)  # noqa: SLF001
    return list(left)


def _ways(model: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    own = [getattr(module, "reset_buffers", None)]
    if all(parameter.is_meta for parameter in module.parameters()):
        own += [getattr(module, name, None) for name in ("reset_parameters", "init_weights")]
    yield from (method for method in own if callable(method))
    steps = path.split(".") if path else []
    for length in reversed(range(len(steps) + 1)):
        around = getattr(model.get_submodule(".".join(steps[:length])), "_init_weights", None)
        if callable(around) and all(parameter.is_meta for parameter in module.parameters()):
            yield lambda around=around: around(module)  # type: ignore[misc]


def _path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _has(names: list[str]) -> str:
    return "have" if len(names) > 1 else "has"
