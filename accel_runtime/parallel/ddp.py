"""The strategy of replicas: DDP with the interface of the script's module, or one process."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from accel_runtime.backends.quantized_tensors import (
    broadcast_quantized,
    list_unsendable,
    refuse_unaveraged,
    refuse_unsent_buffers,
)
from accel_runtime.foundation import nested
from accel_runtime.foundation.module_names import (
    load_state_dict,
    named_parameters,
    script_names,
    uncompiled_module,
)
from accel_runtime.foundation.options import DDPCommunicationHookType
from accel_runtime.foundation.torch_internals import (
    capture_buckets,
    ignore_in_ddp,
    is_graph_pending,
    rebuild_buckets,
    restore_buckets,
    without_compilation,
)
from accel_runtime.parallel.averaging import refuse_max_norm
from accel_runtime.parallel.pickled_models import warn_of_saved_model
from accel_runtime.parallel.strategy import ForwardPreHook, ModelLayout, Strategy
from accel_runtime.storage.errors import format_names

__all__ = [
    "DDPModel",
    "DDPStrategy",
    "check_hidden_gradients",
    "sync_in_backward",
    "wrap_in_ddp",
]


_Future = torch.futures.Future[torch.Tensor]
_Hook = Callable[[Any, Any], _Future]

_HOOKS: dict[DDPCommunicationHookType, _Hook] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
}
_WRAPPERS: dict[DDPCommunicationHookType, Callable[[_Hook], _Hook]] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
}


_PREFIX = "module."
"""DDP's prefix of parameter and buffer names."""
_TORCH_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
"""The torch module that removes the prefix itself, and fails if it is missing."""
_UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"
"""The beginning of DDP's message on parameters without a gradient (torch 2.13)."""
_MAX_NAMES = 6


class DDPModel(DistributedDataParallel):
    """DDP with the attributes, the indexing and the state dict of the script's module.

    A name that neither `nn.Module` nor DDP has is read from the script's module, and set there. `state_dict` has the
    names of the script's module; `load_state_dict` accepts them with and without DDP's prefix.
    """

    _rebuild_buckets: ClassVar[Callable[[DistributedDataParallel], None]] = staticmethod(rebuild_buckets)

    def __init__(
        self,
        module: nn.Module,
        explain_error: Callable[[RuntimeError, str], RuntimeError] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module, **options)
        # Not before: it imports torch's compiler, as DDP has done now.
        DDPModel._rebuild_buckets = staticmethod(without_compilation(rebuild_buckets))
        self._explain_error = explain_error or _keep_error
        self._observe_inputs: ForwardPreHook | None = None
        if hasattr(module, "dim"):
            # DDP uses its own `dim` in `scatter` and `gather` only, which nothing calls; models often have a `dim`.
            del self.dim
        super().register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        # Some may be frozen later: DDP keeps the indices of now.
        self._averaged_names = [
            name for name, parameter in named_parameters(module) if parameter.requires_grad
        ]
        self._own_names = frozenset(vars(self)) | {"_own_names"}

    @override
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> str | tuple[Any, ...]:
        warn_of_saved_model()
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_explain_error": _keep_error}  # the other belongs to the process

    def __getattr__(self, name: str) -> Any:
        try:
            module = self.__dict__["_modules"]["module"]
        except KeyError:  # before DDP is initialized, and while it is unpickled
            raise AttributeError(name) from None
        if name == "module":
            return module
        if name.startswith("__"):  # `copy` looks for methods of this object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(module, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_own_names", ()):
            # DDP sets some in each forward pass; nn.Module would search its parameters first.
            object.__setattr__(self, name, value)
        elif self._has_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    @override
    def __delattr__(self, name: str) -> None:
        if self._has_own(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def _has_own(self, name: str) -> bool:
        """Return whether the attribute `name` belongs to DDP, or DDP is not initialized yet."""
        own = self.__dict__.get("_own_names")
        return own is None or name in own or name == "module" or hasattr(type(self), name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]

    def observe_inputs(self, observe: ForwardPreHook) -> None:
        """Call a function before each forward pass; with a hook of torch, every step takes a slower path."""
        self._observe_inputs = observe

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._observe_inputs is not None:
            self._observe_inputs(self, inputs, kwargs)
        if self.require_forward_param_sync and self.modules_buffers and not torch.is_grad_enabled():
            # DDP leaves it to the next training step, whose broadcast of buffers comes after it. An evaluation on the first rank alone
            # would broadcast its buffers while the others, already in that step, sort their buckets.
            DDPModel._rebuild_buckets(self)
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _UNUSED_PARAMETERS in str(error):
                raise RuntimeError(self._explain_unused(str(error))) from error
            # Buffers are broadcast here: a rank that has ended is noticed before any backward pass.
            if (explained := self._explain_error(error, "the forward pass")) is not error:
                raise explained from error
            raise

    def _explain_unused(self, message: str) -> str:
        """Return DDP's message with names of the parameters without a gradient instead of indices."""
        names = self._averaged_names
        match = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", message)
        indices = [int(index) for index in match[2].split()] if match else []
        unused = [names[index] for index in indices if index < len(names)]
        parameters = format_names(unused, _MAX_NAMES) or "some parameters"
        location = f" on rank {match[1]}" if match else ""
        return (
            f"Gradients of {type(self.module).__name__} cannot be averaged over the processes: the backward pass before "
            f"left no gradient of {parameters}{location}. Use every trainable parameter in the loss, freeze the others before "
            "prepare(), or pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])."
        )

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state under the names of the script's module."""
        if sys._getframe(1).f_globals.get("__name__") == _TORCH_CHECKPOINT:  # noqa: SLF001
            return super().state_dict(*args, **kwargs)
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with the names of the script's module, or with those of wrappers, such as DDP's prefix."""
        return load_state_dict(self.module, state_dict, strict=strict, assign=assign)

    # The methods above use the state of the script's module, and so its hooks.

    @override
    def register_state_dict_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook of the script's module."""
        handle: RemovableHandle = self.module.register_state_dict_pre_hook(hook)
        return handle

    @override
    def register_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook of the script's module."""
        handle: RemovableHandle = self.module.register_state_dict_post_hook(hook)
        return handle

    @override
    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook of the script's module."""
        handle: RemovableHandle = self.module.register_load_state_dict_pre_hook(hook)
        return handle

    @override
    def register_load_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook of the script's module."""
        handle: RemovableHandle = self.module.register_load_state_dict_post_hook(hook)
        return handle


def _keep_error(error: RuntimeError, _: str) -> RuntimeError:
    return error


class _SearchedModel(DDPModel):
    """DDP that searches outputs for the parameters they depend on, also in types in which torch finds no tensors.

    A class of its own, as torch.compile traces these methods.
    """

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return nested.unpack_tensors(super().forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            check_hidden_gradients(output, "DDP does not find the parameters that they depend on")
        return nested.pack_tensors(output)


def _add_prefix(module: DDPModel, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add DDP's prefix to the names if another module that contains this one loads its state."""
    names = {f"{prefix}{name}" for name in module.module.state_dict()}
    for name in [name for name in state_dict if name in names]:
        state_dict[f"{prefix}{_PREFIX}{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _find_sparse(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters of embeddings that make sparse gradients."""
    for module in model.modules():
        weight = getattr(module, "weight", None) if getattr(module, "sparse", False) is True else None
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            yield weight


def _copy_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient.

    The values of a sparse gradient are the gradient of the embedding's output itself, which DDP divides in place (torch
    2.13): the gradients of other layers that are computed from it later would be divided too.
    """
    return gradient.clone()


_copy_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save does not warn of it


_LOG = logging.getLogger("accel_runtime.training.gradients")
_reported_types: set[type] = set()
"""Types of which a warning was written."""


def check_hidden_gradients(outputs: Any, consequence: str) -> None:
    """Check that torch finds the tensors that need gradients in the outputs of a forward pass.

    Raises RuntimeError if it finds none of them; warns once for each type if it finds some, as the others may be unused.
    """
    leaves = nested.leaves(outputs)
    hidden = [
        leaf
        for leaf in leaves
        if not (leaf is None or isinstance(leaf, torch.Tensor))
        and any(tensor.requires_grad for tensor in nested.iterate_hidden_tensors(leaf))
    ]
    if not hidden:
        return
    message = (
        f"tensors that need gradients are in an object of {type(hidden[0]).__name__}, which has more than data (a module, other "
        f"state, or a reference to itself), so {consequence}. Return tensors in a dict, list, tuple or dataclass."
    )
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise RuntimeError(f"Cannot use the outputs of the model: {message}")
    if type(hidden[0]) not in _reported_types:
        _reported_types.add(type(hidden[0]))
        _LOG.warning("In the outputs of a model, %s", message)


def wrap_in_ddp(
    model: nn.Module,
    device: torch.device,
    options: Mapping[str, Any],
    explain_error: Callable[[RuntimeError, str], RuntimeError] | None = None,
) -> DDPModel:
    """Wrap a model with at least one trainable parameter in DDP; `explain_error` is that of a strategy."""
    refuse_max_norm(model, set(model.parameters()))
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout is not torch.strided]
    if sparse and options.get("broadcast_buffers", True):
        raise ValueError(
            f"Buffer {script_names(model, sparse)[sparse[0]]!r} of {type(model).__name__} cannot be broadcast to the other processes: it is sparse. Make it "
            "dense, or pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])."
        )
    if options.get("broadcast_buffers", True):
        refuse_unsent_buffers(model)
    if unsendable := list_unsendable(model):
        ignore_in_ddp(model, unsendable)
    ddp_options = {name: value for name, value in options.items() if not name.startswith("comm_")}
    for buffer in model.buffers():
        _reset_strides(buffer)
    for parameter in _find_sparse(model):
        parameter.register_hook(_copy_gradient)  # type: ignore[no-untyped-call]
    is_searched = ddp_options.get("find_unused_parameters") or ddp_options.get("static_graph")
    kind_of_model = _SearchedModel if is_searched else DDPModel
    device_ids = None if device.index is None else [device.index]
    prepared = kind_of_model(model, explain_error, device_ids=device_ids, **ddp_options)
    kind = options.get("comm_hook", DDPCommunicationHookType.NO)
    if kind in _HOOKS:
        state = None
        if kind is DDPCommunicationHookType.POWER_SGD:
            state = powerSGD_hook.PowerSGDState(None, **options.get("comm_state_option", {}))
        hook = _HOOKS[kind]
        if (wrapper := options.get("comm_wrapper")) in _WRAPPERS:
            hook = _WRAPPERS[wrapper](hook)
        # A lambda, since DDP refuses torch's bf16 hooks without NCCL by name; gloo reduces bfloat16 too.
        prepared.register_comm_hook(state, lambda state, bucket: hook(state, bucket))  # noqa: PLW0108
    return prepared


def _reset_strides(buffer: torch.Tensor) -> None:
    """Give a contiguous buffer the strides of its shape, which those of dimensions of size 1 may not be.

    DDP takes such a buffer (`x.unsqueeze(0).transpose(0, 1)`, as in positional encodings) for one with overlapping elements, and
    cannot broadcast it.
    """
    if buffer.layout is torch.strided and buffer.is_contiguous():
        strides = torch.empty(buffer.shape, device="meta").stride()
        if buffer.stride() != strides:
            buffer.as_strided_(buffer.shape, strides)


@contextmanager
def sync_in_backward(model: DistributedDataParallel) -> Iterator[None]:
    """Return a context in which the next backward pass averages gradients, even after a forward pass in `no_sync`."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


class DDPStrategy(Strategy):
    """Every rank has all parameters; DDP averages the gradients of several."""

    @override
    def check_tensors(self, model: nn.Module) -> None:
        if self.backend.topology.world_size > 1:
            refuse_unaveraged(model)

    @override
    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:
        # DDP refuses a model without trainable parameters.
        is_trainable = any(parameter.requires_grad for parameter in model.parameters())
        is_alone = self.backend.topology.world_size == 1
        if is_alone or isinstance(model, DistributedDataParallel) or not is_trainable:
            return model
        broadcast_quantized(model, self.backend)
        return wrap_in_ddp(model, self.backend.device, ddp_options, self.explain_error)

    @override
    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    @override
    def observe_inputs(self, model: nn.Module, observe: ForwardPreHook) -> None:
        if isinstance(model, DDPModel):
            model.observe_inputs(observe)
        else:
            super().observe_inputs(model, observe)

    @override
    def describe_model(self, model: nn.Module, autocast_dtype: torch.dtype | None) -> ModelLayout:
        is_wrapped = isinstance(model, DistributedDataParallel)
        return ModelLayout(DistributedDataParallel.__name__ if is_wrapped else "none")

    @property
    @override
    def combines_gradients(self) -> bool:
        return self.backend.topology.world_size > 1

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        model = uncompiled_module(model)
        # A static graph is recorded first. Averaging a part of a cycle is exact: averages are added to local gradients.
        if not isinstance(model, DistributedDataParallel) or is_graph_pending(model):
            return nullcontext()
        return model.no_sync()

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        model = uncompiled_module(model)
        return sync_in_backward(model) if isinstance(model, DistributedDataParallel) else nullcontext()

    @override
    def join(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        return Join(list(models))

    @override
    def capture_replica_state(self, model: nn.Module) -> dict[str, Any]:
        if not isinstance(model, DistributedDataParallel):
            return {}
        return capture_buckets(model, dict(named_parameters(model.module)))

    @override
    def restore_replica_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        # Other strategies have other states.
        if "synced" in state and isinstance(model, DistributedDataParallel):
            restore_buckets(model, dict(named_parameters(model.module)), state)
