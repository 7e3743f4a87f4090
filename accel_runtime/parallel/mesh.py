"""The processes as a mesh: which of them share a batch, which divide parameters, which divide layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_runtime.env import Parallel
from accel_runtime.topology import DataPlace, Topology

__all__ = ["DIMENSIONS", "Mesh", "Sizes"]

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
"""The mesh's dimensions, outermost first: neighbouring ranks differ in the last."""


@dataclass(frozen=True)
class Sizes:
    """How many processes stand along each dimension."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    shards: bool
    """Whether parameters are divided over `dp_shard`, be it among one."""

    @classmethod
    def of(cls, asked: Parallel, world_size: int) -> Sizes:
        """What was asked for, on so many processes.

        Raises:
            SettingsError: The product is not their number.
        """
        return cls(*asked.sizes(world_size), shards=asked.shards)

    def data(self, rank: int) -> DataPlace:
        """Which part of a global batch a rank has."""
        copies = self.cp * self.tp
        return DataPlace(rank // copies, self.dp_replicate * self.dp_shard, copies, self.cp)

    @property
    def parameters(self) -> tuple[int, int, int]:
        """Ranks with the same part of a parameter, ranks that divide it, and ranks that divide layers.

        Ranks that divide sequences hold parameters as those do that divide batches.
        """
        if self.shards:
            return self.dp_replicate, self.dp_shard * self.cp, self.tp
        return self.dp_replicate * self.cp, 1, self.tp

    @property
    def averages(self) -> bool:
        """Whether gradients are combined over ranks, or parameters divided."""
        return self.shards or self.dp_replicate * self.cp > 1

    @property
    def told(self) -> str:
        """The dimensions that are more than one, for people."""
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "dp_shard 1"


class Mesh:
    """The processes of a run, as torch's device meshes.

    All ranks make it together; the groups of processes are made with the first mesh that is asked for.

    Args:
        sizes: How many stand along each dimension.
        device: What this process computes on.
        topology: Where it stands.
    """

    def __init__(self, sizes: Sizes, device: torch.device, topology: Topology) -> None:
        self.sizes = sizes
        self.data = sizes.data(topology.rank)
        """Which part of a global batch this process has."""
        self._device = device.type

    @cached_property
    def whole(self) -> DeviceMesh:
        """All dimensions that are more than one, under the names in `DIMENSIONS`."""
        sizes = {name: getattr(self.sizes, name) for name in DIMENSIONS}
        there = {name: size for name, size in sizes.items() if size > 1} or {"dp_shard": 1}
        return _made(dist.group.WORLD, self._device, tuple(there.items()))

    @cached_property
    def _parameters(self) -> DeviceMesh:
        """As `Sizes.parameters` has it; what shards is always there, for `fully_shard` needs it."""
        sizes = dict(zip(("dp_replicate", "dp_shard", "tp"), self.sizes.parameters, strict=True))
        there = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        return _made(dist.group.WORLD, self._device, tuple(there.items()))

    @property
    def shard(self) -> DeviceMesh:
        """What `fully_shard` takes: `[shards]`, or `[copies, shards]` where there are copies."""
        copies, _, _ = self.sizes.parameters
        return self._parameters["dp_replicate", "dp_shard"] if copies > 1 else self._parameters["dp_shard"]

    @property
    def tp(self) -> DeviceMesh | None:
        """The ranks that divide layers; None where nothing does."""
        return self._parameters["tp"] if self.sizes.tp > 1 else None

    @property
    def cp(self) -> DeviceMesh | None:
        """The ranks that divide sequences; None where nothing does."""
        return self.whole["cp"] if self.sizes.cp > 1 else None


# Groups of processes stay until all end, and each has threads: a second Accelerator of the same layout takes those of the
# first. The default group is part of the key, for a new one has other groups.
@cache
def _made(_: object, device: str, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    return init_device_mesh(
        device, tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes)
    )
