"""SPMD: what it asks of a process before all devices of a machine compute as one, and what is cut over them then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime import tree
from accel_runtime.backends.base import Backend
from accel_runtime.backends.refusing import check_hooks, check_spmd
from accel_runtime.backends.rows import Rows
from accel_runtime.data.source import Loop
from accel_runtime.env import Settings
from accel_runtime.topology import Topology

__all__ = ["Machinery", "Meshed", "along", "devices"]

_AXIS = "fsdp"
"""The mesh's one dimension, as FSDPv2 wants it called."""
_CUT = "{devices="
"""How the layout of a tensor begins of which every device holds a part."""


@dataclass(frozen=True)
class Machinery:
    """What of torch_xla is about SPMD."""

    spmd: Any
    """`torch_xla.distributed.spmd`."""
    model: Any
    """`torch_xla.core.xla_model`."""
    core: Any
    """`torch_xla._XLAC`, where alone can be asked how a tensor lies on the devices."""
    wrapper: type[nn.Module]
    """FSDPv2."""


class Meshed(Backend):
    """What a backend whose devices are a mesh does with loaders, models and optimizers.

    Batches are cut by rows, models fully sharded in torch_xla's FSDPv2 wrapper as one unit, and optimizers' states like
    the parameters they are of. Tensors stay whole to whoever looks at them.
    """

    def _spread(self, machinery: Machinery, parts: int) -> None:
        """Begin to compute on so many devices."""
        self._machinery = machinery
        self._mesh = machinery.spmd.Mesh(list(range(parts)), (parts,), (_AXIS,))
        self._rows = Rows(parts, self._sharding, lambda tensor: self._cut_along(tensor, 0))

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
        send = self._machinery.model.send_cpu_data_to_device

        def sent(tensor: torch.Tensor) -> torch.Tensor:
            there: torch.Tensor = send(tensor, self.device, self._rows)[0]
            return there

        return lambda loop: (tree.map_tensors(sent, batch) for batch in walk(loop))

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        learns = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(model, self._machinery.wrapper) or not learns:
            return model
        check_hooks(options)
        prepared = _wrapped(self.place(model), self._wrap)
        prepared.register_forward_hook(self._rows.passed, with_kwargs=True)
        return prepared

    def _wrap(self, model: nn.Module) -> nn.Module:
        # Which outputs have a row for every sample is seen beside the input, where the wrapper does not look.
        return self._machinery.wrapper(model, mesh=self._mesh, shard_output=lambda *_: None)

    @override
    def original(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("_orig_module") if isinstance(model, self._machinery.wrapper) else model

    @override
    def wrapping(self, model: nn.Module) -> str:
        return type(model).__name__ if isinstance(model, self._machinery.wrapper) else "none"

    @override
    def hosted(self, state: Any) -> Any:
        # torch_xla would first make every tensor whole on every device, where it may not fit.
        self.settle()
        whole: dict[int, torch.Tensor] = {}

        def here(leaf: Any) -> Any:
            if not self._is_cut(leaf):
                return leaf
            number = self._machinery.core._xla_get_tensor_id(leaf)  # noqa: SLF001 - the same for tied ones
            if number not in whole:
                whole[number] = self._assembled(leaf.detach())
            return whole[number]

        return super().hosted(tree.map_leaves(here, state))

    def _assembled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is cut, on the CPU, out of the parts that the devices hold."""
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for part in self._machinery.spmd.XLAShardedTensor(tensor).local_shards:
            # Not `unpadded_data`: it takes a list for a tuple, of which torch warns.
            own = tuple(slice(0, place.stop - place.start) for place in part.indices)
            whole[tuple(part.indices)] = part.data[own]
        return whole

    def _is_cut(self, leaf: Any) -> bool:
        there = isinstance(leaf, torch.Tensor) and leaf.device == self.device
        return there and self._layout(leaf).startswith(_CUT)

    def _layout(self, tensor: torch.Tensor) -> str:
        """How a tensor lies on the devices, as XLA writes it; nothing where nobody has said it yet."""
        return str(self._machinery.core._get_xla_sharding_spec(tensor))  # noqa: SLF001

    def _cut_along(self, tensor: torch.Tensor, dimension: int) -> None:
        """Cut a tensor that is on the devices, unless it has a layout."""
        if tensor.device == self.device and not self._layout(tensor):
            self._machinery.spmd.mark_sharding(tensor, self._mesh, along(dimension, tensor.dim()))

    def _sharding(self, rank: int) -> Any:
        return self._machinery.spmd.ShardingSpec(self._mesh, along(0, rank))

    @override
    def watch_over(self, optimizer: torch.optim.Optimizer) -> None:
        # Whole on every device until the next step, a state would need the memory that sharding has saved.
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            if self._is_cut(parameter):
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        self._cut_along(value, _largest(parameter))


def along(dimension: int, rank: int) -> tuple[str | None, ...]:
    """How torch_xla is told that of so many dimensions one is cut."""
    return tuple(_AXIS if place == dimension else None for place in range(rank))


def _largest(tensor: torch.Tensor) -> int:
    """The dimension along which FSDPv2 cuts a parameter."""
    return tensor.shape.index(max(tensor.shape))


def devices(settings: Settings, topology: Topology, runtime: Any, begun: Callable[[], bool]) -> int:
    """How many devices compute as one, with SPMD switched on; 0 where it is not asked for.

    Args:
        settings: What the launcher said.
        topology: What the environment says of this process's place.
        runtime: `torch_xla.runtime`.
        begun: Whether torch_xla has taken up its devices.

    Raises:
        RuntimeError: It cannot be switched on any more, or is on and nobody asked for it; there is no device, or there
            are several processes.
    """
    if not settings.spmd:
        check_spmd(runtime.is_spmd())
        return 0
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
