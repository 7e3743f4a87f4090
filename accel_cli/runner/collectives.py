"""Collectives that hang, in words: which one it is, the ranks that have entered it, and those that have not.

Ranks write torch's record of collectives (Flight Recorder) as JSON. Collectives of a group are numbered in the order of their
calls on each rank, so that equal numbers belong together. With gloo only `retired` tells that one has completed (torch 2.13).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel_cli.runs.run_dir import RankFolder, format_ranks
from accel_cli.runs.run_files import open_file
from accel_runtime.environment.text import parse_json
from accel_runtime.observe.request_pipes import send_request

__all__ = [
    "Collective",
    "GroupTrace",
    "explain_hang",
    "find_absent_ranks",
    "has_different_calls",
    "have_collectives_advanced",
    "parse_trace",
    "request_traces",
]

_TIMEOUT_S, _POLL_S = 3.0, 0.05
_MAX_BYTES = 64 << 20
"""The most bytes of the record of a process."""
_MAX_SIZES = 3


@dataclass(frozen=True)
class Collective:
    """One collective of a group, as a rank has recorded it."""

    name: str
    """Its kind with its backend: `gloo:all_reduce`."""
    sizes: tuple[tuple[int, ...], ...]
    """The shapes of its inputs."""
    is_completed: bool

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
    """The ranks that wait, by their call."""
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
    calls: dict[str, list[int]] = {}
    for rank, trace in sorted(members.items()):
        collective = trace.collectives.get(number)
        if collective and not collective.is_completed:
            calls.setdefault(str(collective), []).append(rank)
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


def explain_hang(traces: Mapping[int, Mapping[str, GroupTrace]], locations: Mapping[int, str]) -> list[str]:
    """Return lines about each group whose oldest collective has not completed; none if no rank waits in one.

    Args:
        traces: The records of the ranks.
        locations: The line of the script at which each rank is, if it is known.
    """
    waits = _find_waits(traces)
    return [line for name, wait in waits.items() for line in _explain_wait(name, wait, locations)]


def _explain_wait(name: str, wait: _Wait, locations: Mapping[int, str]) -> Iterator[str]:
    number = wait.number
    label = f"collective {number} of {'the default group' if name == '0' else f'the group {name}'}"
    if len(wait.calls) > 1:
        calls = "; ".join(f"{format_ranks(ranks)}: {call}" for call, ranks in wait.calls.items())
        yield f"  {label} differs: {calls}"
    else:
        ((call, ranks),) = wait.calls.items()
        yield f"  {format_ranks(ranks)} {_are(ranks)} in {call}, {label}"
    for rank in wait.absent:
        trace = wait.members[rank]
        last = trace.collectives.get(trace.last)
        before = f"its last one is number {trace.last}, {last}" if last else "it has made none"
        place = f"; it is at {locations[rank]}" if locations.get(rank) else ""
        yield f"  rank {rank} has not entered it: {before}{place}"
    if wait.unknown:
        yield f"  {format_ranks(wait.unknown)} {_are(wait.unknown)} without a record"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
