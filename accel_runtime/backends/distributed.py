"""Backends over process groups of torch.distributed."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import multiprocessing
import os
import socket
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import get_worker_info
from typing_extensions import override

from accel_runtime.backends.arrivals import (
    forget_rank_process,
    record_rank_process,
    refuse_child_of_rank,
    report_missing_ranks,
)
from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.single import Single
from accel_runtime.collectives.handshake import Handshake, ObjectGroup
from accel_runtime.collectives.stalls import RankMonitor, rank_monitor_of
from accel_runtime.collectives.transport import connect_group
from accel_runtime.environment.group_libraries import GROUP_LIBRARIES
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.text import decode_text, encode_text
from accel_runtime.environment.topology import Role, Topology, build_refusal
from accel_runtime.foundation.options import DistributedType
from accel_runtime.foundation.process_mesh import build_mesh, find_group, find_node_group
from accel_runtime.foundation.torch_internals import (
    HashStore,
    PrefixStore,
    Store,
    default_store,
)
from accel_runtime.observe.heartbeat import heartbeat
from accel_runtime.observe.threads import PAUSE_S, wait_for_collectives, wait_for_threads

__all__ = [
    "REDUCE_OPS",
    "DistributedBackend",
    "SingleRank",
    "StoreBackend",
    "check_gpus_differ",
    "check_process_group",
]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: the sum is divided
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
"""The reduce ops of `Backend.all_reduce`."""


class StoreBackend(Backend):
    """A backend whose ranks share a torch store."""

    @property
    @abstractmethod
    def _store(self) -> Any:
        """The store."""

    @override
    def set_store_key(self, key: str, text: str) -> None:
        self._store.set(key, encode_text(text))

    @override
    def get_store_key(self, key: str) -> str | None:
        store = self._store
        return decode_text(store.get(key)) if store.check([key]) else None

    @override
    def increment_store_key(self, key: str) -> int:
        # Counted in the store, so that a second backend of this process continues the count.
        return int(self._store.add(f"{key}/turns/{self.topology.rank}", 1))


_FORK_PATIENCE_S = 0.2
"""Seconds for which a fork waits for threads that never rest."""


@functools.cache
def wait_for_threads_before_fork() -> None:
    """Make every later fork of this process wait until the threads of collectives do not use Python.

    Data loader workers are forked. A native thread enters Python when it releases a tensor. A child that is forked at that
    moment deadlocks on Python before 3.12 (python/cpython#112275). Measured with 3.11.7 on a busy machine, each fork beside
    four such threads: 7 of 1500 children hung, 1 of 3000 after a pause alone, none of 3000 after a pause and until no thread
    was running.
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=lambda: wait_for_threads(PAUSE_S, _FORK_PATIENCE_S))


_LOG = logging.getLogger("accel_runtime.backends")

# torch has one default process group per process; the first of two Accelerators to end must not destroy it.
_USERS: WeakSet[Backend] = WeakSet()
_CREATED_WITH: dict[str, Any] = {}
"""Options of the Accelerator that created it."""


class SingleRank(Single):
    """The backend of the only rank of a launcher, which makes no collective.

    Its process group is for calls of the script, such as `torch.distributed.barrier()`, which need one on several processes.
    """

    def __init__(
        self, topology: Topology, runtime: DeviceRuntime, settings: Settings, options: dict[str, Any]
    ) -> None:
        super().__init__(topology, runtime)
        _join_process_group(self, topology, runtime.device, settings, options)

    @property
    @override
    def mesh(self) -> DeviceMesh:
        return build_mesh(self.grid, self.device.type)

    @override
    def get_group(self, role: Role) -> dist.ProcessGroup:
        return find_group(self.grid, self.device.type, role)

    @override
    def close(self) -> None:
        _leave_process_group(self)


class DistributedBackend(StoreBackend):
    """The backend of a process that a launcher started with others, or that shards models alone.

    CPU tensors use a group of their own, separate from the collectives of DDP and of the script.
    """

    def __init__(
        self, topology: Topology, runtime: DeviceRuntime, settings: Settings, options: dict[str, Any]
    ) -> None:
        device = runtime.device
        patience = _join_process_group(self, topology, device, settings, options)
        self._one_machine = topology.local_world_size == topology.world_size
        self._control, transport = connect_group(
            dist.group.WORLD, "control", patience, one_machine=self._one_machine
        )
        super().__init__(topology, runtime, transport, settings.parallel.build_grid(topology.world_size))
        self._progress = heartbeat()
        self.rank_monitor = rank_monitor_of(
            dist.group.WORLD, self._store, topology.rank, topology.world_size, patience
        )
        if self.rank_monitor is not None:
            transport.call_during_waits(self.rank_monitor.check_for_deadlock)
        if device.type == "cuda" and topology.world_size > 1 and self.collective_backend != "gloo":
            check_gpus_differ(
                self.all_gather_objects(_gpu_of(device), "the GPU of every rank"), self.collective_backend
            )

    @property
    @override
    def mesh(self) -> DeviceMesh:
        return build_mesh(self.grid, self.device.type)

    @override
    def get_group(self, role: Role) -> dist.ProcessGroup:
        return find_group(self.grid, self.device.type, role)

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count_collective()
        gathered = tensor.new_empty((self.topology.world_size, *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=self._group(tensor))
        self._end_collective()
        return gathered

    @override
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        self._count_collective()
        dist.all_reduce(tensor, op=REDUCE_OPS[reduction], group=self._group(tensor))
        self._end_collective()
        return tensor.div_(self.topology.world_size) if reduction == "mean" else tensor

    @override
    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._count_collective()
        work = dist.all_reduce(tensor, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return tensor

        return wait

    @override
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self._count_collective()
        dist.broadcast(tensor, src=source, group=self._group(tensor))
        self._end_collective()
        return tensor

    @override
    def broadcast_in_node(self, tensor: torch.Tensor, nodes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        if len(nodes) == 1:
            return self.broadcast(tensor)
        group, source = find_node_group(nodes)
        self._count_collective()
        dist.broadcast(tensor, src=source, group=group)
        self._end_collective()
        return tensor

    @override
    def open_object_channel(self) -> ObjectGroup:
        # Another thread may wait long for its turn.
        _, transport = connect_group(
            dist.group.WORLD, "side", timedelta(days=1), one_machine=self._one_machine
        )
        handshake = Handshake(transport, self.topology.rank, self.topology.world_size, is_counted=False)
        return ObjectGroup("background exchange", handshake)

    @override
    def barrier(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        super().barrier()

    def _count_collective(self) -> None:
        """Count a collective, for ranks that wait for this one elsewhere."""
        if self._progress is not None:
            self._progress.begin_collective()

    def _end_collective(self) -> None:
        if self._progress is not None:
            self._progress.end_collective()

    def _group(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return self._control if tensor.device.type == "cpu" else None

    @property
    @override
    def distributed_type(self) -> DistributedType:
        kind = {"cuda": "GPU"}.get(self.device.type, self.device.type.upper())
        return DistributedType(f"MULTI_{kind}")

    @property
    @override
    def collective_backend(self) -> str | None:
        # "cpu:gloo,cuda:nccl": one backend per device.
        backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
        return backends.get(self.device.type)

    @property
    @override
    def _store(self) -> Any:
        return default_store()

    @override
    def close(self) -> None:
        _leave_process_group(self, self.rank_monitor)


def _join_process_group(
    user: Backend, topology: Topology, device: torch.device, settings: Settings, options: dict[str, Any]
) -> timedelta:
    """Create the default process group unless it exists, and return the timeout of accel's own exchanges in it.

    A process group of the script is used as it is and never destroyed.

    Args:
        user: The backend that needs the group; it ends with the last one.
        topology: Rank and world size of this process.
        device: The device of this process.
        settings: The settings of the launcher.
        options: Arguments for `init_process_group`, which override `settings`.
    """
    timeout = timedelta(seconds=settings.process_group_timeout)
    arguments: dict[str, Any] = {"backend": _group_backend(settings, device), "timeout": timeout} | options
    if not dist.is_initialized():
        _check_is_rank(topology)
        if arguments["backend"] in GROUP_LIBRARIES.names:
            GROUP_LIBRARIES[arguments["backend"]].register(device)
        is_located = bool(arguments.keys() & {"store", "init_method"})
        with nullcontext() if is_located else report_missing_ranks(topology):
            if not is_located:
                # One rank needs no port, which another process could have taken.
                is_alone = topology.world_size == 1
                store = (
                    HashStore() if is_alone else _open_group_store(topology, arguments["timeout"] or timeout)
                )
                arguments |= {"store": store, "rank": topology.rank, "world_size": topology.world_size}
            dist.init_process_group(**arguments)
        if topology.world_size > 1:
            record_rank_process()
        atexit.register(_destroy_process_group)
        _CREATED_WITH.clear()
        _CREATED_WITH.update(options)
        _USERS.clear()
        _USERS.add(user)
    else:
        if _USERS:
            _USERS.add(user)
        _report_late_options(options)
    wait_for_threads_before_fork()
    return arguments["timeout"] or timeout


def _report_late_options(options: Mapping[str, Any]) -> None:
    """Warn of options of a process group that exists already, unless it was created with them."""
    late = [name for name, value in options.items() if not (_USERS and _CREATED_WITH.get(name) == value)]
    if late and not dist.get_rank():
        creator = "an earlier Accelerator or PartialState" if _USERS else "init_process_group() of the script"
        _LOG.warning(
            "%s of InitProcessGroupKwargs has no effect: %s has created the process group. Pass it there.",
            " and ".join(late),
            creator,
        )


def check_process_group(topology: Topology) -> None:
    """Raise RuntimeError if the process group of the script has another rank or size than the variables of this process."""
    if not dist.is_initialized():
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) == (topology.rank, topology.world_size):
        return
    source = "RANK and WORLD_SIZE say" if topology.launched else "no RANK and WORLD_SIZE are set, which means"
    raise RuntimeError(
        f"Cannot connect the processes: init_process_group() of the script made this process rank {rank} of {size}, but {source} "
        f"rank {topology.rank} of {topology.world_size}. Remove init_process_group() and start the script with `accel launch`, or set "
        "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT before it."
    )


def _leave_process_group(user: Backend, monitor: RankMonitor | None = None) -> None:
    """Destroy the process group if `user` is the last backend that uses it, and accel has created it; end its monitor first."""
    if user in _USERS:
        _USERS.remove(user)
        if not _USERS:
            if monitor is not None:
                monitor.service.close()
            _destroy_process_group()


def _check_is_rank(topology: Topology) -> None:
    """Raise RuntimeError in a spawned child with the variables of its rank, which would wait for the others forever.

    Such a child imports the script again, or is a data loader worker.
    """
    if topology.world_size == 1:
        return
    # multiprocessing refuses to start processes by this attribute too (Python 3.11).
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"Cannot connect to the other processes: this one was spawned by rank {topology.rank}, such as a worker of a "
            "DataLoader, and imports the script, which makes an Accelerator or a PartialState outside of functions. Guard "
            "the script with if __name__ == '__main__': main()."
        )
    if get_worker_info() is not None:
        raise build_refusal(f"this process was spawned by rank {topology.rank}")
    refuse_child_of_rank(topology)


def _gpu_of(device: torch.device) -> tuple[Any, ...]:
    """Return what identifies a GPU, whatever its index is in this process."""
    properties: Any = torch.cuda.get_device_properties(device)
    # Some drivers of AMD GPUs give all of them the same UUID.
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return socket.gethostname(), str(properties.uuid), *address


def check_gpus_differ(gpus: Sequence[tuple[Any, ...]], backend: str | None) -> None:
    """Raise RuntimeError if two ranks use the same GPU, which can deadlock NCCL.

    Indices of visible GPUs do not show it: each process of a Slurm job may have its own `cuda:0`.
    """
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu, []).append(rank)
    shared = [
        f"{', '.join(map(str, members))} on {gpu[0]}" for gpu, members in ranks.items() if len(members) > 1
    ]
    if shared:
        raise RuntimeError(
            f"Cannot connect the ranks over {backend}: some use the same GPU (ranks {'; ranks '.join(shared)}). Start at most one "
            "process a GPU, share GPUs with process_group_backend: gloo, or set device: cpu."
        )


def _open_group_store(topology: Topology, timeout: timedelta) -> Store:
    """Return a store for the next process group of this process.

    Each has keys of its own: the ranks of a second group would otherwise read the addresses of the first one, and wait there
    without end. The connection is kept, since a server that rank 0 closes with its group may still answer a faster rank.
    """
    store, numbers = _connect_to_launcher(os.getpid(), topology, timeout)
    return PrefixStore(f"group{next(numbers)}", store)


@functools.cache
def _connect_to_launcher(
    process: int,  # noqa: ARG001 - part of the key: a forked process has a connection of its own
    topology: Topology,
    timeout: timedelta,
) -> tuple[Store, Iterator[int]]:
    """Connect to the store of the launcher, once in a process; return it with the numbers of its process groups."""
    store, _, _ = next(rendezvous("env://", topology.rank, topology.world_size, timeout=timeout))
    return store, itertools.count()


def _group_backend(settings: Settings, device: torch.device) -> str:
    """Return the backend of the process group; tensors on the CPU use gloo on any device."""
    name: str = settings.process_group_backend
    if name == "auto":
        name = dist.get_default_backend_for_device(device)
    is_only = device.index is None or name in {"gloo", *GROUP_LIBRARIES.names}
    return name if is_only else f"cpu:gloo,{device.type}:{name}"


def _destroy_process_group() -> None:
    wait_for_collectives()
    rank_monitor_of.cache_clear()
    connect_group.cache_clear()
    forget_rank_process()
    if dist.is_initialized():
        dist.destroy_process_group()
