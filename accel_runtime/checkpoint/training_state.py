"""The training state of an `Accelerator`, item by item."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import ProcessRandomStates, derive_random_states
from accel_runtime.checkpoint.state_items import (
    LoaderItem,
    ModelItem,
    OptimizerItem,
    RecordItem,
    StatefulItem,
    StateItem,
    is_sharded,
    tensor_name_of,
)
from accel_runtime.data.loader import PreparedLoader
from accel_runtime.data.state import NextBatch
from accel_runtime.foundation.module_names import state_dict
from accel_runtime.parallel.big_modeling import MetaModels
from accel_runtime.parallel.dtensor import shard_like
from accel_runtime.parallel.strategy import StateView, Strategy
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import TensorEntry
from accel_runtime.storage.schema import Count, Shape
from accel_runtime.training.accumulation import Accumulation, CycleState
from accel_runtime.training.gradients import Gradients, name_parameters, numbered_name
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.precision import Precision
from accel_runtime.training.scheduler import PreparedScheduler

__all__ = [
    "TrainingState",
    "capture_accumulation",
    "merge_accumulation",
    "read_model_parallel_size",
    "restore_accumulation",
]

_SLACK = 1 << 22
"""Bytes for small values and uneven shards."""


@dataclass(frozen=True)
class TrainingState:
    """Objects that an `Accelerator` has prepared."""

    strategy: Strategy
    view: StateView
    """Modules and optimizers whose tensors are saved and restored."""
    models: Sequence[nn.Module]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[PreparedScheduler]
    loaders: Sequence[PreparedLoader[Any] | None]
    """Loaders in the order of preparation; None if the script has deleted one."""
    precision: Precision
    accumulation: Accumulation
    gradients: Gradients
    registered: Sequence[Any]
    memory: MetaModels | None = None
    """Memory for models on the meta device."""
    one_rank: bool = False
    """Save without collectives, and without states that need every rank."""

    @property
    def backend(self) -> Backend:
        """Ranks and device."""
        return self.strategy.backend

    @property
    def step(self) -> int:
        """Number of optimizer steps."""
        return max((optimizer.steps for optimizer in self.optimizers), default=0)

    @property
    def bytes(self) -> int:
        """Approximate size of models and optimizers that this rank writes."""
        state = [tensor for model in self.models for tensor in (*model.parameters(), *model.buffers())]
        for optimizer in self.optimizers:
            state += [
                value
                for parameter_state in optimizer.state.values()
                for value in parameter_state.values()
                if torch.is_tensor(value)
            ]
        world_size = self.backend.topology.world_size
        shards = [(getattr(tensor, "_local_tensor", None), tensor.nbytes) for tensor in state]
        sizes = [-(-full // world_size) if local is None else local.nbytes for local, full in shards]
        return sum(sizes) + _SLACK

    def states(self) -> list[dict[str, Any]]:
        """Return the state dict of every model, with the parameter names of the script's module."""
        return [state_dict(model) for model in self.view.models]

    def items(
        self,
        states: Mapping[int, dict[str, Any]] | None = None,
        *,
        without: Container[int] = (),
        strict: bool = True,
        position: NextBatch = "next_batch",
    ) -> list[StateItem]:
        """Return all items in the order of restoring.

        `states` replaces model states by index after hooks have changed them, `without` lists models that hooks
        have removed, and `position` selects the offset at which loaders resume (see
        `PreparedLoader.load_state_dict`).
        """
        groups = [[group["params"] for group in optimizer.param_groups] for optimizer in self.view.optimizers]
        names = name_parameters(self.view.models, groups)
        elsewhere = self.view.list_held_elsewhere(self.backend.topology.rank)
        parameters = frozenset(
            f"{numbered_name('model', index)}.{name}" for index, held in enumerate(elsewhere) for name in held
        )
        items: list[StateItem] = [ReplicaItem(self.strategy, () if self.one_rank else self.models)]
        items += [
            ModelItem(
                numbered_name("model", index),
                model,
                None if states is None else states[index],
                strict=strict,
                memory=self.memory,
                elsewhere=elsewhere[index] if self.view.holders else None,
            )
            for index, model in enumerate(self.view.models)
            if index not in without and (states is None or index in states)
        ]
        items += [
            OptimizerItem(
                numbered_name("optimizer", index), optimizer, names, parameters if self.view.holders else None
            )
            for index, optimizer in enumerate(self.view.optimizers)
        ]
        items += [
            StatefulItem(numbered_name(kind, index), stateful_object)
            for kind, objects in (("scheduler", self.schedulers), ("registered", self.registered))
            for index, stateful_object in enumerate(objects)
        ]
        for index, loader in enumerate(self.loaders):
            left_out = self.one_rank and loader is not None and loader.is_presharded
            items.append(LoaderItem(numbered_name("loader", index), None if left_out else loader, position))
        scaler = self.precision.scaler or self.strategy.loss_scale
        if scaler is not None:
            items.append(StatefulItem("scaler", scaler))
        items += [
            AccumulationItem(
                self.accumulation,
                self.gradients,
                self.backend.data_rank.model_parallel_size,
                has_different_parameters=bool(self.view.holders),
            ),
            StepCountItem(self.optimizers),
        ]
        items.append(RNGItem(self.backend, one_rank=self.one_rank))
        return items


class ReplicaItem(StateItem):
    """State of the strategy that keeps the replicas of a model equal."""

    schema = list[Mapping[str, Any]]

    def __init__(self, strategy: Strategy, models: Sequence[nn.Module]) -> None:
        super().__init__("replicas")
        self._strategy, self._models = strategy, models

    @override
    def tree(self) -> Any:
        return [self._strategy.capture_replica_state(model) for model in self._models]

    @override
    def restore(self, tree: Any) -> None:
        for model, state in zip(self._models, tree, strict=False):
            self._strategy.restore_replica_state(model, state)


@dataclass(frozen=True)
class SparseGradient:
    """Parts of a sparse gradient, not summed, since sums depend on their order."""

    indices: torch.Tensor
    values: torch.Tensor
    shape: Shape
    coalesced: bool


Gradient = SparseGradient | torch.Tensor


@dataclass(frozen=True)
class WeightState:
    """Weights of the losses in an accumulation cycle."""

    pending: torch.Tensor | None = None
    """Sum of the weights on this rank that are not added to `total` yet."""
    total: torch.Tensor | None = None
    """Sum over all ranks that the gradients are divided by."""


@dataclass(frozen=True)
class AccumulationState:
    """The part of an accumulation cycle that the next backward passes need."""

    cycle: CycleState
    unit: torch.Tensor | None = None
    """Common factor of all weights, a scalar."""
    used: tuple[str, ...] = ()
    """Parameters whose gradients an optimizer has used: it skips a parameter without a gradient, but not a zero one."""
    gradients: Mapping[str, Gradient] = field(default_factory=dict)
    """Gradients that no optimizer has used yet, by parameter."""
    weights: Mapping[str, WeightState] = field(default_factory=dict)
    """Weights by the first parameter of their group."""
    model_parallel_size: Count = 1
    """Number of model-parallel ranks that saved the state."""
    averaged: tuple[str, ...] = ()
    """Parameters of sharded models whose gradients are averaged over the ranks."""
    unreduced: Mapping[str, Gradient] = field(default_factory=dict)
    """Gradients that sharded models have not reduced yet, by parameter."""
    has_different_parameters: bool = False
    """True if ranks hold different parameters."""


class AccumulationItem(RecordItem[AccumulationState]):
    """Gradients of an unfinished accumulation cycle, and its step count."""

    schema = AccumulationState
    merge_needs_all_ranks = True

    def __init__(
        self,
        accumulation: Accumulation,
        gradients: Gradients,
        model_parallel_size: int,
        *,
        has_different_parameters: bool = False,
    ) -> None:
        super().__init__("accumulation")
        self._has_different_parameters = has_different_parameters
        self._accumulation, self._gradients = accumulation, gradients
        self._model_parallel_size = model_parallel_size

    @override
    def capture(self) -> AccumulationState:
        state = capture_accumulation(self._accumulation, self._gradients, self._model_parallel_size)
        return replace(state, has_different_parameters=True) if self._has_different_parameters else state

    @override
    def targets(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        parameters = {name: parameter for parameter, name in self._gradients.parameter_names().items()}
        targets = {}
        for name in encoded.get("averaged", ()):
            stored, parameter = tensor_name_of(encoded["gradients"].get(name)), parameters.get(name)
            if stored in tensors and is_sharded(parameter) and parameter is not None:
                dtype = getattr(torch, tensors[stored].dtype)
                targets[stored] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return targets

    @override
    def apply(self, record: AccumulationState) -> None:
        restore_accumulation(record, self._accumulation, self._gradients)

    @override
    def reset(self) -> None:
        # The state between two cycles.
        self.apply(AccumulationState(Accumulation(self._accumulation.plugin).capture_cycle()))

    @override
    def merge_records(
        self, records: Sequence[AccumulationState], rank: int, world_size: int
    ) -> AccumulationState:
        return merge_accumulation(records, world_size, self._model_parallel_size)


@dataclass(frozen=True)
class RNGItemState:
    """Random generators of a process."""

    process: ProcessRandomStates
    saved_by: Count | None = None
    """Rank that saved without the others; None if all ranks saved."""


class RNGItem(RecordItem[RNGItemState]):
    """Random generators of a process."""

    schema = RNGItemState
    merge_needs_all_ranks = True

    def __init__(self, backend: Backend, *, one_rank: bool = False) -> None:
        super().__init__("random")
        self._backend, self._one_rank = backend, one_rank

    @override
    def capture(self) -> RNGItemState:
        states = ProcessRandomStates.capture(self._backend.device, self._module)
        return RNGItemState(states, self._backend.topology.rank if self._one_rank else None)

    @override
    def apply(self, record: RNGItemState) -> None:
        record.process.restore(self._backend.device, self._module)

    @property
    def _module(self) -> Any:
        """Provider of the device's generator; None for the CPU."""
        return None if self._backend.device.type == "cpu" else self._backend.runtime.rng

    @override
    def merge_records(self, records: Sequence[RNGItemState], rank: int, world_size: int) -> RNGItemState:
        # A rank that saved alone keeps its streams: those of rank 0 define the order of the next epochs.
        if records[0].saved_by == self._backend.topology.rank:
            return records[0]
        # Model-parallel ranks draw the same numbers.
        data_ranks = self._backend.data_rank
        processes = [record.process for record in records]
        return RNGItemState(derive_random_states(processes, data_ranks.rank, data_ranks.world_size))


@dataclass(frozen=True)
class StepCountState:
    """Step counts of the optimizers, in the order of preparation."""

    steps: tuple[Count, ...]


class StepCountItem(RecordItem[StepCountState]):
    """Step counts of the optimizers."""

    schema = StepCountState

    def __init__(self, optimizers: Sequence[PreparedOptimizer]) -> None:
        super().__init__("step_counts")
        self._optimizers = optimizers

    @override
    def capture(self) -> StepCountState:
        return StepCountState(tuple(optimizer.steps for optimizer in self._optimizers))

    @override
    def apply(self, record: StepCountState) -> None:
        for optimizer, steps in zip(self._optimizers, record.steps, strict=False):
            optimizer.steps = steps


def capture_accumulation(
    accumulation: Accumulation, gradients: Gradients, model_parallel_size: int = 1
) -> AccumulationState:
    """Return the part of an accumulation cycle that the next backward passes need; its tensors are the live ones.

    Gradients are kept until an optimizer has used them. Gradients that sharded models have not reduced yet are kept apart.
    """
    names = gradients.parameter_names()
    # A cycle is common to all optimizers, and the first that steps ends it.
    unused = gradients.list_unused() if accumulation.is_new_cycle else names.keys()
    visible = names if gradients.in_parameters else {}
    present = {name: p.grad for p, name in visible.items() if p in unused and p.grad is not None}
    return AccumulationState(
        cycle=accumulation.capture_cycle(),
        unit=gradients.weights.unit,
        # A sparse gradient without values is like none.
        used=tuple(
            n for p, n in visible.items() if p not in unused and p.grad is not None and not p.grad.is_sparse
        ),
        gradients={name: _split_sparse(gradient) for name, gradient in present.items()},
        weights={
            names[group.parameters[0]]: WeightState(group.pending, group.total)
            for group in gradients.find_groups()
            if group.is_current and group.parameters[0] in unused
        },
        model_parallel_size=model_parallel_size,
        averaged=tuple(name for name, gradient in present.items() if is_sharded(gradient)),
        unreduced={names[p]: grad for p, grad in gradients.read_unsynced().items() if p in unused},
    )


def restore_accumulation(state: AccumulationState, accumulation: Accumulation, gradients: Gradients) -> None:
    """Restore the result of `capture_accumulation` or `merge_accumulation`; current gradients are dropped."""
    names = gradients.parameter_names()
    _check_gradients(state, {name: gradients.read_shape(parameter) for parameter, name in names.items()})
    used = set(state.used)
    unsynced: dict[nn.Parameter, torch.Tensor] = {}
    for parameter, name in names.items():
        reduced, local = _separate_unreduced(state, name, sharded=is_sharded(parameter))
        if local is not None:
            unsynced[parameter] = local
        if not gradients.in_parameters:
            if reduced is not None:
                unsynced[parameter] = _to_dense(reduced)
        elif reduced is None:
            parameter.grad = torch.zeros_like(parameter) if name in used else None
        else:
            parameter.grad = _place_like(reduced, parameter)
    gradients.restore_unsynced(unsynced)
    held = state.gradients.keys() | state.unreduced.keys()
    gradients.set_unused({parameter for parameter, name in names.items() if name in held})
    gradients.weights.unit = _copy_scalar(state.unit, gradients.device)
    for group in gradients.find_groups():
        weights = state.weights.get(names[group.parameters[0]], WeightState())
        group.set_weights(
            _copy_scalar(weights.pending, gradients.device), _copy_scalar(weights.total, gradients.device)
        )
    accumulation.restore_cycle(state.cycle)


def _separate_unreduced(state: AccumulationState, name: str, *, sharded: bool) -> tuple[Any, Any]:
    """Return the reduced gradient of a parameter, and its part on this rank that is still to be reduced.

    A replicated parameter has both in one tensor, as has a rank that averages full gradients.
    """
    reduced: Any = state.gradients.get(name)
    unsynced: Any = state.unreduced.get(name)
    if sharded and reduced is not None and name not in state.averaged:
        return None, reduced if unsynced is None else reduced + unsynced
    if not sharded and unsynced is not None:
        return unsynced if reduced is None else reduced + unsynced, None
    return reduced, unsynced


def read_model_parallel_size(encoded: Any) -> int:
    """Return the number of model-parallel ranks that saved an accumulation cycle, from its JSON."""
    return int(encoded.get("model_parallel_size", 1)) if isinstance(encoded, dict) else 1


def merge_accumulation(
    states: Sequence[AccumulationState], world_size: int, model_parallel_size: int = 1
) -> AccumulationState:
    """Return the accumulation cycle of every rank of another world size, for the same result of its step.

    The gradients of a step are the mean over the ranks, so the mean of the old ranks on every new rank adds the
    same sum. With weights, gradients contain their weights times the world size, and the mean over the old
    ranks keeps every weight once; weights that are not divided by yet are distributed, so that their sum over
    the ranks stays the same.
    """
    if any(state.has_different_parameters and (state.gradients or state.unreduced) for state in states):
        raise CheckpointError(
            "accumulation: the checkpoint was saved within an accumulation cycle by ranks that hold different parameters. Use as many "
            "ranks as before the save, or save at the end of a cycle."
        )
    saved_size = states[0].model_parallel_size
    if any(state.weights for state in states) and saved_size != model_parallel_size:
        raise CheckpointError(
            f"accumulation: the checkpoint was saved within an accumulation cycle of backward(weight=...) with {saved_size} "
            f"model-parallel ranks, and this run has {model_parallel_size}. Use the same mesh, or save at the end of a cycle."
        )
    return replace(
        states[0],
        unreduced=_average([state.unreduced for state in states]),
        used=_union([state.used for state in states]),
        gradients=_average([state.gradients for state in states]),
        weights={
            name: _distribute_weights(
                [state.weights.get(name, WeightState()) for state in states], world_size
            )
            for name in _union([state.weights for state in states])
        },
    )


def _union(parts: Sequence[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))


def _check_gradients(state: AccumulationState, shapes: Mapping[str, list[int]]) -> None:
    for name, gradient in (*state.gradients.items(), *state.unreduced.items()):
        shape = list(gradient.shape)
        if name not in shapes:
            raise CheckpointError(
                f"accumulation: the checkpoint was saved within an accumulation cycle and contains a gradient of {name}, which "
                "is not among the prepared models and optimizers. Prepare the same objects as before the save."
            )
        if shape != shapes[name]:
            raise CheckpointError(
                f"accumulation: the gradient of {name} has shape {shape}, the parameter {shapes[name]}"
            )


def _split_sparse(gradient: torch.Tensor) -> Gradient:
    """Return a gradient for serialization: the parts of a sparse one."""
    if gradient.layout is not torch.sparse_coo:
        return gradient
    return SparseGradient(
        gradient._indices(),  # noqa: SLF001 - the public one is for what is added up
        gradient._values(),  # noqa: SLF001
        tuple(gradient.shape),
        gradient.is_coalesced(),
    )


def _place_like(gradient: Gradient, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(gradient, SparseGradient):
        return _build_sparse(gradient).to(parameter.device)
    if is_sharded(parameter) and not is_sharded(gradient):
        return shard_like(gradient, parameter, "the gradient")
    # With the strides of the parameter, like autograd.
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _to_dense(gradient: Gradient) -> torch.Tensor:
    return _build_sparse(gradient).to_dense() if isinstance(gradient, SparseGradient) else gradient


def _build_sparse(parts: SparseGradient) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        parts.indices.clone(),
        parts.values.clone(),
        parts.shape,
        check_invariants=True,
        is_coalesced=parts.coalesced,
    )


def _average(by_rank: Sequence[Mapping[str, Gradient]]) -> dict[str, Gradient]:
    return {name: _mean([gradients.get(name) for gradients in by_rank]) for name in _union(by_rank)}


def _mean(gradients: Sequence[Gradient | None]) -> Gradient:
    """Return the mean over the ranks; a missing gradient counts as zero."""
    first = gradients[0]
    if first is not None and all(gradient is first for gradient in gradients):
        # Equal on all ranks.
        return first
    present = [
        _build_sparse(gradient) if isinstance(gradient, SparseGradient) else gradient
        for gradient in gradients
        if gradient is not None
    ]
    dtype = torch.promote_types(present[0].dtype, torch.float32)
    # Divided first, like DDP: the sum may overflow.
    total = sum(
        (gradient.to(dtype) / len(gradients) for gradient in present[1:]),
        start=present[0].to(dtype) / len(gradients),
    )
    return _split_sparse(total.to(present[0].dtype))


def _distribute_weights(groups: Sequence[WeightState], world_size: int) -> WeightState:
    pending = [group.pending for group in groups if group.pending is not None]
    totals = [group.total for group in groups if group.total is not None]
    local_weight = torch.stack(pending).sum() / world_size if pending else None
    return WeightState(local_weight, next(iter(totals), None))


def _copy_scalar(value: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if value is None else value.detach().clone().to(device)
