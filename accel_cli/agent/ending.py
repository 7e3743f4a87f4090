"""How the processes of a run are ended: a signal once to each, time to save, and nothing left of their sessions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from typing_extensions import Self

from accel_cli import console
from accel_cli.agent import guard

__all__ = ["Guard", "Started", "end", "kill"]

_PERIOD_S = 0.05
_REAP_S = 5.0


class Started(Protocol):
    """A process that leads a session of its own, as `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its id, which is that of its session."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""


def end(workers: Sequence[Started], number: int, timeout: float) -> list[int]:
    """Send a signal once to each process that runs, give it time, and kill what is left of its session.

    Only the process itself is told: data-loader workers that got the signal too would fail it while it saves.
    What runs in its session when it has ended is told then. What a process that ended well, and before, has
    left running stays.

    Args:
        workers: The processes.
        number: The signal.
        timeout: Seconds until SIGKILL.

    Returns:
        The ids of the processes that had to be killed.
    """
    ours = [worker for worker in workers if worker.poll() != 0]
    guard.send((worker.pid for worker in ours if worker.poll() is None), number)
    _wait(ours, number, time.monotonic() + timeout)
    late = [worker.pid for worker in ours if worker.poll() is None]
    kill(ours)
    deadline = time.monotonic() + _REAP_S
    while any(worker.poll() is None for worker in ours) and time.monotonic() < deadline:
        time.sleep(_PERIOD_S)
    return late


def kill(workers: Iterable[Started]) -> None:
    """SIGKILL to everything in the sessions of these processes."""
    workers = list(workers)
    guard.send((worker.pid for worker in workers if worker.poll() is None), signal.SIGKILL)
    sessions = {worker.pid for worker in workers}
    guard.send((process.pid for process in guard.processes() if process.session in sessions), signal.SIGKILL)


def _wait(workers: Sequence[Started], number: int, deadline: float) -> None:
    told: set[int] = set()
    while time.monotonic() < deadline:
        ended = {worker.pid for worker in workers if worker.poll() is not None}
        rest = {process.pid for process in guard.processes() if process.session in ended} if ended else set()
        if len(ended) == len(workers) and not rest:
            return
        guard.send(rest - told, number)
        told |= rest
        time.sleep(_PERIOD_S)


class Guard:
    """The process that ends what is left of the run where this one is killed.

    Args:
        folder: Of the run; it is the argument that `ps` shows.
    """

    def __init__(self, folder: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._lose(f"could not start: {error.strerror}")

    def watch(self, pids: Iterable[int]) -> None:
        """Tell it of processes, each the first of a session."""
        self._say("".join(f"{pid} {guard.started(pid)}\n" for pid in pids))

    def check(self) -> None:
        """Say once that the guard has ended; the run does not need it."""
        if self._process and (code := self._process.poll()) is not None:
            self._lose(f"was ended by signal {-code}" if code < 0 else f"ended with code {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say("done\n")
        if self._process:
            try:
                self._process.wait(_REAP_S)
            except subprocess.TimeoutExpired:  # it is stopped
                self._process.kill()
                self._process.wait()

    def _say(self, text: str) -> None:
        if self._process:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended: `check` says so
                os.write(self._process.stdin.fileno(), text.encode())

    def _lose(self, why: str) -> None:
        self._process = None
        console.note(
            f"the guard process of this run {why}: the run continues, but its processes stay if accel launch is killed "
            "(SIGKILL). In that case end them by hand."
        )
