"""Apply torch's `fully_shard` as the settings describe, and check what sharded parameters do not support.

A forward pass sees gathered copies of the parameters, which are freed after it. In-place changes of them are lost, and a graph
through them cannot be used again: both are errors before the first step.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from typing_extensions import override

from accel_runtime.backends.quantized_tensors import keeps_dtype
from accel_runtime.environment.settings import FullyShard, find_nearest
from accel_runtime.foundation import nested
from accel_runtime.foundation.module_names import named_parameters, script_names
from accel_runtime.foundation.torch_internals import (
    BatchNorm,
    gathered_parameters,
    gradient_hooks,
    is_functorch_active,
    is_view,
    keep_dtypes,
    list_owners,
    local_tensor,
    override_method,
    share_gradient_hooks,
    storage_id,
    version_of,
    without_compilation,
)
from accel_runtime.parallel.averaging import GradientAveraging, refuse_max_norm
from accel_runtime.parallel.ddp import check_hidden_gradients
from accel_runtime.parallel.dtensor import class_of
from accel_runtime.parallel.plugins import DTYPE_NAMES
from accel_runtime.storage.errors import format_names

__all__ = [
    "CheckpointedForward",
    "ForwardChecks",
    "GradientSync",
    "Units",
    "build_policy",
    "check_modules",
    "checkpoint_activations",
    "find_batch_norms",
    "find_ignored",
    "find_units",
    "find_unshardable",
    "innermost_units",
    "is_checkpointed",
    "matches_pattern",
    "name_owners",
    "parameters_of_unit",
    "refuse_copies",
    "refuse_gradient_hooks",
    "refuse_mixed_dtypes",
    "shard_model",
    "unpack_outputs",
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
    kept = {
        (id(module), name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if keeps_dtype(parameter)
    }
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
        module.register_forward_hook(checks.pack, with_kwargs=True)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=False if keep_gathered else options.reshard_after_forward,
            mp_policy=module_policy,
            offload_policy=offload,
            ignored_params=set(ignored),
        )
        keep_dtypes(module, kept)
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


def find_unshardable(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that `fully_shard` cannot divide: scalars, and those without elements."""
    return {parameter for parameter in model.parameters() if not parameter.dim() or not parameter.numel()}


def check_modules(model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Check the modules of a model before it is sharded, and make its parameters contiguous.

    Raises ValueError for embeddings that change their weights in the forward pass, or have sparse gradients.
    """
    refuse_max_norm(model, ignored)
    for parameter in set(model.parameters()) - set(ignored):
        # fully_shard refuses other layouts, such as channels_last. Tensor parallelism has made its own contiguous.
        if not hasattr(parameter, "device_mesh"):
            parameter.data = parameter.data.contiguous()
    names = script_names(model, [name for name, _ in model.named_modules()])
    for path, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"Cannot shard {names[path] or 'the model'} of {type(model).__name__}: torch cannot reduce sparse gradients of "
                "sharded models. Set sparse=False."
            )


_UNCHANGED = (
    "Compute the changed weight in the forward pass without storing it, or change the parameter after the optimizer step: "
    "with torch.no_grad(): parameter.clamp_(-1, 1). Parameters in fully_shard.ignore are not gathered."
)


class ForwardChecks:
    """Hooks of a module around those of `fully_shard`, which run while its parameters are gathered.

    `check_parameters` must run before the hook that gathers, `before` after it, and `pack` before the one that frees.
    """

    def __init__(self, names: Mapping[tuple[nn.Module, str], str]) -> None:
        self._names = names
        """Names of parameters in the script, by module and attribute."""
        self._versions: list[int | None] = []
        self._samples: list[torch.Tensor] = []
        self._is_first = True

    @without_compilation
    def check_parameters(self, module: nn.Module, _: Any) -> None:
        """Raise RuntimeError if parameters were replaced, since the forward pass would gather the old ones."""
        if replaced := list_owners(module, replaced=True):
            names = [self._names.get(owner, owner[1]) for owner in replaced]
            raise RuntimeError(
                f"Cannot run the forward pass: {format_names(names)} were replaced after prepare(), by torch.func.functional_call() or an "
                "assignment, and fully_shard would use the parameters before. Call it inside of accelerator.gathered(model), with "
                "parameters of there, or change values in place: with torch.no_grad(): parameter.copy_(value)."
            )

    @without_compilation
    def before(self, module: nn.Module, _: Any) -> None:
        """Record the gathered parameters."""
        if is_functorch_active():
            return
        parameters = gathered_parameters(module)
        self._versions = [_read_version(parameter) for parameter in parameters]
        # `parameter.data` has a version of its own, so that some values are compared too, once.
        self._samples = [_take_sample(parameter) for parameter in parameters] if self._is_first else []

    @without_compilation
    def pack(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Check the forward pass, and return its outputs so that torch finds the tensors in them."""
        if is_functorch_active():
            return nested.pack_tensors(outputs)
        self._check_unchanged(module)
        outputs = _copy_parameters(module, outputs)
        if torch.is_grad_enabled():
            check_hidden_gradients(outputs, "parameters are not gathered for their backward pass")
            outputs = _replace_views((args, kwargs), outputs)
            for leaf in nested.leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(_begin_backward, module))  # type: ignore[no-untyped-call]
        return nested.pack_tensors(outputs)

    def _check_unchanged(self, module: nn.Module) -> None:
        parameters = gathered_parameters(module)
        versions = [_read_version(parameter) for parameter in parameters]
        changed = [index for index, version in enumerate(versions) if version != self._versions[index]]
        if not changed:
            changed = [
                index
                for index, sample in enumerate(self._samples)
                if not torch.equal(sample, _take_sample(parameters[index]))
            ]
        self._is_first = self._is_first and not torch.is_grad_enabled()
        self._samples = []
        if changed:
            owners = list_owners(module)
            names = [self._names.get(owners[index], owners[index][1]) for index in changed]
            raise RuntimeError(
                f"The forward pass changes {format_names(names)}, which is lost: fully_shard gathers a copy of each parameter for a "
                f"forward pass and frees it afterwards. {_UNCHANGED}"
            )


_SAMPLE = 4096
"""Number of elements of a parameter that are compared."""


def _take_sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return the bytes of some elements, since nan is not equal to nan."""
    flat = local_tensor(parameter).detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLE)].clone().view(torch.uint8)


def _read_version(tensor: torch.Tensor) -> int | None:
    is_inference = tensor.is_inference() or local_tensor(tensor).is_inference()
    return None if is_inference else version_of(tensor)


def _begin_backward(module: nn.Module, _: torch.Tensor) -> None:
    """Run hooks of the script in the backward pass of a module, which begins; raise RuntimeError if it builds a graph."""
    # Here and not in the forward pass, since a script may register a hook between both.
    share_gradient_hooks(module)
    # Gradients are enabled in a backward pass with create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Cannot build a graph of the gradients of a sharded model (create_graph=True): parameters are gathered for one backward "
            "pass and freed afterwards, so second derivatives would lack them. Compute them in the forward pass of the prepared model "
            "with fully_shard.wrap: none, or train without sharding (remove dp_shard)."
        )


def _copy_parameters(module: nn.Module, outputs: Any) -> Any:
    """Return outputs with copies of the module's parameters in them, whose memory torch frees after the forward pass."""
    storages = {storage_id(parameter) for parameter in gathered_parameters(module)}

    def is_parameter(tensor: torch.Tensor) -> bool:
        return local_tensor(tensor).layout is torch.strided and storage_id(tensor) in storages

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if is_parameter(leaf) else leaf
        if leaf is not None and any(map(is_parameter, nested.iterate_hidden_tensors(leaf))):
            raise RuntimeError(
                f"Cannot use the outputs of the model: a parameter is in an object of {type(leaf).__name__}, which has more than "
                "data (a module, other state, or a reference to itself), and its memory is freed after the forward pass. Return a "
                "copy of the parameter (clone())."
            )
        return leaf

    return nested.map_leaves(copy, outputs)


class _Alias(torch.autograd.Function):
    """A tensor with the memory and the version of another one, which is no view of it."""

    @staticmethod
    @override
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    @override
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _replace_views(inputs: Any, outputs: Any) -> Any:
    """Return outputs with aliases instead of views, so that operations in place may follow.

    Such an operation on a view drops the hook by which torch gathers parameters for the backward pass. The output of a tensor
    parallel layer is a view, and that of a linear layer with a bias. Views of an input or of another output stay, since autograd
    has to see that both change, and torch warns of them.
    """
    views = [leaf for leaf in nested.list_tensors(outputs) if leaf.requires_grad and is_view(leaf)]
    if not views:
        return outputs
    tensors = [*nested.list_tensors(inputs), *nested.list_tensors(outputs)]
    users = Counter(storage_id(tensor) for tensor in tensors if local_tensor(tensor).layout is torch.strided)
    owned = {id(view) for view in views if users[storage_id(view)] == 1}
    return nested.map_tensors(lambda leaf: _Alias.apply(leaf) if id(leaf) in owned else leaf, outputs)  # type: ignore[no-untyped-call]


@without_compilation
def unpack_outputs(_module: nn.Module, _args: Any, outputs: Any) -> Any:
    """Return the outputs of the forward pass as they were before `ForwardChecks.pack`."""
    return nested.unpack_tensors(outputs)


def name_owners(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Return the names of parameters in the script, by module and attribute."""
    owners = {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules()
        for name in dict(module.named_parameters(recurse=False))
    }
    return {owners[name]: own for name, own in script_names(model, owners).items()}


def refuse_copies(module: nn.Module) -> None:
    """Make `copy.deepcopy` of a sharded module raise an error that names the way out."""
    override_method(module, "__deepcopy__", _refuse_copy)


def _refuse_copy(module: nn.Module, _: Any) -> Any:
    raise RuntimeError(
        f"Cannot copy {class_of(module)}: it is sharded. Copy it before prepare(), and prepare both. An average of weights: "
        "average = AveragedModel(model); model, average = accelerator.prepare(model, average); average.update_parameters(model)."
    )
