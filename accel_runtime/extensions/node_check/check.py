"""The node check of `accel test`: each rank starts its script in a process of its own, all read the same records, and one prints."""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from accel_runtime.environment.settings import NODE_NAME, RANK_FOLDER, format_size
from accel_runtime.environment.text import escape_controls
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.node_check.records import Board, Folder, Limits, Record, Records
from accel_runtime.extensions.node_check.verdict import (
    NodeFinding,
    find_best_links,
    format_rate,
    is_connected,
    judge,
)
from accel_runtime.foundation.torch_internals import TCPStore

__all__ = ["CheckResult", "check_nodes", "format_table"]

_SCRIPT = Path(__file__).with_name("measure.py")
_STORE_S = 60.0
_NOT_CHECKED = "-"
_DEFAULT_WIDTH = 140
_MAX_ROWS = 40


@dataclass(frozen=True)
class CheckResult:
    """The records of all ranks, and the findings."""

    records: Records
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
        return is_connected(self.records)

    def format(self) -> str:
        """Return the table of the nodes, the findings, and whether the other checks can follow."""
        names = self.records.names
        width = shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
        lines = [format_table(self.records, self.findings, width)]
        lines += [
            f"{'BAD   ' if finding.is_bad else 'note  '} {names[finding.node]}: {finding.text}"
            for finding in self.findings
        ]
        bad = sorted({names[finding.node] for finding in self.findings if finding.is_bad})
        noun = "1 node" if len(names) == 1 else f"{len(names)} nodes"
        lines.append(
            f"FAILED nodes: {', '.join(bad)}"
            if bad
            else f"ok     nodes: {noun} checked in {self.seconds:.0f} s"
        )
        if not self.is_connected:
            lines += [
                "the other checks need a process group of all ranks, which these nodes cannot create",
                "something does not work here: see above",
            ]
        return "\n".join([lines[0], *(escape_controls(line, keep_lines=False) for line in lines[1:])])


def check_nodes(environ: Mapping[str, str], *, quick: bool = False) -> CheckResult:
    """Check all nodes with the ranks of this environment; every rank calls it and gets the same result."""
    begin = time.monotonic()
    topology, limits = Topology.from_env(environ), Limits.of(quick=quick)
    rank, world_size, size = topology.rank, topology.world_size, topology.local_world_size
    store, (host, port) = _open_store(topology, environ)
    # All ranks count the same; a store may serve several checks.
    prefix = f"accel/check/{store.add(f'accel/check/turns/{rank}', 1)}"
    board = Board(store, prefix)
    # Without torchrun's variables, all nodes have the same number of ranks.
    node = int(environ.get("GROUP_RANK", rank // size))
    num_nodes = int(environ.get("GROUP_WORLD_SIZE", world_size // size))
    board.publish(Record(rank, node, environ.get(NODE_NAME) or socket.gethostname(), size))
    command = [str(_SCRIPT), "quick" if quick else "full", host, port, prefix, environ.get(RANK_FOLDER, "")]
    variables = {
        **environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    with _run_script(command, variables, board, rank) as watch:
        records = board.collect(num_nodes, world_size, limits, watch, leads=rank == 0)
    board.count("read", 1)
    if rank == 0:
        board.await_readers(world_size)
    return CheckResult(records, tuple(judge(records)), time.monotonic() - begin, store)


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


@contextmanager
def _run_script(
    command: list[str], environ: Mapping[str, str], board: Board, rank: int
) -> Iterator[Callable[[], None]]:
    """Run the script of this rank inside a `with` block; yield a function that publishes once how it has failed."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            [sys.executable, *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        has_reported = False

        def watch() -> None:
            nonlocal has_reported
            if has_reported or not process.poll():
                return
            has_reported = True
            output.seek(0)
            lines = [line for line in output.read().decode(errors="replace").split("\n") if line.strip()]
            reason = lines[-1] if lines else "it has printed nothing"
            board.publish_failure(rank, f"rank {rank} exited with code {process.returncode}: {reason}")

        try:
            yield watch
        finally:
            process.kill()


# The table


@dataclass(frozen=True)
class _Column:
    """A fact of all nodes."""

    heading: str
    cells: Sequence[str]
    """By number of the node."""
    marks: Sequence[str]

    @property
    def is_shared(self) -> bool:
        """True if all nodes have the same value and none is marked."""
        return len({*self.cells}) == 1 and not any(self.marks)


def format_table(records: Records, findings: Sequence[NodeFinding], width: int) -> str:
    """Return a row for each node, below the values that all nodes share, for a terminal of a width in characters."""
    from rich.console import Console  # noqa: PLC0415 - only the rank that prints needs it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    columns = _build_columns(records, findings)
    shared = [column for column in columns[1:] if column.is_shared]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [column for column in columns if column not in shared]
    for column in shown:
        table.add_column(column.heading, overflow="fold")
    rows = _choose_rows(records, findings)
    for node in rows:
        table.add_row(*(Text(column.cells[node] + column.marks[node]) for column in shown))
    output = io.StringIO()
    screen = Console(file=output, width=width, color_system=None, markup=False)
    if shared:
        whose = "all nodes: " if records.num_nodes > 1 else f"{columns[0].cells[0]}: "
        text = f"{whose}{', '.join(f'{column.heading} {column.cells[0]}' for column in shared)}"
        screen.print(textwrap.fill(text, width, subsequent_indent=" " * len(whose)))
    if len(shown) > 1:
        screen.print(table)
    if hidden := records.num_nodes - len(rows):
        screen.print(f"{hidden} more nodes without findings")
    for link in records.links:
        if len(link.nodes) == records.num_nodes > 2 and not link.error:  # noqa: PLR2004 - else in the rows
            latency, bandwidth = _format_latency(link.latency_s), _format_bandwidth(link.bytes_per_s)
            screen.print(f"all_reduce of all ranks: latency {latency}, bandwidth {bandwidth}")
    screen.print(f"! bad, * noted below, {_NOT_CHECKED} not checked")
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _build_columns(records: Records, findings: Sequence[NodeFinding]) -> list[_Column]:
    """Return the columns, that of the names first."""
    numbers = range(records.num_nodes)
    bandwidths, latencies = find_best_links(records)

    def show(value: Callable[[Record], str | None]) -> list[str]:
        known = [records.nodes.get(node) for node in numbers]
        return [(value(node) if node else None) or _NOT_CHECKED for node in known]

    cells: list[tuple[str, str, list[str]]] = [
        ("answer", "node", [escape_controls(name, keep_lines=False) for name in records.names]),
        ("Python", "Python", show(lambda node: node.python)),
        ("torch", "torch", show(lambda node: node.torch)),
        ("accel", "accel", show(lambda node: node.accel)),
        ("NCCL", "NCCL", show(lambda node: node.nccl)),
        ("driver", "driver", show(lambda node: node.driver)),
        ("logs", "logs free", show(lambda node: _format_space(node.log_folder))),
        ("work", "work free", show(lambda node: _format_space(node.work_folder))),
        ("shm", "/dev/shm", show(lambda node: _format_bytes(node.shm_bytes))),  # noqa: S108 - a heading
        ("", "CPUs", show(lambda node: str(node.cpus))),
        ("memory", "memory", show(lambda node: _format_bytes(node.memory_bytes))),
        ("files", "open files", show(lambda node: str(node.open_files or "unlimited"))),
        ("reach", "reaches", show(lambda node: _format_peers(node, records.num_nodes))),
        ("latency", "latency", [_format_latency(latencies.get(node)) for node in numbers]),
        ("bandwidth", "bandwidth", [_format_bandwidth(bandwidths.get(node)) for node in numbers]),
        ("rate", "matmul", [_format_rates(records.by_node.get(node, ())) for node in numbers]),
        ("errors", "GPU errors", [_format_errors(records.by_node.get(node, ())) for node in numbers]),
    ]
    found = {(finding.node, finding.column): " *" for finding in findings}
    found |= {(finding.node, finding.column): " !" for finding in findings if finding.is_bad}
    return [
        _Column(heading, values, [found.get((node, key), "") for node in numbers])
        for key, heading, values in cells
    ]


def _choose_rows(records: Records, findings: Sequence[NodeFinding]) -> list[int]:
    """Return the nodes of the rows: all, or of many the ones with findings and the first others."""
    marked = {finding.node for finding in findings}
    others = [node for node in range(records.num_nodes) if node not in marked]
    return sorted({*marked, *others[: max(1, _MAX_ROWS - len(marked))]})


def _format_bytes(value: int | None) -> str | None:
    return None if value is None else format_size(value)


def _format_space(folder: Folder | None) -> str | None:
    if folder is None:
        return None
    if folder.error and not folder.is_full:
        return "not writable"
    inodes = folder.free_inodes
    short = "" if inodes is None else f", {inodes / 1e6:.1f} M" if inodes >= 10**6 else f", {inodes}"
    return format_size(folder.free_bytes) + (f"{short} inodes" if short else "")


def _format_peers(node: Record, num_nodes: int) -> str | None:
    return None if num_nodes == 1 else f"{sum(not peer.error for peer in node.peers)} of {num_nodes - 1}"


def _format_latency(seconds: float | None) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds else _NOT_CHECKED


def _format_bandwidth(bytes_per_s: float | None) -> str:
    return f"{format_size(bytes_per_s)}/s" if bytes_per_s else _NOT_CHECKED


def _format_rates(records: Sequence[Record]) -> str:
    """Return the rates of the devices of a node: the lowest and highest of several."""
    rates = [record.tflops for record in records if record.tflops]
    if not rates:
        return "failed" if any(record.error for record in records) else _NOT_CHECKED
    low, high = format_rate(min(rates)), format_rate(max(rates))
    return high if low == high else f"{low.removesuffix(' TFLOP/s')} to {high}"


def _format_errors(records: Sequence[Record]) -> str:
    """Return the memory errors of the GPUs of a node."""
    counts = [record.uncorrected_errors for record in records if record.is_gpu]
    rows = [record.row_problem for record in records if record.is_gpu]
    if not counts:
        return _NOT_CHECKED
    errors = _NOT_CHECKED if None in counts else sum(count or 0 for count in counts)
    return f"ECC {errors}, rows {_NOT_CHECKED if None in rows else sum(map(bool, rows))}"
