"""The state of models and optimizers under ZeRO, as sharded tensors by parameter.

deepspeed has one flat tensor a group of parameters, whose parts depend on stage, world size and padding. A view has the layout of
`fully_shard` on the same ranks instead: each parameter, with its master weights in fp32, and each state of it is sharded along its
first dimension. Checkpoints and exports of ZeRO are therefore those of `fully_shard`, and load into any other strategy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.extensions.deepspeed.engine import Engine
from accel_runtime.extensions.deepspeed.fragments import Fragment
from accel_runtime.extensions.deepspeed.library import gather, is_partitioned
from accel_runtime.parallel.dtensor import gather_tensor, local_shard
from accel_runtime.parallel.strategy import StateView

__all__ = ["Originals", "ZeroStateView", "gather_full"]

_BATCH_ELEMENTS = 16 * 1024 * 1024
"""Number of elements that are combined over the ranks at once."""


class Originals:
    """The values that parameters had before deepspeed converted them to the number format of mixed precision.

    deepspeed makes master weights of what it has rounded, and has none of parameters that it does not train. So this rank's shards
    of the values are kept in host memory: until an engine trains the parameter, whose master weights they become, or for good.

    Args:
        backend: Ranks and device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._shards: dict[nn.Parameter, DTensor] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._shards

    @contextmanager
    def keep(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> Iterator[None]:
        """Return a context in which deepspeed may convert full parameters, equal on all ranks, to a dtype; None converts nothing."""
        if dtype is None:
            yield
            return
        mesh = _build_mesh(self._backend)
        # In a model that `from_pretrained` has sharded, the rounded values are all there is.
        new = {
            parameter: _shard(parameter.detach(), mesh)
            for parameter in parameters
            if parameter.is_floating_point() and parameter.dtype != dtype and not is_partitioned(parameter)
        }
        yield
        self._shards |= {
            parameter: shard for parameter, shard in new.items() if parameter.dtype != shard.dtype
        }

    def move_to(self, engine: Engine) -> None:
        """Make the values of the parameters that an engine trains their master weights; collective."""
        own = {parameter: self._shards.pop(parameter, None) for parameter in engine.trained}
        if not engine.sharded.is_swapped:
            _scatter(engine, own.get, _select_master)

    def update(self, parameter: nn.Parameter) -> DTensor:
        """Return the values of a parameter; those that the script has changed since are its values now. Collective in stage 3."""
        shard = self._shards[parameter]
        with gather([parameter]):
            now = local_shard(_shard(parameter.detach(), shard.device_mesh))
        values = local_shard(shard)
        values.copy_(torch.where(values.to(now.dtype) == now, values, now.to(values.dtype)))
        return shard


class ZeroStateView(StateView):
    """Sharded copies of weights and optimizer states, in modules and optimizers of the script's classes; collective.

    Args:
        models: Modules of the script.
        optimizers: Optimizers of the script.
        engines: The engine of each optimizer.
        originals: The values of parameters that deepspeed has converted and does not train.
        backend: Ranks and device.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        engines: Mapping[torch.optim.Optimizer, Engine],
        originals: Originals,
        backend: Backend,
    ) -> None:
        self._optimizers, self._originals = optimizers, originals
        self._device = backend.device
        self._mesh = _build_mesh(backend)
        self._engine_of = {optimizer: engines[optimizer] for optimizer in optimizers if optimizer in engines}
        parameters = {parameter: None for model in models for parameter in model.parameters()}
        self._engines = [
            engine
            for engine in engines.values()
            if engine in self._engine_of.values() or not engine.parameters.keys().isdisjoint(parameters)
        ]
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        """The sharded copy of each parameter that has one."""
        self._copy_weights(parameters)
        modules: dict[nn.Module, nn.Module] = {}
        super().__init__(
            [self._copy_module(model, modules) for model in models],
            [self._copy_optimizer(optimizer) for optimizer in optimizers],
        )

    # Copies ----------------------------------------------------------------------------

    def _copy_weights(self, parameters: Iterable[nn.Parameter]) -> None:
        for engine in self._engines:
            masters = [(f, _select_master(f)) for f in engine.sharded.fragments]
            for parameter, full in gather_full(engine.trained, masters, self._device):
                self._add_copy(parameter, _shard(full, self._mesh))
        for parameter in parameters:
            if parameter in self._copies:
                continue
            if parameter in self._originals:
                self._add_copy(parameter, self._originals.update(parameter))
            elif is_partitioned(parameter):
                with gather([parameter]):
                    self._add_copy(parameter, _shard(parameter.detach(), self._mesh))

    def _add_copy(self, parameter: nn.Parameter, sharded: DTensor) -> None:
        self._copies[parameter] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)

    def _copy_module(self, module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
        """Return a module with the same attributes and buffers, and the sharded parameters."""
        if module not in copies:
            copies[module] = copy = object.__new__(type(module))
            vars(copy).update(vars(module))
            vars(copy)["_parameters"] = {
                name: parameter if parameter is None else self._copies.get(parameter, parameter)
                for name, parameter in module._parameters.items()  # noqa: SLF001
            }
            vars(copy)["_modules"] = {
                name: child if child is None else self._copy_module(child, copies)
                for name, child in module._modules.items()  # noqa: SLF001
            }
        return copies[module]

    def _copy_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer with the same options, the sharded parameters, and sharded states."""
        engine = self._engine_of.get(optimizer)
        if engine is None:
            return optimizer
        copy: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(copy).update(vars(optimizer))
        copy.param_groups = [
            {**group, "params": [self._copies.get(parameter, parameter) for parameter in parameters]}
            for group, parameters in zip(optimizer.param_groups, engine.groups, strict=True)
        ]
        copy.state = defaultdict(dict)
        states = {f: engine.sharded.states.get(f) for f in engine.sharded.fragments}
        scalars, keys = _gather_scalars(engine, states)
        for parameter, values in scalars.items():
            copy.state[self._copies[parameter]] = values
        for key, parameters in keys.items():
            parts = [(f, state[key]) for f, state in states.items() if key in state]
            for parameter, full in gather_full(parameters, parts, self._device):
                copy.state[self._copies[parameter]][key] = _shard(full, self._mesh)
        return copy

    # Writing back ----------------------------------------------------------------------

    @override
    def write_back(self) -> None:
        for engine in self._engines:
            _scatter(engine, self._copies.__getitem__, _select_master)
        for optimizer, copy in zip(self._optimizers, self.optimizers, strict=True):
            if optimizer in self._engine_of:
                self._write_optimizer(self._engine_of[optimizer], optimizer, copy)
        for engine in self._engines:
            engine.sharded.refresh_parameters()
        trained = {parameter for engine in self._engines for parameter in engine.trained}
        for parameter, sharded in self._copies.items():
            if parameter not in trained:
                full = gather_tensor(sharded)
                with torch.no_grad(), gather([parameter], writer=0):
                    parameter.copy_(full)

    def _write_optimizer(
        self, engine: Engine, optimizer: torch.optim.Optimizer, copy: torch.optim.Optimizer
    ) -> None:
        for group, copied in zip(optimizer.param_groups, copy.param_groups, strict=True):
            group.update({key: value for key, value in copied.items() if key != "params"})
        copied_states = {
            parameter: copy.state.get(self._copies[parameter], {}) for parameter in engine.trained
        }
        keys = {
            key: None
            for parameter, state in copied_states.items()
            for key, value in state.items()
            if _is_elementwise(key, value, parameter)
        }
        states = engine.sharded.states
        states.clear()
        for fragment in engine.sharded.fragments:
            if state := copied_states[fragment.parameter]:
                values = {
                    key: torch.zeros_like(_select_master(fragment))
                    if key in keys
                    else value.clone()
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in state.items()
                }
                states.set(fragment, values)
        for key in keys:
            _scatter(
                engine,
                lambda parameter, key=key: copied_states[parameter].get(key),  # type: ignore[misc]
                lambda fragment, key=key: states.get(fragment)[key],  # type: ignore[misc]
            )


def _select_master(fragment: Fragment) -> torch.Tensor:
    """Return the master weights of a fragment: `[length]`."""
    return fragment.select(fragment.flat.detach())


def _scatter(
    engine: Engine,
    find: Callable[[nn.Parameter], torch.Tensor | None],
    select: Callable[[Fragment], torch.Tensor],
) -> None:
    """Write the fragments of this rank in flat tensors from the sharded tensors of parameters that have one; collective."""
    by_parameter: dict[nn.Parameter, list[Fragment]] = defaultdict(list)
    for fragment in engine.sharded.fragments:
        by_parameter[fragment.parameter].append(fragment)
    for parameter in engine.trained:
        sharded = find(parameter)
        if sharded is None:
            continue
        full = gather_tensor(sharded).reshape(-1)
        for fragment in by_parameter[parameter]:
            select(fragment).copy_(full.narrow(0, fragment.offset, fragment.length))


def _gather_scalars(
    engine: Engine, states: Mapping[Fragment, Mapping[str, Any]]
) -> tuple[dict[nn.Parameter, dict[str, Any]], dict[str, list[nn.Parameter]]]:
    """Return the states that are not one number for each element, by parameter, and the parameters of the others by key.

    They are exchanged, since a rank has fragments of some parameters only.
    """
    positions = {parameter: position for position, parameter in enumerate(engine.trained)}
    own: dict[int, tuple[dict[str, Any], tuple[str, ...]]] = {}
    for fragment, state in states.items():
        keys = tuple(
            key
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == (fragment.length,)
        )
        scalars = {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
            if key not in keys
        }
        if state:
            own[positions[fragment.parameter]] = scalars, keys
    gathered: list[dict[int, tuple[dict[str, Any], tuple[str, ...]]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    merged = {position: values for each in gathered for position, values in each.items()}
    by_parameter, by_key = {}, defaultdict(list)
    for position, (scalars, keys) in sorted(merged.items()):
        parameter = engine.trained[position]
        by_parameter[parameter] = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in scalars.items()
        }
        for key in keys:
            by_key[key].append(parameter)
    return by_parameter, dict(by_key)


def gather_full(
    parameters: Sequence[nn.Parameter],
    fragments: Iterable[tuple[Fragment, torch.Tensor]],
    device: torch.device,
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter with a full tensor in its shape, in fp32, combined from the fragments of all ranks; collective."""
    by_parameter: dict[nn.Parameter, list[tuple[Fragment, torch.Tensor]]] = defaultdict(list)
    for fragment, values in fragments:
        by_parameter[fragment.parameter].append((fragment, values))
    for batch in _split(parameters):
        sizes = [_shape(parameter).numel() for parameter in batch]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = flat.split_with_sizes(sizes)
        for parameter, part in zip(batch, parts, strict=True):
            for fragment, values in by_parameter[parameter]:
                part.narrow(0, fragment.offset, fragment.length).copy_(values)
        dist.all_reduce(flat)
        for parameter, part in zip(batch, parts, strict=True):
            yield parameter, part.view(_shape(parameter))


def _shape(parameter: torch.Tensor) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _split(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in groups of `_BATCH_ELEMENTS` elements at most, unless one has more."""
    batch: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        size = _shape(parameter).numel()
        if batch and elements + size > _BATCH_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(parameter)
        elements += size
    if batch:
        yield batch


def _build_mesh(backend: Backend) -> DeviceMesh:
    return init_device_mesh(backend.device.type, (backend.topology.world_size,), mesh_dim_names=("dp_shard",))


def _shard(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the shard of this rank along the first dimension, in host memory, of a tensor that is equal on all ranks."""
    local = full
    if full.dim():
        rows = -(-full.shape[0] // mesh.size())
        begin = min(mesh.get_local_rank() * rows, full.shape[0])
        local = full[begin : begin + rows]
    sharded: Any = DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        mesh,
        [Shard(0) if full.dim() else Replicate()],
        run_check=False,
        shape=full.shape,
        stride=torch.empty(full.shape, device="meta").stride(),
    )
    on_host: DTensor = sharded.cpu()
    return on_host


def _is_elementwise(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a state has one number for each element of a parameter."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == _shape(parameter)
        and (bool(value.dim()) or key not in _SCALARS)
    )


_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""States of torch's optimizers that are one number, also for parameters that are."""
