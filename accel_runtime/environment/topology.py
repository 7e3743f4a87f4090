"""Rank, world size and node-local rank of this process, from the variables that torchrun sets, and the grid of all ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ROLES", "DataRank", "RankGrid", "Role", "Topology", "TopologyError", "build_refusal"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TopologyError(ValueError):
    """Environment variables with the rank of a process that are incomplete or contradict each other."""


Role = Literal["data", "shard", "expert", "pipeline", "sequence", "tensor"]
"""Property in which the ranks of a group differ: they have other replicas (`data`), other shards of the same parameters (`shard`),
other experts (`expert`), other layers (`pipeline`), other parts of the same sequences (`sequence`), or other parts of the same
layers (`tensor`)."""
ROLES: tuple[Role, ...] = get_args(Role)
"""All roles, in the usual order: ranks that communicate most are neighbours."""
_DATA_ROLES: frozenset[Role] = frozenset({"data", "shard", "expert"})
"""Roles whose ranks have different samples; the ranks of all others have the same ones."""


@dataclass(frozen=True)
class DataRank:
    """Data-parallel rank of a process; its model-parallel ranks have the same one."""

    rank: int = 0
    """Data-parallel rank."""
    world_size: int = 1
    """Number of data-parallel ranks."""
    model_parallel_size: int = 1
    """Number of ranks with the same batch: the model-parallel ranks of one data-parallel rank."""


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a run in a grid, with a dimension for each role.

    Nothing else computes ranks: only the order of `sizes` decides which ranks are neighbours.
    """

    sizes: tuple[tuple[Role, int], ...] = ()
    """Number of ranks along each dimension, outermost first: neighbouring ranks differ in the last one. A role that is not named
    has one rank."""
    names: tuple[tuple[Role, str], ...] = ()
    """Names of dimensions that are not those of `layouts.DIMENSION_NAMES`."""

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(size for _, size in self.sizes)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles with several ranks, outermost first."""
        return tuple(role for role, size in self.sizes if size > 1)

    def size(self, *roles: Role) -> int:
        """Return the number of ranks that differ in these roles only."""
        return math.prod(size for role, size in self.sizes if role in roles)

    def coordinate(self, rank: int, role: Role) -> int:
        """Return the index of a rank in its group for a role."""
        inner = 1
        for each, size in reversed(self.sizes):
            if each == role:
                return rank // inner % size
            inner *= size
        return 0

    def rank_of(self, coordinates: Mapping[Role, int]) -> int:
        """Return the rank at some coordinates; those of roles that are left out are 0."""
        rank = 0
        for role, size in self.sizes:
            rank = rank * size + coordinates.get(role, 0)
        return rank

    def ranks_of(self, rank: int, *roles: Role) -> tuple[int, ...]:
        """Return the group of a rank: the ranks that differ from it in these roles only, with the last role innermost."""
        others = {role: self.coordinate(rank, role) for role, _ in self.sizes}
        return tuple(self.rank_of(others | at) for at in self._iterate(roles))

    def arrange(self, *dimensions: Sequence[Role]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks in row-major order of other dimensions, each of one or several roles, and the sizes of these.

        The dimensions name every role of the grid with several ranks.
        """
        roles = [role for dimension in dimensions for role in dimension]
        ranks = tuple(self.rank_of(at) for at in self._iterate(roles))
        return ranks, tuple(self.size(*dimension) for dimension in dimensions)

    def _iterate(self, roles: Sequence[Role]) -> Iterator[dict[Role, int]]:
        for at in itertools.product(*(range(self.size(role)) for role in roles)):
            yield dict(zip(roles, at, strict=True))

    @cached_property
    def data_ranks(self) -> tuple[int, ...]:
        """Data-parallel rank of each rank."""
        data = [(role, size) for role, size in self.sizes if role in _DATA_ROLES]
        samples = RankGrid(tuple(data))
        return tuple(
            samples.rank_of({role: self.coordinate(rank, role) for role, _ in data})
            for rank in range(self.world_size)
        )

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """First of the ranks with each data-parallel rank."""
        first: dict[int, int] = {}
        for rank, data_rank in enumerate(self.data_ranks):
            first.setdefault(data_rank, rank)
        return tuple(first[data_rank] for data_rank in range(len(first)))

    def data_rank(self, rank: int) -> DataRank:
        """Return the data-parallel rank of a rank."""
        count = len(self.first_ranks)
        return DataRank(self.data_ranks[rank], count, self.world_size // count)


@dataclass(frozen=True)
class Topology:
    """Ranks and world sizes of one process, from 0."""

    rank: int = 0
    """Rank among all processes."""
    world_size: int = 1
    """Number of all processes."""
    local_rank: int = 0
    """Rank among the processes of this node."""
    local_world_size: int = 1
    """Number of processes of this node."""
    launched: bool = False
    """True if a launcher started this process; false for plain `python script.py`."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Topology:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from an environment.

        Raises:
            TopologyError: Some of the variables are set and others are not, one is not a number, or a rank is not below
                its world size.
        """
        if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return cls()
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            present = ", ".join(f"{n}={environ[n]}" for n in _NEEDED if environ.get(n))
            raise TopologyError(
                f"The variables of this process are incomplete: {', '.join(missing)} missing ({present}). Start the script with "
                "`accel launch` or `torchrun`, which set all of them."
            )
        rank, world_size, local_rank, local_world_size = (_count(environ, name) for name in _NEEDED[:4])
        topology = cls(rank, world_size, local_rank, local_world_size, launched=True)
        topology._check()
        return topology

    def _check(self) -> None:
        for name, rank, world in (
            ("RANK", self.rank, self.world_size),
            ("LOCAL_RANK", self.local_rank, self.local_world_size),
        ):
            if rank >= world:
                size = name.replace("RANK", "WORLD_SIZE")
                raise TopologyError(f"Invalid {name}={rank}: with {size}={world}, expected 0 to {world - 1}.")
        if self.local_world_size > self.world_size:
            raise TopologyError(
                f"Invalid LOCAL_WORLD_SIZE={self.local_world_size}: it is larger than WORLD_SIZE={self.world_size}."
            )


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if text.isascii() and text.isdigit():
        return int(text)
    raise TopologyError(f"Invalid {name}={text!r}: expected a whole number.")


def build_refusal(origin: str) -> RuntimeError:
    """Return the error for a call that needs the other ranks, in a process that is not a rank.

    `origin` is how the object came to this process.
    """
    return RuntimeError(
        f"This object cannot be used here: {origin}, and this process is not a rank (for example a worker of a DataLoader or of a "
        "pool). Call it on the rank itself; in a function that is launched on several processes, create an Accelerator() first."
    )
