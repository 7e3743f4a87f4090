"""Rank, world size and node-local rank of this process, from the variables that torchrun sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DataRank", "Topology", "TopologyError", "build_refusal"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TopologyError(ValueError):
    """Environment variables with the rank of a process that are incomplete or contradict each other."""


@dataclass(frozen=True)
class DataRank:
    """Data-parallel rank of a process; neighbouring model-parallel ranks have the same one."""

    rank: int = 0
    """Data-parallel rank."""
    world_size: int = 1
    """Number of data-parallel ranks."""
    model_parallel_size: int = 1
    """Number of consecutive ranks with the same batch: the model-parallel ranks of one data-parallel rank."""
    context_parallel_size: int = 1
    """Number of slices that context parallelism splits sequences into; their ranks are `model_parallel_size // sequences` apart."""

    def of(self, rank: int) -> int:
        """Return the data-parallel rank of another rank."""
        return rank // self.model_parallel_size


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
