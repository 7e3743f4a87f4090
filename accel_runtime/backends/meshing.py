"""What SPMD asks of a process, and of a model, before all devices compute as one."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from accel_runtime.topology import Topology

__all__ = ["devices", "wrapped"]


def devices(topology: Topology, runtime: Any, begun: Callable[[], bool]) -> int:
    """How many devices compute as one, with SPMD switched on.

    Args:
        topology: What the environment says of this process's place.
        runtime: `torch_xla.runtime`.
        begun: Whether torch_xla has taken up its devices.

    Raises:
        RuntimeError: It cannot be switched on any more; there is no device, or there are several processes.
    """
    if topology.world_size != 1:
        raise RuntimeError(
            f"WORLD_SIZE={topology.world_size} says that there are {topology.world_size} processes, but SPMD "
            "(launcher.spmd: true, ACCEL_SPMD=1) is one process on all devices: start the script once."
        )
    if not runtime.is_spmd():
        if begun():  # then use_spmd() would warn, and bring what there is to every device
            raise RuntimeError(
                "SPMD (launcher.spmd: true, ACCEL_SPMD=1) cannot be switched on any more, since torch_xla has begun to "
                "compute without it: make the Accelerator before anything on an XLA device, and start the script as "
                "one process, not with torch_xla.launch."
            )
        runtime.use_spmd()
    try:
        hosts, found = runtime.process_count(), runtime.global_runtime_device_count()
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"SPMD finds no device of the kind {runtime.device_type()}: {error}. Set PJRT_DEVICE to what this machine "
            "has."
        ) from error
    if hosts > 1:
        raise RuntimeError(
            f"SPMD is for the devices of one machine here, and torch_xla sees {hosts} machines. Leave launcher.spmd "
            "off: every device is then a replica."
        )
    return int(found)


def wrapped(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The model in torch_xla's FSDPv2 wrapper, itself as it was before.

    Args:
        model: On the device already.
        wrap: Wraps it.
    """
    own = vars(model).get("forward")
    # The wrapper looks for a method, and takes a model whose forward pass is another callable, as autocast's is, for
    # one that has none.
    model.forward = MethodType(_never, model)
    try:
        prepared = wrap(model)
    finally:
        del model.forward
        if own is not None:
            model.forward = own
    # Its backward hook keeps the gradients of nested units apart. On a whole model it runs before there are any, and
    # it makes outputs views, which scripts cannot change in place.
    model._backward_hooks.popitem()  # noqa: SLF001
    model._is_full_backward_hook = True if model._backward_hooks else None  # noqa: SLF001
    return prepared


def _never(*_: Any) -> None:
    raise AssertionError("a forward pass while a model is being wrapped")
