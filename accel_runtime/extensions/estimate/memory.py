"""Memory of training in a parallel layout: parameters, gradients, optimizer state, and activations of a forward pass."""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor.parallel import ColwiseParallel

from accel_runtime.foundation.torch_internals import (
    BatchNorm,
    fake_tensors,
    storage_id,
    tree_leaves,
    tree_map,
)
from accel_runtime.parallel.tensor_parallel import (
    Plan,
    has_sharded_output,
    plan_tensor_parallel,
    sharded_dimensions,
)

__all__ = [
    "DTYPES",
    "OPTIMIZERS",
    "Activations",
    "Estimate",
    "EstimateError",
    "Formats",
    "ModelSpec",
    "ParallelLayout",
    "Parameter",
    "Shape",
    "TensorParallelPlan",
    "Usage",
    "build_optimizer",
    "compute_usage",
    "describe_user_error",
    "list_splits",
    "list_variants",
    "local_shape",
    "measure_activations",
    "measure_state",
    "read_plan",
]

Shape = tuple[int, ...]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""Known optimizers by name."""
_PACKAGE = str(Path(__file__).parents[2])


class EstimateError(Exception):
    """A model cannot be estimated; the message tells why and what to do."""


def describe_user_error(error: BaseException) -> str:
    """Describe an exception of user code, with the last line that is not in a library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _PACKAGE))
    ]
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    user_frames = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    location = f"{user_frames[-1].filename}:{user_frames[-1].lineno}: " if user_frames else ""
    message = str(error).strip().split("\n")[0]
    return f"{location}{type(error).__name__}{': ' if message else ''}{message}"


@dataclass(frozen=True)
class ModelSpec:
    """Result of a factory; the field names are its dict keys."""

    model: nn.Module
    inputs: Any = None
    """Batch of one device: a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None
    """Optimizer over the parameters of the model, or a function that creates one."""
    loss: Callable[..., Any] | None = None
    """Function from the model's output to a loss."""


@dataclass(frozen=True)
class Parameter:
    """Properties of a parameter; one that several modules share is listed once."""

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


@dataclass(frozen=True)
class Estimate:
    """A layout and its memory usage."""

    layout: ParallelLayout
    usage: Usage


def list_splits(devices: int) -> list[tuple[int, int, int]]:
    """Return all (dp_replicate, dp_shard, tp) whose product is the number of devices."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        (devices // (shard * tp), shard, tp) for tp in sizes for shard in sizes if devices % (shard * tp) == 0
    ]


def list_variants(split: tuple[int, int, int]) -> list[ParallelLayout]:
    """Return the layouts of a split: one for replicated models; for sharded ones with each memory-saving option."""
    sharded = [
        ParallelLayout(*split, True, True, reshard, checkpointing)
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


def compute_usage(  # noqa: PLR0913 - one argument a part
    parameters: Sequence[Parameter],
    layout: ParallelLayout,
    formats: Formats,
    *,
    optimizer: int,
    buffers: int = 0,
    activations: Activations | None = None,
) -> Usage:
    """Return the memory usage of a layout.

    Args:
        parameters: The parameters of the model.
        layout: The layout.
        formats: Element sizes in communication.
        optimizer: Bytes of the optimizer state of the local shards.
        buffers: Bytes of the buffers, which are replicated.
        activations: Measured activations; None without inputs.
    """
    held, gradients = (
        sum(math.prod(local_shape(p, layout)) * p.itemsize for p in selected)
        for selected in (parameters, [p for p in parameters if p.trained])
    )
    kept, largest = None, 0
    if activations is not None:
        kept = activations.checkpointed if layout.activation_checkpointing else activations.full
        largest = activations.largest
    if layout.sharded:
        communication = _gathered_peak(parameters, layout, formats)
    else:
        communication = gradients * (layout.dp_replicate > 1)  # the buckets of DDP
    # An optimizer step needs temporaries of the size of the gradients, after activations are freed.
    working = max(communication + largest, gradients - (kept or 0))
    return Usage(held, gradients, optimizer, buffers, kept, working)


def local_shape(parameter: Parameter, layout: ParallelLayout) -> Shape:
    """Return the shape of the largest local shard of a parameter, that of the first rank.

    `tp` shards evenly. `fully_shard` splits the first dimension like `torch.chunk`, padded to the size of the first shard.
    """
    shape = list(parameter.shape)
    if parameter.dim is not None:
        shape[parameter.dim] //= layout.tp
    if layout.sharded and shape:
        shape[0] = math.ceil(shape[0] / layout.dp_shard)
    return tuple(shape)


def _gathered_peak(parameters: Sequence[Parameter], layout: ParallelLayout, formats: Formats) -> int:
    """Return the peak size of gathered parameters and unsharded gradients.

    While one module computes the next one is gathered, and parameters outside of wrapped modules stay gathered until the
    backward pass. A gradient exists in the dtype it was computed in and in that of the reduction.
    """

    def padded_bytes(members: Iterable[Parameter], itemsize: int | None) -> int:
        return sum(
            math.prod(local_shape(p, layout))
            * (layout.dp_shard if p.shape else 1)
            * (itemsize if itemsize and p.floating else p.itemsize)
            for p in members
        )

    groups: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.group if layout.wrapped else None, []).append(parameter)
    gathered = {group: padded_bytes(members, formats.gathered) for group, members in groups.items()}
    root = gathered.pop(None, 0)
    wrapped = sorted(gathered.values(), reverse=True)
    at_once = sum(wrapped[:2]) if layout.reshard_after_forward else sum(wrapped)
    gradients = [
        padded_bytes(trained, formats.gathered) + padded_bytes(trained, formats.reduced)
        for trained in ([p for p in members if p.trained] for members in groups.values())
    ]
    return root + at_once + max(gradients, default=0)


@dataclass(frozen=True)
class TensorParallelPlan:
    """Effect of a tensor parallel plan on a model."""

    dims: Mapping[str, int]
    """Sharded dimension by parameter name; a shared parameter is listed under each name."""
    gathered: tuple[str, ...]
    """Modules whose outputs are gathered."""
    styles: Plan
    """Parallel style of each module."""


def read_plan(model: nn.Module) -> TensorParallelPlan | str:
    """Return the tensor parallel plan of a model, or the reason that it has none."""
    try:
        styles = plan_tensor_parallel(model)
    except ValueError as error:
        return str(error).removeprefix("parallel.tp needs a plan: ")
    dims = {
        f"{name}.{parameter}": dim
        for name, style in styles.items()
        for parameter, dim in sharded_dimensions(model.get_submodule(name), style).items()
    }
    gathered = (
        name
        for name, style in styles.items()
        if isinstance(style, ColwiseParallel) and not has_sharded_output(style)
    )
    return TensorParallelPlan(dims, tuple(gathered), styles)


def build_optimizer(
    model: nn.Module, chosen: torch.optim.Optimizer | Callable[..., Any] | str
) -> torch.optim.Optimizer:
    """Return an optimizer over the trained parameters of a model, by name, from a factory, or the given one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(chosen, str):
        if chosen not in OPTIMIZERS:
            raise EstimateError(
                f"Invalid --optimizer {chosen!r}: expected one of {', '.join(OPTIMIZERS)}. For another one, return a dict with "
                "model and optimizer from the factory."
            )
        chosen = OPTIMIZERS[chosen]
    if not trained:
        return torch.optim.SGD([torch.empty(0, device="meta")], lr=0.1)
    optimizer: Any = chosen
    if not isinstance(chosen, torch.optim.Optimizer):
        try:
            optimizer = chosen(trained)
        except Exception as error:  # noqa: BLE001 - user code
            raise EstimateError(f"the optimizer could not be created: {describe_user_error(error)}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise EstimateError(
            f"the factory's optimizer returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    model_parameters = set(model.parameters())
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in model_parameters:
            raise EstimateError(
                f"{type(optimizer).__name__} has parameters that are not in the model, the first of shape {list(parameter.shape)}"
            )
    return optimizer


def measure_state(optimizer: torch.optim.Optimizer, local: Mapping[nn.Parameter, Shape]) -> int:
    """Return the bytes of the optimizer state after a step over local shards of the given shapes."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    saved_state = dict(optimizer.state)
    try:
        optimizer.state.clear()
        for group, full in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [_make_shard(p, local.get(p, tuple(p.shape))) for p in full]
            for parameter, shard in zip(full, group["params"], strict=True):
                if parameter in saved_state:  # that exists before the first step, like that of Adagrad
                    optimizer.state[shard] = {
                        name: torch.empty_like(shard, dtype=value.dtype)
                        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                        else value
                        for name, value in saved_state[parameter].items()
                    }
        optimizer.step()
        leaves = tree_leaves(list(optimizer.state.values()))
        return sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, torch.Tensor))
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


def _make_shard(parameter: nn.Parameter, shape: Shape) -> nn.Parameter:
    values = torch.empty(shape, dtype=parameter.dtype, device="meta")
    shard = nn.Parameter(values, requires_grad=parameter.requires_grad)
    shard.grad = torch.empty_like(shard) if parameter.requires_grad else None
    return shard


@dataclass
class _SavedMemory:
    """Memory that remains after the forward pass, by the wrapped module that allocated it."""

    excluded: frozenset[int]
    """Storages of parameters and buffers, which are counted elsewhere."""
    inside: int | None = None
    """Index of the wrapped module that is running."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes by storage."""
    units: dict[int, int | None] = field(default_factory=dict)
    """Index of the wrapped module by storage."""
    inputs: set[int] = field(default_factory=set)
    """Storages of inputs of wrapped modules."""
    alive: list[torch.Tensor] = field(default_factory=list)
    """Tensors kept alive, since a freed storage could reappear under the same key."""

    def add(self, value: Any) -> int | None:
        """Count the storage of a tensor once; return its key, or None if it is counted elsewhere."""
        if not isinstance(value, torch.Tensor) or (key := storage_id(value)) in self.excluded:
            return None
        self.alive.append(value)
        self.sizes.setdefault(key, value.untyped_storage().nbytes())
        self.units.setdefault(key, self.inside)
        return key

    def sum(self) -> Activations:
        """Return the sizes; a checkpointed module recomputes what it allocated, except its inputs."""
        kept = 0
        recomputed = dict.fromkeys(self.units.values(), 0)
        for key, unit in self.units.items():
            if unit is None or key in self.inputs:
                kept += self.sizes[key]
            else:
                recomputed[unit] += self.sizes[key]
        checkpointed = kept + max(recomputed.values(), default=0)
        return Activations(sum(self.sizes.values()), checkpointed, max(self.sizes.values(), default=0))


def measure_activations(  # noqa: PLR0913 - options of the forward pass
    spec: ModelSpec,
    units: Sequence[nn.Module],
    *,
    autocast: torch.dtype | None = None,
    gathered: torch.dtype | None = None,
    tp: int = 1,
    plan: TensorParallelPlan | None = None,
) -> Activations:
    """Measure the memory after a forward pass: tensors saved for the backward pass, inputs and outputs.

    Fake CPU tensors are used, since CPU kernels save what GPU kernels save; those of the meta device differ (attention saves
    every score). Tensors that `tp` shards have the local shape.

    Args:
        spec: The model, its inputs and its loss.
        units: The modules that checkpointing wraps; none is nested in another.
        autocast: The dtype of autocast.
        gathered: The dtype of gathered parameters; None keeps theirs.
        tp: The number of tensor parallel ranks.
        plan: The modules that they shard.
    """
    model = spec.model
    with fake_tensors(), ExitStack() as stack:
        # Batch normalization keeps the format of its statistics.
        unchanged = {
            p for module in model.modules() if isinstance(module, BatchNorm) for p in module.parameters()
        }
        parameters = {}
        for name, p in model.named_parameters():
            shape = list(p.shape)
            if plan is not None and name in plan.dims:
                shape[plan.dims[name]] //= tp
            dtype = gathered if gathered and p.is_floating_point() and p not in unchanged else p.dtype
            parameters[name] = torch.empty(shape, dtype=dtype, device="cpu").requires_grad_(p.requires_grad)
        buffers = {name: _make_fake(buffer) for name, buffer in model.named_buffers()}
        saved = _SavedMemory(frozenset(map(storage_id, (*parameters.values(), *buffers.values()))))
        stack.enter_context(_track_units(units, saved))
        for name in plan.gathered if plan is not None else ():
            hook = model.get_submodule(name).register_forward_hook(
                lambda _module, _args, out: torch.cat([out] * tp, dim=-1)
            )
            stack.callback(hook.remove)
        stack.enter_context(saved_tensors_hooks(lambda t: (saved.add(t), t)[1], lambda t: t))
        stack.enter_context(torch.autocast("cpu", autocast) if autocast else nullcontext())
        args, kwargs = tree_map(_make_fake, _split_inputs(spec.inputs))
        try:
            out = torch.func.functional_call(model, parameters | buffers, args, kwargs)
            out = (out, spec.loss(out)) if spec.loss else out
        except Exception as error:  # noqa: BLE001 - user code
            raise EstimateError(f"the forward pass failed: {describe_user_error(error)}") from None
        # torch does not know all mappings as trees.
        out = dict(out) if isinstance(out, Mapping) else out
        for value in tree_leaves((args, kwargs, out)):
            saved.add(value)
    return saved.sum()


def _split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _make_fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu").requires_grad_(value.requires_grad)


@contextmanager
def _track_units(units: Sequence[nn.Module], saved: _SavedMemory) -> Iterator[None]:
    """Record which wrapped module is running."""

    def enter_unit(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if saved.inside is None:
            keys = {saved.add(value) for value in tree_leaves((args, kwargs))}
            saved.inputs |= {key for key in keys if key is not None}
            saved.inside = index

    def exit_unit(index: int) -> None:
        saved.inside = None if saved.inside == index else saved.inside

    with ExitStack() as stack:
        for index, unit in enumerate(units):
            pre_hook = unit.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: enter_unit(index, args, kwargs), with_kwargs=True
            )
            post_hook = unit.register_forward_hook(lambda *_, index=index: exit_unit(index))
            stack.callback(pre_hook.remove)
            stack.callback(post_hook.remove)
        yield
