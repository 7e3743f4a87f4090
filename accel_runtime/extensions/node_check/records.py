"""The record of a rank in the node check, and the board in a store on which all are collected.

The ranks (`measure.py`) write their records; `accel test` (`check.py`) and the agents of `launcher.preflight` collect them, and
`verdict.py` judges them. Standard library only.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Board", "Folder", "Limits", "Link", "Peer", "Record", "Records", "Step", "Store"]

_POLL_S = 0.05
_LEADER_S = 5.0
_READ_S = 10.0


class Step:
    """The steps of a rank, in their order, in words for a message."""

    START = "the start of the check"
    COMPUTE = "a matrix multiplication"
    LOOK = "the check of its folders and of the other nodes"
    COLLECTIVE = "a collective"
    NONE = ""
    """All are completed."""
    ORDER = (START, COMPUTE, LOOK, COLLECTIVE, NONE)


@dataclass(frozen=True)
class Limits:
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
    def of(cls, *, quick: bool) -> Limits:
        """Return the limits of the check before a script, or of the whole one."""
        return cls(0.3, 2, 2) if quick else cls(1.5, 8, 3)


@dataclass(frozen=True)
class Folder:
    """The space in a folder, and the result of writing a small file there."""

    path: str
    free_bytes: int = 0
    free_inodes: int | None = None
    """None if the file system has no fixed number of inodes."""
    error: str = ""
    """Why no file can be written; empty if one was written."""
    is_full: bool = False


@dataclass(frozen=True)
class Peer:
    """The connection from one node to another."""

    node: int
    error: str = ""
    """Why the address cannot be reached; empty if the other node has answered."""
    name_error: str = ""
    """Why its host name does not lead there."""


@dataclass(frozen=True)
class Link:
    """Collectives over the ranks of some nodes, measured by the first of them."""

    nodes: tuple[int, ...]
    """Two nodes, one alone, or all of them."""
    latency_s: float | None = None
    """Time of an all_reduce of one number."""
    bytes_per_s: float | None = None
    """Bus bandwidth of a large all_reduce: the bytes that each rank sends and receives, independent of their number."""
    error: str = ""


@dataclass(frozen=True)
class Record:
    """Facts from one rank; those about its node are from the first rank of it."""

    rank: int
    node: int
    name: str
    """The name of the node."""
    num_ranks: int
    """The number of ranks on the node."""
    missing_step: str = Step.START
    """The first step that it has not completed."""
    failure: str = ""
    """How its process has ended if that was before the last step."""
    host: str = ""
    """The host name of the machine."""
    address: str = ""
    """The address at which it listens during the check, as collectives do."""
    port: int = 0

    device: str = ""
    """The name of its device; empty before the step."""
    is_gpu: bool = False
    tflops: float | None = None
    """Rate of matrix multiplications; None if it was not measured."""
    error: str = ""
    """How the device failed, or which result was wrong."""
    uncorrected_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded; None if they were not checked."""
    row_problem: str | None = None
    """Rows of memory that could not be, or are to be, replaced; empty without any, None if they were not checked."""

    python: str = ""
    """The version; empty before the step, and on all but the first rank of a node."""
    torch: str = ""
    accel: str = ""
    nccl: str | None = None
    """None without NCCL."""
    driver: str | None = None
    """Version of the GPU driver; None if it was not checked."""
    log_folder: Folder | None = None
    work_folder: Folder | None = None
    shm_bytes: int | None = None
    memory_bytes: int | None = None
    """Memory that processes of the node can still allocate, within the limits of its control groups."""
    open_files: int | None = None
    """The limit of this process; None is no limit."""
    cpus: int = 0
    peers: tuple[Peer, ...] = ()
    links: tuple[Link, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Return the record of `asdict`, after JSON."""
        folders = {
            name: Folder(**values[name]) for name in ("log_folder", "work_folder") if values[name] is not None
        }
        peers = tuple(Peer(**each) for each in values["peers"])
        links = tuple(Link(**{**each, "nodes": tuple(each["nodes"])}) for each in values["links"])
        return cls(**{**values, **folders, "peers": peers, "links": links})


@dataclass(frozen=True)
class Records:
    """The records of all ranks that have published one."""

    ranks: tuple[Record, ...]
    num_nodes: int
    waited_s: float = 0.0
    """Seconds for which they were waited for."""

    def to_dict(self) -> dict[str, Any]:
        """Return the records for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Records:
        """Return the records of `to_dict`, after JSON."""
        return cls(tuple(map(Record.from_dict, values["ranks"])), values["num_nodes"], values["waited_s"])

    @cached_property
    def by_node(self) -> Mapping[int, Sequence[Record]]:
        """The records of each node that has any, the lowest rank first."""
        records: dict[int, list[Record]] = {}
        for record in sorted(self.ranks, key=lambda record: (record.node, record.rank)):
            records.setdefault(record.node, []).append(record)
        return records

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of all nodes, by number."""
        known = {node: records[0].name for node, records in self.by_node.items()}
        return [known.get(node, f"node {node}") for node in range(self.num_nodes)]

    @cached_property
    def nodes(self) -> Mapping[int, Record]:
        """The record with the facts of each node that has come so far."""
        return {record.node: record for record in self.ranks if record.python}

    @cached_property
    def links(self) -> Sequence[Link]:
        """The links that were measured."""
        return [link for record in self.ranks for link in record.links]

    @cached_property
    def failures(self) -> Mapping[int, str]:
        """How the check has ended on nodes on which it failed."""
        return {record.node: record.failure for record in reversed(self.ranks) if record.failure}

    @cached_property
    def silent(self) -> Mapping[int, str]:
        """The other nodes that have not completed the check, with the first step that they did not complete."""
        silent = {}
        for node in range(self.num_nodes):
            records = self.by_node.get(node, ())
            steps = [record.missing_step for record in records]
            if not records or len(records) < records[0].num_ranks:
                steps.append(Step.START)
            if (step := min(steps, key=Step.ORDER.index)) and node not in self.failures:
                silent[node] = step
        return silent


class Store(Protocol):
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


class Board:
    """The records and decisions of one check in a store; all keys are below a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def publish(self, record: Record) -> None:
        """Publish the record of a rank: before its process starts, and after each of its steps."""
        self._store.set(f"{self._prefix}/record/{record.rank}", json.dumps(asdict(record)))

    def publish_failure(self, rank: int, text: str) -> None:
        """Publish that the process of a rank, which has ended, did not complete the check."""
        if values := self.get(f"record/{rank}"):
            self.publish(replace(Record.from_dict(values), failure=text))
        self.count("failed", 1)

    def get(self, name: str) -> Any:
        """Return a value; None if it is not set."""
        key = f"{self._prefix}/{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a counter, and return its value."""
        return int(self._store.add(f"{self._prefix}/{name}", amount))

    def wait(self, world_size: int) -> None:
        """Wait until the next read of the store, which serves all ranks."""
        time.sleep(max(_POLL_S, world_size / 2000))

    def decide(self, name: str, value: object) -> Any:
        """Return a value that is the same for all: that of the first one."""
        return json.loads(self._store.compare_set(f"{self._prefix}/{name}", "", json.dumps(value)))

    def agree(self, name: str, compute: Callable[[], object], *, leads: bool) -> Any:
        """Return a value that is the same for all: the leader computes it, and the others only if the leader is late.

        With a thousand ranks, reading all records on each would keep the store busy for a minute.
        """
        end = time.monotonic() + _LEADER_S
        while (value := self.get(name)) is None and not leads and time.monotonic() < end:
            time.sleep(2 * _POLL_S)
        return self.decide(name, compute()) if value is None else value

    def read(self, num_nodes: int, world_size: int, waited_s: float = 0.0) -> Records:
        """Read the records that have been published."""
        values = [self.get(f"record/{rank}") for rank in range(world_size)]
        return Records(tuple(Record.from_dict(each) for each in values if each), num_nodes, waited_s)

    def collect(
        self, num_nodes: int, world_size: int, limits: Limits, watch: Callable[[], None], *, leads: bool
    ) -> Records:
        """Wait until all nodes have completed the check, or those that have not are late, and return all records.

        Args:
            num_nodes: The number of nodes.
            world_size: The number of ranks on all nodes.
            limits: The time limits.
            watch: Called between two reads.
            leads: True for the process that reads the records for all.
        """
        begin = time.monotonic()
        end = begin + limits.total_s
        is_late, members = False, None
        while time.monotonic() < end:
            # Ranks that have not started in time are not waited for again.
            members = self.get("members") if members is None else members
            expected = world_size if members is None else sum(len(ranks) for _, ranks, *_ in members)
            ended, failed = self.count("ended"), self.count("failed")
            if ended >= expected or (failed and self._is_complete(num_nodes, world_size, leads=leads)):
                break
            if not is_late and 2 * (ended + failed) >= expected:
                is_late, end = True, min(end, time.monotonic() + limits.straggler_s)
            watch()
            self.wait(world_size)

        def read() -> dict[str, Any]:
            return self.read(num_nodes, world_size, time.monotonic() - begin).to_dict()

        return Records.from_dict(self.agree("records", read, leads=leads))

    def _is_complete(self, num_nodes: int, world_size: int, *, leads: bool) -> bool:
        """Return True if each node has completed the check or has failed: other ranks of one that failed may never end."""
        return not self.read(num_nodes, world_size).silent if leads else self.get("records") is not None

    def await_readers(self, count: int) -> None:
        """Wait until all have counted as `read`, for at most ten seconds, since they need the store of this process."""
        end = time.monotonic() + _READ_S
        while self.count("read") < count and time.monotonic() < end:
            self.wait(count)
