"""The node check of `accel test`: each rank starts it in a process of its own, and all read the same facts."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from accel_runtime.environment.settings import NODE_NAME, RANK_FOLDER
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.node_check.facts import CheckFacts, CheckLimits, FactsBoard, get_poll_interval
from accel_runtime.extensions.node_check.table import format_check
from accel_runtime.extensions.node_check.verdict import NodeFinding, is_connected, judge
from accel_runtime.foundation.torch_internals import TCPStore

__all__ = ["CheckResult", "check_nodes"]

_MAIN = Path(__file__).with_name("__main__.py")
_STORE_S = 60.0
_END_S = 10.0
"""Seconds that the rank with the store waits until the others have read it."""


@dataclass(frozen=True)
class CheckResult:
    """The facts about all nodes, and the findings."""

    facts: CheckFacts
    findings: tuple[NodeFinding, ...]
    seconds: float
    store: Any = field(repr=False)
    """Kept with the result: other ranks may already use its server for the process group."""

    @property
    def has_passed(self) -> bool:
        """True if no node is bad."""
        return not any(finding.is_bad for finding in self.findings)

    @property
    def is_connected(self) -> bool:
        """True if a process group of all ranks can be created."""
        return is_connected(self.facts)

    def format(self) -> str:
        """Return the table of the nodes, and whether the other checks can follow."""
        count = len(self.facts.names)
        bad = sorted({self.facts.names[finding.node] for finding in self.findings if finding.is_bad})
        lines = [
            format_check(self.facts, self.findings),
            f"FAILED nodes: {', '.join(bad)}"
            if bad
            else f"ok     nodes: {'1 node' if count == 1 else f'{count} nodes'} checked in {self.seconds:.0f} s",
        ]
        if not self.is_connected:
            lines += [
                "the other checks need a process group of all ranks, which these nodes cannot create",
                "something does not work here: see above",
            ]
        return "\n".join(lines)


def check_nodes(environ: Mapping[str, str], *, quick: bool = False) -> CheckResult:
    """Check all nodes with the ranks of this environment; every rank calls it and gets the same result."""
    begin = time.monotonic()
    topology, limits = Topology.from_env(environ), CheckLimits.of(quick=quick)
    store, endpoint = _open_store(topology, environ)
    # All ranks count the same; a store may serve several checks.
    prefix = f"accel/check/{store.add(f'accel/check/turns/{topology.rank}', 1)}"
    board = FactsBoard(store, prefix)
    node, num_nodes = _find_node(topology, environ)
    if topology.local_rank == 0:
        name = environ.get(NODE_NAME) or socket.gethostname()
        board.publish_name(node, name, topology.local_world_size)
    extent = "quick" if quick else "full"
    command = [sys.executable, str(_MAIN), extent, *endpoint, prefix, environ.get(RANK_FOLDER, "")]
    variables = {
        **environ,
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_world_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": endpoint[0],
        "MASTER_PORT": endpoint[1],
    }
    with tempfile.TemporaryFile() as errors, _start(command, variables, errors) as process:
        watch = _watch_process(board, node, topology.rank, process, errors)
        try:
            leads = topology.rank == 0
            facts = board.collect(num_nodes, topology.world_size, limits, watch, leads=leads)
        finally:
            process.kill()
    board.count("read", 1)
    if topology.rank == 0:
        _await_readers(board, topology.world_size)
    return CheckResult(facts, tuple(judge(facts)), time.monotonic() - begin, store)


def _find_node(topology: Topology, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of this node and of all nodes; without torchrun's variables, all have the same number of ranks."""
    size = topology.local_world_size
    node = int(environ.get("GROUP_RANK", topology.rank // size))
    return node, int(environ.get("GROUP_WORLD_SIZE", topology.world_size // size))


def _open_store(topology: Topology, environ: Mapping[str, str]) -> tuple[Any, tuple[str, str]]:
    """Connect to the store of the process group, or serve it, and return it with its host and port."""
    timeout = timedelta(seconds=_STORE_S)
    if not topology.launched:
        store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return store, ("127.0.0.1", str(store.port))
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    # The process group, which is created later, shares the server of this process.
    serves = topology.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        host, int(port), is_master=serves, wait_for_workers=False, multi_tenant=True, timeout=timeout
    )
    return store, (host, port)


def _start(command: list[str], environ: Mapping[str, str], errors: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
    )


def _watch_process(
    board: FactsBoard, node: int, rank: int, process: subprocess.Popen[bytes], errors: Any
) -> Callable[[], None]:
    """Return a function that publishes once how the process of this rank has failed."""
    has_reported = False

    def watch() -> None:
        nonlocal has_reported
        if has_reported or not process.poll():
            return
        has_reported = True
        errors.seek(0)
        lines = [line for line in errors.read().decode(errors="replace").split("\n") if line.strip()]
        reason = lines[-1] if lines else "it has printed nothing"
        board.publish_failure(node, f"rank {rank} exited with code {process.returncode}: {reason}")

    return watch


def _await_readers(board: FactsBoard, count: int) -> None:
    end = time.monotonic() + _END_S
    while board.count("read") < count and time.monotonic() < end:
        time.sleep(get_poll_interval(count))
