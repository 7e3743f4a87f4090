"""How the processes of a run are ended: a signal once to each, time to save, and nothing left of their sessions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from torch.distributed.elastic.multiprocessing import SignalException
from typing_extensions import Self

from accel_cli import console
from accel_cli.runner import guard

__all__ = [
    "FORWARDED_SIGNALS",
    "TERMINATING_SIGNALS",
    "GuardProcess",
    "Orphans",
    "SessionLeader",
    "SignalHandlers",
    "end_processes",
    "kill_sessions",
]


_PERIOD_S = 0.05
_REAP_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class SessionLeader(Protocol):
    """A process that leads a session of its own, as `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its id, which is that of its session."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""


def end_processes(
    workers: Sequence[SessionLeader], number: int, timeout: float, orphans: Orphans
) -> list[int]:
    """Send a signal once to each process that runs, give it time, and kill what is left of its session.

    Only the process itself is told: data-loader workers that got the signal too would fail it while it saves.
    What runs in its session when it has ended is told then, and orphans when all have ended. What a process that
    ended well, and before, has left running stays.

    Args:
        workers: The processes.
        number: The signal.
        timeout: Seconds until SIGKILL.
        orphans: What they have started in sessions of their own.

    Returns:
        The ids of the processes that had to be killed.
    """
    ours = [worker for worker in workers if worker.poll() != 0]
    if not ours:
        return []
    guard.send_signal((worker.pid for worker in ours if worker.poll() is None), number)
    _wait_for_sessions(workers, ours, number, time.monotonic() + timeout, orphans)
    late = [worker.pid for worker in ours if worker.poll() is None]
    kill_sessions(ours)
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        left = orphans.find(workers)
        if not left and all(worker.poll() is not None for worker in ours):
            break
        guard.send_signal(left, signal.SIGKILL)
        time.sleep(_PERIOD_S)
    return late


def kill_sessions(workers: Iterable[SessionLeader], orphans: Orphans | None = None) -> None:
    """SIGKILL to everything in the sessions of these processes; orphans are not waited for from then on."""
    workers = list(workers)
    guard.send_signal((worker.pid for worker in workers if worker.poll() is None), signal.SIGKILL)
    sessions = {worker.pid for worker in workers}
    guard.send_signal(
        (process.pid for process in guard.list_processes() if process.session in sessions), signal.SIGKILL
    )
    if orphans:
        orphans.urgent = True


def _wait_for_sessions(
    workers: Sequence[SessionLeader],
    ours: Sequence[SessionLeader],
    number: int,
    deadline: float,
    orphans: Orphans,
) -> None:
    told: set[int] = set()
    while time.monotonic() < deadline and not orphans.urgent:
        ended = {worker.pid for worker in ours if worker.poll() is not None}
        rest = (
            {process.pid for process in guard.list_processes() if process.session in ended}
            if ended
            else set()
        )
        if len(ended) == len(ours):
            # Not before: one may serve a process that still saves.
            rest |= orphans.find(workers)
            if not rest:
                return
        guard.send_signal(rest - told, number)
        told |= rest
        time.sleep(_PERIOD_S)


class Orphans:
    """Processes in sessions of their own, whose parents have ended: daemons, and children of `start_new_session`.

    The launcher is their subreaper (`PR_SET_CHILD_SUBREAPER`): the kernel makes them its children, so that it can find
    and end them. Where the kernel lists no children (CONFIG_PROC_CHILDREN, Linux) they are not found.
    """

    def __init__(self) -> None:
        self.urgent = False
        """Whether nothing is waited for any more."""
        self._known: set[int] = set()
        self._ended_well: set[int] = set()
        # The guard, the fork server, and what this process had before it became a launcher.
        self._spared = _children()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def update(self, workers: Iterable[SessionLeader]) -> set[int]:
        """Reap orphans that have ended, and spare those that a process leaves which ends well.

        Returns:
            The sessions of those that are new.
        """
        codes = {worker.pid: worker.poll() for worker in workers}
        children = _children()
        orphans = {pid for pid in children - self._spared - codes.keys() if not _reap(pid)}
        new, self._known = orphans - self._known, orphans
        ended_well = {pid for pid, code in codes.items() if code == 0}
        self._spared &= children
        if ended_well - self._ended_well:
            self._spared |= new
        self._ended_well = ended_well
        return {session for pid in new if (session := _session_of(pid))}

    def find(self, workers: Iterable[SessionLeader]) -> set[int]:
        """Find the orphans and their descendants; those of processes that run are not among them."""
        codes = {worker.pid: worker.poll() for worker in workers}
        kept = self._spared | codes.keys()
        running = {process.pid: process for process in guard.list_processes()}
        found = set()
        for process in running.values():
            root = process
            while root.pid not in kept and root.parent != os.getpid() and root.parent in running:
                root = running[root.parent]
            is_orphan = root.parent == os.getpid() and root.pid not in kept
            if is_orphan and codes.get(process.session) != 0:
                found.add(process.pid)
        return found


def _children() -> set[int]:
    """Return the children of this process, also those that have ended and were not waited for."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return set()


def _reap(pid: int) -> bool:
    """Return True if a child has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _session_of(pid: int) -> int:
    """Return the session of a process; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


class GuardProcess:
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
        if lines := "".join(f"{pid} {guard.get_start_time(pid)}\n" for pid in pids):
            self._say(lines)

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


TERMINATING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They end the run: every process gets the same signal, and time to save."""
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Every process gets them, and the run goes on."""
_URGENT = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
"""A second of these ends the run at once; SIGHUP and SIGTERM come together where a session is closed."""
_ECHO_S = 0.1
"""Within this time a second signal is the same one: `timeout`, and wrappers on a terminal, send it twice."""


class SignalHandlers:
    """The handlers of the launcher while a run is under way.

    Args:
        shutdown_timeout: Seconds the processes have after the first signal, to say it.
    """

    def __init__(self, *, shutdown_timeout: int) -> None:
        self.workers: Sequence[SessionLeader] = ()
        """The processes that run now."""
        self.orphans: Orphans | None = None
        """What they have started in sessions of their own."""
        self._timeout = shutdown_timeout
        self._first: signal.Signals | None = None
        self._since = 0.0
        self._held = False
        self._waiting: list[int] = []
        self._before = {
            number: signal.getsignal(number) for number in (*TERMINATING_SIGNALS, *FORWARDED_SIGNALS)
        }

    @property
    def first(self) -> signal.Signals | None:
        """The first signal that ends the run, if one came."""
        return self._first

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _in_main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a signal waits: what is begun is not left half done.

        Raises:
            SignalException: One came.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        while self._waiting:
            self._pass_on(self._waiting.pop(0), None)
        if self._first is not None:
            self._raise()

    def finish(self) -> None:
        """From now on a first signal is only noted: nothing runs any more, and the report is under way."""
        self._held = True

    def _install(self) -> None:
        if not _in_main_thread():
            return
        for numbers, handler in ((TERMINATING_SIGNALS, self._end), (FORWARDED_SIGNALS, self._pass_on)):
            for number in numbers:
                # `nohup` and `&` ask for signals to be ignored, and mean the whole run.
                ignored = self._before[number] is signal.SIG_IGN
                signal.signal(number, signal.SIG_IGN if ignored else handler)

    def announce(self) -> None:
        """Say what happens now that a signal came; no handler prints, it may have interrupted a print."""
        if self._first is not None and any(worker.poll() is None for worker in self.workers):
            name = "Ctrl-C (SIGINT)" if self._first is signal.SIGINT else self._first.name
            console.note(
                f"{name}: the processes have {self._timeout} s to end; a second signal ends them at once"
            )

    def _end(self, number: int, _frame: FrameType | None) -> None:
        now, came = time.monotonic(), signal.Signals(number)
        if self._first is not None:
            if {came, self._first} <= _URGENT and now - self._since > _ECHO_S:
                kill_sessions(self.workers, self.orphans)
            return
        self._first, self._since = came, now
        if self._failed():
            # The others are being ended already, and what failed is still to be reported.
            kill_sessions(self.workers, self.orphans)
        elif not self._held:
            self._raise()

    def _failed(self) -> bool:
        return any(worker.poll() not in {None, 0} for worker in self.workers)

    def _raise(self) -> None:
        assert self._first is not None
        raise SignalException(f"signal {self._first.name}", self._first)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._held:
            self._waiting.append(number)
            return
        guard.send_signal((worker.pid for worker in self.workers if worker.poll() is None), number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
