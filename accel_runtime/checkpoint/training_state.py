"""The training state of an `Accelerator`, item by item."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import capture_rng_state, derive_rng_state, restore_rng_state
from accel_runtime.checkpoint.state_items import (
    LoaderItem,
    ModelItem,
    OptimizerItem,
    StatefulItem,
    StateItem,
    is_sharded,
    tensor_name_of,
)
from accel_runtime.data.loader import NextBatch, PreparedLoader
from accel_runtime.foundation.module_names import state_dict
from accel_runtime.parallel.big_modeling import MetaModels
from accel_runtime.parallel.dtensor import shard_like
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import TensorEntry
from accel_runtime.storage.schema import Count, Rule, Shape
from accel_runtime.storage.state_tree import TensorNode
from accel_runtime.training.accumulation import Accumulation
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

_SAVED_BY = "saved_by"
"""Key in the random states: the rank that saved without the others."""
_SLACK = 1 << 22
"""Bytes for small values and uneven shards."""


@dataclass(frozen=True)
class TrainingState:
    """Objects that an `Accelerator` has prepared."""

    strategy: Strategy
    models: Sequence[nn.Module]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[PreparedScheduler]
    loaders: Sequence[PreparedLoader | None]
    """Loaders in the order of preparation; None if the script has deleted one."""
    precision: Precision
    accumulation: Accumulation
    gradients: Gradients
    registered: Sequence[Any]
    memory: MetaModels | None = None
    """Memory for models on the meta device."""
    alone: bool = False
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
        return [state_dict(self.strategy.unwrap_model(model)) for model in self.models]

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
        names = name_parameters(self.models, self.optimizers, self.strategy.unwrap_model)
        items: list[StateItem] = [ReplicaItem(self.strategy, () if self.alone else self.models)]
        items += [
            ModelItem(
                numbered_name("model", index),
                self.strategy.unwrap_model(model),
                None if states is None else states[index],
                strict=strict,
                memory=self.memory,
            )
            for index, model in enumerate(self.models)
            if index not in without and (states is None or index in states)
        ]
        items += [
            OptimizerItem(numbered_name("optimizer", index), optimizer, names)
            for index, optimizer in enumerate(self.optimizers)
        ]
        items += [
            StatefulItem(numbered_name(kind, index), stateful_object)
            for kind, objects in (("scheduler", self.schedulers), ("registered", self.registered))
            for index, stateful_object in enumerate(objects)
        ]
        for index, loader in enumerate(self.loaders):
            left_out = self.alone and loader is not None and loader.is_presharded
            items.append(LoaderItem(numbered_name("loader", index), None if left_out else loader, position))
        if self.precision.scaler is not None:
            items.append(StatefulItem("scaler", self.precision.scaler))
        items += [
            AccumulationItem(self.accumulation, self.gradients, self.backend.data_rank.model_parallel_size),
            StepCountItem(self.optimizers),
        ]
        items.append(RNGItem(self.backend, alone=self.alone))
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
class _CycleState:
    count: Count
    synced: bool
    fresh: bool
    weighted: bool
    step: Count = 0


@dataclass(frozen=True)
class _SparseGradient:
    indices: TensorNode
    values: TensorNode
    shape: Shape
    coalesced: bool


@dataclass(frozen=True)
class _Weights:
    pending: TensorNode | None
    total: TensorNode | None


@dataclass(frozen=True)
class _AccumulationState:
    accumulation: _CycleState
    unit: TensorNode | None
    used: list[str]
    gradients: Mapping[str, _SparseGradient | TensorNode]
    weights: Mapping[str, _Weights]
    copies: Count = 1
    averaged: list[str] = field(default_factory=list)
    unreduced: Mapping[str, _SparseGradient | TensorNode] = field(default_factory=dict)


class AccumulationItem(StateItem):
    """Gradients of an unfinished accumulation cycle, and its step count."""

    schema = _AccumulationState
    merge_needs_all_ranks = True

    def __init__(self, accumulation: Accumulation, gradients: Gradients, copies: int) -> None:
        super().__init__("window")
        self._accumulation, self._gradients, self._copies = accumulation, gradients, copies

    @override
    def tree(self) -> Any:
        return capture_accumulation(self._accumulation, self._gradients, self._copies)

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
    def restore(self, tree: Any) -> None:
        restore_accumulation(tree, self._accumulation, self._gradients)

    @override
    def merge_ranks(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:
        return merge_accumulation(trees, world_size, self._copies)


_PythonState = Annotated[list[Any], Rule("a list of 3", lambda state: len(state) == 3)]  # noqa: PLR2004
_NumpyState = Annotated[list[Any], Rule("a list of 5", lambda state: len(state) == 5)]  # noqa: PLR2004


@dataclass(frozen=True)
class _Seed:
    seed: int


@dataclass(frozen=True)
class _RandomState:
    torch: _Seed | TensorNode | None = None
    python: _Seed | _PythonState | None = None
    numpy: _Seed | _NumpyState | None = None
    saved_by: Count | None = None


class RNGItem(StateItem):
    """Random generators of a process."""

    schema = _RandomState
    merge_needs_all_ranks = True

    def __init__(self, backend: Backend, *, alone: bool = False) -> None:
        super().__init__("random")
        self._backend, self._alone = backend, alone

    @override
    def tree(self) -> Any:
        streams = capture_rng_state(self._backend.device, self._module)
        return streams | ({_SAVED_BY: self._backend.topology.rank} if self._alone else {})

    @override
    def restore(self, tree: Any) -> None:
        restore_rng_state(tree, self._backend.device, self._module)

    @property
    def _module(self) -> Any:
        """Provider of the device's generator; None for the CPU."""
        return None if self._backend.device.type == "cpu" else self._backend.runtime.rng

    @override
    def merge_ranks(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:
        # A rank that saved alone keeps its streams: those of rank 0 define the order of the next epochs.
        if trees[0].get(_SAVED_BY) == self._backend.topology.rank:
            return trees[0]
        # Model-parallel ranks draw the same numbers.
        data_ranks = self._backend.data_rank
        streams = [{kind: state for kind, state in tree.items() if kind != _SAVED_BY} for tree in trees]
        return derive_rng_state(streams, data_ranks.rank, data_ranks.world_size)


@dataclass(frozen=True)
class _StepCounts:
    steps: list[Count]


class StepCountItem(StateItem):
    """Step counts of the optimizers."""

    schema = _StepCounts

    def __init__(self, optimizers: Sequence[PreparedOptimizer]) -> None:
        super().__init__("counters")
        self._optimizers = optimizers

    @override
    def tree(self) -> Any:
        return {"steps": [optimizer.steps for optimizer in self._optimizers]}

    @override
    def restore(self, tree: Any) -> None:
        for optimizer, steps in zip(self._optimizers, tree["steps"], strict=False):
            optimizer.steps = steps


Tree = dict[str, Any]


def capture_accumulation(accumulation: Accumulation, gradients: Gradients, copies: int = 1) -> Tree:
    """Return the part of an accumulation cycle that the next backward passes need; its tensors are the live ones.

    Gradients are kept until an optimizer has used them. Of used ones only the names are kept: an optimizer
    skips a parameter without a gradient, but not one whose gradient is zero. Gradients that sharded models have
    not reduced yet are kept apart.
    """
    names = gradients.parameter_names()
    # A cycle is common to all optimizers, and the first that steps ends it.
    unused = gradients.list_unused() if accumulation.is_new_cycle else names.keys()
    present = {name: p.grad for p, name in names.items() if p in unused and p.grad is not None}
    sharded = {
        "copies": copies if copies > 1 else None,
        "averaged": [name for name, gradient in present.items() if is_sharded(gradient)],
        "unreduced": {names[p]: gradient for p, gradient in gradients.read_unsynced().items() if p in unused},
    }
    return {key: value for key, value in sharded.items() if value} | {
        "accumulation": accumulation.state_dict(),
        "unit": gradients.weights.unit,
        "used": [name for p, name in names.items() if p not in unused and p.grad is not None],
        "gradients": {name: _serialize_gradient(gradient) for name, gradient in present.items()},
        "weights": {
            names[group.parameters[0]]: {"pending": group.pending, "total": group.total}
            for group in gradients.find_groups()
            if group.is_current and group.parameters[0] in unused
        },
    }


def restore_accumulation(tree: Tree, accumulation: Accumulation, gradients: Gradients) -> None:
    """Restore the result of `capture_accumulation` or `merge_accumulation`; current gradients are dropped."""
    names = gradients.parameter_names()
    _check_gradients(tree, names)
    used = set(tree["used"])
    unsynced = {}
    for parameter, name in names.items():
        reduced, local = _split_gradient(tree, name, sharded=is_sharded(parameter))
        if local is not None:
            unsynced[parameter] = local
        if reduced is None:
            parameter.grad = torch.zeros_like(parameter) if name in used else None
        else:
            parameter.grad = _place_like(reduced, parameter)
    gradients.restore_unsynced(unsynced)
    held = tree["gradients"].keys() | tree.get("unreduced", {}).keys()
    gradients.set_unused({parameter for parameter, name in names.items() if name in held})
    unit = tree["unit"]
    gradients.weights.unit = _copy_scalar(unit, gradients.device)
    for group in gradients.find_groups():
        weights = tree["weights"].get(names[group.parameters[0]], {})
        group.set_weights(*(_copy_scalar(weights.get(key), gradients.device) for key in ("pending", "total")))
    accumulation.load_state_dict(tree["accumulation"])


def _split_gradient(tree: Tree, name: str, *, sharded: bool) -> tuple[Any, Any]:
    """Return the reduced gradient of a parameter, and its part on this rank that is still to be reduced.

    A replicated parameter has both in one tensor, as has a rank that averages full gradients.
    """
    reduced, unsynced = tree["gradients"].get(name), tree.get("unreduced", {}).get(name)
    if sharded and reduced is not None and name not in tree.get("averaged", ()):
        return None, reduced if unsynced is None else reduced + unsynced
    if not sharded and unsynced is not None:
        return unsynced if reduced is None else reduced + unsynced, None
    return reduced, unsynced


def read_model_parallel_size(encoded: Any) -> int:
    """Return the number of model-parallel ranks that saved an accumulation cycle, from its JSON or tree."""
    return int(encoded.get("copies", 1)) if isinstance(encoded, dict) else 1


def merge_accumulation(trees: Sequence[Tree], world_size: int, copies: int = 1) -> Tree:
    """Return the accumulation cycle of every rank of another world size, for the same result of its step.

    The gradients of a step are the mean over the ranks, so the mean of the old ranks on every new rank adds the
    same sum. With weights, gradients contain their weights times the world size, and the mean over the old
    ranks keeps every weight once; weights that are not divided by yet are distributed, so that their sum over
    the ranks stays the same.
    """
    reduced = [tree["gradients"] for tree in trees]
    unsynced = [tree.get("unreduced", {}) for tree in trees]
    weights = [tree["weights"] for tree in trees]
    if any(weights) and read_model_parallel_size(trees[0]) != copies:
        raise CheckpointError(
            f"window: the checkpoint was saved within an accumulation cycle of backward(weight=...) with "
            f"{read_model_parallel_size(trees[0])} model-parallel ranks, and this run has {copies}. Use the same mesh, or save at "
            "the end of a cycle."
        )
    return trees[0] | {
        "unreduced": {
            name: _mean([gradients.get(name) for gradients in unsynced]) for name in _union(unsynced)
        },
        "used": _union([tree["used"] for tree in trees]),
        "gradients": {
            name: _mean([gradients.get(name) for gradients in reduced]) for name in _union(reduced)
        },
        "weights": {
            name: _distribute_weights([group.get(name, {}) for group in weights], world_size)
            for name in _union(weights)
        },
    }


def _union(parts: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _check_gradients(tree: Tree, names: dict[nn.Parameter, str]) -> None:
    shapes = {name: list(parameter.shape) for parameter, name in names.items()}
    for name, gradient in (*tree["gradients"].items(), *tree.get("unreduced", {}).items()):
        shape = list(gradient["shape"] if isinstance(gradient, dict) else gradient.shape)
        if name not in shapes:
            raise CheckpointError(
                f"window: the checkpoint was saved within an accumulation cycle and contains a gradient of {name}, which is "
                "not among the prepared models and optimizers. Prepare the same objects as before the save."
            )
        if shape != shapes[name]:
            raise CheckpointError(
                f"window: the gradient of {name} has shape {shape}, the parameter {shapes[name]}"
            )


def _serialize_gradient(gradient: torch.Tensor) -> Any:
    """Return a gradient for serialization: the parts of a sparse one, not summed, since sums depend on their order."""
    if gradient.layout is not torch.sparse_coo:
        return gradient
    return {
        "indices": gradient._indices(),  # noqa: SLF001 - the public one is for what is added up
        "values": gradient._values(),  # noqa: SLF001
        "shape": list(gradient.shape),
        "coalesced": gradient.is_coalesced(),
    }


def _place_like(gradient: Any, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(gradient, dict):
        return _build_sparse(gradient).to(parameter.device)
    if is_sharded(parameter) and not is_sharded(gradient):
        return shard_like(gradient, parameter, "the gradient")
    # With the strides of the parameter, like autograd.
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _build_sparse(parts: dict[str, Any]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        parts["indices"].clone(),
        parts["values"].clone(),
        tuple(parts["shape"]),
        check_invariants=True,
        is_coalesced=parts["coalesced"],
    )


def _mean(gradients: list[Any]) -> Any:
    """Return the mean over the ranks; a missing gradient counts as zero."""
    if all(gradient is gradients[0] for gradient in gradients):
        # Equal on all ranks.
        return gradients[0]
    present = [
        _build_sparse(gradient) if isinstance(gradient, dict) else gradient
        for gradient in gradients
        if gradient is not None
    ]
    dtype = torch.promote_types(present[0].dtype, torch.float32)
    # Divided first, like DDP: the sum may overflow.
    total = sum(
        (gradient.to(dtype) / len(gradients) for gradient in present[1:]),
        start=present[0].to(dtype) / len(gradients),
    )
    return _serialize_gradient(total.to(present[0].dtype))


def _distribute_weights(
    groups: list[dict[str, torch.Tensor | None]], world_size: int
) -> dict[str, torch.Tensor | None]:
    pending = _present_values(groups, "pending")
    local_weight = torch.stack(pending).sum() / world_size if pending else None
    return {"pending": local_weight, "total": next(iter(_present_values(groups, "total")), None)}


def _present_values(groups: list[dict[str, torch.Tensor | None]], key: str) -> list[torch.Tensor]:
    values = (group.get(key) for group in groups)
    return [value for value in values if value is not None]


def _copy_scalar(value: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if value is None else value.detach().clone().to(device)
