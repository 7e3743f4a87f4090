"""The strategies of replicas on XLA devices: gradients are averaged in the compiled program and not by DDP."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.extensions.xla.backend import NARROW, XLABackend
from accel_runtime.extensions.xla.host import check_ddp_options, check_format
from accel_runtime.extensions.xla.library import xm
from accel_runtime.extensions.xla.runtime import execute_graph
from accel_runtime.foundation.torch_internals import gradient_hooks, set_gradient_hooks
from accel_runtime.parallel.averaging import BufferAveraging, GradientAveraging, operate_flat, split_by_size
from accel_runtime.parallel.strategy import ModelLayout, Strategy

__all__ = ["Replicas", "SingleReplica"]


@torch.no_grad()
def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device in place.

    `module.to` replaces parameters if a device has its own tensor type: tied weights are separated, and an optimizer made
    before keeps the old ones. A swapped parameter stays the object that the other layer, the optimizer and the script hold.

    Raises:
        RuntimeError: A graph or a weak reference holds the memory of a parameter.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device == device:
            continue
        grad, tensor.grad = tensor.grad, None
        hooks = gradient_hooks(tensor)
        moved = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                f"Cannot move {name} to {device}: its memory is referenced elsewhere ({error}). Call prepare() before the first "
                "forward pass."
            ) from error
        tensor.grad = None if grad is None else grad.to(device)
        set_gradient_hooks(tensor, hooks)
    return model


class SingleReplica(Strategy):
    """One replica, which has all parameters and averages nothing."""

    loading_refusal = (
        "the replicas of an XLA device load models themselves. Load the model outside of the block."
    )

    @override
    def check_options(self, ddp_options: Mapping[str, Any], mixed_precision: MixedPrecision) -> None:
        check_format(mixed_precision)
        check_ddp_options(ddp_options)

    @override
    def move_model(self, model: nn.Module) -> nn.Module:
        return move_model(model, self.backend.device)


class _ReplicaModels(threading.local):
    """The models of a replica, which may be one of several threads of a process."""

    def __init__(self) -> None:
        self.averaging: WeakKeyDictionary[nn.Module, GradientAveraging] = WeakKeyDictionary()
        """Models whose gradients are averaged, of all strategies."""


_REPLICA = _ReplicaModels()


class Replicas(SingleReplica):
    """Several replicas, each with all parameters; collectives are a part of the compiled program."""

    backend: XLABackend

    def __init__(self, backend: XLABackend) -> None:
        super().__init__(backend)
        self._averaging = _REPLICA.averaging

    @override
    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:
        if model in self._averaging or not any(p.requires_grad for p in model.parameters()):
            return model
        for group in split_by_size([*model.parameters(), *model.buffers()]):
            self._broadcast_tensors(group)
            execute_graph()
        averaging = GradientAveraging(model.named_parameters(), self._average, self.backend.handshake)
        self._averaging[model] = averaging
        if ddp_options.get("broadcast_buffers", True):
            buffers = BufferAveraging(lambda: averaging.is_active, self._broadcast_tensors)
            model.register_forward_pre_hook(buffers.before)
            model.register_forward_hook(buffers.after)
        return model

    def _broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast tensors from the first replica."""
        operate_flat(
            [tensor.detach() for tensor in tensors], lambda flat: self.backend.broadcast_values(flat, 0)
        )

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        # Copies, since torch_xla loses the result of a reduction in place of a tensor that was itself changed in place,
        # such as an accumulated gradient: its next use is computed from the values before.
        means = [g.float() if g.dtype in NARROW else g.clone() for g in gradients]
        xm.all_reduce(xm.REDUCE_SUM, means, scale=1 / self.backend.topology.world_size)
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)

    @override
    def describe_model(self, model: nn.Module, autocast_dtype: torch.dtype | None) -> ModelLayout:
        return ModelLayout(
            "none (gradients are averaged in the graph)" if model in self._averaging else "none"
        )

    @override
    def _set_sync(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
        averaging = self._averaging.get(model)
        return nullcontext() if averaging is None else averaging.set_sync(wanted=wanted)
