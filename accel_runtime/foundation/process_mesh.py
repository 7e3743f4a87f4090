"""The processes of a run as device meshes, and the facts of a sharded model's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_runtime.environment.settings import Parallel
from accel_runtime.environment.topology import DataRank, Topology

__all__ = ["DIMENSIONS", "GroupFacts", "MeshSizes", "ProcessMesh"]


DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions of the mesh, outermost first; neighbouring ranks differ in the last."""


@dataclass(frozen=True)
class MeshSizes:
    """The number of processes along each dimension."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    shards: bool
    """True if parameters are sharded over `dp_shard`, even if its size is 1."""

    @classmethod
    def of(cls, parallel: Parallel, world_size: int) -> MeshSizes:
        """Return the sizes for a number of processes."""
        return cls(*parallel.sizes(world_size), shards=parallel.shards)

    def data_rank(self, rank: int) -> DataRank:
        """Return the data rank of a rank."""
        copies = self.cp * self.tp
        return DataRank(rank // copies, self.dp_replicate * self.dp_shard, copies, self.cp)

    @property
    def parameters(self) -> tuple[int, int, int]:
        """The number of replicas of a parameter shard, of its shards, and of tensor parallel ranks.

        Context parallel ranks hold parameters like data parallel ranks.
        """
        if self.shards:
            return self.dp_replicate, self.dp_shard * self.cp, self.tp
        return self.dp_replicate * self.cp, 1, self.tp

    @property
    def averages(self) -> bool:
        """Return whether gradients are reduced over ranks, or parameters sharded."""
        return self.shards or self.dp_replicate * self.cp > 1

    @property
    def description(self) -> str:
        """The dimensions larger than one, as text."""
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "dp_shard 1"


class ProcessMesh:
    """The processes of a run as device meshes; created by all ranks together.

    Process groups are created with the first mesh that is used.
    """

    def __init__(self, sizes: MeshSizes, device: torch.device, topology: Topology) -> None:
        self.sizes = sizes
        self.data_rank = sizes.data_rank(topology.rank)
        """The data rank of this process."""
        self._device = device.type

    @cached_property
    def full(self) -> DeviceMesh:
        """The mesh of all dimensions larger than one, named as in `DIMENSIONS`."""
        sizes = {name: getattr(self.sizes, name) for name in DIMENSIONS}
        dimensions = {name: size for name, size in sizes.items() if size > 1} or {"dp_shard": 1}
        return _init_mesh(dist.group.WORLD, self._device, tuple(dimensions.items()))

    @cached_property
    def _parameters(self) -> DeviceMesh:
        """The mesh of `MeshSizes.parameters`; always has `dp_shard`, which `fully_shard` needs."""
        sizes = dict(zip(("dp_replicate", "dp_shard", "tp"), self.sizes.parameters, strict=True))
        dimensions = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        return _init_mesh(dist.group.WORLD, self._device, tuple(dimensions.items()))

    @property
    def shard(self) -> DeviceMesh:
        """The mesh for `fully_shard`: `[shards]`, or `[replicas, shards]`."""
        copies, _, _ = self.sizes.parameters
        return self._parameters["dp_replicate", "dp_shard"] if copies > 1 else self._parameters["dp_shard"]

    @property
    def tp(self) -> DeviceMesh | None:
        """The mesh of tensor parallel ranks, or None."""
        return self._parameters["tp"] if self.sizes.tp > 1 else None

    @property
    def cp(self) -> DeviceMesh | None:
        """The mesh of context parallel ranks, or None."""
        return self.full["cp"] if self.sizes.cp > 1 else None


# Process groups are never destroyed, and each has threads, so a second Accelerator of the same layout uses those of the
# first. The default group is a part of the key, since a new one has other groups.
@cache
def _init_mesh(_: object, device: str, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    return init_device_mesh(
        device, tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes)
    )


@dataclass(frozen=True)
class GroupFacts:
    """Parameters of a sharded model with equal options: of one module, or of several equal ones."""

    modules: tuple[str, ...]
    """Module names; `""` is the model."""
    kind: str
    """The class of the modules."""
    parameters: int
    """Tensors in each module."""
    elements: int
    """Elements in each module, summed over all ranks."""
    dtype: str
    """The dtype of the parameters in the optimizer."""
    gradients: str
    """The dtype of the gradients in the optimizer; empty without trainable parameters."""
    computes_in: str
    """The dtype of gathered parameters in the forward and backward pass, else that of autocast."""
    reduces_in: str
    """The dtype of gradient averaging; empty without averaging."""
    layout: str
    """The sharding of the parameters over the ranks."""
    bytes_here: int
    """The bytes of all modules' parameters on this rank."""
    computed_again: bool
    """If True, activations are recomputed in the backward pass."""
