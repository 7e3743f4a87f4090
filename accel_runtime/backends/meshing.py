"""SPMD: what it asks of a process before all devices of a machine compute as one, and what is cut over them then."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime import tree
from accel_runtime.backends.base import Backend
from accel_runtime.backends.rows import Rows
from accel_runtime.data.source import Loop
from accel_runtime.options import DDPCommunicationHookType
from accel_runtime.topology import Topology

__all__ = ["Meshed", "along", "devices"]


class Meshed(Backend):
    """What a backend whose devices are a mesh does with loaders, models and optimizers.

    Batches are cut by rows, models fully sharded in torch_xla's FSDPv2 wrapper as one unit, and optimizers' states like
    the parameters they are of. Tensors stay whole to whoever looks at them.
    """

    _rows: Rows
    _wrapper: type[nn.Module]

    @abstractmethod
    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of a batch, on the devices."""

    @abstractmethod
    def _is_cut(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on the devices has a sharding."""

    @abstractmethod
    def _cut_along(self, tensor: torch.Tensor, dimension: int) -> None:
        """Cut a tensor that is on the devices, unless it has a sharding."""

    @abstractmethod
    def _wrap(self, model: nn.Module) -> nn.Module:
        """The model in the wrapper."""

    @property
    @override
    def parts(self) -> int:
        return self._rows.parts

    @property
    @override
    def facts(self) -> dict[str, str]:
        return {"mesh": f"{self.parts} devices compute as one (SPMD)"} | super().facts

    @override
    def walked(
        self, walk: Callable[[Loop], Iterator[Any]], loop: Loop, *, place: bool, loaded_beside: bool
    ) -> Iterator[Any]:
        inline = place and not loaded_beside
        sending = self._sending(walk) if inline else walk
        return super().walked(sending, loop, place=place, loaded_beside=loaded_beside)

    def _sending(self, walk: Callable[[Loop], Iterator[Any]]) -> Callable[[Loop], Iterator[Any]]:
        """A walk whose batches are sent when they are asked for."""
        return lambda loop: (tree.map_tensors(self._sent, batch) for batch in walk(loop))

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        learns = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(model, self._wrapper) or not learns:
            return model
        _check_options(options)
        prepared = _wrapped(self.place(model), self._wrap)
        prepared.register_forward_hook(self._rows.passed, with_kwargs=True)
        return prepared

    @override
    def original(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("_orig_module") if isinstance(model, self._wrapper) else model

    @override
    def wrapping(self, model: nn.Module) -> str:
        return type(model).__name__ if isinstance(model, self._wrapper) else "none"

    @override
    def watch_over(self, optimizer: torch.optim.Optimizer) -> None:
        # Whole on every device until the next step, a state would need the memory that sharding has saved.
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            if parameter.device == self.device and parameter.dim() and self._is_cut(parameter):
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        self._cut_along(value, _largest(parameter))


def along(dimension: int, rank: int) -> tuple[str | None, ...]:
    """How torch_xla is told that of so many dimensions one is cut."""
    return tuple("fsdp" if place == dimension else None for place in range(rank))


def _largest(tensor: torch.Tensor) -> int:
    """The dimension along which FSDPv2 cuts a parameter."""
    return tensor.shape.index(max(tensor.shape))


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


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what gradients would be rounded by; what only says how DDP finds and groups them has nothing to do here.

    Args:
        options: Fields of `DistributedDataParallelKwargs`.

    Raises:
        ValueError: There is a communication hook.
    """
    hook = options.get("comm_hook", DDPCommunicationHookType.NO)
    if hook is not DDPCommunicationHookType.NO:
        raise ValueError(
            f"comm_hook={hook.value!r} changes what DDP sends, and with SPMD (launcher.spmd: true) the compiler sends "
            "gradients by itself: leave comm_hook out of DistributedDataParallelKwargs"
        )


def _wrapped(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
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
