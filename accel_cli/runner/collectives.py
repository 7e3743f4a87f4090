"""Collectives that hang, in words: which one it is, the ranks that have entered it, and those that have not.

Ranks write torch's record of collectives (Flight Recorder) as JSON. Collectives of a group are numbered in the order of their
calls on each rank, so that equal numbers belong together. With gloo only `retired` tells that one has completed (torch 2.13).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_cli.runs.run_dir import RankFolder, format_ranks
from accel_cli.runs.run_files import open_file
from accel_runtime.environment.collective_trace import REQUEST_FILE, TRACE_FILE
from accel_runtime.environment.text import decode_text

__all__ = ["Collective", "GroupTrace", "explain_hang", "parse_trace", "request_traces"]

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
    asked = [folder for folder in folders.values() if _send_request(folder.path)]
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline and not all((folder.path / TRACE_FILE).exists() for folder in asked):
        time.sleep(_POLL_S)
    traces = {}
    for rank, folder in folders.items():
        with suppress(OSError, ValueError), open_file(folder.path / TRACE_FILE) as file:
            traces[rank] = parse_trace(decode_text(file.read(_MAX_BYTES)), has_failed=rank == failed)
    return traces


def _send_request(folder: Path) -> bool:
    """Return whether a rank was asked; it does not exist yet, or has no thread that would answer, otherwise."""
    try:
        pipe = os.open(folder / REQUEST_FILE, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        (folder / TRACE_FILE).unlink(missing_ok=True)
        os.write(pipe, b".")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def parse_trace(text: str, *, has_failed: bool = False) -> dict[str, GroupTrace]:
    """Return the collectives of a rank by the name of their group; with `has_failed`, the last one has not completed.

    gloo records one that has timed out as completed.

    Raises:
        ValueError: The text is not a record.
    """
    try:
        record = json.loads(text)
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
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"unknown record of collectives: {error!r}") from None


def _parse_ranks(configs: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the ranks of a group; gloo's default group has an empty key (torch 2.13)."""
    config = configs.get(name) or (configs.get("") if name == "0" else None) or {}
    return tuple(json.loads(str(config.get("ranks", "[]")) or "[]"))


def explain_hang(traces: Mapping[int, Mapping[str, GroupTrace]], locations: Mapping[int, str]) -> list[str]:
    """Return lines about each group whose oldest collective has not completed; none if no rank waits in one.

    Args:
        traces: The records of the ranks.
        locations: The line of the script at which each rank is, if it is known.
    """
    names = sorted({name for trace in traces.values() for name in trace})
    return [line for name in names for line in _explain_group(name, traces, locations)]


def _explain_group(
    name: str, traces: Mapping[int, Mapping[str, GroupTrace]], locations: Mapping[int, str]
) -> Iterator[str]:
    empty = GroupTrace((), {})
    known = next(trace[name].ranks for trace in traces.values() if name in trace)
    members = {rank: trace.get(name, empty) for rank, trace in traces.items() if not known or rank in known}
    waiting = [number for trace in members.values() if (number := trace.pending) is not None]
    if not waiting:
        return
    number = min(waiting)
    label = f"collective {number} of {'the default group' if name == '0' else f'the group {name}'}"
    entered = {
        rank: trace.collectives[number] for rank, trace in members.items() if number in trace.collectives
    }
    by_call: dict[str, list[int]] = {}
    for rank, collective in sorted(entered.items()):
        if not collective.is_completed:
            by_call.setdefault(str(collective), []).append(rank)
    if len(by_call) > 1:
        calls = "; ".join(f"{format_ranks(ranks)}: {call}" for call, ranks in by_call.items())
        yield f"  {label} differs: {calls}"
    else:
        ((call, ranks),) = by_call.items()
        yield f"  {format_ranks(ranks)} {_are(ranks)} in {call}, {label}"
    for rank, trace in sorted(members.items()):
        if trace.last < number:
            last = trace.collectives.get(trace.last)
            before = f"its last one is number {trace.last}, {last}" if last else "it has made none"
            place = f"; it is at {locations[rank]}" if locations.get(rank) else ""
            yield f"  rank {rank} has not entered it: {before}{place}"
    elsewhere = sorted(set(known) - traces.keys())
    if elsewhere:
        yield f"  {format_ranks(elsewhere)} {_are(elsewhere)} without a record"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
