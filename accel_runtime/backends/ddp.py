"""DistributedDataParallel as the options say: how its gradients travel, and when; and as the script's own module."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from accel_runtime.options import DDPCommunicationHookType

__all__ = ["ReplicatedModel", "replicated", "synced"]

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
"""What DDP puts before the names of parameters and buffers."""
_CHECKPOINTS_OF_TORCH = "torch.distributed.checkpoint.state_dict"
"""The module of torch that takes this prefix off by itself, and fails where it is missing."""
_UNUSED = "Expected to have finished reduction in the prior iteration"
"""How DDP's message on parameters without a gradient begins (torch 2.13)."""


class ReplicatedModel(DistributedDataParallel):
    """DDP with the attributes, the indexing and the state dict of the script's module.

    A name that neither `nn.Module` nor DDP has is read from the script's module, and set there. `state_dict` has the
    names of the script's module; `load_state_dict` takes them with and without DDP's prefix.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if hasattr(module, "dim"):
            # DDP uses its own `dim` in `scatter` and `gather` only, which nothing calls; models often have a `dim`.
            del self.dim
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self._own_names = frozenset(vars(self)) | {"_own_names"}

    explain: Callable[[RuntimeError, str], RuntimeError] = staticmethod(lambda error, _: error)
    """`Backend.explain` of the backend that prepared the model."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("explain", None)  # it belongs to the process
        return state

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
            # DDP sets some in each forward pass. They are no parameters, for which alone nn.Module looks at length.
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

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _UNUSED in str(error):
                raise RuntimeError(self._explain_unused(str(error))) from error
            # Buffers are broadcast here: a rank that has ended is noticed before any backward pass.
            if (explained := self.explain(error, "the forward pass")) is not error:
                raise explained from error
            raise

    def _explain_unused(self, message: str) -> str:
        """Return a message that names the parameters without a gradient, made of DDP's message with their indices."""
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        match = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", message)
        indices = [int(index) for index in match[2].split()] if match else []
        parameters = ", ".join(names[index] for index in indices if index < len(names)) or "some parameters"
        where = f" on rank {match[1]}" if match else ""
        return (
            f"Gradients of {type(self.module).__name__} cannot be averaged over the processes: the backward pass before "
            f"left no gradient of {parameters}{where}. Use every trainable parameter in the loss, freeze the others before "
            "prepare(), or pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])."
        )

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state under the names of the script's module."""
        if sys._getframe(1).f_globals.get("__name__") == _CHECKPOINTS_OF_TORCH:  # noqa: SLF001
            return super().state_dict(*args, **kwargs)
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with the names of the script's module, or with DDP's prefix before them."""
        own = self.module.state_dict().keys()
        if not any(name in own for name in state_dict):
            versions = getattr(state_dict, "_metadata", None)
            state_dict = OrderedDict(state_dict)
            if versions is not None:
                state_dict._metadata = dict(versions)  # type: ignore[attr-defined]  # noqa: SLF001 - where torch has them
            consume_prefix_in_state_dict_if_present(state_dict, _PREFIX)
        return self.module.load_state_dict(state_dict, strict, assign)


def _add_prefix(module: ReplicatedModel, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Bring names to DDP's form, where another module that holds this one loads its state."""
    own = {f"{prefix}{name}" for name in module.module.state_dict()}
    for name in [name for name in state_dict if name in own]:
        state_dict[f"{prefix}{_PREFIX}{name.removeprefix(prefix)}"] = state_dict.pop(name)


def replicated(model: nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> ReplicatedModel:
    """The model in DDP.

    Args:
        model: Has at least one trainable parameter.
        device_ids: Its device's index, where devices have one.
        options: Fields of `DistributedDataParallelKwargs`.

    Raises:
        ValueError: A buffer is sparse, and buffers are to be broadcast.
    """
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout is not torch.strided]
    if sparse and options.get("broadcast_buffers", True):
        raise ValueError(
            f"Buffer {sparse[0]!r} of {type(model).__name__} cannot be broadcast to the other processes: it is sparse. Make it "
            "dense, or pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])."
        )
    own = {name: value for name, value in options.items() if not name.startswith("comm_")}
    prepared = ReplicatedModel(model, device_ids=device_ids, **own)
    kind = options.get("comm_hook", DDPCommunicationHookType.NO)
    if kind in _HOOKS:
        state = None
        if kind is DDPCommunicationHookType.POWER_SGD:
            state = powerSGD_hook.PowerSGDState(None, **options.get("comm_state_option", {}))
        prepared.register_comm_hook(state, _chain(kind, options.get("comm_wrapper")))
    return prepared


def _chain(kind: DDPCommunicationHookType, wrapper: DDPCommunicationHookType | None) -> _Hook:
    """The hook as DDP calls it."""
    hook = _HOOKS[kind]
    if wrapper in _WRAPPERS:
        hook = _WRAPPERS[wrapper](hook)

    # DDP knows torch's bf16 hooks by name and refuses them without NCCL; gloo adds bfloat16 up as well.
    return lambda state, bucket: hook(state, bucket)  # noqa: PLW0108


@contextmanager
def synced(model: DistributedDataParallel) -> Iterator[None]:
    """Inside, the next backward pass averages gradients, though its forward pass ran in `no_sync`."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
