"""Measuring: what a child process cost, and several of them in turn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["Run", "child", "interleaved"]

T = TypeVar("T")
_TIMEOUT_S = 300.0
_GRACE_S = 10.0


@dataclass(frozen=True)
class Run:
    """One run of a command, from its start to its end."""

    cpu: float
    """User and system seconds of the command and of every process below it that was waited for."""
    wall: float
    """Seconds from start to end."""
    began: float
    """When it was started, as `time.time()` says it."""
    output: str
    """What it wrote to its standard output."""

    def numbers(self, name: str) -> list[float]:
        """Return the numbers in lines such as `began 1.5` of all ranks; accel launch adds a prefix to each."""
        return [
            float(value) for value in re.findall(rf"^(?:\[\d+\] )?{name} (\S+)$", self.output, re.MULTILINE)
        ]


def child(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> Run:
    """Run a command to its end.

    Args:
        argv: The program and its arguments.
        environ: Its whole environment.
        cwd: Its working directory.

    Raises:
        RuntimeError: It failed, or took longer than five minutes; the message has its last words.
    """
    # Files, not pipes: reading would compete with what is measured.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began, start = time.time(), time.perf_counter()
        process = subprocess.Popen(
            argv,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        cpu = _finish(process)
        wall = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        output, words = out.read().decode(), err.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(argv)} ended with {process.returncode}:\n{output[-2000:]}{words[-4000:]}"
        )
    return Run(cpu, wall, began, output)


def _finish(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process, and return the CPU seconds of it and its children."""
    # SIGTERM first: only then does a launcher end its workers, which are in process groups of their own.
    timers = [
        threading.Timer(after, os.killpg, (process.pid, number))
        for after, number in ((_TIMEOUT_S, signal.SIGTERM), (_TIMEOUT_S + _GRACE_S, signal.SIGKILL))
    ]
    for timer in timers:
        timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        for timer in timers:
            timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def interleaved(cases: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Run the cases in turn, A B C A B C, so that what disturbs the machine disturbs all of them alike.

    Args:
        cases: What to run, by name.
        repeats: How many rounds count; one before them, which fills the caches, does not.
    """
    for case in cases.values():
        case()
    rounds = [{name: case() for name, case in cases.items()} for _ in range(repeats)]
    return {name: [results[name] for results in rounds] for name in cases}
