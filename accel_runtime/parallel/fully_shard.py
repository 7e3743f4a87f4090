"""The strategy of sharded models: tensor parallelism, activation checkpointing, `fully_shard`, and the map of replaced parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.quantized_tensors import (
    as_bytes,
    broadcast_parts,
    keep_weights_unpacked,
    keeps_dtype,
    parts_of,
    refuse_quantized,
    refuse_unaveraged,
    refuse_undivided,
)
from accel_runtime.environment.settings import FullyShard, MixedPrecision, Settings
from accel_runtime.foundation.module_names import named_parameters, script_names, unwrap_module
from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.foundation.options import DistributedType
from accel_runtime.foundation.precision import FORMATS, name_dtype
from accel_runtime.foundation.process_mesh import GroupFacts, ProcessMesh
from accel_runtime.foundation.torch_internals import fsdp_policy, is_fsdp_module, list_buffers
from accel_runtime.parallel.averaging import BufferAveraging, GradientAveraging, operate_flat
from accel_runtime.parallel.big_modeling import refuse_forward_on_meta
from accel_runtime.parallel.dtensor import (
    class_of,
    is_gathered,
    local_shard,
    read_unsynced_gradients,
    refuse_sharded_saves,
    reshard_models,
    restore_unsynced_gradients,
    shard_like,
)
from accel_runtime.parallel.fsdp_units import (
    GradientSync,
    Units,
    build_policy,
    check_modules,
    checkpoint_activations,
    find_ignored,
    find_units,
    find_unshardable,
    is_checkpointed,
    parameters_of_unit,
    refuse_gradient_hooks,
    shard_model,
)
from accel_runtime.parallel.strategy import GradientAccess, ModelLayout, Strategy
from accel_runtime.parallel.tensor_parallel import (
    apply_tensor_parallel,
    check_replicated_gradients,
    plan_tensor_parallel,
)
from accel_runtime.storage.errors import format_names

__all__ = [
    "AverageByKind",
    "FullyShardStrategy",
    "ParameterMap",
    "UntracedBufferBroadcast",
    "broadcast_parameters",
    "build_buffer_broadcast",
    "describe_layout",
]


class FullyShardStrategy(Strategy):
    """Every rank has a shard of each model: `fully_shard`, tensor parallelism, or both.

    Args:
        backend: Connects the ranks.
        settings: The sizes of the parallel dimensions and the options of sharding.

    Raises:
        RuntimeError: If the process group cannot gather shards on this device.
    """

    shards_models = True
    takes_meta_models = True

    def __init__(self, backend: Backend, settings: Settings) -> None:
        super().__init__(backend)
        self.gradients = UnitGradients()
        device = backend.device
        check_collective_backend(backend.collective_backend, device, backend.topology.world_size)
        self.mesh: ProcessMesh = ProcessMesh(backend.grid, device.type, shards=settings.parallel.shards)
        """The device mesh."""
        self._settings = settings
        self._gradient_syncs: WeakKeyDictionary[nn.Module, GradientSync] = WeakKeyDictionary()
        self._parameter_map = ParameterMap()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return DistributedType.FSDP if self.mesh.shards else super().distributed_type

    @override
    def configure(self, configuration: Any) -> None:
        if not isinstance(configuration, FullyShard):
            super().configure(configuration)
        self._settings = replace(self._settings, fully_shard=configuration)

    @override
    def check_options(self, ddp_options: Mapping[str, Any], mixed_precision: MixedPrecision) -> None:
        if ddp_options:
            raise ValueError(
                f"DistributedDataParallelKwargs({', '.join(ddp_options)}) is not supported for sharded models "
                f"({self.mesh.description}). Remove it."
            )

    @override
    def move_model(self, model: nn.Module) -> nn.Module:
        # `wrap_model` moves it shard by shard, since the full model may not fit on the device.
        return model

    @override
    def check_tensors(self, model: nn.Module) -> None:
        refuse_unaveraged(model)

    @override
    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:
        originals = dict(model.named_parameters(remove_duplicate=False))
        if not isinstance(model, FSDPModule):
            self._shard_and_hook(model)
            if isinstance(model, AveragedModel) and model.multi_avg_fn is not None:
                model.multi_avg_fn = AverageByKind(model.multi_avg_fn)
        refuse_forward_on_meta(model)
        self._parameter_map.add(originals, model)
        for optimizer in self._optimizers:
            self._parameter_map.replace_parameters(optimizer)
        return model

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameter_map.replace_parameters(optimizer)
        if optimizer not in self._optimizers:
            optimizer.register_load_state_dict_post_hook(_shard_state)
            self._optimizers.add(optimizer)

    @override
    def list_current(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [self._parameter_map.find_current(parameter) for parameter in parameters]

    def _shard_and_hook(self, model: nn.Module) -> None:
        """Shard a model in place, and let its forward and backward passes synchronize what is not sharded."""
        self._refuse_shared_parameters(model)
        broadcast_parameters(model, self.backend)
        ignored = self._shard(model)
        replicated = [named for named in named_parameters(model) if named[1] in ignored]
        averaging = GradientAveraging(replicated, self._average, self.backend.handshake)
        refuse_sharded_saves(model)
        gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._gradient_syncs[model] = sync = GradientSync(gathered, averaging)
        if any(True for _ in model.buffers()):
            broadcast = build_buffer_broadcast(model, self.backend.broadcast)
            buffers = UntracedBufferBroadcast(lambda: sync.wanted, broadcast)
            model.register_forward_pre_hook(buffers.before)
            model.register_forward_hook(buffers.after)
        model.register_forward_hook(_disable_compiler(_reshard_after_evaluation))

    def _refuse_shared_parameters(self, model: nn.Module) -> None:
        """Raise ValueError if parameters belong to a model that is sharded already: torch gathers each in one model only."""
        for other in self._gradient_syncs:
            owned = {parameter for parameter in other.parameters() if hasattr(parameter, "device_mesh")}
            if names := [name for name, parameter in named_parameters(model) if parameter in owned]:
                raise ValueError(
                    f"Cannot shard {class_of(model)}: {format_names(names)} belong to {class_of(other)} too, which is sharded "
                    "already. Prepare one module that contains both models and calls them in its forward()."
                )

    def _shard(self, model: nn.Module) -> set[nn.Parameter]:
        """Shard a model in place, with equal values on every process or on the meta device; return the ignored parameters."""
        options, shards, tp = self._settings.fully_shard, self.mesh.averages, self.mesh.tp
        units = find_units(model, options.wrap)
        ignored = find_ignored(model, options.ignore) | find_unshardable(model) if shards else set()
        plan = plan_tensor_parallel(model, self._settings.parallel.tp_plan) if tp is not None else {}
        if shards:
            refuse_undivided(model, ignored)
            keep_weights_unpacked(model)
        divided = [p for name in plan for p in model.get_submodule(name).parameters()]
        refuse_quantized(model, "Tensor parallelism", divided)
        before = dict(model.named_parameters())
        replaced = set(before.values()) - ignored if shards else set(divided)
        refuse_gradient_hooks(model, replaced)
        if options.activation_checkpointing:
            checkpoint_activations(model, units)
        if tp is not None:
            apply_tensor_parallel(model, tp, plan)
        if shards:
            check_modules(model, ignored)
            autocast_dtype = FORMATS[self._settings.mixed_precision].dtype
            policy = build_policy(options, autocast_dtype, model.parameters())
            shard_model(model, units, self.mesh.shard, options, policy, ignored)
        for name, parameter in model.named_parameters():
            # Marks of the script, such as `_no_weight_decay`, by which it creates parameter groups.
            for key, value in vars(before[name]).items():
                vars(parameter).setdefault(key, value)
        # Not `model.to`, which replaces sharded tensors, and hooks on gradients stay with the old ones.
        for tensor in ignored if shards else [*model.parameters(), *model.buffers()]:
            if not (tensor.is_meta or hasattr(tensor, "device_mesh")):
                tensor.data = tensor.data.to(self.backend.device)
        return ignored

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        mesh = self.mesh.shard

        def average(flat: torch.Tensor) -> torch.Tensor:
            flat /= mesh.size()
            for dimension in range(mesh.ndim):
                dist.all_reduce(flat, group=mesh.get_group(dimension))
            return flat

        operate_flat([local_shard(gradient) for gradient in gradients], average)

    @override
    def explain_error(self, error: RuntimeError, operation: str) -> RuntimeError:
        if _MIXED_TENSORS in str(error):
            return RuntimeError(
                f"{operation} failed: the loss has parameters of a sharded model, such as a penalty on weights outside of its forward "
                "pass, and torch cannot combine their gradients with gathered ones. Use weight_decay of the optimizer, or compute the "
                "penalty in the forward pass of the prepared model with fully_shard.wrap: none."
            )
        return super().explain_error(error, operation)

    @override
    def synchronize(self) -> None:
        # After a forward pass without a backward pass, parameters of the root module are still gathered.
        reshard_models(self._gradient_syncs)

    @override
    def describe_model(self, model: nn.Module, autocast_dtype: torch.dtype | None) -> ModelLayout:
        names = ["fully_shard"] if isinstance(model, FSDPModule) else []
        names += ["tensor parallel"] if self.mesh.tp is not None else []
        groups: dict[GroupFacts, GroupFacts] = {}
        for group in _iterate_groups(model, autocast_dtype):
            key = replace(group, modules=(), bytes_here=0)
            known = groups.setdefault(key, key)
            groups[key] = replace(
                known,
                modules=known.modules + group.modules,
                bytes_here=known.bytes_here + group.bytes_here,
            )
        wrapper = f"{' and '.join(names) or 'none'} ({self.mesh.description})"
        return ModelLayout(wrapper, tuple(groups.values()))

    @override
    def check_step(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        # After an evaluation just before the step, modules still hold gathered parameters.
        self.synchronize()
        self._parameter_map.check(optimizer, models)
        if self.mesh.tp is not None:
            check_replicated_gradients(models, self.mesh.tp)

    @override
    def _set_sync(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
        # The script may have compiled the model since.
        original = unwrap_module(model)
        syncs = (sync for key, sync in self._gradient_syncs.items() if unwrap_module(key) is original)
        sync = next(syncs, None)
        return nullcontext() if sync is None else sync.set(wanted=wanted)


class UnitGradients(GradientAccess):
    """Gradients of `fully_shard`, whose units have those that are not combined yet; the base unscales and clips."""

    @override
    def read_local(self, models: Sequence[nn.Module]) -> dict[nn.Parameter, torch.Tensor]:
        return read_unsynced_gradients(models)

    @override
    def restore_local(
        self, models: Sequence[nn.Module], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        restore_unsynced_gradients(models, gradients)


class ParameterMap:
    """Map from the parameters that the script created to the sharded parameters that are trained."""

    def __init__(self) -> None:
        # Weak references: the map must not keep full parameters in memory that no optimizer uses.
        self._sharded: MutableMapping[torch.Tensor, nn.Parameter] = WeakTensorKeyDictionary()

    def add(self, originals: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Add the parameters of a sharded model, given the original parameters by name."""
        sharded = dict(model.named_parameters(remove_duplicate=False))
        for name, original in originals.items():
            if sharded[name] is not original:
                self._sharded[original] = sharded[name]

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter that replaced a parameter of the script, or the parameter itself."""
        return self._sharded.get(parameter, parameter)

    def check(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
        """Raise ValueError if an optimizer has parameters of no prepared model."""
        prepared = {parameter for model in models for parameter in model.parameters()}
        missing = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p not in prepared
        ]
        if missing:
            raise ValueError(
                f"{type(optimizer).__name__} cannot step: {len(missing)} of its parameters, the first of shape "
                f"{list(missing[0].shape)}, are in no prepared model, so their gradients are not averaged over the processes. "
                "Pass the model to prepare(); if it was prepared before, create the optimizer from model.parameters()."
            )

    def replace_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of an optimizer by the sharded ones, and shard its state."""
        for group in optimizer.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            for original in parameters:
                if original in self._sharded and original in optimizer.state:
                    sharded = self._sharded[original]
                    optimizer.state[sharded] = {
                        key: shard_like(value, sharded, key)
                        if isinstance(value, torch.Tensor) and value.shape == original.shape
                        else value
                        for key, value in optimizer.state.pop(original).items()
                    }
            # In place: some optimizers keep the list itself.
            parameters[:] = [self.find_current(parameter) for parameter in parameters]
            if has_dtensor(parameters):
                _refuse_optimizer(optimizer, group)
            if len({hasattr(parameter, "device_mesh") for parameter in parameters}) <= 1:
                continue
            # Step parameters one by one: torch's foreach loops refuse a mix of sharded and replicated parameters.
            for name in ("fused", "foreach"):
                if group.get(name):
                    raise ValueError(
                        f"Cannot prepare the optimizer with {name}=True: a parameter group contains both sharded and replicated "
                        f"parameters, which torch cannot step together. Remove {name}, or use one group for each kind."
                    )
            if "foreach" in group:
                group["foreach"] = False


_UNSHARDABLE = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
)
"""Optimizers that torch 2.13 cannot step with sharded parameters."""


def _refuse_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raise ValueError if torch cannot step a group of sharded parameters."""
    name = type(optimizer).__name__
    # Those of transformers and other libraries have the name too.
    if isinstance(optimizer, _UNSHARDABLE) or name == torch.optim.Adafactor.__name__:
        raise ValueError(
            f"{name} cannot train a sharded model: torch has no step for sharded parameters. Use another optimizer, such as AdamW, "
            "or train without sharding (remove dp_shard)."
        )
    if group.get("fused") and isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        raise ValueError(
            f"{name}(fused=True) cannot train a sharded model: torch has no fused step for sharded parameters. Remove fused."
        )


class AverageByKind:
    """A `multi_avg_fn` of torch's AveragedModel for sharded parameters and plain buffers, which no foreach function takes together."""

    def __init__(self, average: Callable[..., Any]) -> None:
        self._average = average

    def __call__(self, averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *args: Any) -> None:
        """Average tensors of each kind by the function of the script."""
        for is_sharded in (True, False):
            pairs = [
                pair
                for pair in zip(averages, values, strict=True)
                if isinstance(pair[0], DTensor) is is_sharded
            ]
            if pairs:
                self._average(*map(list, zip(*pairs, strict=True)), *args)


_MIXED_TENSORS = "got mixed torch.Tensor and DTensor"
"""A part of torch's message on an operation of sharded and plain tensors (torch 2.13)."""


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
    """Yield the groups of parameters that are gathered together."""
    units: Units = [(name, module) for name, module in model.named_modules() if is_fsdp_module(module)]
    names = script_names(model, [name for name, _ in units])
    for name, module in units or [("", model)]:
        policy = fsdp_policy(module) if units else None
        by_layout: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for _, parameter in parameters_of_unit(module, units):
            key = (
                parameter.dtype,
                parameter.requires_grad,
                describe_layout(parameter),
                isinstance(parameter, DTensor),
                keeps_dtype(parameter),
            )
            by_layout.setdefault(key, []).append(parameter)
        for (dtype, learns, layout, sharded, is_kept), members in by_layout.items():
            gathered = policy if sharded else None
            param = getattr(gathered, "param_dtype", None)
            yield GroupFacts(
                modules=(names.get(name, name),),
                kind=class_of(module),
                parameters=len(members),
                elements=sum(member.numel() for member in members),
                dtype=name_dtype(dtype),
                gradients=name_dtype(dtype) if learns else "",
                computes_in=name_dtype(dtype if is_kept else param or autocast_dtype or dtype),
                reduces_in=name_dtype(getattr(gathered, "reduce_dtype", None) or param or dtype)
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


def check_collective_backend(backend: str | None, device: torch.device, world_size: int) -> None:
    """Raise RuntimeError for gloo on GPUs: gathering a sharded tensor ends the process there (pytorch/pytorch#152645)."""
    if backend == "gloo" and device.type != "cpu" and world_size > 1:
        raise RuntimeError(
            f"Cannot shard models over gloo on {device.type}: torch {torch.__version__} crashes when it gathers a sharded "
            f"tensor there. Set process_group_backend to auto, with one process a GPU, or set device: cpu."
        )


def broadcast_parameters(model: nn.Module, backend: Backend) -> None:
    """Broadcast the parameters and buffers of the first rank, as DDP does; only tensors that differ are sent.

    Raises:
        RuntimeError: Names, shapes or dtypes differ between ranks, or a tensor is on the meta device on some only.
    """
    if backend.topology.world_size == 1:
        return
    # Tied tensors are listed under their first name.
    buffers = dict(model.named_buffers())
    buffer_names = script_names(model, buffers)
    tensors: dict[str, torch.Tensor] = dict(named_parameters(model))
    tensors |= {buffer_names[name]: buffer for name, buffer in buffers.items()}
    parts = {f"{name}{end}": part for name, tensor in tensors.items() for end, part in parts_of(tensor)}
    broadcast_parts(type(model).__name__, parts, backend)


def _shard_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard the state that an optimizer loaded from full tensors, such as one of an unsharded run."""
    for parameter, state in optimizer.state.items():
        if hasattr(parameter, "device_mesh"):
            for key, value in state.items():
                is_full = isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh")
                if is_full and value.dim() and value.shape == parameter.shape:
                    state[key] = shard_like(value, parameter, key)


_disable_compiler: Any = torch.compiler.disable


def build_buffer_broadcast(
    model: nn.Module, broadcast: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Return a function that broadcasts the buffers of the first rank, such as running means, which forward passes change.

    Buffers that are not in the state dict are constant tables, such as rotary embeddings, and may be large; they were
    broadcast when the model was prepared.
    """
    # By name, since a forward pass may replace a buffer.
    owners = [(module, name) for module in model.modules() for name in list_buffers(module, persistent=True)]

    def broadcast_buffers(_: Sequence[torch.Tensor]) -> None:
        buffers = (getattr(module, name) for module, name in owners)
        shards = [local_shard(buffer) for buffer in buffers if buffer is not None and not buffer.is_meta]
        parts = [part for shard in shards for _, part in parts_of(shard)]
        operate_flat([as_bytes(part) for part in parts], broadcast)

    return broadcast_buffers


def _reshard_after_evaluation(model: nn.Module, _: Any, output: Any) -> Any:
    """Reshard a model after a forward pass without gradients, and return its output."""
    # Without a backward pass, parameters would stay gathered, and in-place changes of them, as of an average, would be lost.
    # Outputs have copies of them.
    if torch.is_grad_enabled() or is_gathered(model):
        return output
    reshard_models([model])
    return output


class UntracedBufferBroadcast(BufferAveraging):
    """The hooks outside of compiled graphs, since the compiler cannot trace collectives."""

    before = _disable_compiler(BufferAveraging.before)
    after = _disable_compiler(BufferAveraging.after)
