"""Ranks that end with exit code 0 while others run: where the script of each ended, and if other ranks wait for it."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli import console
from accel_cli.runner.collectives import request_traces
from accel_cli.runner.stalls import FRAME, format_location, request_stacks
from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import RankFolder, format_ranks
from accel_cli.runs.run_files import read_json

__all__ = ["EarlyExit", "ExitWatch", "format_exits", "read_exit", "read_exit_record"]

_SAMPLE_S, _MAX_SAMPLE_S = 30.0, 600.0
"""Seconds between two looks at the ranks that still run: at first, and at most."""
_MAX_SHOWN = 2
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ", f"{sysconfig.get_path('stdlib')}/")
_COMMUNICATION = "/torch/distributed/"
_OWN_WORK = ("/torch/distributed/checkpoint/", "/torch/distributed/elastic/")
"""Folders of torch whose functions read and write files, rather than wait for other ranks."""


@dataclass(frozen=True)
class EarlyExit:
    """A rank that has ended with exit code 0."""

    rank: int
    host: str
    place: str
    """Where its script ended, as ` at train.py:7 (main) after 3 steps`; empty if it recorded nothing, as with `os._exit`."""
    time: float
    """When its script ended, on the monotonic clock of its machine."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} had exited before with code 0{self.place}"


def read_exit_record(folder: RankFolder, pid: int) -> Mapping[str, Any]:
    """Return the record of a script that has ended with code 0; its process may still be exiting. Empty without one."""
    try:
        record = read_json(folder.exit)
    except (OSError, ValueError):
        return {}
    return record if record.get("pid") == pid else {}


def read_exit(folder: RankFolder, rank: int, host: str, pid: int) -> EarlyExit:
    """Read where the script of a rank has ended."""
    record = read_exit_record(folder, pid)
    if not record:
        return EarlyExit(rank, host, "", time.monotonic())
    frames = record["frames"]
    place = f" at {_format_frame(frames)}" if frames else " at the end of its script"
    beat = Beat.read(folder.beat)
    if beat and beat.steps:
        place += f" after {beat.steps} step{'' if beat.steps == 1 else 's'}"
    return EarlyExit(rank, host, place, record["monotonic"])


def _format_frame(frames: Sequence[Sequence[Any]]) -> str:
    """Return the innermost line of the user's code; of a stack without any, that of a library."""
    user_frames = [frame for frame in frames if not any(name in frame[0] for name in _LIBRARIES)]
    file, line, name, *_ = [*frames, *user_frames][-1]
    return f"{Path(file).name}:{line} ({name})"


def format_exits(exits: Collection[EarlyExit]) -> str:
    """Return which ranks had exited, the first ones with their lines; empty without any."""
    ordered = sorted(exits, key=lambda each: (each.time, each.rank))
    more = len(ordered) - _MAX_SHOWN
    rest = [f"and {more} more rank{'' if more == 1 else 's'}"] if more > 0 else []
    return ", ".join([*map(str, ordered[:_MAX_SHOWN]), *rest])


class ExitWatch:
    """Prints a line, once, if a rank waits in a collective after another one has exited with code 0.

    A rank that exports or uploads after the others have ended is left alone: only one that is found twice at the same line of a
    function that communicates is reported.

    Args:
        folders: The folders of the ranks of this machine.
        find_exits: Returns the ranks of all machines that have exited with code 0.
    """

    def __init__(
        self, folders: Mapping[int, RankFolder], find_exits: Callable[[], Collection[EarlyExit]]
    ) -> None:
        self._folders, self._find_exits = folders, find_exits
        self._interval = _SAMPLE_S
        self._next = time.monotonic() + self._interval
        self._before: Mapping[int, _Wait] = {}
        self._is_reported = False

    def check(self) -> None:
        """Look at the ranks that still run, now and then."""
        now = time.monotonic()
        if self._is_reported or now < self._next:
            return
        exits = self._find_exits()
        waits = self._find_waits({each.rank for each in exits}) if exits else {}
        if stuck := sorted(rank for rank, wait in waits.items() if self._before.get(rank) == wait):
            self._report(stuck, waits[stuck[0]], exits)
        # The stacks of a rank that uploads for hours must not fill its file.
        is_busy = bool(exits and not waits)
        self._interval = min(2 * self._interval, _MAX_SAMPLE_S) if is_busy else _SAMPLE_S
        self._before, self._next = waits, now + self._interval

    def _report(self, ranks: Sequence[int], wait: _Wait, exits: Collection[EarlyExit]) -> None:
        self._is_reported = True
        verb = "waits" if len(ranks) == 1 else "wait"
        console.note(
            f"{format_ranks(ranks)} {verb} in {wait.operation} at {wait.line}, and {format_exits(exits)}: a rank that has ended "
            "joins no collective. Let all ranks make the same calls until the end. Stacks: accel stacks. End the run: Ctrl-C."
        )

    def _find_waits(self, exited: Collection[int]) -> dict[int, _Wait]:
        """Return the collectives in which ranks wait, other than those of groups whose ranks all run."""
        running = {rank: folder for rank, folder in self._folders.items() if rank not in exited}
        stacks, traces = request_stacks(running), request_traces(running)
        waits = {}
        for rank, each in stacks.items():
            pending = [trace for trace in traces.get(rank, {}).values() if trace.pending is not None]
            if pending and all(trace.ranks and not set(trace.ranks) & set(exited) for trace in pending):
                continue
            numbers = tuple((trace.ranks, trace.pending) for trace in pending)
            if operation := _find_communication(each.main) or ("a collective" if pending else ""):
                waits[rank] = _Wait(operation, format_location(each.main), numbers)
        return waits


class _Wait(NamedTuple):
    """A collective in which a rank is."""

    operation: str
    line: str
    numbers: tuple[object, ...]
    """The groups and numbers of its collectives that have not completed: two waits at one line differ in them."""


def _find_communication(stack: Iterable[str]) -> str:
    """Return the function of torch that communicates, if it is the innermost one of a stack; else an empty text."""
    name = ""
    for match in filter(None, map(FRAME.search, stack)):
        if _COMMUNICATION not in match["file"] or any(folder in match["file"] for folder in _OWN_WORK):
            break
        # `wrapper` is that of torch's decorators.
        name = name if name and match["function"] == "wrapper" else f"{match['function']}()"
    return name
