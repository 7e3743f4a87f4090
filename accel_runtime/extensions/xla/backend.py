"""The backends of XLA devices through torch_xla: one replica, several replicas, and SPMD."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.distributed import StoreBackend
from accel_runtime.backends.single import Single
from accel_runtime.collectives.handshake import ObjectGroup
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.text import decode_text, encode_text
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.xla.host import (
    HostGroup,
    check_cpu_world,
    check_environment,
    check_world,
    read_timeout,
)
from accel_runtime.extensions.xla.library import torch_xla, xm, xr, xs
from accel_runtime.extensions.xla.runtime import LazyRuntime, SPMDRuntime, execute_graph, seed_generator
from accel_runtime.extensions.xla.spmd import DeviceSharding, SPMDFunctions, start_spmd
from accel_runtime.foundation.options import DistributedType
from accel_runtime.observe.heartbeat import disable_heartbeat

__all__ = [
    "XLABackend",
    "connect",
    "read_topology",
    "seed_device",
]

_REDUCE = {"sum": xm.REDUCE_SUM, "mean": xm.REDUCE_SUM, "max": xm.REDUCE_MAX, "min": xm.REDUCE_MIN}
NARROW = {torch.bfloat16, torch.float16}
"""Dtypes that the CPU device cannot sum, and that are summed inaccurately on any."""
_LOOPBACK = "127.0.0.1"


class _ReplicaRecord(threading.local):
    """State of a replica between backends; a replica may be one of several threads of a process."""

    def __init__(self) -> None:
        self.host_group: HostGroup | None = None
        """Kept, so that its counters continue."""
        self.seeded = False
        """True once the device has been seeded."""


_REPLICA = _ReplicaRecord()


def connect(settings: Settings, topology: Topology, options: dict[str, Any]) -> Backend:
    """Select the device of this replica and connect it to the others.

    Args:
        settings: The settings of the launcher.
        topology: Rank and world size in the environment, which must agree with torch_xla.
        options: Fields of `InitProcessGroupKwargs`.

    Raises:
        ValueError: An option is not supported, or a variable requests another precision.
        RuntimeError: Environment and torch_xla disagree, or SPMD is not possible.
    """
    check_environment(os.environ)
    timeout = read_timeout(settings, options)
    num_devices = _start_spmd(settings, topology)
    replica = read_topology(topology)
    if not _REPLICA.seeded:
        # `torch.manual_seed` does not seed this device.
        _seed(torch.initial_seed())
    if num_devices:
        functions = SPMDFunctions(xs, xm, torch_xla._XLAC)  # noqa: SLF001 - it has the functions for sharding specs (torch_xla 2.9)
        mesh = DeviceSharding(functions, torch_xla.device(), num_devices)
        return Single(Topology(), SPMDRuntime(mesh), distributed_type=DistributedType.XLA)
    if replica.world_size == 1:
        return Single(replica, LazyRuntime(torch_xla.device()), distributed_type=DistributedType.XLA)
    check_cpu_world(xr.device_type(), replica.world_size, torch_xla._XLAC._xla_step_marker)  # noqa: SLF001
    if xr.local_ordinal() % xr.addressable_device_count():
        disable_heartbeat()  # one heartbeat per process: use the first replica's
    return XLABackend(replica, torch_xla.device(), _host_group(replica, timeout))


def read_topology(topology: Topology) -> Topology:
    """Return rank and world size of this replica; raise RuntimeError if the environment and torch_xla disagree."""
    torch_xla.device()
    world = xr.world_size()
    check_world(topology, world)
    if world == 1:
        return Topology()
    return Topology(xr.global_ordinal(), world, xr.local_ordinal(), xr.local_device_count(), launched=True)


def seed_device(settings: Settings, seed: int) -> None:
    """Seed the generator of this replica's device, which is initialized for it."""
    _start_spmd(settings, Topology())
    _seed(seed)


def _seed(seed: int) -> None:
    seed_generator(seed)
    _REPLICA.seeded = True


def _start_spmd(settings: Settings, topology: Topology) -> int:
    return start_spmd(settings, topology, xr, torch_xla._XLAC._xla_get_spmd_config_is_locked)  # noqa: SLF001


def _host_group(topology: Topology, timeout: timedelta) -> HostGroup:
    """Return the host group of this replica, shared by all backends so that its counters continue."""
    if _REPLICA.host_group is None:
        address = xr.get_master_ip() if xr.device_type() == "TPU" else _LOOPBACK
        _REPLICA.host_group = HostGroup(topology, _broadcast_text, address, timeout)
    return _REPLICA.host_group


def _broadcast_text(text: str) -> str:
    with torch.device(
        "cpu"
    ):  # with another default device of the script, replicas would record different graphs
        first: bytes = xm.rendezvous("accel", encode_text(text))[0]
    return decode_text(first)


class XLABackend(StoreBackend):
    """The backend of several replicas, which torch_xla started as threads or processes."""

    def __init__(self, topology: Topology, device: torch.device, host_group: HostGroup) -> None:
        super().__init__(topology, LazyRuntime(device, is_first=topology.rank == 0), host_group.transport)
        self._host_group = host_group
        # Replicas of one process are its threads.
        self.ranks_share_generators = xr.process_count() < topology.world_size

    @override
    def open_object_channel(self) -> ObjectGroup:
        return self._host_group.open_object_channel()

    @property
    @override
    def _store(self) -> Any:
        return self._host_group.store

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._host_group.all_gather(tensor)
        if not tensor.numel():
            return tensor.new_empty((self.topology.world_size, *tensor.shape))
        execute_graph()
        # With pin_layout it is a sum over zeros, in which every replica has its own graph.
        gathered: torch.Tensor = xm.all_gather(tensor.unsqueeze(0), dim=0, pin_layout=False)
        execute_graph()
        return gathered

    @override
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._host_group.all_reduce(tensor, reduction)
        execute_graph()
        total = self._record_all_reduce(tensor, reduction)
        execute_graph()
        return total

    def _record_all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """Record an all-reduce as a part of the current graph."""
        if tensor.is_complex():
            return torch.view_as_complex(self._record_all_reduce(torch.view_as_real(tensor), reduction))
        wide = tensor.float() if tensor.dtype in NARROW else tensor
        # One dimension, since a scalar of 0 or 1 becomes a constant of the graph, which may differ between replicas.
        total: torch.Tensor = xm.all_reduce(_REDUCE[reduction], wide.reshape(-1).clone()).view(tensor.shape)
        # all_reduce truncates its scale for integers.
        total = total / self.topology.world_size if reduction == "mean" else total
        return total.to(tensor.dtype) if wide is not tensor else total

    @override
    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        total = self._record_all_reduce(tensor, "sum")
        return lambda: tensor.copy_(total)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._host_group.broadcast(tensor, source)
        execute_graph()
        with torch.no_grad():
            tensor.copy_(self.broadcast_values(tensor, source))
        execute_graph()
        return tensor

    def broadcast_values(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of one replica, as the sum with zeros of the others."""
        is_source = torch.tensor([self.topology.rank == source], device="cpu").to(self.device)
        widened = (
            tensor.to(torch.int32)
            if tensor.dtype in {torch.bool, torch.uint8, torch.int8, torch.int16}
            else tensor
        )
        masked = torch.where(is_source, widened.detach().reshape(-1), torch.zeros_like(widened).reshape(-1))
        return self._record_all_reduce(masked, "sum").view(tensor.shape).to(tensor.dtype)

    @override
    def barrier(self) -> None:
        execute_graph(wait=True)
        super().barrier()

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return DistributedType.XLA

    @property
    @override
    def collective_backend(self) -> str | None:
        return "xla"
