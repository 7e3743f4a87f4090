"""Apply torch's `fully_shard` as the settings describe."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from accel_runtime.environment.settings import FullyShard, find_nearest
from accel_runtime.foundation.module_names import named_parameters, script_names
from accel_runtime.foundation.torch_internals import BatchNorm, gradient_hooks
from accel_runtime.parallel.averaging import GradientAveraging
from accel_runtime.parallel.plugins import DTYPE_NAMES
from accel_runtime.parallel.sharding_checks import ForwardChecks, name_owners, refuse_copies, unpack_outputs
from accel_runtime.storage.errors import format_names

__all__ = [
    "CheckpointedForward",
    "GradientSync",
    "Units",
    "build_policy",
    "checkpoint_activations",
    "find_batch_norms",
    "find_ignored",
    "find_units",
    "innermost_units",
    "is_checkpointed",
    "matches_pattern",
    "parameters_of_unit",
    "refuse_gradient_hooks",
    "refuse_mixed_dtypes",
    "shard_model",
]


Units = list[tuple[str, nn.Module]]
"""Modules with their names, inner ones first."""


def shard_model(  # noqa: PLR0913, PLR0917 - what `fully_shard` takes
    model: nn.Module,
    units: Units,
    mesh: DeviceMesh,
    options: FullyShard,
    policy: MixedPrecisionPolicy,
    ignored: Collection[nn.Parameter],
) -> None:
    """Shard a model in place by its units, inner ones first.

    Args:
        model: The model.
        units: The modules whose parameters are gathered together.
        mesh: `[shards]`, or `[replicas, shards]`.
        options: The settings.
        policy: The precision of parameters, gradients and outputs.
        ignored: Parameters that are not sharded.
    """
    batch_norms, batch_norm_policy = find_batch_norms(model, policy, units, ignored)
    refuse_mixed_dtypes(model, [*batch_norms, *units], ignored)
    names = name_owners(model)
    inner_policy = replace(policy, output_dtype=None)
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()
    )
    for module, module_policy in (
        *((module, batch_norm_policy) for _, module in batch_norms),
        *((module, inner_policy) for _, module in units),
        (model, policy),
    ):
        # The backward pass begins with the rest of the model, so keep it gathered.
        keep_gathered = module is model and bool(units)
        # Around the hooks of torch. The last one searches the outputs for tensors, to gather the parameters in the backward pass.
        checks = ForwardChecks(names)
        module.register_forward_pre_hook(checks.before, prepend=True)
        module.register_forward_hook(checks.pack)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=False if keep_gathered else options.reshard_after_forward,
            mp_policy=module_policy,
            offload_policy=offload,
            ignored_params=set(ignored),
        )
        module.register_forward_pre_hook(checks.check_parameters, prepend=True)
        module.register_forward_hook(unpack_outputs)
        refuse_copies(module)


def find_ignored(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters that match the patterns of `ignore`; raise ValueError for a pattern without a match."""
    ignored: set[nn.Parameter] = set()
    for pattern in patterns:
        matches = {
            parameter
            for name, parameter in named_parameters(model, remove_duplicate=False)
            # A pattern matches the name itself or that of a module around it: `a`, `a.b`, `a.b.c`.
            if any(matches_pattern(pattern, prefix) for prefix in accumulate(name.split("."), "{}.{}".format))
        }
        if not matches:
            raise ValueError(
                f"fully_shard.ignore: {pattern!r} matches no parameter and no module of {type(model).__name__}."
            )
        ignored |= matches
    return ignored


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern, in which `*` matches any text without a dot."""
    return re.fullmatch("[^.]*".join(map(re.escape, pattern.split("*"))), name) is not None


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_units(model: nn.Module, wrap: str) -> Units:
    """Return the modules whose parameters are gathered together, without the model itself.

    A module that shares a parameter with one outside of it is left out, since `fully_shard` needs one owner per parameter; its
    parameters are gathered with the rest of the model.
    """
    if wrap == "none":
        return []
    if wrap.isdigit():
        chosen = list(_find_large(model, int(wrap)))
    elif wrap == "auto":
        chosen = _find_layers(model)
    else:
        chosen = _find_by_class(model, [name.strip() for name in wrap.split(",") if name.strip()])
    chosen = [module for module in chosen if module is not model and _owns_parameters(model, module)]
    ids = {id(module) for module in chosen}
    units = [(name, module) for name, module in _inner_first(model) if id(module) in ids]
    names = script_names(model, [name for name, _ in units])
    return [(names[name], module) for name, module in units]


def _find_by_class(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    classes = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in classes:
            suggestion = find_nearest(name, sorted(classes))
            raise ValueError(
                f"fully_shard.wrap: {type(model).__name__} has no module of class {name}"
                f"{f'; did you mean {suggestion}?' if suggestion else ': ' + ', '.join(sorted(classes))}"
            )
    modules = [module for module in model.modules() if type(module).__name__ in names]
    containers = [type(module).__name__ for module in modules if isinstance(module, _CONTAINERS)]
    if containers:
        raise ValueError(
            f"fully_shard.wrap: {containers[0]} has no forward pass to gather parameters for. Name the class of the modules in it."
        )
    return modules


def _find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules in `_no_split_modules`, else the items of module lists."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    modules = [module for module in model.modules() if type(module).__name__ in names]
    if modules:
        return modules
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    items = [module for items_of in lists for module in items_of if not isinstance(module, _CONTAINERS)]
    return [module for module in items if any(True for _ in module.parameters())]


def _find_large(model: nn.Module, minimum: int) -> Iterator[nn.Module]:
    """Yield modules with at least `minimum` parameters outside of inner units, inner ones first."""
    taken: set[nn.Parameter] = set()
    for _, module in _inner_first(model):
        parameters = set(module.parameters()) - taken
        if (
            not isinstance(module, _CONTAINERS)
            and sum(parameter.numel() for parameter in parameters) >= minimum
        ):
            taken |= parameters
            yield module


def _inner_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return sorted(model.named_modules(), key=lambda named: -named[0].count(".") - bool(named[0]))


def _owns_parameters(model: nn.Module, module: nn.Module) -> bool:
    """Return whether no other part of the model has a parameter of the module."""
    inside = {id(descendant) for descendant in module.modules()}
    parameters = {id(parameter) for parameter in module.parameters()}
    return not any(
        id(parameter) in parameters
        for other in model.modules()
        if id(other) not in inside
        for parameter in other.parameters(recurse=False)
    )


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LOG = logging.getLogger("accel_runtime.parallel")
_HALF_DTYPES = (torch.bfloat16, torch.float16)


def build_policy(
    options: FullyShard, autocast_dtype: torch.dtype | None, parameters: Iterable[nn.Parameter] = ()
) -> MixedPrecisionPolicy:
    """Return the mixed precision policy of parameters, gradients and outputs."""
    param_dtype = _DTYPES.get(options.param_dtype, autocast_dtype)
    is_half = param_dtype in _HALF_DTYPES or any(
        p.requires_grad and p.dtype in _HALF_DTYPES for p in parameters
    )
    # Sums over many ranks are too inaccurate in bfloat16.
    reduce_dtype = _DTYPES.get(
        options.reduce_dtype, torch.float32 if is_half or param_dtype is not None else None
    )
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=_DTYPES.get(options.output_dtype),
        cast_forward_inputs=options.cast_forward_inputs,
    )


def find_batch_norms(
    model: nn.Module, policy: MixedPrecisionPolicy, units: Units, ignored: Collection[nn.Parameter] = ()
) -> tuple[Units, MixedPrecisionPolicy]:
    """Return batch norms that must stay in float32, and their policy.

    With half-precision inputs, torch needs parameters in the dtype of the running statistics.
    """
    unit_ids = {id(module) for _, module in units} | {id(model)}
    batch_norms: Units = []
    if policy.param_dtype in _HALF_DTYPES:
        batch_norms = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, BatchNorm)
            and id(module) not in unit_ids
            and any(p not in ignored and p.dtype not in _HALF_DTYPES for p in module.parameters())
        ]
    batch_norm_policy = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
    return batch_norms, batch_norm_policy


def refuse_mixed_dtypes(model: nn.Module, units: Units, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raise ValueError if trainable parameters of one unit have different dtypes."""
    for unit, module in [*units, ("", model)]:
        names_by_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in parameters_of_unit(module, units):
            if parameter.requires_grad and parameter not in ignored:
                names_by_dtype.setdefault(parameter.dtype, []).append(f"{unit}.{name}" if unit else name)
        if len(names_by_dtype) > 1:
            dtypes = "; ".join(
                f"{str(dtype).removeprefix('torch.')}: {format_names(names)}"
                for dtype, names in names_by_dtype.items()
            )
            name = type(model).__name__
            location = f"{unit} of {name}" if unit else f"{name} outside of the modules in fully_shard.wrap"
            raise ValueError(
                f"fully_shard: the parameters of {location} are gathered together, but have different dtypes ({dtypes}). Convert "
                "them to one dtype, for example by model.float(), or name the class of the module that differs in fully_shard.wrap."
            )


def refuse_gradient_hooks(model: nn.Module, replaced: Collection[nn.Parameter]) -> None:
    """Raise ValueError if the script's gradient hooks are on parameters that sharding replaces."""
    names = [
        name
        for name, parameter in named_parameters(model)
        if parameter in replaced and gradient_hooks(parameter)
    ]
    if names:
        raise ValueError(
            f"Cannot shard {type(model).__name__}: gradient hooks of {format_names(names)} would never run, since sharding replaces "
            "the parameters. Register them after prepare(), on the parameters of the prepared model."
        )


def parameters_of_unit(module: nn.Module, units: Units) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are gathered with a module, without those of inner units."""
    others = {
        id(parameter)
        for _, inner in units
        if inner is not module and any(inner is descendant for descendant in module.modules())
        for parameter in inner.parameters()
    }
    return [(name, p) for name, p in named_parameters(module) if id(p) not in others]


class CheckpointedForward:
    """A forward pass with activation checkpointing.

    As an attribute of the module it keeps names, hooks and classes, runs while `fully_shard` has gathered the parameters, and
    is supported by torch.compile. Dropout is repeated exactly.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        """The forward pass as it was."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; without gradients there is nothing to recompute."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def checkpoint_activations(model: nn.Module, units: Units) -> None:
    """Enable activation checkpointing for the innermost units of a model."""
    if not units:
        _LOG.warning(
            "fully_shard.activation_checkpointing has no effect on %s: fully_shard.wrap selects no module to recompute. Name a "
            "class, such as wrap: Block.",
            type(model).__name__,
        )
        return
    # transformers 5 has another name, and warns of this one.
    recomputes = getattr(model, "is_activation_checkpointing", None)
    if getattr(model, "is_gradient_checkpointing", False) if recomputes is None else recomputes:
        raise ValueError(
            f"fully_shard.activation_checkpointing: {type(model).__name__} already recomputes its activations after "
            "gradient_checkpointing_enable(). Use one of them."
        )
    for _, module in innermost_units(units):
        if not is_checkpointed(module):
            module.forward = CheckpointedForward(module.forward)


def innermost_units(units: Units) -> Units:
    """Return the units without inner units, since nested checkpoints would recompute twice."""
    unit_ids = {id(module) for _, module in units}
    return [
        (name, module)
        for name, module in units
        if not any(id(inner) in unit_ids for inner in module.modules() if inner is not module)
    ]


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a module has activation checkpointing."""
    return isinstance(module.forward, CheckpointedForward)


class GradientSync:
    """Switch gradient reduction of one model on and off."""

    def __init__(self, gathered: Sequence[FSDPModule], replicated: GradientAveraging) -> None:
        # Weak references, to not keep the model alive.
        self._gathered = [ref(module) for module in gathered]
        self._replicated = replicated
        self.wanted = True
        """The current state, since torch has no getter."""

    @contextmanager
    def set(self, *, wanted: bool) -> Iterator[None]:
        """Return a context in which gradients are reduced, or not."""
        before = self.wanted
        self._set_sync(wanted=wanted)
        try:
            with self._replicated.set_sync(wanted=wanted):
                yield
        finally:
            self._set_sync(wanted=before)

    def _set_sync(self, *, wanted: bool) -> None:
        if wanted is self.wanted:
            return
        self.wanted = wanted
        for reference in self._gathered:
            if (module := reference()) is not None:
                module.set_requires_gradient_sync(wanted, recurse=False)
