"""The table of saves that stay on the nodes of a run, beside those of the project directory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accel_runtime.checkpoint.save import SaveOperation, SaveTarget
from accel_runtime.environment.registry import Registry
from accel_runtime.storage.errors import AllGatherObjects, CheckpointError
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.storage.store import Store

__all__ = ["Candidate", "NodeSaves", "open_node_saves"]


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint that may be loaded."""

    number: int
    key: str
    """Its key in the store, or that of the part on this node."""
    save: str = ""
    """Name of the save of the parts on the nodes; empty in the store."""


class NodeSaves(ABC):
    """The saves of a project on its nodes, on one rank.

    Every method is called on all ranks, in the same order.
    """

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that save together with this one; the first one commits."""

    @property
    @abstractmethod
    def takes_next(self) -> bool:
        """Return whether the next save belongs on the nodes."""

    @property
    @abstractmethod
    def operation(self) -> type[SaveOperation]:
        """Return the class of a save on the nodes."""

    @abstractmethod
    def connect(self, all_gather: AllGatherObjects, count_stored: Callable[[], int]) -> int:
        """Find the ranks of this node, and return the number of the next checkpoint; only the first call exchanges anything.

        Args:
            all_gather: The collective call.
            count_stored: Return the next number of the store; called on the first rank.

        Raises:
            CheckpointError: A node cannot save there.
        """

    @abstractmethod
    def choose_target(self, iteration: int, output_dir: str | None) -> SaveTarget:
        """Return the name of the next checkpoint, which no later save gets; `iteration` is the project's number."""

    @abstractmethod
    def record_save(self, key: str, *, on_nodes: bool) -> None:
        """Count a save that is complete on all nodes or in the store, and remove older ones of this node."""

    @abstractmethod
    def find_candidates(
        self,
        all_gather: AllGatherObjects,
        list_stored: Callable[[], tuple[list[Checkpoint], dict[int, CheckpointError]]],
        accepts: Callable[[Checkpoint], bool],
    ) -> list[Candidate]:
        """Return the checkpoints that are complete in the store or on all nodes, the newest first, in one exchange.

        Args:
            all_gather: The collective call.
            list_stored: Return the complete checkpoints in the store, and the errors of the others; called on the first rank.
            accepts: Return whether a checkpoint may be loaded.
        """

    @abstractmethod
    def record_load(self, loaded: Candidate, candidates: Sequence[Candidate]) -> None:
        """Continue after a checkpoint: count the saves since the newest one in the store, and forget newer ones of the nodes."""


_Path = str | os.PathLike[str]
NODE_SAVES: Registry[Callable[[Store, _Path, _Path, int, int], NodeSaves]] = Registry(
    {
        "disks": "accel_runtime.extensions.node_disks.node_disks:NodeDisks",
    },
    error=CheckpointError,
)
"""The classes of saves on nodes; the first one is used."""


def open_node_saves(
    store: Store, node_dir: _Path, project_dir: _Path, store_every: int, rank: int
) -> NodeSaves:
    """Return the saves of a project below `node_dir` on each node; a save of `store_every` goes to the store."""
    name = next(iter(NODE_SAVES), None)
    if name is None:
        raise CheckpointError(
            f"Cannot save in node_dir {os.fspath(node_dir)}: this installation of accel has no saves on nodes. Leave out node_dir."
        )
    return NODE_SAVES[name](store, node_dir, project_dir, store_every, rank)
