"""The processes of a run as device meshes, and the facts of a sharded model's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel_runtime.environment.layouts import name_dimension
from accel_runtime.environment.topology import RankGrid, Role

__all__ = ["GroupFacts", "ProcessMesh", "build_mesh", "find_group", "find_node_group"]


def build_mesh(grid: RankGrid, device: str) -> DeviceMesh:
    """Return the device mesh of all roles with several ranks; collective at the first call for a grid."""
    return _build_mesh(dist.group.WORLD, device, grid, tuple((role,) for role in grid.roles) or (("shard",),))


def find_group(grid: RankGrid, device: str, role: Role) -> dist.ProcessGroup:
    """Return the process group of this rank for a role; collective at the first call for a grid."""
    world = dist.group.WORLD
    if grid.size(role) == 1:
        return world if world is not None and grid.world_size == 1 else _create_group_of_one(world)
    return build_mesh(grid, device).get_group(name_dimension(grid, role))


def find_node_group(nodes: tuple[tuple[int, ...], ...]) -> tuple[dist.ProcessGroup, int]:
    """Return the process group of the ranks of this node, and the first of them; collective at the first call for `nodes`."""
    return _create_node_group(dist.group.WORLD, nodes)


class ProcessMesh:
    """The device meshes of a sharded model; created by all ranks together.

    Process groups are created with the first mesh that is used.

    Args:
        grid: The grid of the ranks.
        device: The kind of their devices.
        shards: Whether parameters are sharded over the role `shard`, even if that is one rank.
    """

    def __init__(self, grid: RankGrid, device: str, *, shards: bool) -> None:
        self.grid, self.shards = grid, shards
        self._device = device

    @property
    def averages(self) -> bool:
        """Return whether gradients are reduced over ranks, or parameters sharded."""
        return self.shards or self.grid.size("data", "sequence") > 1

    @property
    def description(self) -> str:
        """The dimensions larger than one, as text."""
        sizes = [f"{name_dimension(self.grid, role)} {self.grid.size(role)}" for role in self.grid.roles]
        return " x ".join(sizes) or f"{name_dimension(self.grid, 'shard')} 1"

    @property
    def dimensions(self) -> tuple[tuple[Role, ...], tuple[Role, ...], tuple[Role, ...]]:
        """The roles of the replicas of a parameter shard, of its shards, and of tensor parallel ranks.

        Ranks that split sequences hold parameters like data parallel ranks.
        """
        if self.shards:
            return ("data",), ("shard", "sequence"), ("tensor",)
        return ("data", "sequence"), ("shard",), ("tensor",)

    @cached_property
    def _parameters(self) -> DeviceMesh:
        """The mesh of `dimensions`; always has that of the shards, which `fully_shard` needs."""
        shards = self.dimensions[1]
        used = tuple(roles for roles in self.dimensions if roles == shards or self.grid.size(*roles) > 1)
        return _build_mesh(dist.group.WORLD, self._device, self.grid, used)

    @property
    def shard(self) -> DeviceMesh:
        """The mesh for `fully_shard`: `[shards]`, or `[replicas, shards]`."""
        replicas, shards, _ = self.dimensions
        names = [name_dimension(self.grid, roles[0]) for roles in (replicas, shards)]
        return self._parameters[tuple(names)] if self.grid.size(*replicas) > 1 else self._parameters[names[1]]

    @property
    def tp(self) -> DeviceMesh | None:
        """The mesh of tensor parallel ranks, or None."""
        return self._parameters[name_dimension(self.grid, "tensor")] if self.grid.size("tensor") > 1 else None


@cache
def _build_mesh(
    world: object, device: str, grid: RankGrid, dimensions: tuple[tuple[Role, ...], ...]
) -> DeviceMesh:
    """Return the mesh whose dimensions are roles of the grid, also combined; each is named by its first role."""
    names = tuple(name_dimension(grid, roles[0]) for roles in dimensions)
    ranks, sizes = grid.arrange(*dimensions)
    return _create_mesh(world, device, names, ranks, sizes)


# Process groups are never destroyed, and each has threads, so a second Accelerator of the same layout uses those of the
# first. The default group is a part of the key, since a new one has other groups.
@cache
def _create_mesh(
    _: object, device: str, names: tuple[str, ...], ranks: tuple[int, ...], sizes: tuple[int, ...]
) -> DeviceMesh:
    return DeviceMesh(device, torch.tensor(ranks, device="cpu").view(sizes), mesh_dim_names=names)


@cache
def _create_node_group(_: object, nodes: tuple[tuple[int, ...], ...]) -> tuple[dist.ProcessGroup, int]:
    enumerate_groups: Any = dist.new_subgroups_by_enumeration
    group, _groups = enumerate_groups([list(ranks) for ranks in nodes])
    return group, next(ranks[0] for ranks in nodes if dist.get_rank() in ranks)


@cache
def _create_group_of_one(_: object) -> dist.ProcessGroup:
    # Not None, which is the group of all ranks for torch's functions.
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


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
