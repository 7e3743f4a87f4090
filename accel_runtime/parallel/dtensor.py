"""Device meshes of the processes, and shards of DTensors on them: offsets, gathering, buffers, unsynchronized gradients."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from accel_runtime.backends.quantized_tensors import is_sendable
from accel_runtime.foundation.module_names import state_dict, unwrap_module
from accel_runtime.parallel.averaging import BufferAveraging
from accel_runtime.storage.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
from accel_runtime.foundation.torch_internals import (
    compute_shard_region,
    fsdp_parameter_groups,
    gathered_parameters,
    is_fsdp_module,
    keep_gathered,
    local_tensor,
    override_method,
    qualified_name,
    set_unsharded_gradient,
    unsharded_gradient,
    unsharded_spec,
)

__all__ = [
    "ShardRegion",
    "class_of",
    "gather_parameters",
    "gather_state_dict",
    "gather_tensor",
    "is_gathered",
    "is_sharded_by_tp",
    "is_sharded_model",
    "list_gathered",
    "local_shard",
    "map_shard",
    "narrow_to",
    "read_unsynced_gradients",
    "refuse_sharded_saves",
    "region_of",
    "reshard_models",
    "restore_unsynced_gradients",
    "shard_like",
]


def class_of(model: nn.Module) -> str:
    """Return the class name of a module in the script."""
    model = unwrap_module(model)
    name = type(model).__name__
    # fully_shard replaces the class of a module by a subclass with this prefix.
    sharded = any(base.__name__ == "FSDPModule" for base in type(model).__mro__)
    return name.removeprefix("FSDP") if sharded else name


class ShardRegion(NamedTuple):
    """Offsets and sizes of a shard in the full tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on this rank."""
    return local_tensor(tensor).detach()


def map_shard(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same layout whose memory on this rank is the result of an elementwise function."""
    if not hasattr(tensor, "device_mesh"):
        return function(tensor)
    return _build_dtensor(function(local_shard(tensor)), tensor, tensor.stride())


def region_of(tensor: torch.Tensor, name: str) -> ShardRegion:
    """Return the region of this rank in a tensor.

    Raises ValueError if its placements are partial, or a shard is not one region.
    """
    if not hasattr(tensor, "device_mesh"):
        return ShardRegion((0,) * tensor.dim(), tuple(tensor.shape))
    sharded: Any = tensor
    _check_placements(sharded, name)
    region = ShardRegion(*compute_shard_region(tensor.shape, sharded.device_mesh, sharded.placements))
    if region.sizes != tuple(local_shard(tensor).shape):
        raise ValueError(
            f"{name} of shape {list(tensor.shape)} cannot be saved: tensor parallelism and fully_shard split it into shards of "
            f"unequal size, whose offsets are unknown ({sharded.placements}). Choose a tp that divides it."
        )
    return region


def shard_like(full: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """Shard a full tensor, equal on all ranks, like another one; nothing is sent."""
    if not hasattr(like, "device_mesh"):
        return full
    shard = narrow_to(full, region_of(like, name)).clone(memory_format=torch.contiguous_format)
    sharded: Any = like
    return _build_dtensor(shard.to(local_shard(like).device), sharded, like.stride())


def narrow_to(full: torch.Tensor, region: ShardRegion) -> torch.Tensor:
    """Return a view of a shard; the offset of an empty one may be past the end."""
    for dimension, (offset, length) in enumerate(zip(*region, strict=True)):
        full = full.narrow(dimension, min(offset, full.shape[dimension]), length)
    return full


def _build_dtensor(shard: torch.Tensor, spec: Any, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the DTensor of a shard, with the mesh, the placements and the shape of another one or of torch's spec."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - it takes a second to load

    return DTensor.from_local(
        shard, spec.device_mesh, spec.placements, run_check=False, shape=spec.shape, stride=stride
    )


def _check_placements(tensor: DTensor, name: str) -> None:
    """Raise ValueError for partial placements, and for strided shards that no later shard undoes."""
    placements = tensor.placements
    for index, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{name} cannot be sharded: it has partial sums ({placements})")
        factor = getattr(placement, "split_factor", None)
        right = [
            tensor.device_mesh.size(later)
            for later in range(index + 1, len(placements))
            if getattr(placements[later], "dim", None) == getattr(placement, "dim", None)
        ]
        if factor is not None and factor != math.prod(right):
            raise ValueError(
                f"{name} cannot be described: the rows of a rank are not contiguous ({placements})"
            )


_GATHERED = "_accel_gathered"
"""An attribute of a model inside of `gathered`."""
_LOG = logging.getLogger("accel_runtime.parallel")


def list_units(model: nn.Module) -> list[Any]:
    """Return the modules under `fully_shard`, outermost first."""
    return [module for module in model.modules() if is_fsdp_module(module)]


def list_gathered(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of modules under `fully_shard` that their forward passes have gathered."""
    return [parameter for unit in list_units(model) for parameter in gathered_parameters(unit)]


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether a parameter of the model is sharded."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters()) or bool(
        list_units(model)
    )


def is_gathered(model: nn.Module) -> bool:
    """Return whether a model is inside of `gathered`."""
    return _GATHERED in vars(unwrap_module(model))


def reshard_models(models: Iterable[nn.Module]) -> None:
    """Reshard models; after a forward pass without a backward pass, parameters of the root are still gathered.

    Raises:
        RuntimeError: A model is inside of `gathered`.
    """
    for model in models:
        if is_gathered(model):
            raise RuntimeError(
                "Cannot save, load or take a state dict inside of gathered(model): parameters are full and in the dtype of the "
                "computation. Exit the context first."
            )
        _reshard(model)


def _reshard(model: nn.Module) -> None:
    for unit in list_units(model):
        unit.reshard()


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded one; collective."""
    if not hasattr(tensor, "device_mesh"):
        return tensor.detach()
    sharded: Any = tensor.detach()
    if sharded.device.type != sharded.device_mesh.device_type:
        # Offloaded to the host, and collectives need the device.
        sharded = sharded.to(sharded.device_mesh.device_type)
    shard = local_shard(sharded)
    if is_sendable(shard):
        full: torch.Tensor = sharded.full_tensor()
        return full
    # The bytes of each element in a dimension of their own, so that the placements stay right.
    stored = shard.contiguous().unsqueeze(-1).view(torch.uint8)
    shape = torch.Size([*sharded.shape, stored.shape[-1]])
    spec = SimpleNamespace(device_mesh=sharded.device_mesh, placements=sharded.placements, shape=shape)
    strides = torch.empty(shape, device="meta").stride()
    gathered: Any = _build_dtensor(stored, spec, strides)
    return gather_tensor(gathered).contiguous().view(shard.dtype).squeeze(-1)


def gather_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the state dict of a model with full tensors on the CPU; collective.

    Ranks with `keep=False` drop each tensor once it is gathered, and return an empty dict. Tied weights are one tensor.
    """
    state = state_dict(model, keep_vars=True)
    by_id: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in by_id:
            full = gather_tensor(value) if isinstance(value, torch.Tensor) else value
            if keep and isinstance(full, torch.Tensor):
                # On a mesh of one rank, `full_tensor` shares the memory of the parameter.
                full = full.cpu() if full.device.type != "cpu" else full.clone()
            by_id[id(value)] = full if keep else None
    return {name: by_id[id(value)] for name, value in state.items()} if keep else {}


def refuse_sharded_saves(model: nn.Module) -> None:
    """Make `save_pretrained` of a sharded model raise unless it gets full tensors."""
    for module in model.modules():
        # Of its class: a wrapper has the attributes of the module in it.
        if callable(getattr(type(module), "save_pretrained", None)):
            override_method(module, "save_pretrained", _save_pretrained)


def _save_pretrained(module: Any, *args: Any, **kwargs: Any) -> Any:
    save = type(module).save_pretrained
    arguments = inspect.signature(save).bind_partial(module, *args, **kwargs).arguments
    state_dict = arguments.get("state_dict", kwargs.get("state_dict"))
    if state_dict is None and is_sharded_model(module) and not is_gathered(module):
        raise RuntimeError(
            "save_pretrained() of a sharded model: each rank has only its shards of the weights. Collect them on all ranks, "
            "and give them to it: accelerator.unwrap_model(model).save_pretrained(directory, "
            "is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)). For a class whose "
            "save_pretrained() takes no state_dict, accelerator.save_model(model, directory) writes the weights."
        )
    return save(module, *args, **kwargs)


@contextmanager
def gather_parameters(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Iterator[nn.Module]:
    """Return a context in which the parameters of a model are full plain tensors, also after forward passes.

    Raises:
        RuntimeError: One of the optimizers steps inside.
    """
    units = list_units(model)
    if not units:
        yield model
        return
    if any(map(is_sharded_by_tp, model.parameters())):
        _LOG.warning(
            "gathered() does not gather layers under tensor parallelism, so the ranks of a tp group must call the model together "
            "and equally often."
        )
    reshard_models([model])
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.register_step_pre_hook(_refuse_step).remove)
        stack.callback(_reshard, model)
        marked = vars(unwrap_module(model))
        marked[_GATHERED] = True
        stack.callback(marked.pop, _GATHERED)
        for owner in _find_buffer_hooks(model):
            stack.enter_context(owner.suspended())
        stack.enter_context(keep_gathered(units))
        for unit in units:
            unit.unshard()
        yield model


def _find_buffer_hooks(model: nn.Module) -> set[BufferAveraging]:
    """Return the owners of the hooks that broadcast buffers, of a model that the script may have wrapped since."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())  # noqa: SLF001 - torch has no list of them
    ]
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return {owner for owner in owners if isinstance(owner, BufferAveraging)}


def is_sharded_by_tp(parameter: nn.Parameter) -> bool:
    """Return whether tensor parallelism shards a parameter."""
    sharded: Any = parameter
    names = (sharded.device_mesh.mesh_dim_names or ()) if hasattr(parameter, "device_mesh") else ()
    return "tp" in names and not sharded.placements[names.index("tp")].is_replicate()


def _refuse_step(*_: Any) -> None:
    raise RuntimeError(
        "optimizer.step() inside gathered(model) would update the shards but not the gathered parameters. Exit the context "
        "first."
    )


def read_unsynced_gradients(models: Iterable[nn.Module]) -> dict[nn.Parameter, torch.Tensor]:
    """Return accumulated gradients that are not reduced yet, as full tensors; collective for tensor parallel ranks."""
    gradients = {}
    for sharded in _iterate_fsdp_params(models):
        gradient: Any = unsharded_gradient(sharded)
        if gradient is None:
            continue
        if hasattr(gradient, "device_mesh"):
            if any(placement.is_partial() for placement in gradient.placements):
                raise CheckpointError(
                    f"Cannot save in the middle of an accumulation cycle: the gradient of {qualified_name(sharded)} is a partial "
                    "sum of tensor parallelism, and completing it now would round differently. Save at the end of a cycle."
                )
            gradient = gradient.full_tensor()
        gradients[sharded.sharded_param] = gradient
    return gradients


def restore_unsynced_gradients(
    models: Iterable[nn.Module], gradients: Mapping[nn.Parameter, torch.Tensor]
) -> None:
    """Restore the result of `read_unsynced_gradients`; the next backward passes add to it."""
    for sharded in _iterate_fsdp_params(models):
        gradient = gradients.get(sharded.sharded_param)
        if gradient is not None:
            stride, gradient = gradient.stride(), gradient.to(sharded.device).clone()
            # `fully_shard` accumulates a shard if tensor parallelism shards the parameter too.
            if (spec := unsharded_spec(sharded)) is not None:
                region = ShardRegion(*compute_shard_region(spec.shape, spec.mesh, spec.placements))
                gradient = _build_dtensor(narrow_to(gradient, region).contiguous(), spec, stride)
        set_unsharded_gradient(sharded, gradient)


def _iterate_fsdp_params(models: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield torch's FSDPParam of every sharded parameter, which is private (torch 2.13)."""
    for model in models:
        for unit in list_units(model):
            for group in fsdp_parameter_groups(unit):
                yield from group.fsdp_params
