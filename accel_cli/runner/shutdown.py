"""Shutdown of a run: all that happens between Ctrl-C and the end of the last rank, in this order.

1. Ranks lead sessions, so that Ctrl-C on the terminal reaches the launcher only. It calls `SignalHandlers._terminate`,
   which raises `SignalException` in the main thread; while processes are being started, `defer` raises it after that.
2. torch's agent catches the exception and calls `ElasticAgent._shutdown`. That publishes the reason for other nodes, prints
   the line of `SignalHandlers.announce`, and closes the processes.
3. `WorkerProcesses.close` calls `end_processes`: each running rank gets the same signal once, and `shutdown_timeout` seconds
   to save and exit. Processes that a rank leaves in its session, such as data-loader workers, get the signal once that
   rank has exited, and orphans in other sessions once all ranks have exited.
4. A second Ctrl-C in this time calls `kill_sessions` from the handler: SIGKILL to all sessions, and no further waiting.
   Otherwise `end_processes` sends SIGKILL to the rest after the timeout, and the ids of late ranks are printed.
5. All ranks have ended. The agent copies the last output and completes the logs. The exception leaves the agent, the guard
   process ends, the run folder gets the exit code, and the launcher exits with 128 + the number of the signal.

If the processes are being ended already, for another reason, the signal kills them at once; after the failure of a rank, that
is reported with its exit code. If the launcher itself is killed (SIGKILL), or ends while a rank runs, the guard process
(`guard.py`) ends the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self, TypeAlias

from torch.distributed.elastic.multiprocessing import SignalException

from accel_cli import console
from accel_cli.errors import AccelError
from accel_cli.runner import guard
from accel_cli.runner.forkserver import adopt_orphans

__all__ = ["GuardProcess", "Orphans", "SignalHandlers", "end_processes", "kill_sessions"]


_POLL_S = 0.05
_REAP_S = 5.0
_MAX_STARTS = 3
"""How often the guard is started."""
_KILLING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
"""A second of these kills the ranks. Not SIGHUP: it comes together with SIGTERM when a session is closed."""
_DUPLICATE_S = 0.1
"""A second signal within this time is a copy of the first: `timeout`, and wrappers on a terminal, send it twice."""


Worker: TypeAlias = "subprocess.Popen[bytes]"
"""A process that leads a session."""


def _get_running(workers: Iterable[Worker]) -> list[int]:
    return [worker.pid for worker in workers if worker.poll() is None]


class SignalHandlers:
    """Signal handlers of the launcher during a run; `shutdown_timeout` is shown to the user."""

    def __init__(self, *, shutdown_timeout: int) -> None:
        self.workers: Sequence[Worker] = ()
        self.orphans: Orphans | None = None
        self.received: signal.Signals | None = None
        """The first signal that ends the run."""
        self._received_at = 0.0
        self._shutdown_timeout = shutdown_timeout
        self._is_deferring = False
        self._is_ending = self._must_raise = False
        self._deferred: list[int] = []
        self._before = {number: signal.getsignal(number) for number in guard.HANDLED_SIGNALS}

    def __enter__(self) -> Self:
        for number, before in self._before.items():
            # `nohup` and `&` ignore signals for the whole run.
            if before is not signal.SIG_IGN:
                ends_run = number in guard.TERMINATING_SIGNALS
                signal.signal(number, self._terminate if ends_run else self._forward)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was installed before Python started, and that it cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _terminate(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal that ends the run."""
        now, received = time.monotonic(), signal.Signals(number)
        if self.received is not None:
            if {received, self.received} <= _KILLING_SIGNALS and now - self._received_at > _DUPLICATE_S:
                kill_sessions(self.workers, self.orphans)
            return
        self.received, self._received_at = received, now
        if any(worker.poll() not in {None, 0} for worker in self.workers):
            # A rank has failed: the others are being ended, and the failure is still to be reported.
            kill_sessions(self.workers, self.orphans)
        elif self._is_ending:
            # An exception would leave those that do not exit by themselves.
            self._must_raise = True
            kill_sessions(self.workers, self.orphans)
        elif not self._is_deferring:
            raise SignalException(f"signal {received.name}", received)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on to every rank."""
        if self._is_deferring:
            self._deferred.append(number)
            return
        guard.send_signal(_get_running(self.workers), number)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Defer signals while processes are being started: one that ends the run is raised at the end."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        while self._deferred:
            self._forward(self._deferred.pop(0), None)
        if self.received is not None:
            raise SignalException(f"signal {self.received.name}", self.received)

    @contextmanager
    def end_processes(self) -> Iterator[None]:
        """While the processes are being ended, let a first signal kill them, and raise it once they have ended."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False
        if self._must_raise and self.received is not None:
            self._must_raise = False
            raise SignalException(f"signal {self.received.name}", self.received)

    def stop_raising(self) -> None:
        """Do not raise for a first signal from now on: all ranks have ended, and the run is being reported."""
        self._is_deferring = True

    def announce(self) -> None:
        """Print what follows a signal; not in the handler, which may have interrupted a print."""
        if self.received is not None and _get_running(self.workers):
            name = "Ctrl-C (SIGINT)" if self.received is signal.SIGINT else self.received.name
            console.note(
                f"received {name}: the processes have {self._shutdown_timeout} s to exit; a second signal kills them"
            )


def end_processes(workers: Sequence[Worker], number: int, timeout: float, orphans: Orphans) -> list[int]:
    """Send a signal once to each running process, wait until it exits, and kill the rest of its session.

    Only the process itself gets the signal at first: data-loader workers that get it too would fail it while it saves.
    Processes that a rank left running when it exited with 0 are spared. Return the ids of the processes that did not exit
    within `timeout` seconds.
    """
    targets = [worker for worker in workers if worker.poll() != 0]
    if not targets:
        return []
    folders = guard.find_socket_folders({worker.pid for worker in targets})
    guard.send_signal(_get_running(targets), number)
    _wait_for_sessions(workers, targets, number, time.monotonic() + timeout, orphans)
    late = _get_running(targets)
    kill_sessions(targets)
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        remaining = orphans.find(workers)
        if not remaining and not _get_running(targets):
            break
        guard.send_signal(remaining, signal.SIGKILL)
        time.sleep(_POLL_S)
    guard.remove_socket_folders(folders)
    return late


def _wait_for_sessions(
    workers: Sequence[Worker],
    targets: Sequence[Worker],
    number: int,
    deadline: float,
    orphans: Orphans,
) -> None:
    """Wait until the sessions of the targets are empty, and signal what each target has left running."""
    signalled: set[int] = set()
    while time.monotonic() < deadline and not orphans.skip_waiting:
        ended = {worker.pid for worker in targets if worker.poll() is not None}
        processes = guard.list_processes() if ended else []
        remaining = {process.pid for process in processes if process.session in ended}
        if len(ended) == len(targets):
            # Not earlier: an orphan may serve a rank that is still saving.
            remaining |= orphans.find(workers)
            if not remaining:
                return
        guard.send_signal(remaining - signalled, number)
        signalled |= remaining
        time.sleep(_POLL_S)


def kill_sessions(workers: Sequence[Worker], orphans: Orphans | None = None) -> None:
    """Send SIGKILL to every process in the sessions of the workers; with orphans, wait for no process any more."""
    running = _get_running(workers)
    guard.send_signal(running, signal.SIGKILL)
    sessions = {worker.pid for worker in workers}
    processes = guard.list_processes()
    guard.send_signal((process.pid for process in processes if process.session in sessions), signal.SIGKILL)
    if orphans:
        orphans.skip_waiting = True
        orphans.killed_workers |= {*running}


class Orphans:
    """Processes in sessions of their own whose parents have ended: daemons, and children of `start_new_session`.

    The launcher is their subreaper (`PR_SET_CHILD_SUBREAPER`): the kernel makes them its children, so that it can find
    and end them. It does not find them on systems without lists of children (CONFIG_PROC_CHILDREN, Linux).
    """

    def __init__(self) -> None:
        self.skip_waiting = False
        """True after a second signal: do not wait any more."""
        self.killed_workers: set[int] = set()
        """The workers that the signal killed which set `skip_waiting`."""
        self._known: set[int] = set()
        self._succeeded: set[int] = set()
        # The guard, the fork server, and children that this process had before it became a launcher.
        self._spared = _get_children()
        adopt_orphans()

    def update(self, workers: Iterable[Worker]) -> set[int]:
        """Reap orphans that have ended, spare those of workers that exited with 0, and return the sessions of new ones."""
        codes = {worker.pid: worker.poll() for worker in workers}
        children = _get_children()
        orphans = {pid for pid in children - self._spared - codes.keys() if not _reap(pid)}
        new, self._known = orphans - self._known, orphans
        succeeded = {pid for pid, code in codes.items() if code == 0}
        self._spared &= children
        if succeeded - self._succeeded:
            self._spared |= new
        self._succeeded = succeeded
        sessions = set()
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                sessions.add(os.getsid(pid))
        return sessions

    def spare(self, pid: int) -> None:
        """Leave a child of this process alone."""
        self._spared.add(pid)

    def find(self, workers: Iterable[Worker]) -> set[int]:
        """Find orphans and their descendants."""
        codes = {worker.pid: worker.poll() for worker in workers}
        excluded = self._spared | codes.keys()
        processes = {process.pid: process for process in guard.list_processes()}
        orphans = set()
        for process in processes.values():
            root = process
            while root.pid not in excluded and root.parent != os.getpid() and root.parent in processes:
                root = processes[root.parent]
            is_orphan = root.parent == os.getpid() and root.pid not in excluded
            if is_orphan and codes.get(process.session) != 0:
                orphans.add(process.pid)
        return orphans


def _get_children() -> set[int]:
    """Return the children of this process, including zombies."""
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


class GuardProcess:
    """The guard process, which ends the ranks of a run folder if this process is killed, or ends while they run.

    Args:
        folder: The run folder.
        signals: Has the ranks of this node.
    """

    def __init__(self, folder: Path, signals: SignalHandlers) -> None:
        self._folder, self._signals = folder, signals
        self._watched: list[str] = []
        self._starts = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes] | None:
        self._starts += 1
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._warn(f"could not start: {error.strerror}")
            return None

    def watch(self, pids: Iterable[int]) -> None:
        """Add the sessions that these processes lead."""
        lines = [f"{pid} {guard.get_start_time(pid)}\n" for pid in pids]
        self._watched += lines
        self._send("".join(lines))

    def check(self) -> None:
        """Start the guard again if it has ended; warn after a few times. The run continues."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        end = f"was terminated by signal {-code}" if code < 0 else f"exited with code {code}"
        self._process = self._start() if self._starts < _MAX_STARTS else None
        if self._process is None:
            self._warn(end)
            return
        if self._signals.orphans:
            self._signals.orphans.spare(self._process.pid)
        self._send("".join(self._watched))
        console.note(f"the guard process of this run {end}, and was started again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_expected = kind is None or issubclass(kind, (AccelError, SignalException))
        is_done = is_expected and not _get_running(self._signals.workers)
        if is_done:
            self._send("done\n")
        if self._process:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_REAP_S if is_done else 2 * guard.GRACE_S)
            except subprocess.TimeoutExpired:  # it is stopped, or still ends the ranks
                if is_done:
                    self._process.kill()
                    self._process.wait()

    def _send(self, text: str) -> None:
        if self._process and text:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended, which `check` reports
                os.write(self._process.stdin.fileno(), text.encode("ascii"))

    def _warn(self, problem: str) -> None:
        console.note(
            f"the guard process of this run {problem}: the run continues, but if accel launch is killed (SIGKILL), its "
            "processes stay. In that case end them by hand."
        )
