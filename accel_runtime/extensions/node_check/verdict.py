"""Judgement of the facts about nodes: which node is bad, and why; standard library only.

The thresholds and their reasons are in `docs/design/preflight.md`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from accel_runtime.environment.settings import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accel_runtime.extensions.node_check.facts import (
        CheckFacts,
        DeviceFacts,
        FolderFacts,
        LinkFacts,
        NodeFacts,
    )

__all__ = ["NodeFinding", "find_best_links", "find_broken_pairs", "format_rate", "is_connected", "judge"]

_CLOCK_S = 1.0
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
_HARDWARE_XIDS = frozenset({48, 64, 79, 95})
"""Numbers of errors of the driver for a failed memory cell or a GPU that has left the bus; most others come from programs."""
_MAX_NAMED = 4


@dataclass(frozen=True)
class NodeFinding:
    """A sentence about one node."""

    node: int
    severity: Literal["bad", "note"]
    text: str
    column: str = ""
    """The column of the table with the value."""

    @property
    def is_bad(self) -> bool:
        """True if the node must not take part."""
        return self.severity == "bad"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def judge(facts: CheckFacts) -> list[NodeFinding]:
    """Return the findings about all nodes, the bad ones first."""
    findings = [
        *_judge_answers(facts),
        *_judge_connections(facts),
        *_judge_versions(facts),
        *(finding for node in facts.nodes.values() for finding in _judge_node(node)),
        *_judge_clocks(facts),
        *(finding for device in facts.devices for finding in _judge_device(device)),
        *_judge_rates(facts),
        *_judge_links(facts),
    ]
    return sorted(findings, key=lambda finding: (not finding.is_bad, finding.node))


def is_connected(facts: CheckFacts) -> bool:
    """Return True if all nodes have answered and reach each other, so that a process group of all can be created."""
    return not (facts.silent or facts.failures or find_broken_pairs(facts))


def _judge_answers(facts: CheckFacts) -> Iterator[NodeFinding]:
    """Yield the nodes whose check has failed, or has not ended."""
    for node, text in sorted(facts.failures.items()):
        yield NodeFinding(node, "bad", f"the check failed: {text}", "answer")
    for node, step in sorted(facts.silent.items()):
        yield NodeFinding(
            node, "bad", f"did not answer within {facts.waited_s:.0f} s: {step} did not end", "answer"
        )


# Connections


def find_broken_pairs(facts: CheckFacts) -> dict[tuple[int, int], str]:
    """Return the pairs of nodes of which one does not reach the other, or whose collectives failed, with the reason."""
    absent = facts.silent.keys() | facts.failures.keys()
    broken: dict[tuple[int, int], str] = {}
    for node in facts.nodes.values():
        for peer in node.peers:
            if peer.error and not {node.node, peer.node} & absent:
                broken.setdefault((min(node.node, peer.node), max(node.node, peer.node)), peer.error)
    for link in facts.links:
        if link.error and len(link.nodes) == 2 and not {*link.nodes} & absent:  # noqa: PLR2004 - a pair
            first, second = sorted(link.nodes)
            broken.setdefault((first, second), f"a collective failed: {link.error}")
    return broken


def _judge_connections(facts: CheckFacts) -> Iterator[NodeFinding]:
    """Yield the nodes that have the most broken pairs; of a pair of which neither has more, the one of the higher rank."""
    broken = find_broken_pairs(facts)
    while broken:
        counts = Counter(node for pair in broken for node in pair)
        (worst, count), *others = counts.most_common()
        is_decided = count > 1 and (not others or others[0][1] < count)
        pair = next(iter(broken))
        node = worst if is_decided else pair[1]
        of_node = {other: reason for other, reason in broken.items() if node in other}
        if is_decided:
            partners = sorted({one for other in of_node for one in other} - {node})
            names = _list_names([facts.names[partner] for partner in partners])
            text = f"is not connected with {names}: {next(iter(of_node.values()))}"
        else:
            text = (
                f"is not connected with {facts.names[pair[0]]}, and either may be the cause: {broken[pair]}"
            )
        yield NodeFinding(node, "bad", text, "reach")
        broken = {other: reason for other, reason in broken.items() if node not in other}
    for link in facts.links:
        if link.error and len(link.nodes) > 2 and not find_broken_pairs(facts):  # noqa: PLR2004 - more than a pair
            yield NodeFinding(
                link.nodes[0], "note", f"a collective of all ranks failed: {link.error}", "reach"
            )
        if link.error and len(link.nodes) == 1:
            yield NodeFinding(
                link.nodes[0], "bad", f"a collective of its ranks failed: {link.error}", "reach"
            )
    for known in facts.nodes.values():
        if unnamed := [peer for peer in known.peers if peer.name_error and not peer.error]:
            names = _list_names([facts.names[peer.node] for peer in unnamed])
            text = f"does not reach {names} by name, only by address: {unnamed[0].name_error}"
            yield NodeFinding(known.node, "note", text, "reach")


# Versions and clocks

_VERSIONS: Sequence[tuple[str, Callable[[NodeFacts], str | None], Literal["bad", "note"]]] = (
    ("Python", lambda node: ".".join(node.python.split(".")[:2]), "bad"),
    ("torch", lambda node: node.torch, "bad"),
    ("accel", lambda node: node.accel, "bad"),
    ("NCCL", lambda node: node.nccl, "bad"),
    ("driver", lambda node: node.driver, "note"),
)


def _judge_versions(facts: CheckFacts) -> Iterator[NodeFinding]:
    """Yield the nodes with another version than most; without a majority, than the first node."""
    for name, get_version, severity in _VERSIONS:
        versions = {node.node: get_version(node) for node in facts.nodes.values()}
        counts = Counter(versions.values()).most_common()
        if len(counts) < 2:  # noqa: PLR2004 - all have the same
            continue
        is_majority = counts[0][1] > counts[1][1]
        expected = counts[0][0] if is_majority else versions[min(versions)]
        whose = "most nodes have" if is_majority else f"{facts.names[min(versions)]} has"
        for node, version in sorted(versions.items()):
            if version != expected:
                text = f"has {name} {version or 'not installed'}, and {whose} {expected or 'none'}"
                yield NodeFinding(node, severity, text, name)


def _judge_clocks(facts: CheckFacts) -> Iterator[NodeFinding]:
    for node in facts.nodes.values():
        offset = get_clock_offset(node)
        if offset is not None and abs(offset[0]) - offset[1] > _CLOCK_S:
            direction = "ahead of" if offset[0] > 0 else "behind"
            text = f"its clock is {abs(offset[0]):.1f} s {direction} that of {facts.names[0]}; synchronize it with NTP"
            yield NodeFinding(node.node, "note", text, "clock")


def get_clock_offset(node: NodeFacts) -> tuple[float, float] | None:
    """Return the clock of a node minus that of node 0, and by how much it may be wrong."""
    for peer in node.peers:
        if peer.node == 0 and peer.clock_offset_s is not None:
            return peer.clock_offset_s, peer.clock_error_s
    return None


# Resources of a node


def _judge_node(node: NodeFacts) -> Iterator[NodeFinding]:
    """Yield what a node lacks."""
    if node.log_folder:
        yield from _judge_folder(node.node, "the log folder", node.log_folder, is_needed=True)
    if node.work_folder:
        yield from _judge_folder(node.node, "the working folder", node.work_folder, is_needed=False)
    for column, value, least, text in (
        (
            "shm",
            node.shm_bytes,
            _SHM_BYTES,
            "its /dev/shm has only {}, which data loader workers and NCCL use",
        ),
        ("memory", node.memory_bytes, _MEMORY_BYTES, "only {} of memory is available"),
    ):
        if value is not None and value < least:
            yield NodeFinding(node.node, "note", text.format(format_size(value)), column)
    if node.open_files is not None and node.open_files < _OPEN_FILES:
        yield NodeFinding(
            node.node,
            "note",
            f"the limit on open files is {node.open_files}; raise it: ulimit -n 65536",
            "files",
        )
    for number in node.xid_errors or ():
        cause = "of the hardware" if number in _HARDWARE_XIDS else "of a program or of the hardware"
        yield NodeFinding(
            node.node, "note", f"the GPU driver has reported Xid {number}, an error {cause}", "errors"
        )


def _judge_folder(node: int, noun: str, folder: FolderFacts, *, is_needed: bool) -> Iterator[NodeFinding]:
    """Yield that a folder is full or cannot be written, or will soon be full."""
    column = "logs" if is_needed else "work"
    if folder.error:
        # A script may run in a folder of an image, which cannot be written.
        severity: Literal["bad", "note"] = "bad" if is_needed or folder.is_full else "note"
        yield NodeFinding(node, severity, f"{noun} {folder.path} cannot be written: {folder.error}", column)
    elif folder.free_bytes < _FOLDER_BYTES:
        yield NodeFinding(
            node, "note", f"{noun} {folder.path} has only {format_size(folder.free_bytes)} left", column
        )
    elif folder.free_inodes is not None and folder.free_inodes < _FOLDER_INODES:
        yield NodeFinding(
            node, "note", f"{noun} {folder.path} has only {folder.free_inodes} inodes left", column
        )


# Devices and links


def _judge_device(device: DeviceFacts) -> Iterator[NodeFinding]:
    if device.error:
        yield NodeFinding(device.node, "bad", f"rank {device.rank} on {device.name}: {device.error}", "rate")
    if device.uncorrected_errors:
        text = f"{device.name} of rank {device.rank} has {device.uncorrected_errors} uncorrected memory errors (ECC); reset or replace it"
        yield NodeFinding(device.node, "bad", text, "errors")
    if device.row_problem:
        severity: Literal["bad", "note"] = "bad" if "failed" in device.row_problem else "note"
        yield NodeFinding(
            device.node, severity, f"{device.name} of rank {device.rank}: {device.row_problem}", "errors"
        )


def _judge_rates(facts: CheckFacts) -> Iterator[NodeFinding]:
    """Yield the devices that compute slower than the others of the same name."""
    for name in sorted({device.name for device in facts.devices}):
        devices = [device for device in facts.devices if device.name == name and device.tflops]
        values = {device.rank: device.tflops or 0.0 for device in devices}
        by_rank = {device.rank: device for device in devices}
        thresholds = (_BAD, _LOW) if any(device.is_gpu for device in devices) else (0.0, _CPU_LOW)
        for rank, part, severity in _compare(values, *thresholds):
            rate, middle = format_rate(values[rank]), format_rate(median(values.values()))
            text = f"rank {rank} computes at {rate}, {_format_part(part)} of the median ({middle})"
            yield NodeFinding(by_rank[rank].node, severity, text, "rate")


def find_best_links(facts: CheckFacts) -> tuple[dict[int, LinkFacts], dict[int, LinkFacts]]:
    """Return the link of each node with the highest bandwidth, and the one with the lowest latency, of its pairs.

    A healthy node that was paired with a bad one also has another partner.
    """
    fastest: dict[int, LinkFacts] = {}
    soonest: dict[int, LinkFacts] = {}
    for link in facts.links:
        if link.error or len(link.nodes) != min(2, len(facts.names)):
            continue
        for node in link.nodes:
            if link.bytes_per_s and link.bytes_per_s > _get_bandwidth(fastest.get(node)):
                fastest[node] = link
            if link.latency_s and link.latency_s < _get_latency(soonest.get(node)):
                soonest[node] = link
    return fastest, soonest


def _get_bandwidth(link: LinkFacts | None) -> float:
    return link.bytes_per_s or 0.0 if link else 0.0


def _get_latency(link: LinkFacts | None) -> float:
    return link.latency_s or float("inf") if link else float("inf")


def _judge_links(facts: CheckFacts) -> Iterator[NodeFinding]:
    """Yield the nodes whose best link is slower than that of the others."""
    fastest, soonest = find_best_links(facts)
    bandwidths = {node: _get_bandwidth(link) for node, link in fastest.items()}
    is_gpu = any(link.is_gpu for link in facts.links)
    thresholds = (_BAD, _LOW) if is_gpu else (_GLOO_BAD, _GLOO_LOW)
    for node, part, severity in _compare(bandwidths, *thresholds):
        best, middle = format_size(bandwidths[node]), format_size(median(bandwidths.values()))
        text = f"its best link has {best}/s, {_format_part(part)} of the median ({middle}/s)"
        yield NodeFinding(node, severity, text, "bandwidth")
    latencies = {node: _get_latency(link) for node, link in soonest.items()}
    if len(latencies) >= _NEEDED_VALUES:
        middle_s = median(latencies.values())
        for node, latency in sorted(latencies.items()):
            if latency > max(_LATENCY_S, _LATENCY_FACTOR * middle_s):
                text = f"the latency of its best link is {latency * 1e3:.1f} ms, and the median {middle_s * 1e3:.1f} ms"
                yield NodeFinding(node, "note", text, "latency")


def _compare(
    values: Mapping[int, float], bad: float, low: float
) -> Iterator[tuple[int, float, Literal["bad", "note"]]]:
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
