"""Waiting until the threads of collectives are done with Python: before a fork, and before a process leaves."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from pathlib import Path

__all__ = ["forks_wait", "wait_for_threads"]

PAUSE_S = 0.002
_PATIENCE_S = 0.2
"""How long a fork waits for threads that never rest."""
_TASKS = Path("/proc/self/task")


@functools.cache
def forks_wait() -> None:
    """Have every fork of this process from now on wait until the threads of collectives are done with Python.

    It is how the workers of a DataLoader start. A thread that is not Python's own enters Python where it lets go of a
    tensor. A child that is forked in the moment in which one enters waits for ever, with a lock that nobody opens, where
    Python is older than 3.12 (python/cpython#112275). Measured with 3.11.7 on a busy machine, each fork beside four
    threads that enter: 7 of 1500 children hung, 1 of 3000 after a pause alone, none of 3000 after a pause and until no
    thread was at work.
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=lambda: wait_for_threads(PAUSE_S, _PATIENCE_S))


def wait_for_threads(pause_s: float, patience_s: float) -> None:
    """Sleep, and then until no other thread of this process is at work.

    Args:
        pause_s: For how many seconds at least.
        patience_s: And for how many at most: some threads never rest.
    """
    end = time.monotonic() + patience_s
    time.sleep(pause_s)
    while _others_run() and time.monotonic() < end:
        time.sleep(PAUSE_S)


def _others_run() -> bool:
    """Whether another thread of this process runs, or would if it had a processor; False where that cannot be seen."""
    own = str(threading.get_native_id())
    try:
        return any(_runs(task) for task in _TASKS.iterdir() if task.name != own)
    except OSError:
        return False


def _runs(task: Path) -> bool:
    try:
        said = (task / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended since
        return False
    # "12 (a name) R 1 ...", see proc_pid_stat(5); a name may have brackets of its own.
    return said.rpartition(")")[2].lstrip().startswith("R")
