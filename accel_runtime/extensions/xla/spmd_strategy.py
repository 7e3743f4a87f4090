"""The strategy of one process on all devices of a machine (SPMD): models are sharded by torch_xla's FSDPv2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.extensions.xla.library import SpmdFullyShardedDataParallel
from accel_runtime.extensions.xla.replicas import SingleReplica
from accel_runtime.extensions.xla.spmd import DeviceSharding

__all__ = ["ShardedOverDevices"]


class ShardedOverDevices(SingleReplica):
    """Models are wrapped in FSDPv2 as one unit, and optimizer states are sharded like their parameters.

    Tensors have their global shape, and XLA inserts the collectives.

    Args:
        backend: The backend of the process.
        sharding: Shards tensors over the devices.
    """

    def __init__(self, backend: Backend, sharding: DeviceSharding) -> None:
        super().__init__(backend)
        self._sharding = sharding

    @override
    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:
        learns = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(model, SpmdFullyShardedDataParallel) or not learns:
            return model
        prepared = _wrap_in_fsdp(self.move_model(model), self._wrap)
        prepared.register_forward_hook(self._sharding.rows.shard_outputs, with_kwargs=True)
        return prepared

    def _wrap(self, model: nn.Module) -> nn.Module:
        # A forward hook shards outputs, since the wrapper does not see the rows of the input.
        wrapper: nn.Module = SpmdFullyShardedDataParallel(
            model, mesh=self._sharding.mesh, shard_output=lambda *_: None
        )
        return wrapper

    @override
    def unwrap_model(self, model: nn.Module) -> nn.Module:
        is_wrapped = isinstance(model, SpmdFullyShardedDataParallel)
        return model.get_submodule("_orig_module") if is_wrapped else model

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        # Replicated until the next step, a state would need the memory that sharding saves.
        optimizer.register_load_state_dict_post_hook(self._shard_loaded_state)

    def _shard_loaded_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            if self._sharding.is_sharded(parameter):
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        # FSDPv2 shards a parameter along its largest dimension.
                        self._sharding.shard_along(value, parameter.shape.index(max(parameter.shape)))


def _wrap_in_fsdp(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrap a model on the device in FSDPv2 without changing the model."""
    forward = vars(model).get("forward")
    # The wrapper expects a method, and ignores a forward pass that is another callable, such as autocast's.
    model.forward = MethodType(_unused_forward, model)
    try:
        prepared = wrap(model)
    finally:
        del model.forward
        if forward is not None:
            model.forward = forward
    # Its backward hook separates the gradients of nested units. On a full model it runs before there are any, and
    # makes outputs views, which scripts cannot change in place.
    model._backward_hooks.popitem()  # noqa: SLF001
    model._is_full_backward_hook = True if model._backward_hooks else None  # noqa: SLF001
    return prepared


def _unused_forward(*_: Any) -> None:
    raise AssertionError("The model ran a forward pass while it was wrapped.")
