"""Shard a model over the processes: tensor parallelism, then activation checkpointing, then `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from accel_runtime.backends.base import Backend
from accel_runtime.backends.ddp import BufferAveraging, operate_flat
from accel_runtime.checkpoint.serialization import hash_tensor
from accel_runtime.env import Settings
from accel_runtime.parallel.dtensor import GroupFacts, ProcessMesh, class_of, local_shard, shard_like
from accel_runtime.parallel.fully_shard import (
    Units,
    build_policy,
    checkpoint_activations,
    find_ignored,
    find_units,
    is_checkpointed,
    parameters_of_unit,
    shard_model,
)
from accel_runtime.parallel.tensor_parallel import (
    apply_tensor_parallel,
    plan_tensor_parallel,
)
from accel_runtime.torch_internals import fsdp_state, list_buffers
from accel_runtime.training.precision import FORMATS

__all__ = [
    "BufferBroadcast",
    "ModelSharder",
    "UntracedBufferBroadcast",
    "broadcast_parameters",
    "describe_layout",
    "list_parameter_groups",
    "shard_loaded_state",
]


@dataclass(frozen=True)
class ShardedModel:
    """The parts of a sharded model."""

    gathered: Sequence[FSDPModule]
    """The modules that `fully_shard` was applied to."""
    replicated: Sequence[tuple[str, nn.Parameter]]
    """The parameters that are not sharded, by name."""


class ModelSharder:
    """Shard models as the settings describe.

    Args:
        mesh: The device mesh.
        settings: The settings of the launcher and the script.
        device: The device of this process.
    """

    def __init__(self, mesh: ProcessMesh, settings: Settings, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._parallel, self._options = settings.parallel, settings.fully_shard
        self._autocast_dtype = FORMATS[settings.mixed_precision].dtype

    def apply(self, model: nn.Module) -> ShardedModel:
        """Shard a model in place, with equal values on every process or on the meta device."""
        options, shards = self._options, self._mesh.sizes.averages
        units = find_units(model, options.wrap)
        ignored = find_ignored(model, options.ignore) if shards else set()
        plan = plan_tensor_parallel(model, self._parallel.tp_plan) if self._mesh.tp is not None else {}
        if options.activation_checkpointing:
            checkpoint_activations(model, units)
        if self._mesh.tp is not None:
            apply_tensor_parallel(model, self._mesh.tp, plan)
        if shards:
            policy = build_policy(options, self._autocast_dtype, model.parameters())
            shard_model(model, units, self._mesh.shard, options, policy, ignored)
        # Not `model.to`, which replaces sharded tensors, and hooks on gradients stay with the old ones.
        for tensor in ignored if shards else [*model.parameters(), *model.buffers()]:
            if not (tensor.is_meta or hasattr(tensor, "device_mesh")):
                tensor.data = tensor.data.to(self._device)
        gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
        return ShardedModel(gathered, [named for named in model.named_parameters() if named[1] in ignored])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def list_parameter_groups(model: nn.Module, autocast_dtype: torch.dtype | None) -> tuple[GroupFacts, ...]:
    """Return the groups of parameters that are gathered together; equal modules are one entry."""
    groups: dict[GroupFacts, GroupFacts] = {}
    for group in _iterate_groups(model, autocast_dtype):
        key = replace(group, modules=(), bytes_here=0)
        known = groups.get(key)
        if known is None:
            groups[key] = group
        else:
            groups[key] = replace(
                known,
                modules=known.modules + group.modules,
                bytes_here=known.bytes_here + group.bytes_here,
            )
    return tuple(groups.values())


def describe_layout(parameter: torch.Tensor) -> str:
    """Describe how a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dimension {index} of the mesh" for index in range(mesh.ndim))
    texts = [
        _describe_placement(name, mesh.size(index), parameter.placements[index])
        for index, name in sorted(enumerate(names), key=lambda named: named[1] == "dp_replicate")
    ]
    return ", ".join(filter(None, texts)) or "whole on every rank"


def _iterate_groups(model: nn.Module, autocast_dtype: torch.dtype | None) -> Iterator[GroupFacts]:
    units: Units = [
        (name, module) for name, module in model.named_modules() if fsdp_state(module) is not None
    ]
    for name, module in units or [("", model)]:
        policy = fsdp_state(module)._mp_policy if units else None  # noqa: SLF001
        by_layout: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for _, parameter in parameters_of_unit(module, units):
            key = (
                parameter.dtype,
                parameter.requires_grad,
                describe_layout(parameter),
                isinstance(parameter, DTensor),
            )
            by_layout.setdefault(key, []).append(parameter)
        for (dtype, learns, layout, sharded), members in by_layout.items():
            gathered = policy if sharded else None
            param = getattr(gathered, "param_dtype", None)
            yield GroupFacts(
                modules=(name,),
                kind=class_of(module),
                parameters=len(members),
                elements=sum(member.numel() for member in members),
                dtype=_dtype_name(dtype),
                gradients=_dtype_name(dtype) if learns else "",
                computes_in=_dtype_name(param or autocast_dtype or dtype),
                reduces_in=_dtype_name(getattr(gathered, "reduce_dtype", None) or param or dtype)
                if learns and units
                else "",
                layout=layout,
                bytes_here=sum(local_shard(member).nbytes for member in members),
                computed_again=is_checkpointed(module),
            )


def _describe_placement(name: str, size: int, placement: Placement) -> str:
    ranks = f"over {size} rank{'s' if size > 1 else ''} of {name}"
    if placement.is_replicate() and name == "dp_replicate":
        return f"{size} copies" if size > 1 else ""
    if placement.is_replicate():
        return f"the same {ranks}"
    if placement.is_partial():
        return f"to be added up {ranks}"
    dimension = getattr(placement, "dim", 0)
    axis = "" if name == "dp_shard" and dimension == 0 else f" along dimension {dimension}"
    return f"divided {ranks}{axis}"


def broadcast_parameters(model: nn.Module, backend: Backend) -> None:
    """Broadcast the parameters and buffers of the first rank, as DDP does; only tensors that differ are sent.

    Raises:
        RuntimeError: Names, shapes or dtypes differ between ranks, or a tensor is on the meta device on some only.
    """
    if backend.topology.world_size == 1:
        return
    # Tied tensors are listed under their first name.
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    hashes_by_rank = backend.all_gather_objects(
        {
            name: (
                f"{list(tensor.shape)} {_dtype_name(tensor.dtype)}",
                None if tensor.is_meta else hash_tensor(tensor),
            )
            for name, tensor in tensors.items()
        },
        f"the tensors of {type(model).__name__}",
    )
    first = hashes_by_rank[0]
    for rank, hashes in enumerate(hashes_by_rank):
        if mismatch := _describe_mismatch(first, hashes):
            raise RuntimeError(f"{type(model).__name__} differs between rank {rank} and rank 0: {mismatch}")
    for name, tensor in tensors.items():
        if any(hashes[name] != first[name] for hashes in hashes_by_rank):
            with torch.no_grad():
                tensor.copy_(backend.broadcast(tensor.detach().contiguous()))


def _describe_mismatch(
    first: dict[str, tuple[str, int | None]], other: dict[str, tuple[str, int | None]]
) -> str:
    for name in [*first, *other]:
        if name not in first or name not in other:
            return f"{name} is on one of them only"
        if first[name][0] != other[name][0]:
            return f"{name} is {other[name][0]}, and on rank 0 {first[name][0]}"
        if (first[name][1] is None) != (other[name][1] is None):
            return (
                f"{name} is on the meta device on one of them only. Make the model on the meta device on all ranks, and call "
                "accelerator.load_model(model, path) after prepare(): each rank reads its own part"
            )
    return ""


def shard_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard the state that an optimizer loads from full tensors, such as one of an unsharded run."""
    optimizer.register_load_state_dict_post_hook(_shard_state)


def _shard_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if hasattr(parameter, "device_mesh"):
            for key, value in state.items():
                is_full = isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh")
                if is_full and value.dim() and value.shape == parameter.shape:
                    state[key] = shard_like(value, parameter, key)


_disable_compiler: Any = torch.compiler.disable


class BufferBroadcast:
    """Broadcast the buffers of the first rank, such as running means, which forward passes change.

    Buffers that are not in the state dict are constant tables, such as rotary embeddings, and may be large; they were
    broadcast when the model was prepared.

    Args:
        model: The model.
        broadcast: Broadcasts a tensor of the first rank, in place.
    """

    def __init__(self, model: nn.Module, broadcast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._broadcast = broadcast
        # By name, since a forward pass may replace a buffer.
        self._owners = [
            (module, name) for module in model.modules() for name in list_buffers(module, persistent=True)
        ]

    def broadcast_buffers(self) -> None:
        """Broadcast the buffers; collective."""
        buffers = (getattr(module, name) for module, name in self._owners)
        shards = [local_shard(buffer) for buffer in buffers if buffer is not None and not buffer.is_meta]
        operate_flat(shards, self._broadcast)


class UntracedBufferBroadcast(BufferAveraging):
    """The hooks outside of compiled graphs, since the compiler cannot trace collectives."""

    before = _disable_compiler(BufferAveraging.before)
    after = _disable_compiler(BufferAveraging.after)
