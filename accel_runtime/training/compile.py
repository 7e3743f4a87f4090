"""Compilation of models by `torch.compile`, in place, and unwrapping of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typing_extensions import override

from accel_runtime.foundation.module_copies import copy_modules
from accel_runtime.foundation.module_names import uncompiled_module
from accel_runtime.foundation.options import Configuration, KwargsHandler
from accel_runtime.foundation.torch_internals import compile_call, compile_like, is_compiled, uncompile_call
from accel_runtime.training.precision import AutocastForward

__all__ = [
    "DynamoBackend",
    "TorchDynamoPlugin",
    "compile_in_place",
    "compile_regions",
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
