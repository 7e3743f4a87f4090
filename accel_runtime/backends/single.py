"""The backend of a single process, and the data of a backend without its connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.collectives.handshake import ObjectGroup
from accel_runtime.collectives.transport import Transport
from accel_runtime.environment.topology import DataRank, RankGrid, Topology, build_refusal
from accel_runtime.foundation.options import DistributedType

__all__ = ["DetachedBackend", "Single"]


@dataclass(frozen=True)
class DetachedBackend:
    """The data of a backend; other attributes raise an error."""

    topology: Topology
    device: torch.device
    grid: RankGrid
    distributed_type: DistributedType
    collective_backend: str | None

    @classmethod
    def of(cls, backend: Backend | DetachedBackend) -> DetachedBackend:
        """Copy the data of a backend."""
        return cls(
            backend.topology,
            backend.device,
            backend.grid,
            backend.distributed_type,
            backend.collective_backend,
        )

    @property
    def data_rank(self) -> DataRank:
        """The part of every global batch that the rank had."""
        return self.grid.data_rank(self.topology.rank)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` look for methods of this object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise self.build_error()

    def build_error(self) -> RuntimeError:
        """Return the error of a call that needs the other processes."""
        return build_refusal(f"it was pickled on rank {self.topology.rank}")


class _LoopbackTransport(Transport):
    """The transport of a single rank."""

    @override
    def all_gather_slots(self, slot: memoryview) -> bytearray:
        return bytearray(slot)

    @override
    def all_reduce_min(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    @override
    def transfer(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        return None


class Single(Backend):
    """The backend of a single process.

    Args:
        topology: A rank of a world of size 1.
        runtime: How the device of this process executes.
        distributed_type: The kind of distributed training.
        is_counted: If true, collectives count as progress of this process. In a process of several, they must not: ranks compare
            the number of their common collectives.
    """

    def __init__(
        self,
        topology: Topology,
        runtime: DeviceRuntime,
        *,
        distributed_type: DistributedType = DistributedType.NO,
        is_counted: bool = True,
    ) -> None:
        super().__init__(topology, runtime, _LoopbackTransport(), is_counted=is_counted)
        self._distributed_type = distributed_type
        self._store: dict[str, str] = {}
        self._counters: Counter[str] = Counter()

    @override
    def open_object_channel(self) -> ObjectGroup:
        return ObjectGroup("background exchange")

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    @override
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        return tensor

    @override
    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor

    @override
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return self._distributed_type

    @property
    @override
    def collective_backend(self) -> str | None:
        return None

    @override
    def set_store_key(self, key: str, text: str) -> None:
        self._store[key] = text

    @override
    def get_store_key(self, key: str) -> str | None:
        return self._store.get(key)

    @override
    def increment_store_key(self, key: str) -> int:
        self._counters[key] += 1
        return self._counters[key]
