"""Measure activations on tensors without memory, and estimate all layouts of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from accel_runtime.estimate.layout import (
    Activations,
    Formats,
    MeasuredBytes,
    ParallelLayout,
    Parameter,
    TensorParallelPlan,
    Usage,
    build_optimizer,
    compute_usage,
    find_obstacle,
    list_splits,
    list_variants,
    local_parameter,
    read_plan,
    state_bytes,
)
from accel_runtime.estimate.model import EstimateError, ModelSpec, describe_user_error
from accel_runtime.parallel.fully_shard import Units, find_units, innermost_units

__all__ = [
    "DTYPES",
    "Estimate",
    "EstimateResult",
    "ForwardOptions",
    "ModelInputs",
    "estimate_layouts",
    "measure_activations",
]


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a forward pass."""

    inputs: Any
    """A tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    loss: Callable[..., Any] | None = None

    def split(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments."""
        if isinstance(self.inputs, Mapping):
            return (), dict(self.inputs)
        if isinstance(self.inputs, (tuple, list)):
            return tuple(self.inputs), {}
        return (self.inputs,), {}


@dataclass(frozen=True)
class ForwardOptions:
    """Precision and tensor parallelism of a forward pass."""

    autocast: torch.dtype | None = None
    """dtype of autocast."""
    gathered: torch.dtype | None = None
    """dtype of gathered parameters; None keeps theirs."""
    tp: int = 1
    division: TensorParallelPlan | None = None
    """Modules that tensor parallelism shards."""


@dataclass
class _SavedMemory:
    """Memory that remains after the forward pass, by the wrapped module that allocated it."""

    excluded: frozenset[int]
    """Storages of parameters and buffers, which are counted elsewhere."""
    inside: int | None = None
    """Index of the wrapped module that is running."""
    all: dict[int, int] = field(default_factory=dict)
    """Bytes by storage."""
    units: dict[int, int | None] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    """Storages of inputs of wrapped modules."""
    alive: list[torch.Tensor] = field(default_factory=list)
    """Tensors kept alive, since a freed storage could reappear under the same key."""

    def add(self, value: Any) -> int | None:
        """Count the storage of a tensor once; return its key, or None if it is counted elsewhere."""
        if not isinstance(value, torch.Tensor):
            return None
        storage = value.untyped_storage()
        key: int = storage._cdata  # noqa: SLF001 - the only identity of a storage
        if key in self.excluded:
            return None
        self.alive.append(value)
        self.all.setdefault(key, storage.nbytes())
        self.units.setdefault(key, self.inside)
        return key


def measure_activations(
    model: nn.Module, units: Sequence[nn.Module], batch: ModelInputs, forward: ForwardOptions
) -> Activations:
    """Measure the memory after a forward pass: tensors saved for the backward pass, inputs and outputs.

    Fake CPU tensors are used, since CPU kernels save what GPU kernels save; those of the meta device differ
    (attention
    saves every score). Tensors that `tp` shards have the local shape. `units` are the modules that checkpointing
    wraps.
    """
    with FakeTensorMode(), ExitStack() as stack:
        # Batch normalization keeps the format of its statistics.
        unchanged = {
            p for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()
        }
        parameters = {
            name: _make_fake(p, _local_shape(name, p, forward), None if p in unchanged else forward.gathered)
            for name, p in model.named_parameters()
        }
        buffers = {name: _make_fake(b, tuple(b.shape), None) for name, b in model.named_buffers()}
        seen = _SavedMemory(
            frozenset(t.untyped_storage()._cdata for t in (*parameters.values(), *buffers.values()))  # noqa: SLF001
        )
        stack.enter_context(_track_units(units, seen))
        stack.enter_context(_gather_outputs(model, forward))
        stack.enter_context(saved_tensors_hooks(lambda t: (seen.add(t), t)[1], lambda t: t))
        stack.enter_context(torch.autocast("cpu", forward.autocast) if forward.autocast else nullcontext())
        positional, named = tree_map(_make_fake_input, batch.split())
        try:
            out = torch.func.functional_call(model, parameters | buffers, positional, named)
            out = (out, batch.loss(out)) if batch.loss else out
        except Exception as error:  # noqa: BLE001 - user code
            raise EstimateError(f"the forward pass failed: {describe_user_error(error)}") from None
        # torch does not know all mappings as trees.
        out = dict(out) if isinstance(out, Mapping) else out
        for value in tree_leaves((positional, named, out)):
            seen.add(value)
    return _sum_activations(seen)


def _sum_activations(seen: _SavedMemory) -> Activations:
    kept = {key for key, unit in seen.units.items() if unit is None} | (seen.inputs & seen.all.keys())
    recomputed: dict[int, int] = {}
    for key, unit in seen.units.items():
        if unit is not None and key not in kept:
            recomputed[unit] = recomputed.get(unit, 0) + seen.all[key]
    checkpointed = sum(seen.all[key] for key in kept) + max(recomputed.values(), default=0)
    return Activations(sum(seen.all.values()), checkpointed, max(seen.all.values(), default=0))


def _make_fake(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    target_dtype = dtype if dtype and tensor.is_floating_point() else tensor.dtype
    fake = torch.empty(shape, dtype=target_dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _make_fake_input(value: Any) -> Any:
    return (
        torch.empty(value.shape, dtype=value.dtype, device="cpu")
        if isinstance(value, torch.Tensor)
        else value
    )


def _local_shape(name: str, parameter: nn.Parameter, forward: ForwardOptions) -> tuple[int, ...]:
    shape = list(parameter.shape)
    dim = forward.division.dims.get(name) if forward.division else None
    if dim is not None:
        shape[dim] //= forward.tp
    return tuple(shape)


@contextmanager
def _track_units(units: Sequence[nn.Module], seen: _SavedMemory) -> Iterator[None]:
    """Record which wrapped module is running; none is nested in another."""

    def enter_unit(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if seen.inside is None:
            keys = {seen.add(value) for value in tree_leaves((args, kwargs))}
            seen.inputs |= {key for key in keys if key is not None}
            seen.inside = index

    def exit_unit(index: int) -> None:
        seen.inside = None if seen.inside == index else seen.inside

    with ExitStack() as stack:
        for index, unit in enumerate(units):
            pre_hook = unit.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: enter_unit(index, args, kwargs), with_kwargs=True
            )
            post_hook = unit.register_forward_hook(lambda *_, index=index: exit_unit(index))
            stack.callback(pre_hook.remove)
            stack.callback(post_hook.remove)
        yield


@contextmanager
def _gather_outputs(model: nn.Module, forward: ForwardOptions) -> Iterator[None]:
    """Gather the outputs of the modules whose plan does so."""

    def gather(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out] * forward.tp, dim=-1)

    names = forward.division.gathered if forward.division and forward.tp > 1 else ()
    hooks = [model.get_submodule(name).register_forward_hook(gather) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Estimate:
    """A layout and its memory usage."""

    layout: ParallelLayout
    usage: Usage


@dataclass(frozen=True)
class EstimateResult:
    """Memory usage of a model in every layout."""

    spec: ModelSpec
    units: Units
    estimates: list[Estimate]
    """Layouts for every number of devices that divides the requested one."""
    left_out: dict[int, str]
    """Reasons for impossible values of `tp`."""
    optimizer: str
    """Class name of the optimizer."""


def estimate_layouts(
    spec: ModelSpec, *, devices: int, mixed_precision: str, wrap: str, optimizer: str | None
) -> EstimateResult:
    """Estimate every layout on every number of devices that divides `devices`.

    `wrap` is as in `FullyShard.wrap`; `optimizer` is a name, or None for that of the factory, else AdamW.
    """
    try:
        units = find_units(spec.model, wrap)
    except ValueError as error:
        raise EstimateError(str(error).replace("fully_shard.wrap", "--wrap")) from None
    measure = _Measure(spec, units, DTYPES.get(mixed_precision), optimizer)
    left_out: dict[int, str] = {}
    estimates = []
    for count in (n for n in range(1, devices + 1) if devices % n == 0):
        for split in list_splits(count):
            if split[2] not in left_out and (reason := measure.obstacle(split[2])):
                left_out[split[2]] = reason
            if split[2] not in left_out:
                # Activation checkpointing needs wrapped modules.
                possible = (
                    layout for layout in list_variants(split) if units or not layout.activation_checkpointing
                )
                estimates += [Estimate(layout, measure.usage(layout)) for layout in possible]
    return EstimateResult(spec, units, estimates, left_out, measure.optimizer)


class _Measure:
    """Measures the optimizer state and activations of layouts, each only once."""

    def __init__(
        self, spec: ModelSpec, units: Units, compute_dtype: torch.dtype | None, optimizer: str | None
    ) -> None:
        self._spec, self._units, self._compute_dtype = spec, units, compute_dtype
        self._named = dict(spec.model.named_parameters())
        self._division = read_plan(spec.model)
        self._parameters = _describe_parameters(self._named, units, self._division)
        self._half = any(p.requires_grad and p.dtype in _HALF_DTYPES for p in self._named.values())
        self._optimizer = build_optimizer(spec.model, optimizer or spec.optimizer or "adamw")
        buffers = {id(buffer): buffer for buffer in spec.model.buffers()}
        self._buffers = sum(buffer.untyped_storage().nbytes() for buffer in buffers.values())
        self._state = cache(self._measure_state)
        self._activations: Callable[[int, bool], Activations | None] = cache(self._measure_activations)

    @property
    def optimizer(self) -> str:
        """Class name of the optimizer."""
        return type(self._optimizer).__name__

    def obstacle(self, tp: int) -> str:
        """Return the reason that `tp` devices cannot shard the layers, or an empty string."""
        if tp == 1:
            return ""
        if isinstance(self._division, str):
            return self._division
        if reason := find_obstacle(self._spec.model, self._division, tp):
            return reason
        try:
            self._activations(tp, False)
        except EstimateError as error:
            return f"with sharded layers {error}"
        return ""

    def usage(self, layout: ParallelLayout) -> Usage:
        """Return the memory usage of a layout."""
        size = self._compute_dtype.itemsize if self._compute_dtype else None
        formats = Formats(size, 4 if size or self._half else None)
        state = self._state(tuple(local_parameter(p, layout) for p in self._parameters))
        activations = self._activations(layout.tp, layout.sharded and self._compute_dtype is not None)
        return compute_usage(
            self._parameters, layout, formats, MeasuredBytes(state, self._buffers, activations)
        )

    def _measure_state(self, shapes: tuple[tuple[int, ...], ...]) -> int:
        return state_bytes(self._optimizer, dict(zip(self._named.values(), shapes, strict=True)))

    def _measure_activations(self, tp: int, gathered: bool) -> Activations | None:
        if self._spec.inputs is None:
            return None
        division = self._division if isinstance(self._division, TensorParallelPlan) and tp > 1 else None
        forward = ForwardOptions(self._compute_dtype, self._compute_dtype if gathered else None, tp, division)
        batch = ModelInputs(self._spec.inputs, self._spec.loss)
        return measure_activations(
            self._spec.model, [module for _, module in innermost_units(self._units)], batch, forward
        )


def _describe_parameters(
    named: Mapping[str, nn.Parameter], units: Units, division: TensorParallelPlan | str
) -> list[Parameter]:
    """Return the parameters for the arithmetic; an inner module gathers its own parameters."""
    unit_of: dict[int, int] = {}
    for index, (_, module) in enumerate(units):
        for parameter in module.parameters():
            unit_of.setdefault(id(parameter), index)
    dims = division.dims if isinstance(division, TensorParallelPlan) else {}
    return [
        Parameter(
            name,
            tuple(p.shape),
            p.element_size(),
            p.requires_grad,
            p.is_floating_point(),
            unit_of.get(id(p)),
            dims.get(name),
        )
        for name, p in named.items()
    ]
