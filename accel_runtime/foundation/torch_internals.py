"""Private names of torch, seen in torch 2.9 and 2.13 unless another version is named; no other module names them."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, overrides
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "COMPILED_ATTRIBUTE",
    "TORCH",
    "WRAPPER_ATTRIBUTES",
    "BatchNorm",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "capture_buckets",
    "compile_call",
    "compile_like",
    "compute_shard_region",
    "copy_attributes",
    "copy_loader",
    "default_store",
    "fake_tensors",
    "find_wrapped_module",
    "foreach_multiply",
    "foreach_norm",
    "fsdp_parameter_groups",
    "fsdp_policy",
    "function_modes",
    "gathered_parameters",
    "generate_numpy_state",
    "gradient_hooks",
    "graph_task_id",
    "group_timeout",
    "ignore_in_ddp",
    "is_compiled",
    "is_fsdp_module",
    "is_functorch_active",
    "is_graph_pending",
    "is_view",
    "iterator_function",
    "keep_dtypes",
    "keep_gathered",
    "list_buffers",
    "list_owners",
    "list_tensors",
    "list_written",
    "local_tensor",
    "on_backward_end",
    "open_file_part",
    "override_method",
    "own_tensors",
    "qualified_name",
    "rebuild_buckets",
    "remove_forward_pre_hooks",
    "replace_data",
    "replace_iterator",
    "restore_buckets",
    "set_gradient_hooks",
    "set_state_versions",
    "set_unsharded_gradient",
    "set_worker_dataset",
    "set_worker_info",
    "share_gradient_hooks",
    "state_versions",
    "storage_id",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "uncompile_call",
    "unsharded_gradient",
    "unsharded_spec",
    "version_of",
    "without_compilation",
]

BatchNorm = _BatchNorm
"""The base class of batch normalizations."""
_DIST: Any = dist
"""`torch.distributed`, whose stubs lack the names of DDP."""


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that changes whenever a tensor is written.

    Operations on a DTensor, such as autograd's additions to gradients, count in it, and those of `fully_shard` in its local tensor.
    """
    version: int = tensor._version
    return version if (local := getattr(tensor, "_local_tensor", None)) is None else version + local._version


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on this rank, without a step of autograd; or the tensor itself if it is not a DTensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which may have no address."""
    return int(local_tensor(tensor).untyped_storage()._cdata)


def list_written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation of a dispatch mode writes."""
    return [
        kwargs.get(argument.name, args[index] if index < len(args) else None)
        for index, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd regards a tensor as a view of another one."""
    return tensor._base is not None


def list_buffers(module: nn.Module, *, persistent: bool) -> list[str]:
    """Return the names of a module's own buffers, of those in its state dict or of the others."""
    return [
        name for name in module._buffers if (name not in module._non_persistent_buffers_set) is persistent
    ]


def list_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model, each as often as a module has it; several times faster than with names."""
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module itself."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def remove_forward_pre_hooks(module: nn.Module, kind: type) -> None:
    """Remove the forward pre-hooks of a class, also those that a copy of another module has."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)]:
        del module._forward_pre_hooks[key]


def replace_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Replace the memory of a parameter, also by that of another device; it stays the same object, with its attributes and hooks."""
    attributes, hooks = dict(vars(parameter)), gradient_hooks(parameter)
    swap_tensors: Any = torch.utils.swap_tensors
    swap_tensors(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
    vars(parameter).update(attributes)
    set_gradient_hooks(parameter, hooks)


def state_versions(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the versions of modules by their names in a state dict of `nn.Module.state_dict`; None in other mappings."""
    return getattr(state, "_metadata", None)


def set_state_versions(state: OrderedDict[str, Any], versions: dict[str, Any]) -> None:
    """Set the versions of modules in a state dict, which `nn.Module.load_state_dict` reads."""
    state._metadata = versions  # type: ignore[attr-defined]


def override_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Override a method of one module by a function that takes the module; a deep copy of the module gets one of its own.

    An assignment to the result of `torch.compile` would change the module in it (seen in torch 2.13).
    """
    vars(module)[name] = MethodType(function, module)


_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def gradient_hooks(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the hooks of the script on the gradient of a tensor, for `set_gradient_hooks`; empty if there are none."""
    return {name: hooks for name in _GRADIENT_HOOKS if (hooks := getattr(tensor, name))}


def set_gradient_hooks(tensor: torch.Tensor, hooks: Mapping[str, Any]) -> None:
    """Set hooks on the gradient of a tensor, also those that it has: `swap_tensors` does not move what calls them."""
    for name, hooks_by_id in hooks.items():
        setattr(tensor, name, hooks_by_id)


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor, in `dtype`; torch's own clipping uses it."""
    return torch._foreach_norm(tensors, order, dtype=dtype)


def foreach_multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place."""
    torch._foreach_mul_(tensors, factor)


def graph_task_id() -> int:
    """Return the number of the current backward pass; DDP uses it."""
    return int(torch._C._current_graph_task_id())


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass, as DDP and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def function_modes() -> list[Any]:
    """Return the active modes of torch functions, outermost first; torch.compile uses it."""
    modes: list[Any] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


@contextmanager
def open_file_part(file: Path, start: int, length: int) -> Iterator[Any]:
    """Open consecutive bytes of a file as a file, as the reader of torch.distributed.checkpoint does."""
    from torch.distributed.checkpoint.utils import _create_file_view  # noqa: PLC0415 - for few folders

    with file.open("rb") as opened:
        view: Any = _create_file_view(opened, start, length)
        view.name = str(file)
        yield view


def fake_tensors() -> Any:
    """Return a context in which tensors have no memory, and CPU kernels run without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - slow to import

    return FakeTensorMode()


def group_timeout(group: Any) -> timedelta:
    """Return the time limit of a process group's collectives."""
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta = backend.options._timeout
    return timeout


def default_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def set_worker_info(info: Any) -> None:
    """Set the result of `torch.utils.data.get_worker_info` in this process."""
    worker._worker_info = info


def set_worker_dataset(info: Any, dataset: Any) -> None:
    """Set the dataset in a result of `get_worker_info`, which refuses assignments (seen in torch 2.13)."""
    object.__setattr__(info, "dataset", dataset)


def copy_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy with other attributes; a copy, not a new loader, keeps subclasses and all options.

    A `DataLoader` refuses the assignment of some attributes, and holds its persistent workers (seen in torch 2.13).
    """
    copied = copy.copy(loader)
    vars(copied).update(attributes, _iterator=None)
    return copied


def copy_attributes(loader: DataLoader[Any], target: DataLoader[Any]) -> None:
    """Give a loader the attributes of another one, except for its persistent workers.

    A `DataLoader` refuses the assignment of some, and its `__init__` would build another loader (seen in torch 2.13).
    """
    vars(target).update({name: value for name, value in vars(loader).items() if name != "_iterator"})


def iterator_function(loader: DataLoader[Any]) -> Callable[[DataLoader[Any]], Any]:
    """Return the function by which loaders of this class build an iterator; a subclass may have its own."""
    function: Callable[[DataLoader[Any]], Any] = type(loader)._get_iterator
    return function


def replace_iterator(loader: DataLoader[Any], build: Callable[[], Any]) -> None:
    """Make `DataLoader.__iter__` return what a function builds, so that a subclass's own iteration sees only batches."""
    vars(loader)["_get_iterator"] = build


def generate_numpy_state(base_seed: int, worker_id: int) -> Any:
    """Return the seed of NumPy that torch gives a worker of a data loader."""
    generate_state: Any = worker._generate_state
    return generate_state(base_seed, worker_id)


def compute_shard_region(
    shape: torch.Size, mesh: Any, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of this rank's shard, as `torch.distributed.checkpoint` computes them."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - slow to import

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(offsets), tuple(sizes)


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a module, without importing it."""
    # To its class: a compiled module has the attributes of the module in it.
    return hasattr(type(module), "_get_fsdp_state")


TORCH = f"{Path(torch.__file__).parent}/"
"""Directory of torch, for `call_site` to leave out."""
COMPILED_ATTRIBUTE = "_orig_mod"
"""The attribute in which the result of `torch.compile` holds the module."""
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", COMPILED_ATTRIBUTE),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)
"""Wrappers: the torch module that must be loaded before there is one, the class, and the attribute of the wrapped module."""
WRAPPER_ATTRIBUTES = frozenset(attribute for *_, attribute in _WRAPPERS)
"""The attributes in which wrappers of torch hold a module; parts of parameter names."""


def find_wrapped_module(wrapper: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the module in a wrapper of torch, and the attribute that holds it; None for other modules."""
    for attribute, inner in wrapper._modules.items():
        if attribute not in WRAPPER_ATTRIBUTES or inner is None:
            continue
        for source, name, held_as in _WRAPPERS:
            kind = getattr(sys.modules.get(source), name, None)
            if held_as == attribute and kind is not None and isinstance(wrapper, kind):
                return attribute, inner
    return None


def fsdp_parameter_groups(unit: Any) -> list[Any]:
    """Return torch's parameter groups of a unit: at most one in torch 2.9, any number in torch 2.13."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def gathered_parameters(unit: Any) -> list[torch.Tensor]:
    """Return the parameters of a unit as its forward pass sees them: the memory is freed after it."""
    parameters = (sharded for group in fsdp_parameter_groups(unit) for sharded in group.fsdp_params)
    return [sharded._unsharded_param for sharded in parameters if hasattr(sharded, "_unsharded_param")]


def share_gradient_hooks(unit: Any) -> None:
    """Let tensor hooks on the sharded parameters of a unit run on the gradients of the gathered ones, which autograd computes.

    Both have one dict of hooks, so that a handle removes a hook from both. torch itself runs the post-accumulate hooks of sharded
    parameters, after gradients are reduced.
    """
    for group in fsdp_parameter_groups(unit):
        for sharded in group.fsdp_params:
            hooks = sharded.sharded_param._backward_hooks
            if hooks and sharded._unsharded_param._backward_hooks is not hooks:
                sharded._unsharded_param._backward_hooks = hooks


def list_owners(unit: Any, *, replaced: bool = False) -> list[tuple[nn.Module, str]]:
    """Return the module and the attribute of each of `gathered_parameters`.

    With `replaced`, return those of parameters that are not what the unit would gather, if it is not gathered. The first forward
    pass accepts other sharded parameters, such as those that were loaded.
    """
    owners = []
    is_initialized = unit._get_fsdp_state()._is_root is not None
    for group in fsdp_parameter_groups(unit):
        for sharded in group.fsdp_params:
            module, name = sharded._module_info.module, sharded._module_info.param_name
            current = module._parameters.get(name)
            is_accepted = current is sharded.sharded_param or (
                hasattr(current, "_local_tensor") and not is_initialized
            )
            is_replaced = sharded.sharded_state.name == "SHARDED" and not is_accepted
            if is_replaced if replaced else hasattr(sharded, "_unsharded_param"):
                owners.append((module, name))
    return owners


def is_functorch_active() -> bool:
    """Return whether a transform of `torch.func` runs, whose tensors have no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def fsdp_policy(unit: Any) -> Any:
    """Return the mixed precision policy of a module under `fully_shard`."""
    return unit._get_fsdp_state()._mp_policy


def keep_dtypes(unit: Any, owners: Collection[tuple[int, str]]) -> None:
    """Let a unit gather parameters in the dtype that they have, whatever its policy is.

    Args:
        unit: A module under `fully_shard`, before its first forward pass.
        owners: The parameters: the id of the module that has each, and the attribute.
    """
    for group in fsdp_parameter_groups(unit):
        for sharded in group.fsdp_params:
            info = sharded._module_info
            if (id(info.module), info.param_name) in owners:
                # torch calls it at the first forward pass.
                vars(sharded)["init_dtype_attrs"] = MethodType(_init_without_cast, sharded)


def _init_without_cast(sharded: Any, policy: Any) -> None:
    type(sharded).init_dtype_attrs(sharded, replace(policy, param_dtype=None))


def ignore_in_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Let DDP neither broadcast nor average parameters and buffers, beside those that the script has named."""
    earlier = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*earlier, *names])  # type: ignore[no-untyped-call]


@contextmanager
def keep_gathered(units: list[Any]) -> Iterator[None]:
    """Keep gathered parameters after a forward pass and for a state dict."""
    # The root module has other settings from its first forward pass on.
    units[0]._get_fsdp_state()._lazy_init()
    groups = [group for unit in units for group in fsdp_parameter_groups(unit)]
    mesh_infos = [group.post_forward_mesh_info for group in groups]
    hooks = [_remove_state_dict_hooks(group) for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, info in zip(groups, mesh_infos, strict=True):
            group.post_forward_mesh_info = info
        for restore in hooks:
            restore()


def _remove_state_dict_hooks(group: Any) -> Callable[[], None]:
    """Remove the state dict hooks that reshard; return a function that restores them."""
    handles = (
        group._module_to_pre_save_state_dict_hook_handle,
        group._module_to_pre_load_state_dict_hook_handle,
    )
    for handles_by_module in handles:
        for handle in handles_by_module.values():
            handle.remove()

    def restore() -> None:
        # The group registers hooks only if the dicts are empty.
        for handles_by_module in handles:
            handles_by_module.clear()
        group._register_state_dict_hooks()

    return restore


def unsharded_gradient(sharded: Any) -> torch.Tensor | None:
    """Return the accumulated gradient of an FSDPParam that is not reduced yet."""
    gradient: torch.Tensor | None = sharded.unsharded_accumulated_grad
    if gradient is None and hasattr(sharded, "_unsharded_param"):
        gradient = sharded._unsharded_param.grad
    return gradient


def set_unsharded_gradient(sharded: Any, gradient: torch.Tensor | None) -> None:
    """Set the accumulated gradient of an FSDPParam; the next backward passes add to it."""
    if hasattr(sharded, "_unsharded_param"):
        sharded._unsharded_param.grad = None
    sharded.unsharded_accumulated_grad = gradient


def qualified_name(sharded: Any) -> str:
    """Return the name of an FSDPParam in its model."""
    return str(sharded._param_fqn)


def unsharded_spec(sharded: Any) -> Any:
    """Return the layout of an FSDPParam that tensor parallelism shards too, after it is gathered; None for others."""
    return sharded._unsharded_dtensor_spec


def without_compilation(function: F) -> F:
    """Make compiled code call a function as it is, with its type."""
    disable: Any = torch.compiler.disable
    plain: F = disable(function)
    return plain


def is_compiled(module: nn.Module) -> bool:
    """Return whether the calls of a module are compiled in place."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compile_call(module: nn.Module, codes: dict[type[nn.Module], CodeType], **options: Any) -> None:
    """Compile the calls of a module in place, as `nn.Module.compile` does, also those of torch's own classes.

    Args:
        module: The module.
        codes: The code objects of one model by class, which grows. Dynamo counts the compilations of a code object, and stops to
            compile it at a limit, so models must not share one. Equal blocks of a model share one, and are compiled once.
        **options: Arguments of `torch.compile`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    code = codes.setdefault(type(module), call.__code__.replace())
    own_call = FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    module._compiled_call_impl = torch.compile(own_call, **options)


def compile_like(module: nn.Module, compiled: Any) -> nn.Module:
    """Return a module compiled with the options of another result of `torch.compile` (seen in torch 2.13)."""
    like: nn.Module = type(compiled)(module, compiled.dynamo_ctx)
    return like


def uncompile_call(module: nn.Module) -> None:
    """Remove the compilation of a module's calls."""
    module._compiled_call_impl = None


def is_graph_pending(model: DistributedDataParallel) -> bool:
    """Return whether DDP has yet to record a static graph: the first backward pass must average gradients (torch 2.13)."""
    return bool(model.static_graph) and not getattr(model, "_static_graph_delay_allreduce_enqueued", True)


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Sort the buckets of DDP in the order of the first gradients, once; collective, as in the forward pass that would do it."""
    with suppress(RuntimeError):  # the previous step is incomplete: the next forward pass reports it
        model.reducer._rebuild_buckets()


def capture_buckets(model: DistributedDataParallel, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return the bucket order of DDP by the names of the parameters; collective."""
    return {"buckets": _bucket_names(model, parameters), "synced": model.require_forward_param_sync}


def restore_buckets(
    model: DistributedDataParallel, parameters: Mapping[str, nn.Parameter], state: dict[str, Any]
) -> None:
    """Restore a state of `capture_buckets`; ignored if the parameters differ."""
    model.require_forward_param_sync = bool(state["synced"])
    buckets = state["buckets"]
    if buckets is None or model.static_graph or buckets == _bucket_names(model, parameters):
        return
    with suppress(AttributeError, TypeError):
        _assign_buckets(model, parameters, buckets)


def _bucket_names(model: Any, named: Mapping[str, nn.Parameter]) -> list[list[str]] | None:
    """Return the parameter names of every bucket, after a pending rebuild."""
    names = {id(parameter): name for name, parameter in named.items()}
    try:
        rebuild_buckets(model)
        with _ReuseZeros():  # type: ignore[no-untyped-call]
            buckets = model.reducer._get_zeros_like_grad_buckets()
    except (AttributeError, RuntimeError):
        # RuntimeError: a parameter with sparse gradients has no bucket in memory.
        return None
    return [[names.get(id(parameter), "") for parameter in bucket.parameters()] for bucket in buckets]


def _assign_buckets(model: Any, named: Mapping[str, nn.Parameter], names_by_bucket: list[list[str]]) -> None:
    parameters, sparse = model._build_params_for_reducer()
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    buckets = [[indices.get(id(named.get(name)), -1) for name in bucket] for bucket in names_by_bucket]
    if sorted(index for bucket in buckets for index in bucket) != list(range(len(parameters))):
        return
    names = model._build_debug_param_to_name_mapping(parameters)
    with _fixed_buckets(lambda *_: (buckets[::-1], [model.bucket_bytes_cap] * len(buckets))):
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    for hook, state in model._comm_hooks:
        _DIST._register_comm_hook(model.reducer, state, hook)


@contextmanager
def _fixed_buckets(assign: Callable[..., Any]) -> Iterator[None]:
    """Make DDP assign parameters to given buckets inside of the context."""
    original = _DIST._compute_bucket_assignment_by_size
    _DIST._compute_bucket_assignment_by_size = assign
    try:
        yield
    finally:
        _DIST._compute_bucket_assignment_by_size = original


class _ReuseZeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Return the argument of `zeros_like` inside of the context, since only the bucket contents are read."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.ops.aten.zeros_like.default else func(*args, **(kwargs or {}))
