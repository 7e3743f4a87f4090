"""`torch.compile`, in place: a compiled model keeps its class, its names and its state dict."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.configuration import Configuration
from accel_runtime.options import KwargsHandler

__all__ = ["DynamoBackend", "TorchDynamoPlugin", "compile_in_place", "plain", "restore"]


class DynamoBackend(str, Enum):
    """The compilers that Accelerate names. Any other that this torch knows can be given by its own name."""

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
    """The compiler, in capitals or not; `no` compiles nothing."""
    mode: str | None = None
    """`default`, `reduce-overhead`, `max-autotune` or `max-autotune-no-cudagraphs`."""
    fullgraph: bool = False
    """Whether a model that falls into several graphs is an error."""
    dynamic: bool | None = None
    """Whether shapes may change; None lets torch find out."""
    options: dict[str, Any] | None = None
    """What the compiler itself takes."""
    disable: bool = False
    """Whether to do all but compile, for tests."""
    use_regional_compilation: bool = False
    """Whether repeated blocks are compiled one by one: the first is compiled, the others are found."""

    @override
    def _check(self) -> None:
        name = self.name
        if self.mode is not None and self.options is not None:
            raise ValueError("torch.compile takes mode or options, not both; leave out one")
        if name != "no" and name not in (known := _known()):
            raise ValueError(
                f"dynamo backend {name!r} is not one that this torch knows: {', '.join(known)}, or no"
            )

    @property
    def name(self) -> str:
        """The backend as torch writes it."""
        given = self.backend.value if isinstance(self.backend, DynamoBackend) else self.backend
        return given.lower()

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, copied; the backend as torch writes it."""
        return super().to_dict() | {"backend": self.name}

    @override
    def to_kwargs(self) -> dict[str, Any]:
        """Arguments for `torch.compile`."""
        return {
            "backend": self.name,
            "mode": self.mode,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "options": self.options,
            "disable": self.disable,
        }


def _known() -> list[str]:
    # Seconds to import, which only a run that compiles pays.
    found: list[str] = importlib.import_module("torch._dynamo").list_backends(exclude_tags=())
    return found


def compile_in_place(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the model's calls, unless that is done already."""
    if plugin.name == "no" or _compiled(model):
        return
    parts = list(_regions(model)) if plugin.use_regional_compilation else [model]
    for part in parts:
        if not _compiled(part):
            # What nn.Module.compile does, except that it compiles nothing of torch's own classes.
            part._compiled_call_impl = torch.compile(_call(part), **plugin.to_kwargs())  # noqa: SLF001


def _call(model: nn.Module) -> Callable[..., Any]:
    """The model's call, as a function that the compiler looks into whatever the model's class is."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001

    return call


def restore(model: nn.Module) -> nn.Module:
    """The model as it was before it was compiled, here or by the script; its parts alike."""
    model = plain(model)
    for part in model.modules():
        part._compiled_call_impl = None  # noqa: SLF001 - what nn.Module.compile sets
    return model


def plain(model: nn.Module) -> nn.Module:
    """The module in what `torch.compile(model)` of the script returned; any other as it is."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model


def _compiled(model: nn.Module) -> bool:
    return plain(model) is not model or model._compiled_call_impl is not None  # noqa: SLF001


def _regions(model: nn.Module) -> Iterator[nn.Module]:
    """Repeated blocks each for itself, and what lies around them in pieces as large as can be."""
    if _repeated(model):
        yield from model.children()
    elif any(_repeated(part) for part in model.modules()):
        for child in model.children():
            yield from _regions(child)
    else:
        yield model


def _repeated(module: nn.Module) -> bool:
    kinds = [type(child) for child in module.children()]
    return isinstance(module, nn.ModuleList) and len(kinds) > 1 and len(set(kinds)) == 1
