"""Hangs in collectives: the report in words, the evidence on this node, and the records of all nodes.

Ranks write torch's record of collectives (Flight Recorder) as JSON. Collectives of a group are numbered in the order of their
calls on each rank, so that equal numbers belong together. With gloo only `retired` tells that one has completed (torch 2.13).

Silence alone is no hang: a run that is paused, saves, exports, compiles, evaluates or finishes makes no steps either. Two
observations are compared. Output and collectives that complete are progress. Processor time, transferred bytes, another
call, and the phases of `_PHASES` are doubts, which extend the limit. A rank that waits in a collective for one that has
not entered it shows neither, whatever its other threads do.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import DistError

from accel_cli.runner.bootstrap import BootstrapStore, NodeInfo
from accel_cli.runner.guard import list_processes
from accel_cli.runs.run_dir import RankFolder, format_ranks
from accel_cli.runs.run_files import open_file, read_pid, read_size
from accel_cli.runs.usage import read_cpu_time
from accel_runtime.environment.text import parse_json
from accel_runtime.observe.request_pipes import send_request

__all__ = [
    "Collective",
    "GroupTrace",
    "HangExchange",
    "HangRecord",
    "Judgement",
    "Observation",
    "RankObservation",
    "explain_hang",
    "find_absent_ranks",
    "has_different_calls",
    "have_collectives_advanced",
    "judge",
    "observe_ranks",
    "parse_trace",
    "request_traces",
]

_TIMEOUT_S, _POLL_S = 3.0, 0.05
_MAX_BYTES = 64 << 20
"""The most bytes of the record of a process."""
_MAX_SIZES = 3
_EXCHANGE_S, _EXCHANGE_POLL_S = 8.0, 0.1
"""Seconds until nodes that do not answer are left out: another node looks for requests once a second, and asks its ranks for their
stacks and their collectives, three each."""
_CHECK_S = 1.0
_MAX_COLLECTIVES = 32
"""The newest collectives of a group that are sent to other nodes."""
_BUSY_SHARE = 0.02
"""The part of a processor that shows work: a sleeping rank with the threads of accel uses 0.3 % of one."""
_BUSY_BYTES_PER_S = 64 << 10
_EQUAL_SHAPES = frozenset({"all_reduce", "broadcast", "reduce"})
"""The collectives whose inputs have one shape on all ranks."""
_BARRIER = "a barrier waits for a rank that works alone"
_PHASES: Mapping[str, tuple[str, ...]] = {
    "a checkpoint or a model is saved or loaded": (
        "/accel_runtime/accelerator/checkpointing.py",
        "/accel_runtime/checkpoint/",
        "/accel_runtime/export/",
        "/accel_runtime/storage/",
        "/torch/serialization.py",
        "/torch/distributed/checkpoint/",
        "/safetensors/",
        " in save_pretrained",
    ),
    _BARRIER: (
        " in wait_for_everyone",
        " in barrier",
        " in monitored_barrier",
        " in main_process_first",
        " in local_main_process_first",
    ),
    "a model is exported or compiled": (
        "/torch/onnx/",
        "/torch/export/",
        "/torch/_inductor/",
        "/torch/_dynamo/",
        "/triton/",
    ),
    "a debugger waits for input": ("/pdb.py", "/bdb.py"),
    "files are transferred": ("/huggingface_hub/", "/http/client.py", "/urllib3/", "/botocore/"),
}
"""Long work that may be silent, and the parts of the frames of the main thread that show it."""


@dataclass(frozen=True)
class Collective:
    """One collective of a group, as a rank has recorded it."""

    name: str
    """Its kind with its backend: `gloo:all_reduce`."""
    sizes: tuple[tuple[int, ...], ...]
    """The shapes of its inputs."""
    is_completed: bool

    @property
    def comparable(self) -> tuple[object, ...]:
        """What must be equal on all ranks: in a scatter or gather, the shapes of one rank may differ."""
        kind = self.name.rpartition(":")[2]
        return (kind, self.sizes) if kind in _EQUAL_SHAPES else (kind,)

    def __str__(self) -> str:
        kind = self.name.rpartition(":")[2]
        shapes = [str(list(shape)) for shape in self.sizes]
        shown = ", ".join(shapes[:_MAX_SIZES]) + (", ..." if len(shapes) > _MAX_SIZES else "")
        return f"{kind} of {shown}" if shown else kind


@dataclass(frozen=True)
class GroupTrace:
    """The collectives of a rank in one process group, by their numbers from 1."""

    ranks: tuple[int, ...]
    """The ranks of the group; empty if they are not recorded."""
    collectives: Mapping[int, Collective]

    @property
    def last(self) -> int:
        """The number of the newest collective; 0 without one."""
        return max(self.collectives, default=0)

    @property
    def pending(self) -> int | None:
        """The number of the oldest collective still in progress; None without one."""
        return min(
            (number for number, each in self.collectives.items() if not each.is_completed), default=None
        )


def request_traces(
    folders: Mapping[int, RankFolder], failed: int | None = None
) -> dict[int, dict[str, GroupTrace]]:
    """Request the records of all ranks at the same time; ranks that do not answer within three seconds are left out.

    The rank `failed` has written its record when it failed in its last collective.
    """
    asked = [folder for folder in folders.values() if send_request(folder.trace_request, folder.trace)]
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline and not all(folder.trace.exists() for folder in asked):
        time.sleep(_POLL_S)
    traces = {}
    for rank, folder in folders.items():
        with suppress(OSError, ValueError), open_file(folder.trace) as file:
            traces[rank] = parse_trace(file.read(_MAX_BYTES), has_failed=rank == failed)
    return traces


def parse_trace(text: str | bytes, *, has_failed: bool = False) -> dict[str, GroupTrace]:
    """Return the collectives of a rank by the name of their group; with `has_failed`, the last one has not completed.

    gloo records one that has timed out as completed.

    Raises:
        ValueError: The text is not a record.
    """
    try:
        record = parse_json(text)
        groups: dict[str, dict[int, Collective]] = {}
        entries = [entry for entry in record.get("entries", ()) if not entry["is_p2p"]]
        for entry in entries:
            collective = Collective(
                str(entry["profiling_name"]),
                tuple(tuple(map(int, shape)) for shape in entry["input_sizes"]),
                (entry["retired"] or entry["state"] == "completed")
                and not (has_failed and entry is entries[-1]),
            )
            groups.setdefault(str(entry["process_group"][0]), {})[int(entry["collective_seq_id"])] = (
                collective
            )
        configs: Mapping[str, Any] = record.get("pg_config", {})
        return {
            name: GroupTrace(_parse_ranks(configs, name), collectives) for name, collectives in groups.items()
        }
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"unknown record of collectives: {error!r}") from None


def _parse_ranks(configs: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the ranks of a group; gloo's default group has an empty key (torch 2.13)."""
    config = configs.get(name) or (configs.get("") if name == "0" else None) or {}
    return tuple(map(int, parse_json(str(config.get("ranks", "[]")) or "[]")))


class _Wait(NamedTuple):
    """The oldest collective of a group that ranks wait in."""

    number: int
    members: Mapping[int, GroupTrace]
    """The records of the ranks of the group."""
    calls: Mapping[str, Sequence[int]]
    """The ranks that wait, by their call, and those that have made another one under its number."""
    absent: Sequence[int]
    """The ranks that have not entered it."""
    unknown: Sequence[int]
    """The ranks of the group without a record."""


def _find_wait(name: str, traces: Mapping[int, Mapping[str, GroupTrace]]) -> _Wait | None:
    """Return what ranks wait in, in the group of a name; None if no rank waits."""
    empty = GroupTrace((), {})
    known = next(trace[name].ranks for trace in traces.values() if name in trace)
    members = {rank: trace.get(name, empty) for rank, trace in traces.items() if not known or rank in known}
    pending = [number for trace in members.values() if (number := trace.pending) is not None]
    if not pending:
        return None
    number = min(pending)
    entered = {
        rank: each for rank, trace in sorted(members.items()) if (each := trace.collectives.get(number))
    }
    waiting = {each.comparable for each in entered.values() if not each.is_completed}
    texts: dict[object, str] = {}
    calls: dict[str, list[int]] = {}
    for rank, each in entered.items():
        # gloo may complete a call on one rank that does not match the calls of the others.
        if not each.is_completed or each.comparable not in waiting:
            text = texts.setdefault(each.comparable, str(each))
            calls.setdefault(text, []).append(rank)
    absent = [rank for rank, trace in sorted(members.items()) if trace.last < number]
    return _Wait(number, members, calls, absent, sorted(set(known) - traces.keys()))


def _find_waits(traces: Mapping[int, Mapping[str, GroupTrace]]) -> dict[str, _Wait]:
    names = sorted({name for trace in traces.values() for name in trace})
    return {name: wait for name in names if (wait := _find_wait(name, traces))}


def find_absent_ranks(traces: Mapping[int, Mapping[str, GroupTrace]]) -> dict[int, set[int]]:
    """Return for each rank that waits in a collective the ranks that have not entered it, if there are any.

    Ranks of the group without a record are among them.
    """
    result: dict[int, set[int]] = {}
    for wait in _find_waits(traces).values():
        if missing := {*wait.absent, *wait.unknown}:
            for rank in itertools.chain.from_iterable(wait.calls.values()):
                result.setdefault(rank, set()).update(missing)
    return result


def has_different_calls(traces: Mapping[int, Mapping[str, GroupTrace]]) -> bool:
    """Return whether ranks wait for each other in different calls under one number."""
    return any(len(wait.calls) > 1 for wait in _find_waits(traces).values())


def have_collectives_advanced(
    before: Mapping[int, Mapping[str, GroupTrace]], now: Mapping[int, Mapping[str, GroupTrace]]
) -> bool:
    """Return whether a rank has entered or completed a collective between two records."""
    empty = GroupTrace((), {})
    return any(
        group.last > (earlier := before[rank].get(name, empty)).last or group.pending != earlier.pending
        for rank in before.keys() & now.keys()
        for name, group in now[rank].items()
    )


def explain_hang(record: HangRecord) -> list[str]:
    """Return lines about each group whose oldest collective has not completed.

    Without one, as with a receive or a wait for a store key, which torch does not record, they are about the ranks that are in
    a call that waits for others, and those that are elsewhere. There are none if no rank waits for others. The last lines are
    about the ranks that do not answer, and those whose threads have failed.
    """
    waits = _find_waits(record.traces)
    lines = [line for name, wait in waits.items() for line in _explain_wait(name, wait, record)]
    if not waits and record.calls:
        lines = _list_places(record.locations, record)
    texts: dict[str, list[int]] = {}
    for each in (record.problems, record.thread_failures):
        for rank, text in sorted(each.items()):
            texts.setdefault(text, []).append(rank)
    return [*lines, *(f"  {format_ranks(ranks)}: {text}" for text, ranks in texts.items())]


def _list_places(ranks: Iterable[int], record: HangRecord) -> list[str]:
    """Return a line for each place at which ranks are, of those whose line is known."""
    places: dict[str, list[int]] = {}
    for rank in sorted(set(ranks) & record.locations.keys()):
        places.setdefault(record.describe_place(rank), []).append(rank)
    return [f"  {format_ranks(group)} {_are(group)} {place}" for place, group in places.items()]


def _explain_wait(name: str, wait: _Wait, record: HangRecord) -> Iterator[str]:
    number = wait.number
    label = f"collective {number} of {'the default group' if name == '0' else f'the group {name}'}"
    if len(wait.calls) > 1:
        calls = "; ".join(f"{format_ranks(ranks)}: {call}" for call, ranks in wait.calls.items())
        yield f"  {label} differs: {calls}"
        yield from _list_places(itertools.chain.from_iterable(wait.calls.values()), record)
    else:
        ((call, ranks),) = wait.calls.items()
        yield f"  {format_ranks(ranks)} {_are(ranks)} in {call}, {label}"
    for rank in wait.absent:
        trace = wait.members[rank]
        last = trace.collectives.get(trace.last)
        before = f"its last one is number {trace.last}, {last}" if last else "it has made none"
        place = f"; it is {record.describe_place(rank)}" if record.locations.get(rank) else ""
        yield f"  rank {rank} has not entered it: {before}{place}"
    if unknown := [rank for rank in wait.unknown if rank not in record.problems]:
        yield f"  {format_ranks(unknown)} {_are(unknown)} without a record"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


@dataclass(frozen=True)
class HangRecord:
    """The collectives of ranks, and their lines."""

    traces: Mapping[int, Mapping[str, GroupTrace]] = field(default_factory=dict)
    """The records of the ranks, by rank and group."""
    locations: Mapping[int, str] = field(default_factory=dict)
    """The line of the script at which each rank is, if it is known."""
    calls: Mapping[int, str] = field(default_factory=dict)
    """The call that waits for others in which a rank is: `recv()`."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """The reason for which a rank does not answer: `no answer: it is stopped`."""
    thread_failures: Mapping[int, str] = field(default_factory=dict)
    """The exceptions that have ended threads of a rank, for which its main thread may wait."""
    activity: Mapping[str, str] = field(default_factory=dict)
    """What other nodes do that may be work, by their host."""

    def describe_place(self, rank: int) -> str:
        """Return where a rank is, whose line is known, as `in recv() at train.py:12 (main)`."""
        call = f"in {self.calls[rank]} " if rank in self.calls else ""
        return f"{call}at {self.locations[rank]}"

    def merge(self, other: HangRecord) -> HangRecord:
        """Return the records of both."""
        return HangRecord(
            {**self.traces, **other.traces},
            {**self.locations, **other.locations},
            {**self.calls, **other.calls},
            {**self.problems, **other.problems},
            {**self.thread_failures, **other.thread_failures},
            {**self.activity, **other.activity},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data, with the newest collectives only."""
        traces = {
            rank: {
                name: {
                    "ranks": trace.ranks,
                    "collectives": [
                        (number, each.name, each.sizes, each.is_completed)
                        for number, each in sorted(trace.collectives.items())[-_MAX_COLLECTIVES:]
                    ],
                }
                for name, trace in groups.items()
            }
            for rank, groups in self.traces.items()
        }
        return {
            "traces": traces,
            "locations": dict(self.locations),
            "calls": dict(self.calls),
            "problems": dict(self.problems),
            "thread_failures": dict(self.thread_failures),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], host: str) -> HangRecord:
        """Return the record that `to_json` wrote on a node."""
        traces = {
            int(rank): {
                name: GroupTrace(
                    tuple(trace["ranks"]),
                    {
                        number: Collective(call, tuple(map(tuple, sizes)), is_completed)
                        for number, call, sizes, is_completed in trace["collectives"]
                    },
                )
                for name, trace in groups.items()
            }
            for rank, groups in data["traces"].items()
        }

        def read_texts(name: str, end: str = f" on {host}") -> dict[int, str]:
            return {int(rank): f"{text}{end}" for rank, text in data[name].items()}

        activity = data.get("activity")
        return cls(
            traces,
            read_texts("locations"),
            read_texts("calls", ""),
            read_texts("problems"),
            read_texts("thread_failures"),
            {host: f"{activity} on {host}"} if activity else {},
        )


class HangExchange:
    """Shares the records of a hang among the nodes of a round: one that finds a hang asks the others.

    Args:
        bootstrap: The store of the run.
        number: The round.
        nodes: All nodes of the round; none if this is the only one.
        read: Returns the record of the ranks of this node.
        describe_activity: Describes what the ranks of this node do that may be work; empty if they seem to hang.
    """

    def __init__(
        self,
        bootstrap: BootstrapStore,
        number: int,
        nodes: Sequence[NodeInfo],
        read: Callable[[], HangRecord],
        describe_activity: Callable[[], str],
    ) -> None:
        self._bootstrap, self._read, self._describe_activity = bootstrap, read, describe_activity
        self._prefix = f"round/{number}/hang"
        self._others = {node.id: node.host for node in nodes if node.id != bootstrap.node.id}
        self._answered = 0
        self._next_check = time.monotonic() + _CHECK_S

    def answer(self) -> bool:
        """Publish the record of this node if another one has asked for it since the last call, at most once a second.

        Returns:
            True if the record was published, which takes seconds if a rank does not answer.
        """
        now = time.monotonic()
        if not self._others or now < self._next_check:
            return False
        self._next_check = now + _CHECK_S
        asked = self._count(0)
        if asked <= self._answered:
            return False
        self._publish(self._read(), asked)
        return True

    def collect(self, own: HangRecord) -> HangRecord:
        """Return the records of all nodes, with that of this node; a node that does not answer in time has none."""
        records = own
        with suppress(DistError):  # the store is lost
            if self._others:
                asked = self._count(1)
                self._publish(own, asked)
                for answer in self._wait_for_answers(own, asked):
                    records = records.merge(answer)
        return records

    def _wait_for_answers(self, own: HangRecord, asked: int) -> Iterator[HangRecord]:
        waiting = dict(self._others)
        deadline = time.monotonic() + _EXCHANGE_S
        while waiting and time.monotonic() < deadline:
            for node, host in list(waiting.items()):
                text = self._bootstrap.get_value(f"{self._prefix}/{node}")
                answer = json.loads(text) if text else {"asked": 0}
                if answer["asked"] >= asked:
                    del waiting[node]
                    yield HangRecord.from_json(answer, host)
            if (newest := self._count(0)) > self._answered:
                # Another node that has found the same hang waits for this one.
                self._publish(own, newest)
            time.sleep(_EXCHANGE_POLL_S)
        for host in waiting.values():
            yield HangRecord(activity={host: f"the launcher on {host} does not answer"})

    def _publish(self, record: HangRecord, asked: int) -> None:
        self._answered = asked
        text = json.dumps({"asked": asked, "activity": self._describe_activity(), **record.to_json()})
        self._bootstrap.set_value(f"{self._prefix}/{self._bootstrap.node.id}", text)

    def _count(self, amount: int) -> int:
        return int(self._bootstrap.store.add(self._bootstrap.get_key(f"{self._prefix}/asked"), amount))


class RankObservation(NamedTuple):
    """What a rank has done up to a moment."""

    stack: tuple[str, ...] = ()
    """The frames of the thread that runs the script, the innermost first."""
    has_ended: bool = False
    """True if its process has ended; with another code than 0, the run ends or restarts before it is observed."""
    collectives: int = 0
    """The number of collectives of an Accelerator that have completed."""
    is_in_collective: bool = False
    """True in a collective of an Accelerator."""
    processor_s: float = 0.0
    """Processor time of the rank and its child processes."""
    transferred: int = 0
    """Bytes that they have read and written."""
    output: int = 0
    """Bytes of its output."""


class Observation(NamedTuple):
    """The progress of ranks up to a moment."""

    time: float
    ranks: Mapping[int, RankObservation]
    """The ranks of this node."""
    record: HangRecord
    """The collectives of the ranks of this node, or of all nodes."""
    has_other_nodes: bool


@dataclass(frozen=True)
class Judgement:
    """The conclusion from two observations."""

    has_progress: bool = False
    """True if the ranks have certainly worked since the first one."""
    is_hang: bool = False
    """True if the collectives that ranks wait in can never complete."""
    doubts: Sequence[str] = field(default_factory=list)
    """Reasons for which the silence may be work; none if nothing has happened."""


def observe_ranks(
    folders: Mapping[int, RankFolder],
    stacks: Mapping[int, tuple[str, ...]],
    collectives: Mapping[int, tuple[int, bool]],
) -> dict[int, RankObservation]:
    """Observe the ranks of this node.

    Args:
        folders: Their folders.
        stacks: The frames of their scripts.
        collectives: The number of collectives of an Accelerator that each has completed, and if it is in one.
    """
    processes = list_processes()
    running = {process.pid for process in processes}
    sessions: dict[int, list[int]] = {}
    for process in processes:
        sessions.setdefault(process.session, []).append(process.pid)
    ranks = {}
    for rank, folder in folders.items():
        pid = read_pid(folder.pid) or 0
        pids = sessions.get(pid, []) if pid else []
        ranks[rank] = RankObservation(
            stacks.get(rank, ()),
            bool(pid and running) and pid not in running,
            *collectives.get(rank, (0, False)),
            processor_s=sum(map(read_cpu_time, pids)),
            transferred=sum(map(_read_transferred, pids)),
            output=read_size(folder.output),
        )
    return ranks


def judge(before: Observation, now: Observation) -> Judgement:
    """Compare two observations of the same ranks."""
    ranks = now.ranks.keys() & before.ranks.keys()
    absent, was_absent = find_absent_ranks(now.record.traces), find_absent_ranks(before.record.traces)
    waiting = absent.keys() | _find_handshake_waits(now)
    has_output = any(now.ranks[rank].output > before.ranks[rank].output for rank in ranks - waiting)
    if has_output or have_collectives_advanced(before.record.traces, now.record.traces):
        return Judgement(has_progress=True)
    ended = {rank for rank, each in now.ranks.items() if each.has_ended}
    missing = {rank for waiter in absent.keys() & was_absent.keys() for rank in absent[waiter]}
    differs = has_different_calls(before.record.traces) and has_different_calls(now.record.traces)
    if differs or missing & ended:
        return Judgement(is_hang=True)
    finishing = [f"{format_ranks(ended)} finished with exit code 0"] if ended else []
    return Judgement(
        doubts=[
            *finishing,
            *_describe_phases(now, waiting),
            *_describe_work(before, now, ranks - waiting - ended),
            *now.record.activity.values(),
        ]
    )


def _find_handshake_waits(now: Observation) -> set[int]:
    """Return the ranks in a collective of an Accelerator that another rank of this node has not entered."""
    inside = {rank for rank, each in now.ranks.items() if each.is_in_collective}
    have_all_entered = (
        inside == now.ranks.keys() and len({each.collectives for each in now.ranks.values()}) == 1
    )
    return set() if have_all_entered else inside


def _describe_phases(now: Observation, waiting: AbstractSet[int]) -> list[str]:
    """Describe the long work of ranks that do not wait for others, and barriers that not all have entered."""
    doubts = []
    for text, marks in _PHASES.items():
        ranks = {rank for rank, each in now.ranks.items() if _contains(each.stack, marks)}
        if text != _BARRIER:
            ranks -= waiting
        elif ranks == now.ranks.keys() and not now.has_other_nodes:
            continue
        if ranks:
            doubts.append(f"{text} ({format_ranks(ranks)})")
    return doubts


def _contains(stack: Iterable[str], marks: Sequence[str]) -> bool:
    return any(mark in frame for frame in stack for mark in marks)


def _describe_work(before: Observation, now: Observation, ranks: AbstractSet[int]) -> list[str]:
    """Describe the ranks that have used a processor, transferred bytes, or have made another call."""
    seconds = max(now.time - before.time, 1e-3)
    doubts = []
    for rank in sorted(ranks):
        first, last = before.ranks[rank], now.ranks[rank]
        share = (last.processor_s - first.processor_s) / seconds
        if share >= _BUSY_SHARE:
            doubts.append(f"rank {rank} uses {share:.0%} of a processor")
        elif last.transferred - first.transferred >= _BUSY_BYTES_PER_S * seconds:
            doubts.append(f"rank {rank} reads or writes files")
        elif first.stack and last.stack and first.stack != last.stack:
            doubts.append(f"rank {rank} is at another call than before")
    return doubts


def _read_transferred(pid: int) -> int:
    """Return the bytes that a process has read and written, also from caches and pipes; 0 if they cannot be read."""
    with suppress(OSError, ValueError):
        lines = Path("/proc", str(pid), "io").read_text(encoding="ascii").splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["rchar"]) + int(counts["wchar"])
    return 0
