"""The progress sinks of a launch: each is called from a thread of its own, so that none delays the run or another one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from accel_cli.errors import UsageError
from accel_cli.planning.plan import AgentSettings
from accel_cli.runs.progress import ProgressSink, RunProgress, RunState
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.sinks import PROGRESS_SINKS

__all__ = ["ProgressSinks"]

_READ_ERRORS = (OSError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of files that other programs have changed; not those that a signal raises, which ends the run."""
_Result = TypeVar("_Result")

_WAIT_S = 5.0
"""The most seconds that a launch waits at its start until the sinks are open, and at its end until they are closed."""


class _SinkThread(threading.Thread):
    """The thread of a sink, in which all of its code runs: the main thread must be free for signals.

    Args:
        name: The name of the sink.
        launch: The arguments of `ProgressSink.create`.
        run: The folder of the run.
        is_per_node: Start only a sink that is per node, or only one that is not; None starts either.
    """

    def __init__(
        self,
        name: str,
        launch: tuple[AgentSettings, Mapping[str, str]],
        run: RunFolder,
        *,
        is_per_node: bool | None,
    ) -> None:
        # A daemon: the launcher exits although a sink waits.
        super().__init__(name=name, daemon=True)
        self.is_per_node = is_per_node
        self._launch, self._run_folder = launch, run
        self._has_opened, self._is_ending = threading.Event(), threading.Event()
        """The first is set once it is known whether the sink is open."""
        self._is_open = False
        self._outcome: RunProgress | None = None
        self._refusal: UsageError | None = None
        self._warning = ""
        self._lines: deque[str] = deque()
        """The lines that the sink has returned, which the launcher prints."""
        self._has_failed = self._has_failed_to_write = False

    def run(self) -> None:
        """Open the sink, write until the run ends, and close it."""
        sink, folder = self._call("create", self._create), self._run_folder
        if sink is not None:
            self._call("open", lambda: sink.open(folder))
            self._is_open = not self._has_failed
        self._has_opened.set()
        if sink is None or not self._is_open:
            return
        interval = sink.interval_s
        while interval is not None and not self._has_failed and not self._is_ending.is_set():
            self._print(self._call("write", lambda: sink.write(RunProgress.read(folder))))
            self._is_ending.wait(interval)
        self._is_ending.wait()
        if outcome := self._outcome:
            self._print(self._call("close", lambda: sink.close(outcome)))

    @property
    def is_off(self) -> bool:
        """True if there is no sink that has to be closed."""
        return self._has_opened.is_set() and not self._is_open

    def end(self, outcome: RunProgress) -> None:
        """Let the thread close the sink."""
        self._outcome = outcome
        self._is_ending.set()

    def wait_until_open(self, deadline: float) -> None:
        """Wait until the sink is open, at most until a time of the monotonic clock.

        Raises:
            UsageError: It cannot be opened, and the user has to correct something.
        """
        if self._has_opened.wait(max(0.0, deadline - time.monotonic())) and self._refusal:
            refusal, self._refusal = self._refusal, None
            raise refusal

    def take_warning(self) -> str:
        """Return the text about the first exception, once; empty without one."""
        refusal, self._refusal = self._refusal, None
        if refusal:  # it came too late to refuse the launch
            return _format_failure(self.name, "open", refusal)
        warning, self._warning = self._warning, ""
        return warning

    def take_lines(self) -> list[str]:
        """Return the lines of the sink since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def _print(self, line: str | None) -> None:
        if line:
            self._lines.append(line)

    def _create(self) -> ProgressSink | None:
        kind = PROGRESS_SINKS[self.name]
        return kind.create(*self._launch) if self.is_per_node in {None, kind.is_per_node} else None

    def _call(self, method: str, call: Callable[[], _Result]) -> _Result | None:
        """Call a method of the sink; return None after an exception."""
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - also `sys.exit` in a sink of another package
            if method in {"create", "open"} and isinstance(error, UsageError):
                self._refusal = error
            elif method == "write" and isinstance(error, OSError):
                if not self._has_failed_to_write:
                    self._warning = _format_failure(self.name, method, error)
                    self._has_failed_to_write = True
                return None
            elif not self._has_failed:
                self._warning = _format_failure(self.name, method, error)
            self._has_failed = True
            return None


class ProgressSinks:
    """The progress sinks of a launch, which the main thread opens and closes.

    On several nodes, those that are not per node are open on the one that leads: the node of rank 0, whose folder has the logged
    metrics. After a restart another node may lead.

    Args:
        run: The folder of the run.
        settings: The settings of the launch.
        environ: Its environment.
    """

    def __init__(self, run: RunFolder, settings: AgentSettings, environ: Mapping[str, str]) -> None:
        self._run, self._settings, self._environ = run, settings, environ
        self._threads: list[_SinkThread] = []
        self._warnings: list[str] = []
        self._lines: list[str] = []
        self._shown: set[str] = set()
        """The warnings that were taken: a sink that cannot be imported fails again where the node leads."""
        self._is_leading = settings.is_single_node

    def open(self) -> None:
        """Open the sinks of this node, and those of the run if it has no other node.

        Raises:
            UsageError: The user has to correct something before the run can start.
        """
        self._start(is_per_node=None if self._is_leading else True)

    def lead(self, *, is_leading: bool) -> None:
        """Open the sinks of the run if this node leads it from now on; close them if another one does.

        Raises:
            UsageError: As for `open`.
        """
        if is_leading == self._is_leading:
            return
        self._is_leading = is_leading
        if is_leading:
            self._start(is_per_node=False)
        else:
            self._end([thread for thread in self._threads if not thread.is_per_node], self._read_last())

    @property
    def is_leading(self) -> bool:
        """True if this node has the sinks of the run: that of rank 0, whose folder has the logged metrics."""
        return self._is_leading

    def take_lines(self) -> list[str]:
        """Return the lines of the sinks since the last call, and the texts about what has failed."""
        lines, self._lines = (
            [*self._lines, *(line for each in self._threads for line in each.take_lines())],
            [],
        )
        return [*lines, *self._take_warnings()]

    def _take_warnings(self) -> list[str]:
        texts = [*self._warnings, *(thread.take_warning() for thread in self._threads)]
        warnings = [text for text in dict.fromkeys(texts) if text and text not in self._shown]
        self._warnings = []
        self._shown.update(warnings)
        return warnings

    def close(self, exit_code: int, *, is_stopped: bool) -> list[str]:
        """Close all sinks at the end of the run, once, and return their last lines, and the texts about what has failed.

        Args:
            exit_code: The exit code of the launch.
            is_stopped: True if a signal to the launcher has ended the run.
        """
        if self._threads:
            state: RunState = "stopped" if is_stopped else "failed" if exit_code else "succeeded"
            self._end(self._threads, replace(self._read_last(), state=state, exit_code=exit_code))
        return self.take_lines()

    def _start(self, *, is_per_node: bool | None) -> None:
        """Start the threads of sinks, and wait until those that are switched on are open."""
        launch = self._settings, self._environ
        started = [_SinkThread(name, launch, self._run, is_per_node=is_per_node) for name in PROGRESS_SINKS]
        deadline = time.monotonic() + _WAIT_S
        try:
            for thread in started:
                thread.start()
            for thread in started:
                thread.wait_until_open(deadline)
        finally:
            self._warnings += [thread.take_warning() for thread in started if thread.is_off]
            self._threads += [thread for thread in started if not thread.is_off and thread.ident]

    def _end(self, threads: Sequence[_SinkThread], outcome: RunProgress) -> None:
        """Close the sinks of some threads, and wait a few seconds for them."""
        for thread in threads:
            thread.end(outcome)
        deadline = time.monotonic() + _WAIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._lines += [line for thread in threads for line in thread.take_lines()]
        self._warnings += [thread.take_warning() for thread in threads]
        self._warnings += [
            f"the progress sink {thread.name!r} has not ended within {_WAIT_S:.0f} s: its last values may be missing."
            for thread in threads
            if thread.is_alive()
        ]
        self._threads = [thread for thread in self._threads if thread not in threads]

    def _read_last(self) -> RunProgress:
        """Read the progress at the end; without a folder that can be read, there is no more than its name."""
        try:
            return RunProgress.read(self._run)
        except _READ_ERRORS:
            return RunProgress(time.time(), self._run.path.name, "starting")


def _format_failure(name: str, method: str, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    reason = reason.rstrip(".")
    if method == "write" and isinstance(error, OSError):
        return f"the progress sink {name!r} failed to write: {reason}. It writes again at the next interval."
    return f"the progress sink {name!r} is off, since its {method}() failed: {reason}."
