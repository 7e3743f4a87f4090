"""Memory of a parallel layout on its fullest device: arithmetic over shapes, and the state of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.utils._pytree import tree_leaves

from accel_runtime.estimate.model import EstimateError, describe_user_error
from accel_runtime.parallel.tensor_parallel import (
    check_divisibility,
    has_sharded_output,
    plan_tensor_parallel,
    sharded_dimensions,
)

__all__ = [
    "NAMES",
    "Activations",
    "Formats",
    "MeasuredBytes",
    "ParallelLayout",
    "Parameter",
    "TensorParallelPlan",
    "Usage",
    "build_optimizer",
    "compute_usage",
    "find_obstacle",
    "list_splits",
    "list_variants",
    "local_parameter",
    "read_plan",
    "state_bytes",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """Properties of a parameter; one that several modules share is listed once."""

    name: str
    shape: Shape
    itemsize: int
    trained: bool
    floating: bool = True
    group: int | None = None
    """Index of the wrapped module that gathers it; None for the root module."""
    dim: int | None = None
    """Dimension that tensor parallelism shards; None if it is replicated."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions, and options of sharded models."""

    dp_replicate: int
    dp_shard: int
    tp: int
    sharded: bool
    """Whether `fully_shard` is used, which also averages the gradients of replicated parameters under `tp`."""
    wrapped: bool = False
    """Whether modules are gathered one at a time."""
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def division(self) -> tuple[int, ...]:
        """Sort key: layouts that slow a step least come first."""
        # Tensor parallelism communicates in every layer; recomputation costs a third of a step; shards are gathered
        # during the computation.
        parts = (self.tp, int(self.activation_checkpointing), self.dp_shard, int(self.sharded))
        return (*parts, int(self.sharded and self.reshard_after_forward))


@dataclass(frozen=True)
class Formats:
    """Bytes of an element in communication; None keeps that of the parameter."""

    gathered: int | None = None
    """Gathered parameters, and gradients computed from them."""
    reduced: int | None = None
    """Gradients that are averaged."""


@dataclass(frozen=True)
class Activations:
    """Bytes that the forward pass leaves for the backward pass on one device."""

    full: int
    """Without activation checkpointing."""
    checkpointed: int
    """With checkpointing: the inputs of wrapped modules, and the largest content of one of them."""
    largest: int
    """Largest tensor, whose gradient exists at the same time."""


@dataclass(frozen=True)
class MeasuredBytes:
    """Measured sizes."""

    optimizer: int
    """Optimizer state of the local shards."""
    buffers: int = 0
    """Buffers of the model, which are replicated."""
    activations: Activations | None = None
    """Activations; None without inputs."""


@dataclass(frozen=True)
class Usage:
    """Bytes on the fullest device of a layout."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    """None if they were not measured."""
    working: int
    """Temporary memory: gathered parameters, gradients in communication, buckets, optimizer temporaries."""

    @property
    def total(self) -> int:
        """Sum of all; not all exist at the same time."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held + (self.activations or 0) + self.working


def local_parameter(parameter: Parameter, layout: ParallelLayout) -> Shape:
    """Return the shape of the largest local shard of a parameter, that of the first rank.

    `tp` shards evenly. `fully_shard` splits the first dimension like `torch.chunk`, padded to the size of the first
    shard.
    """
    shape = list(parameter.shape)
    if parameter.dim is not None:
        shape[parameter.dim] //= layout.tp
    if layout.sharded and shape:
        shape[0] = math.ceil(shape[0] / layout.dp_shard)
    return tuple(shape)


def compute_usage(
    parameters: Sequence[Parameter],
    layout: ParallelLayout,
    formats: Formats,
    measured: MeasuredBytes,
) -> Usage:
    """Return the memory usage of a layout from all parameters and measured sizes."""
    activations = measured.activations
    parameter_bytes = _sum_bytes(parameters, layout)
    gradients = _sum_bytes((p for p in parameters if p.trained), layout)
    activation_bytes = None
    if activations:
        activation_bytes = activations.checkpointed if layout.activation_checkpointing else activations.full
    communication = (
        _gathered_peak(parameters, layout, formats)
        if layout.sharded
        else gradients * (layout.dp_replicate > 1)  # the buckets of DDP
    )
    # An optimizer step needs temporaries of the size of the gradients, after activations are freed.
    working = max(
        communication + (activations.largest if activations else 0), gradients - (activation_bytes or 0)
    )
    return Usage(parameter_bytes, gradients, measured.optimizer, measured.buffers, activation_bytes, working)


def list_splits(devices: int) -> list[tuple[int, int, int]]:
    """Return all (dp_replicate, dp_shard, tp) whose product is the number of devices."""
    parts = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        (devices // (shard * tp), shard, tp) for tp in parts for shard in parts if devices % (shard * tp) == 0
    ]


def list_variants(split: tuple[int, int, int]) -> list[ParallelLayout]:
    """Return the layouts of a split: one for replicated models; for sharded ones with each memory-saving option."""
    sharded = [
        ParallelLayout(
            *split,
            sharded=True,
            wrapped=True,
            reshard_after_forward=reshard,
            activation_checkpointing=checkpointing,
        )
        for checkpointing in (False, True)
        for reshard in (False, True)
    ]
    dp_replicate, dp_shard, tp = split
    if dp_shard > 1:
        return sharded
    replicated = ParallelLayout(*split, sharded=dp_replicate > 1 and tp > 1, reshard_after_forward=False)
    if tp > 1:
        return [replicated, replace(replicated, activation_checkpointing=True)]
    # `dp_shard: auto` on one process shards over one, so that activations can be checkpointed.
    return [replicated, *sharded[2:]] if dp_replicate == 1 else [replicated]


def _sum_bytes(parameters: Iterable[Parameter], layout: ParallelLayout) -> int:
    return sum(math.prod(local_parameter(p, layout)) * p.itemsize for p in parameters)


def _gathered_peak(parameters: Sequence[Parameter], layout: ParallelLayout, formats: Formats) -> int:
    """Return the peak size of gathered parameters and unsharded gradients.

    While one module computes the next one is gathered, and parameters outside of wrapped modules stay gathered until
    the
    backward pass. A gradient exists in the dtype it was computed in and in that of the reduction.
    """
    members: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        members.setdefault(parameter.group if layout.wrapped else None, []).append(parameter)
    gathered = {group: _gathered_bytes(members[group], layout, formats.gathered) for group in members}
    wrapped = sorted((size for group, size in gathered.items() if group is not None), reverse=True)
    at_once = sum(wrapped[:2]) if layout.reshard_after_forward else sum(wrapped)
    return (
        gathered.get(None, 0)
        + at_once
        + max((_reduced_bytes(m, layout, formats) for m in members.values()), default=0)
    )


def _gathered_bytes(parameters: Iterable[Parameter], layout: ParallelLayout, itemsize: int | None) -> int:
    return sum(
        _padded_elements(p, layout) * (itemsize if itemsize and p.floating else p.itemsize)
        for p in parameters
    )


def _reduced_bytes(parameters: Iterable[Parameter], layout: ParallelLayout, formats: Formats) -> int:
    trained = [p for p in parameters if p.trained]
    return _gathered_bytes(trained, layout, formats.gathered) + _gathered_bytes(
        trained, layout, formats.reduced
    )


def _padded_elements(parameter: Parameter, layout: ParallelLayout) -> int:
    """Return the number of elements of a gathered parameter with padding."""
    part = math.prod(local_parameter(parameter, layout))
    return part * layout.dp_shard if parameter.shape else part


@dataclass(frozen=True)
class TensorParallelPlan:
    """Effect of a tensor parallel plan on a model."""

    dims: Mapping[str, int]
    """Sharded dimension by parameter name; a shared parameter is listed under each name."""
    gathered: tuple[str, ...]
    """Modules whose outputs are gathered."""
    styles: Mapping[str, ParallelStyle]
    """Parallel style of each module."""


def read_plan(model: nn.Module) -> TensorParallelPlan | str:
    """Return the tensor parallel plan of a model, or the reason that it has none."""
    try:
        plan = {division.name: division.style for division in plan_tensor_parallel(model)}
    except ValueError as error:
        return str(error).removeprefix("parallel.tp needs a plan: ")
    dims = {
        f"{name}.{parameter}": dim
        for name, style in plan.items()
        for parameter, dim in sharded_dimensions(model.get_submodule(name), style).items()
    }
    gathered = [
        name
        for name, style in plan.items()
        if isinstance(style, ColwiseParallel) and not has_sharded_output(style)
    ]
    return TensorParallelPlan(dims, tuple(gathered), plan)


def find_obstacle(model: nn.Module, division: TensorParallelPlan, tp: int) -> str:
    """Return the reason that `tp` processes cannot shard the layers, or an empty string."""
    try:
        check_divisibility(model, tp, division.styles)
    except ValueError as error:
        return str(error)
    return ""


_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
NAMES = tuple(_OPTIMIZERS)
"""Names of known optimizers."""


def build_optimizer(
    model: nn.Module, chosen: torch.optim.Optimizer | Callable[..., Any] | str
) -> torch.optim.Optimizer:
    """Return an optimizer over the trained parameters of a model, by name, from a factory, or the given one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(chosen, str):
        if chosen not in _OPTIMIZERS:
            raise EstimateError(
                f"Invalid --optimizer {chosen!r}: expected one of {', '.join(NAMES)}. For another one, return a dict with model "
                "and optimizer from the factory."
            )
        chosen = _OPTIMIZERS[chosen]
    if not trained:
        return torch.optim.SGD([torch.empty(0, device="meta")], lr=0.1)
    optimizer = chosen if isinstance(chosen, torch.optim.Optimizer) else _call_factory(chosen, trained)
    model_parameters = {id(p) for p in model.parameters()}
    foreign = [
        p for group in optimizer.param_groups for p in group["params"] if id(p) not in model_parameters
    ]
    if foreign:
        raise EstimateError(
            f"{type(optimizer).__name__} has parameters that are not in the model, the first of shape {list(foreign[0].shape)}"
        )
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer, local: Mapping[nn.Parameter, tuple[int, ...]]) -> int:
    """Return the size of the optimizer state after a step over local shards of the given shapes."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    saved_state = dict(optimizer.state)
    try:
        optimizer.state.clear()
        for group, full in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [_make_shard(p, local.get(p, tuple(p.shape))) for p in full]
            for parameter, shard in zip(full, group["params"], strict=True):
                _copy_initial_state(optimizer, shard, parameter, saved_state)
        optimizer.step()
        return sum(t.untyped_storage().nbytes() for t in _list_state_tensors(optimizer))
    except Exception as error:  # noqa: BLE001 - user code
        raise EstimateError(
            f"the state of {type(optimizer).__name__} cannot be measured: a step on the meta device failed: "
            f"{describe_user_error(error)}. Name an optimizer with as much state by --optimizer."
        ) from None
    finally:
        for group, full in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = full
        optimizer.state.clear()
        optimizer.state.update(saved_state)


def _call_factory(factory: Callable[..., Any], trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        optimizer = factory(trained)
    except Exception as error:  # noqa: BLE001 - user code
        raise EstimateError(f"the optimizer could not be created: {describe_user_error(error)}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise EstimateError(
            f"the factory's optimizer returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    return optimizer


def _make_shard(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    shard = nn.Parameter(
        torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
    )
    if parameter.requires_grad:
        shard.grad = torch.empty_like(shard)
    return shard


def _copy_initial_state(
    optimizer: torch.optim.Optimizer, shard: nn.Parameter, full: nn.Parameter, saved_state: Mapping[Any, Any]
) -> None:
    """Copy state that exists before the first step, like that of Adagrad, for a shard."""
    if full in saved_state:
        optimizer.state[shard] = {
            name: torch.empty_like(shard, dtype=value.dtype)
            if isinstance(value, torch.Tensor) and value.shape == full.shape
            else value
            for name, value in saved_state[full].items()
        }


def _list_state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from (
        leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)
    )
