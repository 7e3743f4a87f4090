"""Sharded models put together again: tensor by tensor for files, all at once for a while."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from accel_runtime.backends.averaging import Buffers

__all__ = [
    "at_rest",
    "gathered",
    "is_divided",
    "parameter_groups",
    "refuse_sharded_saves",
    "units",
    "whole",
    "whole_state",
]

_GATHERED = "_accel_gathered"
"""What a model has as long as it is gathered."""
_LOG = logging.getLogger("accel_runtime.parallel")


def units(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` gathers and lets go again, the outermost first."""
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def parameter_groups(unit: Any) -> list[Any]:
    """Return torch's groups of the parameters of a unit: one at most in torch 2.9, any number in torch 2.13."""
    state = unit._get_fsdp_state()  # noqa: SLF001 - nothing public has them
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)  # noqa: SLF001
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # noqa: SLF001


def is_divided(model: nn.Module) -> bool:
    """Whether a rank has but a part of a parameter."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters()) or bool(units(model))


def at_rest(models: Iterable[nn.Module]) -> None:
    """See to it that sharded models have their shards for parameters.

    After a forward pass without a backward pass the outermost parameters are still gathered, and those are other objects
    than the optimizer has.

    Raises:
        RuntimeError: A model is gathered on purpose.
    """
    for model in models:
        if _GATHERED in vars(model):
            raise RuntimeError(
                "parameters are whole inside of gathered(model), in the format in which they compute: save, load and take "
                "state dicts outside of it"
            )
        _let_go(model)


def _let_go(model: nn.Module) -> None:
    for unit in units(model):
        unit.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose parts lie on several ranks, all of it; one that is plain is given back. The ranks call it together."""
    if not hasattr(tensor, "device_mesh"):
        return tensor.detach()
    sharded: Any = tensor.detach()
    if sharded.device.type != sharded.device_mesh.device_type:
        # Offloaded to the host: the ranks speak to each other from their devices.
        sharded = sharded.to(sharded.device_mesh.device_type)
    found: torch.Tensor = sharded.full_tensor()
    return found


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """A model's state with every tensor whole and on the CPU; the ranks call it together.

    Args:
        model: The script's own module.
        keep: Whether this rank wants it; else it lets every tensor go as soon as it was put together.

    Returns:
        The state, in which tied weights are one tensor; nothing where it is not kept.
    """
    state = model.state_dict(keep_vars=True)
    seen: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in seen:
            found = _copied(value) if isinstance(value, torch.Tensor) else value
            seen[id(value)] = found if keep else None
    return {name: seen[id(value)] for name, value in state.items()} if keep else {}


def _copied(value: torch.Tensor) -> torch.Tensor:
    """A tensor that no step of an optimizer changes."""
    found = whole(value)
    # Of a mesh of one, `full_tensor` is the live memory itself.
    return found.cpu() if found.device.type != "cpu" else found.clone()


def refuse_sharded_saves(model: nn.Module) -> None:
    """Make `save_pretrained` of a sharded model, and of modules inside it, raise unless it is given whole tensors."""
    for module in model.modules():
        if callable(getattr(module, "save_pretrained", None)):
            # A bound method, so that a deep copy of the model saves the copy.
            vars(module)["save_pretrained"] = MethodType(_save_pretrained, module)


def _save_pretrained(module: Any, *args: Any, **kwargs: Any) -> Any:
    save = type(module).save_pretrained
    arguments = inspect.signature(save).bind_partial(module, *args, **kwargs).arguments
    given = arguments.get("state_dict", kwargs.get("state_dict"))
    if given is None and is_divided(module) and _GATHERED not in vars(module):
        raise RuntimeError(
            "save_pretrained() of a sharded model: each rank has only its shards of the weights. Collect them on all ranks, "
            "and give them to it: accelerator.unwrap_model(model).save_pretrained(directory, "
            "is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)). For a class whose "
            "save_pretrained() takes no state_dict, accelerator.save_model(model, directory) writes the weights."
        )
    return save(module, *args, **kwargs)


@contextmanager
def gathered(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Iterator[nn.Module]:
    """Inside, the parameters of a model that is fully sharded are whole plain tensors, and stay so between forward passes.

    Args:
        model: A model. One that is not sharded is as it is.
        optimizers: Those that must not step meanwhile.

    Raises:
        RuntimeError: An optimizer steps inside.
    """
    sharded = units(model)
    if not sharded:
        yield model
        return
    _tell_of_tensor_parallel(model)
    at_rest([model])
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.register_step_pre_hook(_refuse_step).remove)
        stack.callback(_let_go, model)
        vars(model)[_GATHERED] = True
        stack.callback(vars(model).pop, _GATHERED)
        for hook in (*model._forward_pre_hooks.values(), *model._forward_hooks.values()):  # noqa: SLF001 - torch has no list of them
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Buffers):
                stack.enter_context(owner.suspended())
        stack.enter_context(_kept(sharded))
        for unit in sharded:
            unit.unshard()
        yield model


@contextmanager
def _kept(sharded: list[Any]) -> Iterator[None]:
    """Inside, parameters that are gathered are not let go, neither after a forward pass nor for a state dict."""
    # The outermost module knows which it is from the first forward pass on, and has other settings then.
    sharded[0]._get_fsdp_state()._lazy_init()  # noqa: SLF001 - nothing public does this without an input
    groups = [group for unit in sharded for group in parameter_groups(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    hooks = [_without_hooks(group) for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info
        for restore in hooks:
            restore()


def _without_hooks(group: Any) -> Callable[[], None]:
    """Take away the hooks with which a state dict lets go of what is gathered; gives what puts them back."""
    handles = (
        group._module_to_pre_save_state_dict_hook_handle,  # noqa: SLF001
        group._module_to_pre_load_state_dict_hook_handle,  # noqa: SLF001
    )
    for some in handles:
        for handle in some.values():
            handle.remove()

    def restore() -> None:
        # As long as they are in the dicts, the group takes them to be there.
        for some in handles:
            some.clear()
        group._register_state_dict_hooks()  # noqa: SLF001

    return restore


def _tell_of_tensor_parallel(model: nn.Module) -> None:
    placements = [
        placement
        for parameter in model.parameters()
        for placement, name in zip(
            getattr(parameter, "placements", ()),
            getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or (),
            strict=False,
        )
        if name == "tp" and placement.is_shard()
    ]
    if placements:
        _LOG.warning(
            "gathered(): what fully_shard has divided is whole; layers under tensor parallelism stay divided, so the "
            "ranks of a tp group have to call the model together, and equally often"
        )


def _refuse_step(*_: Any) -> None:
    raise RuntimeError(
        "an optimizer steps inside of gathered(model): the step changes shards, and the gathered parameters would be as "
        "they were. Train outside of it"
    )
