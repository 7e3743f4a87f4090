"""The interface of a backend: the ranks, their collectives and store, and the device of one process."""

from __future__ import annotations

import logging
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import torch

from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.collectives.handshake import (
    Handshake,
    ObjectGroup,
    RankLostError,
    StallError,
    all_gather_objects,
    build_writer,
    call_at_site,
)
from accel_runtime.collectives.transport import Transport
from accel_runtime.environment.topology import RankGrid, Role, Topology
from accel_runtime.foundation.options import DistributedType
from accel_runtime.observe.call_sites import call_site
from accel_runtime.observe.heartbeat import heartbeat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_runtime.collectives.stalls import MissingRanks, RankMonitor
    from accel_runtime.environment.settings import Settings

__all__ = ["Backend", "Devices", "Reduction"]

Reduction = Literal["sum", "mean", "max", "min"]

_LOG = logging.getLogger("accel_runtime.backends")
CHECK_INTERVAL_S = 30.0
"""Seconds between two checks of the ranks that a rank waits for."""
REPORT_S = 10.0
"""Seconds before a rank that waits for a store key reports it on stderr."""
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.005, 0.5
_DONE, _FAILED, _FOLLOWS = "done", "failed", "follows"


class Devices(Protocol):
    """Devices of one kind that another library connects than torch: an entry of the table of devices."""

    def connect(self, settings: Settings, topology: Topology, options: dict[str, Any]) -> Backend:
        """Select the device of this rank and connect it to the others; see `accel_runtime.backends.connect`."""

    def read_topology(self, settings: Settings, topology: Topology) -> Topology:
        """Return rank and world size of this process or replica, before it is connected; `topology` is of the environment."""

    def seed_device(self, settings: Settings, seed: int) -> None:
        """Seed the generator of the device, before it is connected."""


class Backend(ABC):
    """Connect this process to the other ranks and to its device; a single process has a backend too. It knows no model."""

    ranks_share_generators = False
    """Ranks share the random number generators of one process, so that the first rank draws for all."""

    rank_monitor: RankMonitor | None = None
    """Finds the ranks that will not join a call; None on one process."""

    def __init__(
        self,
        topology: Topology,
        runtime: DeviceRuntime,
        transport: Transport,
        grid: RankGrid | None = None,
        *,
        is_counted: bool = True,
    ) -> None:
        self.topology = topology
        """Rank and world size of this process."""
        self.runtime = runtime
        """How the device of this process executes."""
        self.grid = grid or RankGrid((("data", topology.world_size),))
        """The roles of the ranks; by default each has a replica."""
        self.data_rank = self.grid.data_rank(topology.rank)
        """The part of every global batch that this process has."""
        self.handshake = Handshake(transport, topology.rank, topology.world_size, is_counted=is_counted)
        """The handshake that precedes every collective call."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Cannot pickle or copy an object that is connected to the other processes, such as a prepared DataLoader. Pickle its "
            "dataset, or the Accelerator."
        )

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.runtime.device

    @property
    @abstractmethod
    def distributed_type(self) -> DistributedType:
        """The kind of distributed training, as `Accelerator.distributed_type`."""

    @property
    @abstractmethod
    def collective_backend(self) -> str | None:
        """The process group backend for tensors of this device (`gloo`, `nccl`, ...); None on one process."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a device mesh of torch, with a dimension for each role with several ranks; made once, by all ranks together.

        None if torch.distributed does not connect the ranks: then no role but one has several, and the collectives here are those
        of its group.
        """
        return None

    def get_group(self, role: Role) -> ProcessGroup | None:  # noqa: ARG002 - of ranks that torch connects
        """Return the process group of the ranks that differ from this one in a role only, also if that is this rank alone.

        Made once, by all ranks together. None if torch.distributed does not connect the ranks, as for `mesh`.
        """
        return None

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all ranks, which have equal shapes: `[...]` becomes `[world_size, ...]`."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """Return a contiguous tensor reduced elementwise over the ranks, in its own memory or in new memory; no mean of integers."""

    @abstractmethod
    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum `tensor` over the ranks in place; return a function that waits for the sum and returns it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy the tensor of rank `source` into `tensor` on every rank."""

    def broadcast_in_node(self, tensor: torch.Tensor, nodes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        """Copy the tensor of the first rank of each node into `tensor` on its other ranks; `nodes` are the ranks of each.

        All ranks call it, with tensors of equal sizes.
        """
        for ranks in nodes:
            is_mine = self.topology.rank in ranks
            self.broadcast(tensor if is_mine else torch.empty_like(tensor), ranks[0])
        return tensor

    def all_gather_objects(self, item: Any, subject: str) -> list[Any]:
        """Return the picklable objects of all ranks, by rank; `subject` replaces the source line in the handshake."""
        return all_gather_objects(f"all_gather_objects of {subject}", item, self.handshake)

    def all_gather_numbers(self, numbers: Sequence[int], subject: str) -> list[tuple[int, ...]]:
        """Return the integers of all ranks, by rank: equally many, of 64 bits. They are sent with the handshake itself.

        `subject` replaces the source line in the handshake.
        """
        layout = struct.Struct(f"={len(numbers)}q")
        call = call_at_site(f"all_gather of {subject}", anywhere=True)
        result = self.handshake.exchange(call, layout.size, build_writer(layout.pack(*numbers)))
        return [layout.unpack(result.view(rank)) for rank in range(self.topology.world_size)]

    def broadcast_object(self, item: Any, subject: str, source: int = 0) -> Any:
        """Return the picklable object of rank `source`; `subject` replaces the source line in the handshake."""
        sent = item if self.topology.rank == source else None
        operation = f"broadcast_object of {subject} from rank {source}"
        return all_gather_objects(operation, sent, self.handshake)[source]

    @abstractmethod
    def open_object_channel(self) -> ObjectGroup:
        """Return a group of all ranks for exchanges of objects in another thread; collective."""

    def barrier(self) -> None:
        """Wait for all ranks, whatever line they call from."""
        self.handshake.exchange(call_at_site("wait_for_everyone", anywhere=True))

    def wait_for_ranks(self, operation: str) -> MissingRanks | None:
        """Wait until all ranks call `operation`; return the ranks that are known never to call it, if any."""
        return None if self.rank_monitor is None else self.rank_monitor.wait(operation)

    def explain_error(self, error: RuntimeError, operation: str) -> RuntimeError:
        """Return an error that names the state of the other ranks if `error` comes from a collective, else `error`."""
        return error if self.rank_monitor is None else self.rank_monitor.explain_error(error, operation)

    @abstractmethod
    def set_store_key(self, key: str, text: str) -> None:
        """Set a key in the store of the ranks, without waiting for any of them."""

    @abstractmethod
    def get_store_key(self, key: str) -> str | None:
        """Return the value of a key in the store, or None if no rank has set it."""

    @abstractmethod
    def increment_store_key(self, key: str) -> int:
        """Increment this rank's counter for a key and return it, from 1; ranks in step get the same number."""

    @contextmanager
    def run_first(self, leader: int, operation: str) -> Iterator[None]:
        """Run the block on rank `leader` first, then on all ranks that wait for it at once.

        No collective is pending meanwhile, so the block may take longer than the timeout of the process group.

        Raises:
            RuntimeError: The block failed on the leader, or the leader itself waits for another rank.
        """
        rank = self.topology.rank
        key = f"accel/{operation}/{self.increment_store_key(f'accel/{operation}')}"
        if rank == leader:
            try:
                yield
            except BaseException as error:
                self.set_store_key(f"{key}/{rank}", f"{_FAILED}:{type(error).__name__}: {error}")
                raise
            self.set_store_key(f"{key}/{rank}", _DONE)
            return
        self.set_store_key(f"{key}/{rank}", _FOLLOWS)
        result = self.wait_for_leader(leader, f"{key}/{leader}", operation)
        if result == _FOLLOWS:
            raise RuntimeError(
                f"{operation} failed: rank {rank} waits for rank {leader}, which is not the first rank of its machine. Number the ranks "
                "of a machine consecutively, as `accel launch` and `torchrun` do."
            )
        if result != _DONE:
            raise RuntimeError(f"{operation} failed on rank {leader}: {result.removeprefix(f'{_FAILED}:')}")
        yield

    def wait_for_leader(self, leader: int, key: str, operation: str) -> str:
        """Return what `leader` sets for `key`, without a timeout; ranks that wait for this one meanwhile find it by its status."""
        site, progress = call_site(), heartbeat()
        # Only one of the waiting ranks reports it.
        reported = operation if self.topology.rank == leader + 1 else None
        try:
            with nullcontext() if progress is None else progress.wait_in_store(operation, site):
                return self.wait_for_store_key(leader, key, reported)
        except RuntimeError as error:  # the process that serves the store has ended
            raise RankLostError(
                f"{operation} at {site} cannot complete: rank {leader} did not call it, or its block did not end, before the store of the "
                f"process group was lost ({error})."
            ) from None

    def wait_for_store_key(
        self, rank: int, key: str, operation: str | None, *, detect_deadlock: bool = False
    ) -> str:
        """Wait for the value that `rank` sets for `key`, without a timeout; report the wait on stderr if `operation` is given.

        If `detect_deadlock`, raise StallError if that rank waits for this one in a collective.
        """
        started, pause, checks = time.monotonic(), _MIN_INTERVAL_S, 0
        while (value := self.get_store_key(key)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _MAX_INTERVAL_S)
            waited = time.monotonic() - started
            if operation is not None and waited > REPORT_S:
                line = f"rank {self.topology.rank}: waiting for rank {rank} ({waited:.0f} s) in {operation}"
                print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the terminal, whatever the logging
                operation = None
            if detect_deadlock and self.rank_monitor and waited > (checks + 1) * CHECK_INTERVAL_S:
                checks += 1
                if text := self.rank_monitor.describe_wait(rank):
                    raise StallError(f"rank {rank} {text}")
        return value

    @property
    def may_have_padding(self) -> bool:
        """Return whether batches may be padded, so that padding samples must be counted."""
        return self.runtime.static_shapes or self.data_rank.world_size > 1

    def close(self) -> None:  # noqa: B027 - one process has no process group
        """Release this backend; the process group ends with its last user."""
