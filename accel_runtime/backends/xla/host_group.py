"""Connect the hosts of torch_xla replicas over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from accel_runtime.backends.ddp import GradientAveraging
from accel_runtime.backends.distributed import REDUCE_OPS, StoreBackend
from accel_runtime.collectives.handshake import Handshake
from accel_runtime.collectives.objects import all_gather_objects
from accel_runtime.collectives.transport import Transport, connect_transport
from accel_runtime.topology import Topology

__all__ = ["HostGroup", "HostGroupBackend", "ReplicaRecord"]

_DAY = timedelta(days=1)


class HostGroup:
    """The host side of one replica: a store, and a gloo group that torch.distributed does not know.

    `torch.distributed` has one default group per process, and replicas may be threads of a process.

    Args:
        topology: Rank and world size of this replica.
        broadcast_text: Broadcasts the text of the first replica over the device, to find the store.
        address: The address of the first replica.
        timeout: How long to wait for other replicas.
    """

    def __init__(
        self, topology: Topology, broadcast_text: Callable[[str], str], address: str, timeout: timedelta
    ) -> None:
        self._topology, self._timeout = topology, timeout
        self._server = None
        if topology.rank == 0:
            self._server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        host, _, port = broadcast_text(f"{address}:{self._server.port}" if self._server else "").rpartition(
            ":"
        )
        self.store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        """The store of all replicas."""
        self._group = self._new_group("control")
        self._one_machine = topology.local_world_size == topology.world_size
        self.transport: Transport = self._connect(self._group, "transport", timeout)
        """Moves bytes between the replicas."""
        self._num_channels = 0

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the CPU tensors of all replicas."""
        gathered = tensor.new_empty((self._topology.world_size, *tensor.shape))
        self._group.allgather([list(gathered.unbind())], [tensor.contiguous()]).wait()
        return gathered

    def all_reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduce CPU tensors over the replicas into a new one."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._group.allreduce([total], REDUCE_OPS[reduction]).wait()
        return total / self._topology.world_size if reduction == "mean" else total

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy the CPU tensor of one replica into those of the others."""
        self._group.broadcast(tensor, source).wait()
        return tensor

    def open_object_channel(self) -> Callable[[Any], list[Any]]:
        """Connect the replicas for another thread; see `Backend.open_object_channel`."""
        self._num_channels += 1
        name = f"channel {self._num_channels}"
        transport = self._connect(self._new_group(name, _DAY), f"transport of {name}", _DAY)
        handshake = Handshake(transport, self._topology.rank, self._topology.world_size)
        return lambda item: all_gather_objects(name, item, handshake)

    def _connect(self, group: Any, name: str, timeout: timedelta) -> Transport:
        return connect_transport(group, self._prefix_store(name), timeout, one_machine=self._one_machine)

    def _new_group(self, name: str, timeout: timedelta | None = None) -> Any:
        rank, size = self._topology.rank, self._topology.world_size
        return dist.ProcessGroupGloo(self._prefix_store(name), rank, size, timeout or self._timeout)

    def _prefix_store(self, name: str) -> Any:
        return dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]


class HostGroupBackend(StoreBackend):
    """A backend with a host group.

    Args:
        topology: Rank and world size of this replica.
        device: The device of this replica.
        hosts: The host group of this replica.
    """

    def __init__(self, topology: Topology, device: torch.device, host_group: HostGroup) -> None:
        super().__init__(topology, device, host_group.transport)
        self._host_group = host_group

    @override
    def open_object_channel(self) -> Callable[[Any], list[Any]]:
        return self._host_group.open_object_channel()

    @property
    @override
    def _store(self) -> Any:
        return self._host_group.store


class ReplicaRecord(threading.local):
    """State of a replica between backends; a replica may be one of several threads of a process."""

    def __init__(self) -> None:
        self.host_group: HostGroup | None = None
        """Kept, so that its counters continue."""
        self.averaging: WeakKeyDictionary[nn.Module, GradientAveraging] = WeakKeyDictionary()
        """Models whose gradients are averaged."""
        self.seeded = False
        """True once the device has been seeded."""
