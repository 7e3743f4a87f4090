"""The table of a node check: a row for each node, values that all nodes share above it, and the findings below it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accel_runtime.environment.settings import format_size
from accel_runtime.environment.text import escape_controls
from accel_runtime.extensions.node_check.facts import CheckFacts, FolderFacts, LinkFacts, NodeFacts
from accel_runtime.extensions.node_check.verdict import (
    NodeFinding,
    find_best_links,
    format_rate,
    get_clock_offset,
)

__all__ = ["format_check", "format_findings"]

_NOT_CHECKED = "-"
_BAD, _NOTE = "!", "*"
_DEFAULT_WIDTH = 140
_MAX_ROWS = 40
_GAP = "  "


@dataclass(frozen=True)
class _Column:
    """A fact of all nodes."""

    heading: str
    cells: tuple[str, ...]
    """By rank of the node."""
    marks: tuple[str, ...]

    @property
    def is_shared(self) -> bool:
        """True if all nodes have the same value and none is marked."""
        return len(set(self.cells)) == 1 and not any(self.marks)

    @property
    def width(self) -> int:
        return max(len(self.heading), *(len(cell) + len(mark) for cell, mark in self._pairs))

    @property
    def _pairs(self) -> Sequence[tuple[str, str]]:
        return list(zip(self.cells, self.marks, strict=True))

    def format_cell(self, index: int | None) -> str:
        """Return the cell of a node with its mark, or the heading."""
        text = self.heading if index is None else self.cells[index] + self.marks[index]
        return text.ljust(self.width)


def format_check(facts: CheckFacts, findings: Sequence[NodeFinding], width: int | None = None) -> str:
    """Return the table and the findings for a terminal of a width, unless given that of this terminal."""
    width = width or shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
    columns = _build_columns(facts, findings)
    shared = [column for column in columns[1:] if column.is_shared and len(facts.names) > 1]
    lines = _wrap_shared(shared, width)
    rows = _choose_rows(facts, findings)
    for block in _split_columns([column for column in columns if column not in shared], width):
        lines += [
            _GAP.join(column.format_cell(index) for column in block).rstrip() for index in [None, *rows]
        ]
        lines.append("")
    if hidden := len(facts.names) - len(rows):
        lines.append(f"{hidden} more nodes without findings")
    lines += _format_whole(facts)
    if any(mark for column in columns for mark in column.marks):
        lines.append(f"{_BAD} bad, {_NOTE} noted below, {_NOT_CHECKED} not checked")
    elif any(_NOT_CHECKED in column.cells for column in columns):
        lines.append(f"{_NOT_CHECKED} not checked")
    return "\n".join([*lines, *format_findings(facts.names, findings)])


def format_findings(names: Sequence[str], findings: Sequence[NodeFinding]) -> list[str]:
    """Return a line for each finding."""
    return [
        escape_controls(
            f"{'BAD   ' if finding.is_bad else 'note  '} {names[finding.node]}: {finding.text}",
            keep_lines=False,
        )
        for finding in findings
    ]


def _build_columns(facts: CheckFacts, findings: Sequence[NodeFinding]) -> list[_Column]:
    """Return the columns, that of the names first."""
    fastest, soonest = find_best_links(facts)
    absent = facts.silent.keys() | facts.failures.keys()

    def show(value: Callable[[NodeFacts], str | None]) -> list[str]:
        known = [facts.nodes.get(node) for node in range(len(facts.names))]
        return [(value(node) if node else None) or _NOT_CHECKED for node in known]

    numbers = range(len(facts.names))
    cells: list[tuple[str, str, list[str]]] = [
        ("answer", "node", [escape_controls(name, keep_lines=False) for name in facts.names]),
        ("Python", "Python", show(lambda node: node.python)),
        ("torch", "torch", show(lambda node: node.torch)),
        ("accel", "accel", show(lambda node: node.accel)),
        ("NCCL", "NCCL", show(lambda node: node.nccl)),
        ("driver", "driver", show(lambda node: node.driver)),
        ("clock", "clock", show(_format_clock)),
        ("logs", "logs free", show(lambda node: _format_space(node.log_folder))),
        ("work", "work free", show(lambda node: _format_space(node.work_folder))),
        ("shm", "/dev/shm", show(lambda node: _format_bytes(node.shm_bytes))),  # noqa: S108 - a heading
        ("", "CPUs", show(lambda node: str(node.cpus))),
        ("memory", "memory", show(lambda node: _format_bytes(node.memory_bytes))),
        ("files", "open files", show(lambda node: str(node.open_files or "unlimited"))),
        ("reach", "reaches", show(lambda node: _format_peers(node, len(facts.names)))),
        ("latency", "latency", [_format_latency(soonest.get(node)) for node in numbers]),
        ("bandwidth", "bandwidth", [_format_bandwidth(fastest.get(node)) for node in numbers]),
        ("rate", "matmul", [_format_rates(facts, node) for node in numbers]),
        ("errors", "GPU errors", [_format_errors(facts, node) for node in numbers]),
    ]
    return [
        _Column(heading, tuple(values), tuple(_find_mark(findings, node, key, absent) for node in numbers))
        for key, heading, values in cells
    ]


def _find_mark(findings: Sequence[NodeFinding], node: int, column: str, absent: set[int]) -> str:
    found = [finding for finding in findings if finding.node == node and finding.column == column]
    if column == "answer" and node in absent:
        return f" {_BAD}"
    if any(finding.is_bad for finding in found):
        return f" {_BAD}"
    return f" {_NOTE}" if found else ""


def _choose_rows(facts: CheckFacts, findings: Sequence[NodeFinding]) -> list[int]:
    """Return the nodes of the rows: all, or of many the ones with findings and the first others."""
    numbers = list(range(len(facts.names)))
    marked = {finding.node for finding in findings}
    others = [node for node in numbers if node not in marked]
    return sorted({*marked, *others[: max(1, _MAX_ROWS - len(marked))]})


def _split_columns(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Split columns into blocks that fit, each of which begins with the names."""
    names, *others = columns
    blocks, block, used = [], [names], names.width
    for column in others:
        if len(block) > 1 and used + len(_GAP) + column.width > width:
            blocks.append(block)
            block, used = [names], names.width
        block.append(column)
        used += len(_GAP) + column.width
    return [*blocks, block]


def _wrap_shared(columns: Sequence[_Column], width: int) -> list[str]:
    """Return the lines with the values that all nodes share."""
    lines = [""]
    known = [column for column in columns if column.cells[0] != _NOT_CHECKED]
    unknown = [column.heading.strip() for column in columns if column.cells[0] == _NOT_CHECKED]
    items = [f"{column.heading.strip()} {column.cells[0]}" for column in known]
    if unknown:
        items.append(f"not checked: {' '.join(unknown)}")
    for item in items:
        start = lines[-1] or "all nodes: "
        joined = f"{start}{', ' if lines[-1] else ''}{item}"
        if lines[-1] and len(joined) > width:
            lines[-1] += ","
            lines.append(f"           {item}")
        else:
            lines[-1] = joined
    return lines if items else []


def _format_whole(facts: CheckFacts) -> list[str]:
    """Return the line about the collectives of all ranks of several nodes."""
    if len(facts.names) < 3:  # noqa: PLR2004 - those of one or two nodes are in their rows
        return []
    for link in facts.links:
        if len(link.nodes) == len(facts.names):
            result = link.error or f"latency {_format_latency(link)}, bandwidth {_format_bandwidth(link)}"
            return [f"all_reduce of all ranks: {result}"]
    return ["all_reduce of all ranks: not checked"]


def _format_clock(node: NodeFacts) -> str | None:
    if node.node == 0:
        return "0 (reference)" if node.peers else None
    offset = get_clock_offset(node)
    if offset is None:
        return None
    seconds, error = offset
    if abs(seconds) >= 1:
        return f"{seconds:+.1f} s"
    return f"{seconds * 1e3:+.1f} ms +-{error * 1e3:.1f}"


def _format_bytes(value: int | None) -> str | None:
    return None if value is None else format_size(value)


def _format_space(folder: FolderFacts | None) -> str | None:
    if folder is None:
        return None
    if folder.error and not folder.is_full:
        return "not writable"
    inodes = folder.free_inodes
    short = "" if inodes is None else f", {inodes / 1e6:.1f} M" if inodes >= 10**6 else f", {inodes}"
    return format_size(folder.free_bytes) + (f"{short} inodes" if short else "")


def _format_peers(node: NodeFacts, num_nodes: int) -> str | None:
    if num_nodes == 1:
        return None
    return f"{sum(not peer.error for peer in node.peers)} of {num_nodes - 1}"


def _format_latency(link: LinkFacts | None) -> str:
    return f"{link.latency_s * 1e3:.2f} ms" if link and link.latency_s else _NOT_CHECKED


def _format_bandwidth(link: LinkFacts | None) -> str:
    return f"{format_size(link.bytes_per_s)}/s" if link and link.bytes_per_s else _NOT_CHECKED


def _format_rates(facts: CheckFacts, node: int) -> str:
    """Return the rates of the devices of a node: the lowest and highest of several."""
    devices = [device for device in facts.devices if device.node == node]
    rates = [device.tflops for device in devices if device.tflops]
    if not rates:
        return "failed" if any(device.error for device in devices) else _NOT_CHECKED
    low, high = format_rate(min(rates)), format_rate(max(rates))
    return high if low == high else f"{low.removesuffix(' TFLOP/s')} to {high}"


def _format_errors(facts: CheckFacts, node: int) -> str:
    """Return the memory errors of the GPUs of a node, and the errors of the driver."""
    devices = [device for device in facts.devices if device.node == node and device.is_gpu]
    known = [device for device in devices if device.uncorrected_errors is not None]
    if not devices:
        return _NOT_CHECKED
    errors = sum(device.uncorrected_errors or 0 for device in known)
    parts = [f"ECC {errors}" if len(known) == len(devices) else f"ECC {_NOT_CHECKED}"]
    rows = [device.row_problem for device in devices]
    parts.append(f"rows {_NOT_CHECKED}" if None in rows else f"rows {sum(map(bool, rows))}")
    numbers = facts.nodes[node].xid_errors if node in facts.nodes else None
    parts.append(f"Xid {_NOT_CHECKED}" if numbers is None else f"Xid {len(numbers)}")
    return ", ".join(parts)
