"""The forward pass of a prepared model: autocast with loss scaling, `torch.compile` in place, and unwrapping."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typing_extensions import override

from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.foundation import nested
from accel_runtime.foundation.module_names import uncompiled_module
from accel_runtime.foundation.options import Configuration, KwargsHandler
from accel_runtime.foundation.precision import FORMATS, PrecisionFormat
from accel_runtime.foundation.torch_internals import compile_call, compile_like, is_compiled, uncompile_call
from accel_runtime.parallel.strategy import UnscaleGradients, unscale_gradients

__all__ = [
    "AutocastForward",
    "DynamoBackend",
    "LossScaler",
    "Precision",
    "TorchDynamoPlugin",
    "compile_in_place",
    "compile_regions",
    "has_compiled_regions",
    "is_compiled_module",
    "uncompile",
    "unwrap",
    "unwrap_submodules",
]


class LossScaler(torch.amp.GradScaler):
    """GradScaler of torch, shared by optimizers that step separately.

    The scale may change only when all optimizers of an iteration have stepped. These are known once every optimizer
    has, or at the next backward pass.
    """

    def __init__(
        self, device: str, unscale_gradients: UnscaleGradients = unscale_gradients, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._unscale_gradients = unscale_gradients
        self._optimizers: set[int] = set()
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the scale only after steps of this optimizer too."""
        self._optimizers.add(id(optimizer))

    def begin_backward(self) -> None:
        """Update the scale if optimizers have stepped since the last backward pass."""
        if self._stepped:
            self.update()

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, unless that is done already."""
        self._check_scaled()
        if id(optimizer) not in self._unscaled | self._stepped:
            self.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step_unless_overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless the gradients have overflowed; return whether it did."""
        self._check_scaled()
        self.step(optimizer)
        found_infs = self._found_inf_per_device(optimizer) if self.is_enabled() else {}
        overflowed = any(bool(count) for count in found_infs.values())
        self._stepped.add(id(optimizer))
        if self._stepped >= self._optimizers:
            self.update()
        return not overflowed

    def _check_scaled(self) -> None:
        if self.is_enabled() and self._scale is None:
            raise RuntimeError(
                "The gradients cannot be unscaled: no loss was scaled for fp16. Call accelerator.backward(loss) in place of "
                "loss.backward()."
            )

    @override
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        def unscale(unscaled_optimizer: Any) -> dict[torch.device, torch.Tensor]:
            return super(LossScaler, self)._unscale_grads_(
                unscaled_optimizer, inv_scale, found_inf, allow_fp16
            )

        if any(
            p.grad is not None and p.grad.is_cpu for group in optimizer.param_groups for p in group["params"]
        ):
            # GradScaler copies both to the CPU asynchronously, so offloaded gradients could be unscaled before the copy ends.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()

        return self._unscale_gradients(optimizer, unscale)

    @override
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self._unscaled.clear()
        self._stepped.clear()


class Precision:
    """Autocast and loss scaling on one device.

    Args:
        mixed_precision: The number format.
        device: The device of the run.
        autocast_options: Fields of `AutocastKwargs`.
        scaler_options: Fields of `GradScalerKwargs`.
        unscale_gradients: That of the strategy.
    """

    def __init__(
        self,
        mixed_precision: MixedPrecision,
        device: torch.device,
        autocast_options: dict[str, Any],
        scaler_options: dict[str, Any],
        unscale_gradients: UnscaleGradients = unscale_gradients,
    ) -> None:
        self.format = FORMATS[mixed_precision]
        self._autocast = Autocast(self.format, device.type, autocast_options)
        self.scaler = (
            LossScaler(device.type, unscale_gradients, **scaler_options) if self.format.scales_loss else None
        )
        """Loss scaler, or None if the format needs none."""

    def set_autocast(self, options: Mapping[str, Any]) -> None:
        """Set the arguments for `torch.autocast`, also of models that are prepared already."""
        self._autocast.set_options(options)

    @property
    def description(self) -> str:
        """Return the format as text."""
        if self.format.dtype is None:
            return "no: what the models have"
        scales_loss = ", the loss is scaled" if self.scaler is not None else ""
        return f"autocast to {str(self.format.dtype).removeprefix('torch.')}{scales_loss}"

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the format; `options` replace the arguments for `torch.autocast` of the run."""
        return self._autocast.enter(options)

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise ValueError if a trainable parameter is float16, as the loss scaler cannot unscale its gradients."""
        if self.scaler is None or not self.scaler.is_enabled():
            return
        if any(p.requires_grad and p.dtype == torch.float16 for p in parameters):
            raise ValueError(
                "mixed_precision fp16 cannot train float16 parameters: the loss is scaled, and their gradients cannot be unscaled. "
                "Keep the parameters in float32 (model.float(), or load with torch_dtype=torch.float32), as autocast computes in "
                "float16 anyway, or use mixed_precision bf16."
            )

    def wrap(self, model: nn.Module) -> None:
        """Make `model` compute in the format wherever it is called from; see `AutocastForward`."""
        forward = model.forward
        if isinstance(forward, AutocastForward):
            # Prepared before, maybe in another format.
            model.forward = forward.forward
        if self.format.dtype is not None:
            model.forward = AutocastForward(model.forward, self._autocast)

    def begin_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for a backward pass, scaled if the format needs it."""
        if self.scaler is None:
            return loss
        self.scaler.begin_backward()
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor scaled like gradients before they are unscaled."""
        return tensor if self.scaler is None else self.scaler.scale(tensor)


class Autocast:
    """Autocast of a number format on one device; copies of a model have copies of it.

    Args:
        number_format: The number format.
        device_type: The device type of the run.
        options: Fields of `AutocastKwargs`.
    """

    def __init__(self, number_format: PrecisionFormat, device_type: str, options: Mapping[str, Any]) -> None:
        self._dtype, self._device_type = number_format.dtype, device_type
        self.set_options(options)

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Set the arguments for `torch.autocast`."""
        self._options = dict(options)
        self.converts_outputs = bool(self._options.pop("fp32_outputs", True))
        """True if outputs in half precision are converted to float32."""

    def enter(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """Return the context; `options` replace the arguments for `torch.autocast` of the run."""
        if self._dtype is None:
            return nullcontext()
        kwargs = (
            self._options if options is None else {k: v for k, v in options.items() if k != "fp32_outputs"}
        )
        return torch.autocast(self._device_type, dtype=self._dtype, **kwargs)


class AutocastForward:
    """Forward pass of a model under autocast.

    Half-precision outputs are converted to float32: a loss computed from them outside the model would otherwise be
    computed in half precision too.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        autocast: Autocast,
    ) -> None:
        self.forward = forward
        """Original forward pass."""
        self._autocast = autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, and convert half-precision outputs to float32 unless that is disabled."""
        with self._autocast.enter():
            outputs = self.forward(*args, **kwargs)
        return nested.map_leaves(_to_float32, outputs) if self._autocast.converts_outputs else outputs


_LOG = logging.getLogger("accel_runtime.training.precision")
_HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
_reported_types: set[type] = set()
"""Types of which a warning was written."""


def _to_float32(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.float() if leaf.dtype in _HALF_DTYPES else leaf
    if leaf is not None and type(leaf) not in _reported_types:
        _report_unconverted(leaf)
    return leaf


def _report_unconverted(leaf: Any) -> None:
    """Warn once for each type whose tensors stay in half precision."""
    if isinstance(leaf, Iterator):
        _reported_types.add(type(leaf))
        _LOG.warning(
            "The outputs of a model contain an object of %s: it computes after the forward pass, without mixed precision. Return a list.",
            type(leaf).__name__,
        )
    elif any(tensor.dtype in _HALF_DTYPES for tensor in nested.iterate_hidden_tensors(leaf)):
        _reported_types.add(type(leaf))
        _LOG.warning(
            "The outputs of a model contain an object of %s, in which tensors stay in half precision, as it has more than data (a "
            "module, other state, or a reference to itself). Return tensors in a dict, list, tuple or dataclass, or call float() "
            "on them.",
            type(leaf).__name__,
        )


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

    The copy has the parameters and buffers of the model, under the same names; the model itself is not changed.

    Args:
        module: A model; blocks are the modules of a `ModuleList` of one class. Without any, it is compiled as a whole.
        **compile_kwargs: Arguments of `torch.compile`.
    """
    regions = set(_find_regions(module))
    copies: dict[nn.Module, nn.Module] = {}
    codes: dict[type[nn.Module], CodeType] = {}

    def copy(original: nn.Module) -> nn.Module:
        if original not in copies:
            copies[original] = new = type(original).__new__(type(original))
            vars(new).update(vars(original))
            if original in regions:
                compile_call(new, codes, **compile_kwargs)
            else:
                children = original._modules.items()  # noqa: SLF001 - children() leaves out names without a module
                new._modules = {name: child if child is None else copy(child) for name, child in children}  # noqa: SLF001
        return copies[original]

    return copy(module)


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
