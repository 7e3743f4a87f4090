"""The facts of a backend, in a process that has not joined the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.kinds import DistributedType
from accel_runtime.topology import DataPlace, Topology

__all__ = ["DetachedBackend", "build_refusal"]


@dataclass(frozen=True)
class DetachedBackend:
    """The facts of a backend, as data; everything else of a backend is refused."""

    topology: Topology
    device: torch.device
    data: DataPlace
    kind: DistributedType
    name: str | None

    @classmethod
    def of(cls, backend: Backend | DetachedBackend) -> DetachedBackend:
        """Return the facts of a backend."""
        return cls(backend.topology, backend.device, backend.data, backend.kind, backend.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` look for methods of this object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise self.refusal()

    def refusal(self) -> RuntimeError:
        """Return the error of a call that needs the other processes."""
        return build_refusal(f"it was pickled on rank {self.topology.rank}")


def build_refusal(origin: str) -> RuntimeError:
    """Return the error of a call that needs the other processes, in one that has not joined them.

    Args:
        origin: How the object came to this process.
    """
    return RuntimeError(
        f"This object cannot be used here: {origin}, and this process has not joined the ranks, as a worker of a DataLoader or "
        "of a pool has not. Make the call on the rank itself; in a function that is launched on several processes, make an "
        "Accelerator() first."
    )
