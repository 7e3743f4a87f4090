"""Compilation of models by `torch.compile`, in place, and unwrapping of models: copies that share parameters, and run their own modules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typing_extensions import override

from accel_runtime.foundation.module_names import uncompiled_module
from accel_runtime.foundation.nested import rebuild
from accel_runtime.foundation.options import Configuration, KwargsHandler
from accel_runtime.foundation.torch_internals import (
    compile_call,
    compile_like,
    is_compiled,
    is_fsdp_module,
    uncompile_call,
)
from accel_runtime.training.precision import AutocastForward

__all__ = [
    "DynamoBackend",
    "TorchDynamoPlugin",
    "compile_in_place",
    "compile_regions",
    "copy_modules",
    "has_compiled_regions",
    "is_compiled_module",
    "uncompile",
    "unwrap",
    "unwrap_submodules",
]


class DynamoBackend(str, Enum):
    """Compilers named by Accelerate; any other that torch has can be passed by its own name."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin(Configuration, KwargsHandler):
    """Arguments of `torch.compile`, for `Accelerator(dynamo_plugin=...)`.

    Raises:
        ValueError: A backend that this torch does not know, or `mode` together with `options`.
    """

    backend: DynamoBackend | str = DynamoBackend.NO
    """Name of the compiler, in any case; `no` does not compile."""
    mode: str | None = None
    """`default`, `reduce-overhead`, `max-autotune` or `max-autotune-no-cudagraphs`."""
    fullgraph: bool = False
    """If true, a graph break is an error."""
    dynamic: bool | None = None
    """If true, shapes may change; None lets torch detect it."""
    options: dict[str, Any] | None = None
    """Options of the compiler itself."""
    disable: bool = False
    """If true, do everything except compile, for tests."""
    use_regional_compilation: bool = False
    """If true, repeated blocks are compiled separately: the first is compiled, and the others reuse it."""

    @override
    def _check(self) -> None:
        name = self.name
        if self.mode is not None and self.options is not None:
            raise ValueError("torch.compile takes either mode or options. Leave out one of them.")
        if name != "no" and name not in (known := torch.compiler.list_backends(exclude_tags=())):
            raise ValueError(
                f"Unknown dynamo backend {name!r}: this version of torch has {', '.join(known)}. Use one of them, or no."
            )

    @property
    def name(self) -> str:
        """Return the backend as torch spells it."""
        backend = self.backend.value if isinstance(self.backend, DynamoBackend) else self.backend
        return backend.lower()

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the fields by name, with the backend as torch spells it."""
        return super().to_dict() | {"backend": self.name}

    @override
    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile`."""
        return {
            "backend": self.name,
            "mode": self.mode,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "options": self.options,
            "disable": self.disable,
        }


def compile_in_place(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the model's calls, unless that is done already."""
    if plugin.name == "no" or _is_compiled(model):
        return
    modules = list(_find_regions(model)) if plugin.use_regional_compilation else [model]
    codes: dict[type[nn.Module], CodeType] = {}
    for module in modules:
        if not _is_compiled(module):
            compile_call(module, codes, **plugin.to_kwargs())


def uncompile(model: nn.Module) -> nn.Module:
    """Return the model without compilation, by accel or by the script, of itself and its submodules."""
    model = uncompiled_module(model)
    for module in model.modules():
        uncompile_call(module)
    return model


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy of a model in which repeated blocks are compiled one by one, which is faster than all at once.

    The copy has the parameters and buffers of the model, under the same names, and methods that the instance has of its own; the
    model itself is not changed.

    Args:
        module: A model; blocks are the modules of a `ModuleList` of one class. Without any, it is compiled as a whole.
        **compile_kwargs: Arguments of `torch.compile`.

    Raises:
        ValueError: The model is sharded or scripted, or a method of the instance runs it through a global variable.
    """
    copies = copy_modules(module)
    codes: dict[type[nn.Module], CodeType] = {}
    for region in set(_find_regions(module)):
        compile_call(copies[region], codes, **compile_kwargs)
    return copies[module]


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module itself is compiled, by `torch.compile` or in place."""
    return _is_compiled(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module or one in it is compiled."""
    return any(_is_compiled(each) for each in module.modules())


def _is_compiled(model: nn.Module) -> bool:
    return uncompiled_module(model) is not model or is_compiled(model)


def _find_regions(model: nn.Module) -> Iterator[nn.Module]:
    """Yield repeated blocks one by one, and the modules around them in pieces as large as possible."""
    if _is_repeated(model):
        yield from model.children()
    elif any(_is_repeated(module) for module in model.modules()):
        for child in model.children():
            yield from _find_regions(child)
    else:
        yield model


def _is_repeated(module: nn.Module) -> bool:
    kinds = [type(child) for child in module.children()]
    return isinstance(module, nn.ModuleList) and len(kinds) > 1 and len(set(kinds)) == 1


_WRAPPERS = (DataParallel, DistributedDataParallel)
"""Wrappers of torch that replicate a module, and have it as `module`."""


def unwrap(
    model: nn.Module,
    unwrap_model: Callable[[nn.Module], nn.Module],
    *,
    keep_autocast: bool,
    keep_compiled: bool,
) -> nn.Module:
    """Return the module that was prepared, without the wrappers of accel and of the script that replicate it.

    Of a wrapper that was compiled, the module in it is returned with the same compilation. Without `keep_autocast`, autocast of the forward pass
    is removed too, without `keep_compiled` also `torch.compile`. `unwrap_model` is that of the strategy. Raises
    TypeError if `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unwrap_model() failed: {model!r} is not a torch.nn.Module. Pass a model.")
    outer = unwrap_model(model)
    original = _strip_wrappers(outer)
    if not keep_compiled:
        original = uncompile(original)
    elif original is not outer and uncompiled_module(outer) is not outer and not _is_compiled(original):
        if outer not in _compiled:
            _compiled[outer] = compile_like(original, outer)
        return _compiled[outer]
    forward = original.__dict__.get("forward")
    if not keep_autocast and isinstance(forward, AutocastForward):
        original.forward = forward.forward
    return original


_compiled: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""The compiled module of the script for each wrapper that the script compiled."""


def unwrap_submodules(model: nn.Module) -> nn.Module:
    """Replace wrapped modules inside a model by the modules in them, and return the model."""
    for name, child in list(model.named_children()):
        if (inner := unwrap_submodules(_strip_wrappers(child))) is not child:
            setattr(model, name, inner)
    return model


def _strip_wrappers(model: nn.Module) -> nn.Module:
    while isinstance(wrapper := uncompiled_module(model), _WRAPPERS):
        model = wrapper.module
    return model


def copy_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return a copy of each module of a model, by the module.

    Attributes, hooks and methods that an instance has of its own, such as a patched `forward`, refer to the copies where they
    refer to modules of the model: in lists and dicts, bound methods, partial functions, closures, and objects that are methods.

    Raises:
        ValueError: A module is sharded or scripted, so that a copy of its attributes would not work; or a method of an instance runs
            a module through a global variable.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        if is_scripted or is_fsdp_module(module):
            raise ValueError(
                f"Cannot copy {type(model).__name__}: {type(module).__name__} in it is {'scripted' if is_scripted else 'sharded'}. "
                "Copy the model before that."
            )
        copies[module] = object.__new__(type(module))
    for module, copied in copies.items():
        for name, value in vars(module).items():
            is_method = callable(getattr(type(module), name, None))
            vars(copied)[name] = _rebind_method(value, copies) if is_method else _rebind(value, copies, {})
        if is_compiled(copied):
            uncompile_call(copied)  # it calls the module that was compiled
    return copies


def _rebind(value: Any, copies: Mapping[nn.Module, nn.Module], known: dict[int, Any]) -> Any:
    """Return a value with copies in place of the modules that it refers to; without any, the value itself."""
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value  # for one that contains itself
    parts = _list_parts(value)
    rebound = [_rebind(part, copies, known) for part in parts]
    if any(new is not part for new, part in zip(rebound, parts, strict=True)):
        known[id(value)] = _rebuild(value, rebound)
    return known[id(value)]


def _list_parts(value: Any) -> list[Any]:
    match value:
        case Mapping():
            return list(value.values())
        case list() | tuple() | deque():
            return list(value)
        case MethodType():
            return [value.__self__]
        case partial():
            return [value.func, value.args, value.keywords]
        case FunctionType() if value.__closure__:
            return [None if cell == CellType() else cell.cell_contents for cell in value.__closure__]
    return []


def _rebuild(value: Any, parts: list[Any]) -> Any:
    match value:
        case Mapping():
            return rebuild(value, dict(zip(value, parts, strict=True)))
        case MethodType():
            return MethodType(value.__func__, *parts)
        case partial():
            return type(value)(parts[0], *parts[1], **parts[2])
        case FunctionType():
            return _rebuild_function(value, parts)
    return rebuild(value, parts)


def _rebuild_function(function: FunctionType, contents: list[Any]) -> FunctionType:
    """Return a function with other contents of its closure; variables that stay are those of the function."""
    cells = tuple(
        cell if new is None or new is cell.cell_contents else CellType(new)
        for cell, new in zip(function.__closure__ or (), contents, strict=True)
    )
    rebuilt = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    vars(rebuilt).update(vars(function))
    return rebuilt


def _rebind_method(method: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a method of an instance for its copy, also one of another object, which may hold the method that it replaces."""
    if isinstance(method, MethodType) and not isinstance(method.__self__, nn.Module):
        owner = _rebind_object(method.__self__, copies)
        return method if owner is method.__self__ else MethodType(method.__func__, owner)
    if isinstance(method, FunctionType):
        _check_globals(method, copies)
    if isinstance(method, (MethodType, FunctionType, partial, nn.Module, type)):
        return _rebind(method, copies, {})
    return _rebind_object(method, copies)


def _rebind_object(owner: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    changed = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        is_called = callable(value) and not isinstance(value, MethodType)
        new = _rebind_method(value, copies) if is_called else _rebind(value, copies, {})
        if new is not value:
            changed[name] = new
    if not changed:
        return owner
    copied = copy.copy(owner)
    vars(copied).update(changed)
    return copied


def _check_globals(method: FunctionType, copies: Mapping[nn.Module, nn.Module]) -> None:
    """Raise ValueError if a method of an instance runs a module through a variable of the script, which a copy cannot replace."""
    for name in method.__code__.co_names:
        value = method.__globals__.get(name)
        module = value if isinstance(value, nn.Module) else getattr(value, "__self__", None)
        if isinstance(module, nn.Module) and module in copies:
            raise ValueError(
                f"Cannot copy {type(module).__name__}: {method.__name__}() at {method.__code__.co_filename}:"
                f"{method.__code__.co_firstlineno} replaces a method of the model, and runs the original through the global variable "
                f"{name!r}. Give it the model as an argument: model.forward = types.MethodType(function, model)."
            )
