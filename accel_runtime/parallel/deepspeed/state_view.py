"""The state of models and optimizers under ZeRO, as sharded tensors by parameter.

deepspeed has one flat tensor a group of parameters, whose parts depend on stage, world size and padding. A view has the layout of
`fully_shard` on the same ranks instead: each parameter, with its master weights in fp32, and each state of it is sharded along its
first dimension. Checkpoints and exports of ZeRO are therefore those of `fully_shard`, and load into any other strategy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.parallel.deepspeed.engine import Engine
from accel_runtime.parallel.deepspeed.library import Fragment, gather, is_partitioned
from accel_runtime.parallel.dtensor import gather_tensor
from accel_runtime.parallel.strategy import StateView

__all__ = ["ZeroStateView", "gather_full"]

_BATCH_ELEMENTS = 16 * 1024 * 1024
"""Number of elements that are combined over the ranks at once."""


class ZeroStateView(StateView):
    """Sharded copies of weights and optimizer states, in modules and optimizers of the script's classes; collective.

    Args:
        models: Modules of the script.
        optimizers: Optimizers of the script.
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
        self._optimizers = optimizers
        self._device = backend.device
        self._mesh = init_device_mesh(
            backend.device.type, (backend.topology.world_size,), mesh_dim_names=("dp_shard",)
        )
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
            masters = [(f, f.select(f.flat.detach())) for f in engine.sharded.list_fragments()]
            for parameter, full in gather_full(engine.trained, masters, self._device):
                self._add_copy(parameter, full)
        for parameter in parameters:
            if is_partitioned(parameter) and parameter not in self._copies:
                with gather([parameter]):
                    self._add_copy(parameter, parameter.detach())

    def _add_copy(self, parameter: nn.Parameter, full: torch.Tensor) -> None:
        self._copies[parameter] = nn.Parameter(
            _shard(full, self._mesh), requires_grad=parameter.requires_grad
        )

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
        fragments = engine.sharded.list_fragments()
        keys, options = self._list_keys(engine, fragments)
        for parameter in engine.trained if keys or options else ():
            copy.state[self._copies[parameter]] |= {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in options.items()
            }
        for key in keys:
            values = [(f, f.select(engine.sharded.get_state(f.flat)[key])) for f in fragments]
            for parameter, full in gather_full(engine.trained, values, self._device):
                copy.state[self._copies[parameter]][key] = _shard(full, self._mesh)
        return copy

    @staticmethod
    def _list_keys(engine: Engine, fragments: Sequence[Fragment]) -> tuple[list[str], dict[str, Any]]:
        """Return the keys of states with a value for each element, and the other states, which are equal for all parameters.

        They are exchanged, since a rank may have no fragment.
        """
        keys: dict[str, None] = {}
        options: dict[str, Any] = {}
        for flat in {id(fragment.flat): fragment.flat for fragment in fragments}.values():
            for key, value in engine.sharded.get_state(flat).items():
                if _has_elements_of(value, flat):
                    keys[key] = None
                else:
                    options[key] = value.cpu() if isinstance(value, torch.Tensor) else value
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (list(keys), options))
        found = next((each for each in gathered if any(each)), gathered[0])
        return found[0], found[1]

    # Writing back ----------------------------------------------------------------------

    @override
    def write_back(self) -> None:
        for engine in self._engines:
            self._scatter(engine, self._copies.__getitem__, lambda fragment: fragment.flat.detach())
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

    def _scatter(
        self,
        engine: Engine,
        find: Callable[[nn.Parameter], torch.Tensor],
        select: Callable[[Fragment], torch.Tensor],
    ) -> None:
        """Write the fragments of this rank in flat tensors from the sharded tensors of all parameters."""
        by_parameter: dict[nn.Parameter, list[Fragment]] = defaultdict(list)
        for fragment in engine.sharded.list_fragments():
            by_parameter[fragment.parameter].append(fragment)
        for parameter in engine.trained:
            full = gather_tensor(find(parameter)).reshape(-1)
            for fragment in by_parameter[parameter]:
                fragment.select(select(fragment)).copy_(full.narrow(0, fragment.offset, fragment.length))

    def _write_optimizer(
        self, engine: Engine, optimizer: torch.optim.Optimizer, copy: torch.optim.Optimizer
    ) -> None:
        for group, copied in zip(optimizer.param_groups, copy.param_groups, strict=True):
            group.update({key: value for key, value in copied.items() if key != "params"})
        states = {parameter: copy.state.get(self._copies[parameter], {}) for parameter in engine.trained}
        keys: dict[str, None] = {}
        options: dict[str, Any] = {}
        for parameter, state in states.items():
            for key, value in state.items():
                if _has_elements_of(value, self._copies[parameter]):
                    keys[key] = None
                else:
                    options[key] = value
        for flat in engine.sharded.list_flats():
            state = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in options.items()
            }
            engine.sharded.set_state(flat, state | {key: torch.zeros_like(flat.detach()) for key in keys})
        for key in keys:

            def find(parameter: nn.Parameter, key: str = key) -> torch.Tensor:
                value = states[parameter].get(key)
                return torch.zeros(_shape(parameter)) if value is None else value

            def select(fragment: Fragment, key: str = key) -> torch.Tensor:
                value: torch.Tensor = engine.sharded.get_state(fragment.flat)[key]
                return value

            self._scatter(engine, find, select)


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


def _shard(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the shard of this rank along the first dimension, in host memory, of a tensor that is equal on all ranks."""
    if not full.dim():
        return DTensor.from_local(full.clone(), mesh, [Replicate()], run_check=False).cpu()
    rows = -(-full.shape[0] // mesh.size())
    begin = min(mesh.get_local_rank() * rows, full.shape[0])
    shard = full[begin : begin + rows].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=stride).cpu()


def _has_elements_of(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and bool(value.dim())
