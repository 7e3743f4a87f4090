"""The tables of what runs on a node before its ranks start: preparations of the node, and the check of a rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from accel_cli.errors import UsageError
from accel_runtime.environment.registry import Registry

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

    from accel_cli.runner.bootstrap import BootstrapStore
    from accel_cli.runner.context import RunContext
    from accel_cli.runner.rendezvous import NodeRendezvous
    from accel_cli.runs.run_dir import RankFolder

__all__ = ["NODE_CHECKS", "PREPARATIONS", "BuildEnvironment", "NodeCheck", "find_node_check", "prepare_node"]

BuildEnvironment = Callable[["Worker", "RankFolder"], dict[str, str]]
"""Returns the environment of a process with a folder."""


class NodeCheck(Protocol):
    """The checks of one run on this node, between its rendezvous and the start of its ranks."""

    def __init__(self, context: RunContext, bootstrap: BootstrapStore, nodes: NodeRendezvous | None) -> None:
        """Create the checks; `nodes` is None on a single node."""

    @staticmethod
    def refuse_bad_node(bootstrap: BootstrapStore) -> None:
        """Raise UsageError if a check of this run has left out this machine."""

    def is_needed(self) -> bool:
        """Return True if a node of this round has not passed a check of this run."""

    def check(self, group: WorkerGroup, number: int, build_environment: BuildEnvironment) -> bool:
        """Check the nodes of a round; return False if a bad one was left out, and the others must meet again."""


NODE_CHECKS: Registry[type[NodeCheck]] = Registry(
    {
        "preflight": "accel_cli.extensions.node_check.preflight:Preflight",
    },
    error=UsageError,
)
"""Checks of the nodes of a run, by the key of the launcher that chooses one."""
PREPARATIONS: Registry[Callable[[Sequence[str], Mapping[str, str]], None]] = Registry(
    {
        "deepspeed": "accel_cli.extensions.deepspeed.build_operators:compile_operators",
    },
    error=UsageError,
)
"""Functions of the command and the environment of a rank, which prepare this node for it."""


def find_node_check(key: str) -> type[NodeCheck]:
    """Return the check of a key of the launcher; raise UsageError if this installation has none."""
    try:
        return NODE_CHECKS[key]
    except KeyError:
        raise UsageError(
            f"Cannot use launcher.{key}: true: this installation of accel has no such check. Set it to false."
        ) from None


def prepare_node(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run all preparations for ranks with a command and an environment."""
    for prepare in PREPARATIONS.values():
        prepare(argv, environ)
