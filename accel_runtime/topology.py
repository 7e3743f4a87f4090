"""Where this process stands among the others, as the variables torchrun sets say it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_runtime.env import placed_by_device

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DataPlace", "Topology", "TopologyError"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TopologyError(ValueError):
    """The variables that place a process are incomplete or contradict each other."""


@dataclass(frozen=True)
class DataPlace:
    """Which part of every global batch a process has: neighbouring ranks may have the same."""

    rank: int = 0
    """Position among the parts."""
    world_size: int = 1
    """Number of parts."""
    copies: int = 1
    """Ranks that have the same part, one after the other: those that divide its computation among them."""
    sequences: int = 1
    """Of the copies, how many have different places of each sequence; they are `copies // sequences` ranks apart."""

    def of(self, rank: int) -> int:
        """The part of another rank."""
        return rank // self.copies


@dataclass(frozen=True)
class Topology:
    """The place of one process: counts and zero-based positions."""

    rank: int = 0
    """Position among all processes."""
    world_size: int = 1
    """Number of all processes."""
    local_rank: int = 0
    """Position among the processes of this machine."""
    local_world_size: int = 1
    """Number of processes of this machine."""
    launched: bool = False
    """Whether a launcher placed this process; False for plain `python script.py`."""

    @classmethod
    def here(cls) -> Topology:
        """The place of this process; see `from_env`."""
        return cls.from_env(os.environ)

    @classmethod
    def standing(cls) -> Topology:
        """The place of this process or replica: torch_xla's replicas are placed by their device, others as `here`."""
        if not placed_by_device(os.environ):
            return cls.here()
        from accel_runtime.current import standing  # noqa: PLC0415 - it loads torch, and logging does without

        return standing()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Topology:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, whoever set them.

        Raises:
            TopologyError: Some of the variables are set and others are not, one is not a number, or a
                rank lies outside its world.
        """
        if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return cls()
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            present = ", ".join(f"{n}={environ[n]}" for n in _NEEDED if environ.get(n))
            raise TopologyError(
                f"the environment places this process only in part ({present}); also needed: "
                f"{', '.join(missing)}. `accel launch` and `torchrun` set all of them."
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
                raise TopologyError(f"{name}={rank} does not fit {size}={world}: ranks count from 0")
        if self.local_world_size > self.world_size:
            raise TopologyError(
                f"LOCAL_WORLD_SIZE={self.local_world_size} is more than WORLD_SIZE={self.world_size}"
            )


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if text.isascii() and text.isdigit():
        return int(text)
    raise TopologyError(f"{name} must be a whole number; it is {text!r}")
