"""What replicas of a device that `torch.distributed` does not drive tell each other through their hosts."""

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

from accel_runtime.backends.averaging import Averaging
from accel_runtime.backends.wire import wire_between
from accel_runtime.backends.words import OPERATIONS, InStore
from accel_runtime.exchange.agreement import Agreement, Wire
from accel_runtime.exchange.objects import share_objects
from accel_runtime.topology import Topology

__all__ = ["ByHosts", "Hosts", "Kept"]

_ANY_DAY = timedelta(days=1)


class Hosts:
    """The host side of one replica: a store, and a gloo group over it that belongs to no process.

    `torch.distributed` has one default group a process, and replicas may be threads of one.

    Args:
        topology: Where this replica stands.
        share: Gives every replica the text of the first, over the device; how they find the store.
        address: Of the first replica, as the others reach it.
        timeout: How long to wait for the others.
    """

    def __init__(
        self, topology: Topology, share: Callable[[str], str], address: str, timeout: timedelta
    ) -> None:
        self._topology, self._timeout = topology, timeout
        self._server = None
        if topology.rank == 0:
            self._server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        host, _, port = share(f"{address}:{self._server.port}" if self._server else "").rpartition(":")
        self.store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        """What all replicas can write into and read from."""
        self._group = self._joined("control")
        self._one_machine = topology.local_world_size == topology.world_size
        self.wire: Wire = self._connect(self._group, "wire", timeout)
        """Carries bytes between the replicas."""
        self._asides = 0

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every replica's tensor on the CPU, stacked."""
        everyone = tensor.new_empty((self._topology.world_size, *tensor.shape))
        self._group.allgather([list(everyone.unbind())], [tensor.contiguous()]).wait()
        return everyone

    def all_reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Every replica's tensor on the CPU, combined into a new one."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._group.allreduce([total], OPERATIONS[reduction]).wait()
        return total / self._topology.world_size if reduction == "mean" else total

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of one replica on the CPU, written into that of every other."""
        self._group.broadcast(tensor, source).wait()
        return tensor

    def apart(self) -> Callable[[Any], list[Any]]:
        """See `Backend.apart`."""
        self._asides += 1
        name = f"aside {self._asides}"
        wire = self._connect(self._joined(name, _ANY_DAY), f"wire of {name}", _ANY_DAY)
        agreement = Agreement(wire, self._topology.rank, self._topology.world_size)
        return lambda item: share_objects(name, item, agreement)

    def _connect(self, group: Any, name: str, timeout: timedelta) -> Wire:
        return wire_between(group, self._prefixed(name), timeout, one_machine=self._one_machine)

    def _joined(self, name: str, timeout: timedelta | None = None) -> Any:
        rank, size = self._topology.rank, self._topology.world_size
        return dist.ProcessGroupGloo(self._prefixed(name), rank, size, timeout or self._timeout)

    def _prefixed(self, name: str) -> Any:
        return dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]


class ByHosts(InStore):
    """A backend whose host side does what the device has no part in.

    Args:
        topology: Where this replica stands.
        device: What it computes on.
        hosts: Its host side.
    """

    def __init__(self, topology: Topology, device: torch.device, hosts: Hosts) -> None:
        super().__init__(topology, device, hosts.wire)
        self._hosts = hosts

    @override
    def apart(self) -> Callable[[Any], list[Any]]:
        return self._hosts.apart()

    @property
    @override
    def _store(self) -> Any:
        return self._hosts.store


class Kept(threading.local):
    """What a replica keeps from one backend to the next: it may be a thread of a process that has others."""

    def __init__(self) -> None:
        self.hosts: Hosts | None = None
        """Made once: what it counts goes on."""
        self.averaging: WeakKeyDictionary[nn.Module, Averaging] = WeakKeyDictionary()
        """The models that average their gradients."""
        self.seeded = False
        """Whether the device has been seeded."""
