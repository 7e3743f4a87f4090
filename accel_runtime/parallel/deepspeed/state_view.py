"""The state of models and optimizers under ZeRO, as sharded tensors by parameter.

deepspeed has one flat tensor a group of parameters, whose parts depend on stage, world size and padding. A view has the layout of
`fully_shard` on the same ranks instead: each parameter, with its master weights in fp32, and each state of it is sharded along its
first dimension. Checkpoints and exports of ZeRO are therefore those of `fully_shard`, and load into any other strategy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from accel_runtime.backends.base import Backend
from accel_runtime.parallel.deepspeed.engine import Engine
from accel_runtime.parallel.deepspeed.library import Fragment, gather, is_partitioned
from accel_runtime.parallel.dtensor import gather_tensor
from accel_runtime.parallel.strategy import StateView

__all__ = ["ZeroStateView", "build_view"]

_BATCH_ELEMENTS = 16 * 1024 * 1024
"""Number of elements that are combined over the ranks at once."""


class ZeroStateView(StateView):
    """Sharded copies of weights and optimizer states, in modules and optimizers of the script's classes.

    Args:
        models: The prepared models.
        optimizers: The optimizers of the script.
        engines: The engine of each optimizer.
        backend: Ranks and device.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        engines: Mapping[torch.optim.Optimizer, Engine],
        backend: Backend,
    ) -> None:
        self._live_models, self._live_optimizers, self._engines = models, optimizers, engines
        self._device = backend.device
        self._mesh = init_device_mesh(
            backend.device.type, (backend.topology.world_size,), mesh_dim_names=("dp_shard",)
        )
        self._shards: dict[nn.Parameter, nn.Parameter] = {}
        """The sharded copy of each parameter."""
        self._copy_weights()
        modules: dict[nn.Module, nn.Module] = {}
        super().__init__(
            [self._copy_module(model, modules) for model in models],
            [self._copy_optimizer(optimizer) for optimizer in optimizers],
        )

    # Copies ----------------------------------------------------------------------------

    def _list_engines(self) -> list[Engine]:
        """Return the engines of the models and optimizers."""
        parameters = {parameter for model in self._live_models for parameter in model.parameters()}
        return [
            engine
            for optimizer, engine in self._engines.items()
            if optimizer in self._live_optimizers or not parameters.isdisjoint(engine.parameters)
        ]

    def _copy_weights(self) -> None:
        for engine in self._list_engines():
            fragments = engine.sharded.list_fragments()
            for parameter, full in self._gather_full(
                engine, fragments, lambda fragment: fragment.flat.detach()
            ):
                self._add_copy(parameter, full)
        others = [
            parameter
            for model in self._live_models
            for parameter in model.parameters()
            if is_partitioned(parameter) and parameter not in self._shards
        ]
        for parameter in dict.fromkeys(others):
            with gather([parameter]):
                self._add_copy(parameter, parameter.detach())

    def _add_copy(self, parameter: nn.Parameter, full: torch.Tensor) -> None:
        self._shards[parameter] = nn.Parameter(
            _shard(full, self._mesh), requires_grad=parameter.requires_grad
        )

    def _gather_full(
        self, engine: Engine, fragments: Sequence[Fragment], select: Callable[[Fragment], torch.Tensor]
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter of an engine with a full tensor, combined from fragments of flat tensors; collective."""
        by_parameter: dict[nn.Parameter, list[Fragment]] = defaultdict(list)
        for fragment in fragments:
            by_parameter[fragment.parameter].append(fragment)
        trained = [parameter for parameter in engine.parameters if parameter.requires_grad]
        for batch in _split(trained):
            flat = torch.zeros(sum(map(_numel, batch)), dtype=torch.float32, device=self._device)
            parts = torch.split(flat, [_numel(parameter) for parameter in batch])
            for parameter, part in zip(batch, parts, strict=True):
                for fragment in by_parameter[parameter]:
                    part.narrow(0, fragment.offset, fragment.length).copy_(fragment.select(select(fragment)))
            dist.all_reduce(flat)
            for parameter, part in zip(batch, parts, strict=True):
                yield parameter, part.view(_shape(parameter))

    def _copy_module(self, module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
        """Return a module with the same attributes and buffers, and the sharded parameters."""
        if module not in copies:
            copies[module] = copy = object.__new__(type(module))
            vars(copy).update(vars(module))
            parameters: dict[str, nn.Parameter | None] = dict(module._parameters.items())  # noqa: SLF001
            vars(copy)["_parameters"] = {
                name: parameter if parameter is None else self._shards.get(parameter, parameter)
                for name, parameter in parameters.items()
            }
            vars(copy)["_modules"] = {
                name: child if child is None else self._copy_module(child, copies)
                for name, child in module._modules.items()  # noqa: SLF001
            }
        return copies[module]

    def _copy_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer with the same options, the sharded parameters, and sharded states."""
        engine = self._engines.get(optimizer)
        if engine is None:
            return optimizer
        copy: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(copy).update(vars(optimizer))
        copy.param_groups = [
            {**group, "params": [self._shards.get(parameter, parameter) for parameter in parameters]}
            for group, parameters in zip(optimizer.param_groups, engine.groups, strict=True)
        ]
        copy.state = defaultdict(dict)
        fragments = engine.sharded.list_fragments()
        flats = {fragment.flat: None for fragment in fragments}
        states = [engine.sharded.get_state(flat) for flat in flats]
        by_flat = dict(zip(flats, states, strict=True))
        elementwise = {
            key: None
            for flat, state in by_flat.items()
            for key, value in state.items()
            if _is_elementwise(value, flat)
        }
        others = {key: value for state in states for key, value in state.items() if key not in elementwise}
        gathered: list[tuple[list[str], dict[str, Any]]] = [({}, {})] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(gathered, (list(elementwise), {k: _to_number(v) for k, v in others.items()}))
        keys = dict.fromkeys(key for names, _ in gathered for key in names)
        if not keys and not any(values for _, values in gathered):
            return copy
        scalars = next(values for names, values in gathered if names or values)
        for key in keys:
            for parameter, full in self._gather_full(
                engine,
                fragments,
                lambda fragment, key=key: by_flat[fragment.flat][key],  # type: ignore[misc]
            ):
                copy.state[self._shards[parameter]][key] = _shard(full, self._mesh)
        for parameter in engine.parameters:
            if parameter.requires_grad:
                copy.state[self._shards[parameter]] |= {
                    key: _to_tensor(value) for key, value in scalars.items()
                }
        return copy

    # Writing back ----------------------------------------------------------------------

    def write_back(self) -> None:
        """Set weights, options and states of the live objects to those of the view; collective."""
        for engine in self._list_engines():
            fragments = engine.sharded.list_fragments()
            self._scatter(
                engine, fragments, lambda parameter: self._shards[parameter], lambda fragment: fragment.flat
            )
        for optimizer, copy in zip(self._live_optimizers, self.optimizers, strict=True):
            if optimizer in self._engines:
                self._write_optimizer(self._engines[optimizer], optimizer, copy)
        for engine in self._list_engines():
            engine.sharded.refresh_parameters()
        trained = {
            parameter
            for engine in self._list_engines()
            for parameter in engine.parameters
            if parameter.requires_grad
        }
        for parameter, shard in self._shards.items():
            if parameter not in trained:
                full = gather_tensor(shard)
                with torch.no_grad(), gather([parameter], writer=0):
                    parameter.data.copy_(full)

    def _scatter(
        self,
        engine: Engine,
        fragments: Sequence[Fragment],
        find: Callable[[nn.Parameter], torch.Tensor],
        select: Callable[[Fragment], torch.Tensor],
    ) -> None:
        """Write the fragments of this rank from sharded tensors; collective."""
        by_parameter: dict[nn.Parameter, list[Fragment]] = defaultdict(list)
        for fragment in fragments:
            by_parameter[fragment.parameter].append(fragment)
        for parameter in engine.parameters:
            if not parameter.requires_grad:
                continue
            full = gather_tensor(find(parameter)).reshape(-1)
            for fragment in by_parameter[parameter]:
                fragment.select(select(fragment).detach()).copy_(
                    full.narrow(0, fragment.offset, fragment.length)
                )

    def _write_optimizer(
        self, engine: Engine, optimizer: torch.optim.Optimizer, copy: torch.optim.Optimizer
    ) -> None:
        for group, copied in zip(optimizer.param_groups, copy.param_groups, strict=True):
            group.update({key: value for key, value in copied.items() if key != "params"})
        fragments = engine.sharded.list_fragments()
        trained = [parameter for parameter in engine.parameters if parameter.requires_grad]
        states = {parameter: copy.state.get(self._shards[parameter], {}) for parameter in trained}
        keys = dict.fromkeys(
            key
            for parameter, state in states.items()
            for key, value in state.items()
            if _is_elementwise(value, self._shards[parameter])
        )
        scalars = {key: value for state in states.values() for key, value in state.items() if key not in keys}
        flats = {fragment.flat: None for fragment in fragments}
        for flat in flats:
            state = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in scalars.items()
            }
            state |= {key: torch.zeros_like(flat, requires_grad=False) for key in keys}
            engine.sharded.set_state(flat, state)
        for key in keys:
            self._scatter(
                engine,
                fragments,
                lambda parameter, key=key: states[parameter].get(key, torch.zeros(_shape(parameter))),  # type: ignore[misc]
                lambda fragment, key=key: engine.sharded.get_state(fragment.flat)[key],  # type: ignore[misc]
            )


def build_view(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    engines: Mapping[torch.optim.Optimizer, Engine],
    backend: Backend,
) -> ZeroStateView:
    """Return a view of models and optimizers; collective."""
    return ZeroStateView(models, optimizers, engines, backend)


def _numel(parameter: torch.Tensor) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: torch.Tensor) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _split(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    batch: list[nn.Parameter] = []
    for parameter in parameters:
        if batch and sum(map(_numel, batch)) + _numel(parameter) > _BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


def _shard(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the shard of this rank along the first dimension, on the host; equal full tensors on all ranks."""
    if not full.dim():
        return DTensor.from_local(full.clone(), mesh, [Replicate()], run_check=False).cpu()
    rows = -(-full.shape[0] // mesh.size())
    begin = min(mesh.get_local_rank() * rows, full.shape[0])
    shard = full[begin : begin + rows].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=stride).cpu()


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and bool(value.dim())


def _to_number(value: Any) -> Any:
    return ("tensor", value.item(), str(value.dtype)) if isinstance(value, torch.Tensor) else value


def _to_tensor(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("tensor",):
        return torch.tensor(value[1], dtype=getattr(torch, value[2].removeprefix("torch.")))
    return value
