"""The guard of a run: a process that ends the ranks if their launcher is killed.

Standard library only and run by path, so that it starts at once and stays small: `guard.py RUN_FOLDER`. Its standard input
is a pipe that only the launcher holds. A line `PID START_TIME` adds a session to watch, and `done` ends the guard. If the
pipe closes without `done`, the launcher was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "FORWARDED_SIGNALS",
    "GRACE_S",
    "HANDLED_SIGNALS",
    "TERMINATING_SIGNALS",
    "Process",
    "find_socket_folders",
    "get_start_time",
    "list_processes",
    "main",
    "remove_socket_folders",
    "send_signal",
]

TERMINATING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They end the run: every rank gets the same signal, and time to save."""
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""They are passed on to every rank, and the run continues."""
HANDLED_SIGNALS = (*TERMINATING_SIGNALS, *FORWARDED_SIGNALS)
"""The signals for which the launcher has handlers; ranks start with Python's defaults."""
GRACE_S = 3.5
"""Seconds until SIGKILL once the launcher was killed: after five seconds no rank is left."""
_MAX_KILLS = 100
"""How often SIGKILL is sent to what still runs: a process that waits for a device ends later."""
_POLL_S = 0.05
_STATE, _PARENT, _SESSION, _START = 0, 1, 3, 19
"""Fields of /proc/PID/stat after the name."""
_SOCKET_INODE, _SOCKET_PATH = 6, 7
"""Fields of /proc/net/unix."""


class Process(NamedTuple):
    """A running process of this node."""

    pid: int
    session: int
    """The id of the process that leads its session."""
    start: int
    """Its start time; unique together with the process id."""
    parent: int


def main(folder: str) -> None:
    """Wait until the launcher ends; if it was killed, end the sessions of its run."""
    # Schedulers signal every process of a job, and the guard must outlive the ranks.
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    leaders: dict[int, int] = {}
    for line in sys.stdin:
        if line == "done\n":
            return
        pid, _, start = line.partition(" ")
        leaders[int(pid)] = int(start)
    _end_sessions(leaders, os.fsencode(f"={folder}/"))


def list_processes() -> list[Process]:
    """List the running processes of this node, without zombies; empty without /proc (macOS)."""
    entries = Path("/proc").iterdir() if Path("/proc").is_dir() else ()
    processes = (_read_process(entry.name) for entry in entries if entry.name.isdigit())
    return [process for process in processes if process]


def get_start_time(pid: int) -> int:
    """Return the start time of a process; 0 if it has ended."""
    process = _read_process(str(pid))
    return process.start if process else 0


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, and ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def find_socket_folders(sessions: Container[int]) -> set[Path]:
    """Find the folders `pymp-...` of the sockets with which processes of these sessions pass tensors to each other.

    multiprocessing removes them at the exit of a process, such as a data-loader worker, but not if a signal ends it.
    """
    folders = set()
    for process in list_processes():
        if process.session not in sessions:
            continue
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/net/unix").read_bytes().splitlines()
            paths = {
                fields[_SOCKET_INODE]: fields[_SOCKET_PATH]
                for fields in map(bytes.split, lines)
                if len(fields) > _SOCKET_PATH
            }
            links = {os.fsencode(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
            sockets = {path for inode, path in paths.items() if b"socket:[%s]" % inode in links}
            folders |= {Path(os.fsdecode(path)).parent for path in sockets if b"/pymp-" in path}
    return folders


def remove_socket_folders(folders: Iterable[Path]) -> None:
    """Remove folders of `find_socket_folders` that ended processes have left."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for file in folder.iterdir():
                if file.is_socket():
                    file.unlink()
            folder.rmdir()


def _read_process(pid: str) -> Process | None:
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return None
    # The process name may contain brackets and spaces.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[_STATE] in {b"Z", b"X"}:
        return None
    return Process(int(pid), int(fields[_SESSION]), int(fields[_START]), int(fields[_PARENT]))


def _end_sessions(leaders: dict[int, int], mark: bytes) -> None:
    """Send SIGTERM to each leader, then to its session once it has ended, and SIGKILL to the rest after `GRACE_S`."""
    signalled: set[int] = set()
    folders = find_socket_folders(leaders)
    start, kills = time.monotonic(), 0
    # Not until a time: if this process is suspended meanwhile, the ranks must be killed all the same.
    while (remaining := _find_remaining(leaders, mark)) and kills < _MAX_KILLS:
        pids = {process.pid for process in remaining}
        due = {p.pid for p in remaining if p.pid == p.session or p.session not in pids} - signalled
        send_signal(due, signal.SIGTERM)
        signalled |= due
        if time.monotonic() - start > GRACE_S:
            send_signal(pids, signal.SIGKILL)
            kills += 1
        time.sleep(_POLL_S)
    remove_socket_folders(folders)


def _find_remaining(leaders: dict[int, int], mark: bytes) -> list[Process]:
    """Find the processes in the sessions of the leaders, and in sessions that the launcher had no time to report."""
    running = [process for process in list_processes() if process.pid != os.getpid()]
    for process in running:
        is_leader = process.pid == process.session
        if is_leader and process.pid not in leaders and _belongs_to_run(process.pid, mark):
            leaders[process.pid] = process.start
    # A process id that was reused was free, so that its old session had ended.
    reused = {process.pid for process in running if leaders.get(process.pid, process.start) != process.start}
    return [process for process in running if process.session in leaders.keys() - reused]


def _belongs_to_run(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
