"""DistributedDataParallel as the options say: how its gradients travel, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_runtime.options import DDPCommunicationHookType

__all__ = ["replicated", "synced"]

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


def replicated(
    model: nn.Module, device_ids: list[int] | None, options: dict[str, Any]
) -> DistributedDataParallel:
    """The model in DDP.

    Args:
        model: Has at least one trainable parameter.
        device_ids: Its device's index, where devices have one.
        options: Fields of `DistributedDataParallelKwargs`.
    """
    own = {name: value for name, value in options.items() if not name.startswith("comm_")}
    prepared = DistributedDataParallel(model, device_ids=device_ids, **own)
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
