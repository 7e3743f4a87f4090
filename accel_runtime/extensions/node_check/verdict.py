"""Judgement of the records of all ranks: which node is bad, and why; standard library only.

The thresholds and their reasons are in `docs/design/preflight.md`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from accel_runtime.environment.settings import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from accel_runtime.extensions.node_check.records import Folder, Record, Records

__all__ = ["NodeFinding", "find_best_links", "find_broken_pairs", "format_rate", "is_connected", "judge"]

_SHM_BYTES = 64 * 10**6
_OPEN_FILES = 4096
_MEMORY_BYTES = 2 * 10**9
_FOLDER_BYTES, _FOLDER_INODES = 10**9, 1000
_LATENCY_FACTOR, _LATENCY_S = 3.0, 1e-3
_NEEDED_VALUES = 3
"""A median of fewer values does not separate the bad one from the good one."""
_BAD, _LOW = 0.5, 0.8
"""Parts of the median below which a value of a GPU is bad, or low."""
_GLOO_BAD, _GLOO_LOW = 0.25, 0.5
"""The same of links through gloo, whose values depend on the load of the machine."""
_CPU_LOW = 0.5
"""The same of a CPU, for a note only: another process may use it."""
_MAX_NAMED = 4

Severity = Literal["bad", "note"]


@dataclass(frozen=True)
class NodeFinding:
    """A sentence about one node."""

    node: int
    severity: Severity
    text: str
    column: str = ""
    """The column of the table with the value."""

    @property
    def is_bad(self) -> bool:
        """True if the node must not take part."""
        return self.severity == "bad"


def judge(records: Records) -> list[NodeFinding]:
    """Return the findings about all nodes, the bad ones first."""
    findings = [
        *_judge_answers(records),
        *_judge_connections(records),
        *_judge_versions(records),
        *(finding for node in records.nodes.values() for finding in _judge_node(node)),
        *(finding for record in records.ranks for finding in _judge_device(record)),
        *_judge_rates(records),
        *_judge_links(records),
    ]
    return sorted(findings, key=lambda finding: (not finding.is_bad, finding.node))


def is_connected(records: Records) -> bool:
    """Return True if all nodes have answered and reach each other, so that a process group of all can be created."""
    return not (records.silent or records.failures or find_broken_pairs(records, ()))


def _judge_answers(records: Records) -> Iterator[NodeFinding]:
    """Yield the nodes whose check has failed, or has not ended."""
    for node, text in sorted(records.failures.items()):
        yield NodeFinding(node, "bad", f"the check failed: {text}", "answer")
    for node, step in records.silent.items():
        yield NodeFinding(
            node, "bad", f"did not answer within {records.waited_s:.0f} s: {step} did not end", "answer"
        )


# Connections


def find_broken_pairs(records: Records, absent: Collection[int]) -> dict[tuple[int, int], str]:
    """Return the pairs of nodes of which one does not reach the other, or whose collectives failed, with the reason.

    Pairs with a node of `absent`, which may be the cause, are left out.
    """
    broken: dict[tuple[int, int], str] = {}
    for node in records.nodes.values():
        for peer in node.peers:
            if peer.error and not {node.node, peer.node} & {*absent}:
                broken.setdefault((min(node.node, peer.node), max(node.node, peer.node)), peer.error)
    for link in records.links:
        if link.error and len(link.nodes) == 2 and not {*link.nodes} & {*absent}:  # noqa: PLR2004 - a pair
            first, second = sorted(link.nodes)
            broken.setdefault((first, second), f"a collective failed: {link.error}")
    return broken


def _judge_connections(records: Records) -> Iterator[NodeFinding]:
    """Yield the nodes that have the most broken pairs; of a pair of which neither has more, the one of the higher rank."""
    broken = find_broken_pairs(records, records.silent.keys() | records.failures.keys())
    # Every node has a record of the collective of all ranks.
    of_all = [link for link in records.links if link.error and len(link.nodes) > 2]  # noqa: PLR2004 - more than a pair
    if of_all and not broken:
        text = f"a collective of all ranks failed: {of_all[0].error}"
        yield NodeFinding(of_all[0].nodes[0], "note", text, "reach")
    for link in records.links:
        if link.error and len(link.nodes) == 1:
            text = f"a collective of its ranks failed: {link.error}"
            yield NodeFinding(link.nodes[0], "bad", text, "reach")
    for node in records.nodes.values():
        if unnamed := [peer for peer in node.peers if peer.name_error and not peer.error]:
            names = _list_names([records.names[peer.node] for peer in unnamed])
            text = f"does not reach {names} by name, only by address: {unnamed[0].name_error}"
            yield NodeFinding(node.node, "note", text, "reach")
    while broken:
        counts = Counter(node for pair in broken for node in pair)
        (worst, count), *others = counts.most_common()
        is_decided = count > 1 and (not others or others[0][1] < count)
        pair = next(iter(broken))
        bad = worst if is_decided else pair[1]
        of_node = {other: reason for other, reason in broken.items() if bad in other}
        if is_decided:
            partners = sorted({one for other in of_node for one in other} - {bad})
            names = _list_names([records.names[partner] for partner in partners])
            text = f"is not connected with {names}: {next(iter(of_node.values()))}"
        else:
            text = (
                f"is not connected with {records.names[pair[0]]}, and either may be the cause: {broken[pair]}"
            )
        yield NodeFinding(bad, "bad", text, "reach")
        broken = {other: reason for other, reason in broken.items() if bad not in other}


# Versions

_VERSIONS: Sequence[tuple[str, Callable[[Record], str | None], Severity]] = (
    ("Python", lambda node: ".".join(node.python.split(".")[:2]), "bad"),
    ("torch", lambda node: node.torch, "bad"),
    ("accel", lambda node: node.accel, "bad"),
    ("NCCL", lambda node: node.nccl, "bad"),
    ("driver", lambda node: node.driver, "note"),
)


def _judge_versions(records: Records) -> Iterator[NodeFinding]:
    """Yield the nodes with another version than most; without a majority, than the first node."""
    for name, get_version, severity in _VERSIONS:
        versions = {node.node: get_version(node) for node in records.nodes.values()}
        counts = Counter(versions.values()).most_common()
        if len(counts) < 2:  # noqa: PLR2004 - all have the same
            continue
        is_majority = counts[0][1] > counts[1][1]
        expected = counts[0][0] if is_majority else versions[min(versions)]
        whose = "most nodes have" if is_majority else f"{records.names[min(versions)]} has"
        for node, version in sorted(versions.items()):
            if version != expected:
                text = f"has {name} {version or 'not installed'}, and {whose} {expected or 'none'}"
                yield NodeFinding(node, severity, text, name)


# Resources of a node


def _judge_node(node: Record) -> Iterator[NodeFinding]:
    """Yield what a node lacks."""
    if node.log_folder:
        yield from _judge_folder(node.node, "the log folder", node.log_folder, is_needed=True)
    if node.work_folder:
        yield from _judge_folder(node.node, "the working folder", node.work_folder, is_needed=False)
    if node.shm_bytes is not None and node.shm_bytes < _SHM_BYTES:
        text = f"its /dev/shm has only {format_size(node.shm_bytes)}, which data loader workers and NCCL use"
        yield NodeFinding(node.node, "note", text, "shm")
    if node.memory_bytes is not None and node.memory_bytes < _MEMORY_BYTES:
        text = f"only {format_size(node.memory_bytes)} of memory is available"
        yield NodeFinding(node.node, "note", text, "memory")
    if node.open_files is not None and node.open_files < _OPEN_FILES:
        text = f"the limit on open files is {node.open_files}; raise it: ulimit -n 65536"
        yield NodeFinding(node.node, "note", text, "files")


def _judge_folder(node: int, noun: str, folder: Folder, *, is_needed: bool) -> Iterator[NodeFinding]:
    """Yield that a folder is full or cannot be written, or will soon be full."""
    column = "logs" if is_needed else "work"
    if folder.error:
        # A script may run in a folder of an image, which cannot be written.
        severity: Severity = "bad" if is_needed or folder.is_full else "note"
        yield NodeFinding(node, severity, f"{noun} {folder.path} cannot be written: {folder.error}", column)
    elif folder.free_bytes < _FOLDER_BYTES:
        text = f"{noun} {folder.path} has only {format_size(folder.free_bytes)} left"
        yield NodeFinding(node, "note", text, column)
    elif folder.free_inodes is not None and folder.free_inodes < _FOLDER_INODES:
        text = f"{noun} {folder.path} has only {folder.free_inodes} inodes left"
        yield NodeFinding(node, "note", text, column)


# Devices and links


def _judge_device(record: Record) -> Iterator[NodeFinding]:
    name = f"{record.device} of rank {record.rank}"
    if record.error:
        text = f"rank {record.rank} on {record.device}: {record.error}"
        yield NodeFinding(record.node, "bad", text, "rate")
    if record.uncorrected_errors:
        text = f"{name} has {record.uncorrected_errors} uncorrected memory errors (ECC); reset or replace it"
        yield NodeFinding(record.node, "bad", text, "errors")
    if record.row_problem:
        severity: Severity = "bad" if "failed" in record.row_problem else "note"
        yield NodeFinding(record.node, severity, f"{name}: {record.row_problem}", "errors")


def _judge_rates(records: Records) -> Iterator[NodeFinding]:
    """Yield the devices that compute slower than the others of the same name."""
    measured = {record.rank: record for record in records.ranks if record.tflops}
    for name in sorted({record.device for record in measured.values()}):
        values = {rank: record.tflops or 0.0 for rank, record in measured.items() if record.device == name}
        is_gpu = any(measured[rank].is_gpu for rank in values)
        for rank, part, severity in _compare(values, *((_BAD, _LOW) if is_gpu else (0.0, _CPU_LOW))):
            rate, middle = format_rate(values[rank]), format_rate(median(values.values()))
            text = f"rank {rank} computes at {rate}, {_format_part(part)} of the median ({middle})"
            yield NodeFinding(measured[rank].node, severity, text, "rate")


def find_best_links(records: Records) -> tuple[dict[int, float], dict[int, float]]:
    """Return the highest bandwidth and the lowest latency of each node, of the links to its partners.

    A healthy node that was paired with a bad one also has another partner.
    """
    bandwidths: dict[int, float] = {}
    latencies: dict[int, float] = {}
    for link in records.links:
        if link.bytes_per_s and link.latency_s and len(link.nodes) == min(2, records.num_nodes):
            for node in link.nodes:
                bandwidths[node] = max(link.bytes_per_s, bandwidths.get(node, 0.0))
                latencies[node] = min(link.latency_s, latencies.get(node, link.latency_s))
    return bandwidths, latencies


def _judge_links(records: Records) -> Iterator[NodeFinding]:
    """Yield the nodes whose best link is slower than that of the others."""
    bandwidths, latencies = find_best_links(records)
    is_gpu = any(record.is_gpu for record in records.ranks)
    for node, part, severity in _compare(bandwidths, *((_BAD, _LOW) if is_gpu else (_GLOO_BAD, _GLOO_LOW))):
        best, middle = format_size(bandwidths[node]), format_size(median(bandwidths.values()))
        text = f"its best link has {best}/s, {_format_part(part)} of the median ({middle}/s)"
        yield NodeFinding(node, severity, text, "bandwidth")
    if len(latencies) >= _NEEDED_VALUES:
        middle_s = median(latencies.values())
        for node, latency in sorted(latencies.items()):
            if latency > max(_LATENCY_S, _LATENCY_FACTOR * middle_s):
                text = f"the latency of its best link is {latency * 1e3:.1f} ms, and the median {middle_s * 1e3:.1f} ms"
                yield NodeFinding(node, "note", text, "latency")


def _compare(values: Mapping[int, float], bad: float, low: float) -> Iterator[tuple[int, float, Severity]]:
    """Yield the keys of values below `low` times the median, with their part of it and the severity."""
    middle = median(values.values()) if values else 0.0
    for key, value in sorted(values.items()):
        part = value / middle if middle else 1.0
        if part < low:
            yield key, part, "bad" if part < bad and len(values) >= _NEEDED_VALUES else "note"


def _format_part(part: float) -> str:
    return f"{part:.0%}" if part >= 0.01 else "under 1%"  # noqa: PLR2004 - a percent


def format_rate(tflops: float) -> str:
    """Return a rate of matrix multiplications with its unit."""
    return f"{tflops:.0f} TFLOP/s" if tflops >= 10 else f"{tflops:.2f} TFLOP/s"  # noqa: PLR2004 - two digits


def _list_names(names: Iterable[str]) -> str:
    """Return the first names, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
