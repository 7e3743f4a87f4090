"""Facts about the nodes of a run that the node check measures, and the keys under which they are in a store.

The ranks of the check write them (`accel_runtime/extensions/node_check`); `accel test` and the agents of `launcher.preflight` read and
judge them (`node_verdict.py`). Standard library only.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "CheckFacts",
    "CheckLimits",
    "DeviceFacts",
    "FactStore",
    "FactsBoard",
    "FolderFacts",
    "LinkFacts",
    "NodeFacts",
    "PeerFacts",
    "get_poll_interval",
]


_POLL_S = 0.05
_LEADER_S = 5.0


@dataclass(frozen=True)
class CheckLimits:
    """Sizes and time limits of one check."""

    matmul_s: float
    """Seconds of matrix multiplications on each device."""
    message_mb: int
    """Size of the large collective on the CPU; `gpu_factor` times as large on a GPU."""
    rounds: int
    """The most rounds of pairs."""
    start_s: float = 60.0
    """Seconds that the first ranks may need to start, which includes the import of torch."""
    straggler_s: float = 15.0
    """Seconds that the other ranks have once most of them have started, or have reported a step."""
    collective_s: float = 10.0
    """Seconds that a collective, or the connection for it, may take."""
    gpu_factor: int = 16

    @property
    def total_s(self) -> float:
        """Seconds after which no result is expected any more."""
        return self.start_s + 2 * self.straggler_s + (self.rounds + 2) * self.collective_s

    @classmethod
    def of(cls, *, quick: bool) -> CheckLimits:
        """Return the limits of the check before a script, or of the whole one."""
        return cls(0.3, 2, 2) if quick else cls(1.5, 8, 3)


@dataclass(frozen=True)
class FolderFacts:
    """The space in a folder, and the result of writing a small file there."""

    path: str
    free_bytes: int = 0
    free_inodes: int | None = None
    """None if the file system has no fixed number of inodes."""
    error: str = ""
    """Why no file can be written; empty if one was written."""
    is_full: bool = False


@dataclass(frozen=True)
class PeerFacts:
    """The connection from one node to another."""

    node: int
    error: str = ""
    """Why the address cannot be reached; empty if the other node has answered."""
    name_error: str = ""
    """Why its host name does not lead there."""
    clock_offset_s: float | None = None
    """The clock of this node minus that of the other."""
    clock_error_s: float = 0.0
    """Half of the round trip, by which the offset may be wrong."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node, from its first rank."""

    node: int
    python: str
    torch: str
    accel: str
    nccl: str | None = None
    """None without NCCL."""
    driver: str | None = None
    """Version of the GPU driver; None if it was not checked."""
    xid_errors: tuple[int, ...] | None = None
    """Numbers of the errors that the GPU driver has reported since the start of the system; None if they cannot be read."""
    log_folder: FolderFacts | None = None
    work_folder: FolderFacts | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memory_bytes: int | None = None
    """Memory that processes of this node can still allocate, within the limits of its control groups."""
    open_files: int | None = None
    """The limit of this process; None is no limit."""
    cpus: int = 0
    peers: tuple[PeerFacts, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NodeFacts:
        """Return the facts of `asdict`, after JSON."""
        folders = {
            name: FolderFacts(**values[name]) for name in ("log_folder", "work_folder") if values[name]
        }
        peers = tuple(PeerFacts(**peer) for peer in values["peers"])
        xid_errors = None if values["xid_errors"] is None else tuple(values["xid_errors"])
        return cls(**{**values, **folders, "peers": peers, "xid_errors": xid_errors})


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about the device of one rank."""

    rank: int
    node: int
    name: str
    is_gpu: bool
    tflops: float | None = None
    """Rate of matrix multiplications; None if it was not measured."""
    error: str = ""
    """How the device failed, or which result was wrong."""
    uncorrected_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded; None if they were not checked."""
    row_problem: str | None = None
    """Rows of memory that could not be, or are to be, replaced; empty without any, None if they were not checked."""


@dataclass(frozen=True)
class LinkFacts:
    """Collectives over the ranks of some nodes, measured by the first of them."""

    nodes: tuple[int, ...]
    """Two nodes, one alone, or all of them."""
    is_gpu: bool = False
    latency_s: float | None = None
    """Time of an all_reduce of one number."""
    bytes_per_s: float | None = None
    """Bus bandwidth of a large all_reduce: the bytes that each rank sends and receives, independent of their number."""
    error: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinkFacts:
        """Return the facts of `asdict`, after JSON."""
        return cls(**{**values, "nodes": tuple(values["nodes"])})


@dataclass(frozen=True)
class CheckFacts:
    """All facts of a check, with those that are missing."""

    names: tuple[str, ...]
    """The names of the nodes, by rank of the node."""
    nodes: Mapping[int, NodeFacts] = field(default_factory=dict)
    devices: Sequence[DeviceFacts] = ()
    links: Sequence[LinkFacts] = ()
    failures: Mapping[int, str] = field(default_factory=dict)
    """How the check ended on nodes on which it failed."""
    silent: Mapping[int, str] = field(default_factory=dict)
    """The nodes that have not completed it in time, with the step that they did not complete."""
    waited_s: float = 0.0
    """Seconds for which they were waited for."""

    def to_dict(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckFacts:
        """Return the facts of `to_dict`, after JSON, whose keys are texts."""

        def number(by_node: Mapping[str, Any]) -> dict[int, Any]:
            return {int(node): value for node, value in by_node.items()}

        return cls(
            names=tuple(values["names"]),
            nodes={node: NodeFacts.from_dict(each) for node, each in number(values["nodes"]).items()},
            devices=tuple(DeviceFacts(**each) for each in values["devices"]),
            links=tuple(map(LinkFacts.from_dict, values["links"])),
            failures=number(values["failures"]),
            silent=number(values["silent"]),
            waited_s=values["waited_s"],
        )


class FactStore(Protocol):
    """The methods of a store of torch that the check needs."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, and return its value."""

    def check(self, keys: list[str], /) -> bool:
        """Return True if all keys are set."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set a key that is not set yet, and return its value."""


class FactsBoard:
    """The facts of one check in a store; all keys are below a prefix."""

    def __init__(self, store: FactStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def publish_name(self, node: int, name: str, num_ranks: int) -> None:
        """Publish the name of a node and the number of its ranks, before they start."""
        self.put(f"name/{node}", name)
        self.put(f"size/{node}", num_ranks)

    def publish_node(self, facts: NodeFacts) -> None:
        """Publish the facts about a node."""
        self.put(f"node/{facts.node}", asdict(facts))

    def publish_device(self, facts: DeviceFacts) -> None:
        """Publish the facts about the device of a rank."""
        self.put(f"device/{facts.rank}", asdict(facts))

    def publish_links(self, node: int, links: Sequence[LinkFacts]) -> None:
        """Publish the links that a node has measured."""
        self.put(f"links/{node}", [asdict(link) for link in links])

    def publish_end(self, node: int) -> None:
        """Publish that a rank of a node has completed the check."""
        self.count(f"finished/{node}", 1)
        self.count("finished", 1)

    def publish_failure(self, node: int, text: str) -> None:
        """Publish that a rank of a node cannot complete the check."""
        self.put(f"failed/{node}", text)
        self.count("failed", 1)

    def put(self, name: str, value: object) -> None:
        """Set a value."""
        self._store.set(f"{self._prefix}/{name}", json.dumps(value))

    def get(self, name: str) -> Any:
        """Return a value; None if it is not set."""
        key = f"{self._prefix}/{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a counter, and return its value."""
        return int(self._store.add(f"{self._prefix}/{name}", amount))

    def decide(self, name: str, value: object) -> Any:
        """Return a value that is the same for all: that of the first one."""
        return json.loads(self._store.compare_set(f"{self._prefix}/{name}", "", json.dumps(value)))

    def agree(self, name: str, compute: Callable[[], object], *, leads: bool) -> Any:
        """Return a value that is the same for all: the leader computes it, and the others only if the leader is late.

        With a thousand ranks, reading all facts on each would keep the store busy for a minute.
        """
        end = time.monotonic() + _LEADER_S
        while not leads and time.monotonic() < end:
            if (value := self.get(name)) is not None:
                return value
            time.sleep(2 * _POLL_S)
        value = self.get(name)
        return self.decide(name, compute()) if value is None else value

    def collect(
        self, num_nodes: int, world_size: int, limits: CheckLimits, watch: Callable[[], None], *, leads: bool
    ) -> CheckFacts:
        """Wait until all nodes have completed the check, or those that have not are late, and return all facts.

        Args:
            num_nodes: The number of nodes.
            world_size: The number of ranks on all nodes.
            limits: The time limits.
            watch: Called between two reads.
            leads: True for the process that reads the facts for all.
        """
        begin = time.monotonic()
        end = begin + limits.total_s
        is_late, members = False, None
        while time.monotonic() < end:
            # Ranks that have not started in time are not waited for again.
            members = self.get("members") if members is None else members
            expected = world_size if members is None else sum(len(ranks) for _, ranks in members[0])
            count = self.count("finished")
            failed = self.count("failed")
            if count >= expected or (failed and self._have_ended(range(num_nodes))):
                break
            if not is_late and 2 * (count + failed) >= expected:
                is_late, end = True, min(end, time.monotonic() + limits.straggler_s)
            watch()
            time.sleep(get_poll_interval(world_size))

        def read() -> dict[str, Any]:
            return self.read(num_nodes, world_size, time.monotonic() - begin).to_dict()

        return CheckFacts.from_dict(self.agree("facts", read, leads=leads))

    def read(self, num_nodes: int, world_size: int, waited_s: float) -> CheckFacts:
        """Read all facts that have been published."""
        nodes: dict[int, NodeFacts] = {}
        links: list[LinkFacts] = []
        failures: dict[int, str] = {}
        for node in range(num_nodes):
            if values := self.get(f"node/{node}"):
                nodes[node] = NodeFacts.from_dict(values)
            links += map(LinkFacts.from_dict, self.get(f"links/{node}") or ())
            if failure := self.get(f"failed/{node}"):
                failures[node] = failure
        texts = (self.get(f"device/{rank}") for rank in range(world_size))
        devices = tuple(DeviceFacts(**values) for values in texts if values)
        steps = {node: self._find_missing_step(node, node in nodes) for node in range(num_nodes)}
        silent = {node: step for node, step in steps.items() if step and node not in failures}
        names = tuple(self.get(f"name/{node}") or f"node {node}" for node in range(num_nodes))
        return CheckFacts(names, nodes, devices, tuple(links), failures, silent, waited_s)

    def _find_missing_step(self, node: int, has_facts: bool) -> str:
        """Return the first step that a node has not completed; empty if it has completed the check."""
        size = self.get(f"size/{node}")
        if size is None or self.count(f"started/{node}") < size:
            return "the start of the check"
        if self.count(f"computed/{node}") < size:
            return "a matrix multiplication"
        if not has_facts:
            return "the check of its folders and of the other nodes"
        return "" if self.count(f"finished/{node}") >= size else "a collective"

    def _have_ended(self, nodes: Iterable[int]) -> bool:
        """Return True if each node has completed the check, or has failed."""
        for node in nodes:
            size = self.get(f"size/{node}")
            is_complete = size is not None and self.count(f"finished/{node}") >= size
            if not is_complete and not self.get(f"failed/{node}"):
                return False
        return True


def get_poll_interval(world_size: int) -> float:
    """Return the seconds between two reads of the store, which serves all ranks."""
    return max(_POLL_S, world_size / 2000)
