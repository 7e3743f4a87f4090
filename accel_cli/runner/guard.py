"""The guard of a run: a process of its own that ends what is left of the run once its launcher is gone.

Standard library only, and run by path, so that it is there in a moment and small: `guard.py RUN_FOLDER`.
Its standard input is a pipe that only the launcher holds. A line `PID START` tells it of a process that leads
a session, `done` that the run is over. Where the pipe ends without `done`, the launcher was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["GRACE_S", "Process", "get_start_time", "list_processes", "main", "send_signal"]

GRACE_S = 3.5
"""Seconds the processes have to end once their launcher is gone: none is left after five."""
_PERIOD_S = 0.05
_DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_STATE, _PARENT, _SESSION, _START = 0, 1, 3, 19


class Process(NamedTuple):
    """A process of this machine that runs."""

    pid: int
    session: int
    """The process that began its session."""
    start: int
    """When it started: together with its id it is unique."""
    parent: int
    """The process whose child it is."""


def main(folder: str) -> None:
    """Wait for the end of the launcher, and end what is left of its run."""
    # A scheduler that signals every process of a job means the scripts.
    for number in _DEAF:
        signal.signal(number, signal.SIG_IGN)
    leaders: dict[int, int] = {}
    for line in sys.stdin:
        if line == "done\n":
            return
        pid, _, start = line.partition(" ")
        leaders[int(pid)] = int(start)
    _end_sessions(leaders, f"={folder}/".encode())


def list_processes() -> list[Process]:
    """The processes of this machine that run; what has ended and was not asked for yet is left out."""
    # Without /proc (macOS) nothing is known of the others, and nobody is signalled by mistake.
    known = Path("/proc").iterdir() if Path("/proc").is_dir() else ()
    found = (_read(entry.name) for entry in known if entry.name.isdigit())
    return [process for process in found if process]


def get_start_time(pid: int) -> int:
    """When a process started, as `Process.start`; 0 if it is gone."""
    process = _read(str(pid))
    return process.start if process else 0


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _read(pid: str) -> Process | None:
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return None
    # The name of a process may hold anything, also brackets and spaces.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[_STATE] in {b"Z", b"X"}:
        return None
    return Process(int(pid), int(fields[_SESSION]), int(fields[_START]), int(fields[_PARENT]))


def _end_sessions(leaders: dict[int, int], mark: bytes) -> None:
    """SIGTERM to each leader, to the rest of its session when the leader is gone, SIGKILL to all in the end."""
    told: set[int] = set()
    now = begin = time.monotonic()
    while (left := _find_remaining(leaders, mark)) and now - begin < 2 * GRACE_S:
        there = {process.pid for process in left}
        due = {p.pid for p in left if p.pid == p.session or p.session not in there} - told
        send_signal(due, signal.SIGTERM)
        told |= due
        if now - begin > GRACE_S:
            send_signal(there, signal.SIGKILL)
        time.sleep(_PERIOD_S)
        now = time.monotonic()


def _find_remaining(leaders: dict[int, int], mark: bytes) -> list[Process]:
    """What runs in the sessions of the leaders, and of those that the launcher had no time to tell of."""
    running = list_processes()
    for process in running:
        if (
            process.pid == process.session
            and process.pid not in leaders
            and _belongs_to_run(process.pid, mark)
        ):
            leaders[process.pid] = process.start
    # An id that somebody else has by now was free, so nobody was left in the session of that name.
    foreign = {process.pid for process in running if leaders.get(process.pid, process.start) != process.start}
    return [process for process in running if process.session in leaders.keys() - foreign]


def _belongs_to_run(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
