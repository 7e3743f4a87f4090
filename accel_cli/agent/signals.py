"""What the launcher does when a signal comes: it ends the run in order, or passes the signal on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from torch.distributed.elastic.multiprocessing import SignalException
from typing_extensions import Self

from accel_cli import console
from accel_cli.agent import guard
from accel_cli.agent.ending import Orphans, Started, kill

__all__ = ["ENDING", "PASSED_ON", "Signals"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They end the run: every process gets the same signal, and time to save."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Every process gets them, and the run goes on."""
_URGENT = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
"""A second of these ends the run at once; SIGHUP and SIGTERM come together where a session is closed."""
_ECHO_S = 0.1
"""Within this time a second signal is the same one: `timeout`, and wrappers on a terminal, send it twice."""


class Signals:
    """The handlers of the launcher while a run is under way.

    Args:
        shutdown_timeout: Seconds the processes have after the first signal, to say it.
    """

    def __init__(self, *, shutdown_timeout: int) -> None:
        self.workers: Sequence[Started] = ()
        """The processes that run now."""
        self.orphans: Orphans | None = None
        """What they have started in sessions of their own."""
        self._timeout = shutdown_timeout
        self._first: signal.Signals | None = None
        self._since = 0.0
        self._held = False
        self._waiting: list[int] = []
        self._before = {number: signal.getsignal(number) for number in (*ENDING, *PASSED_ON)}

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
        for numbers, handler in ((ENDING, self._end), (PASSED_ON, self._pass_on)):
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
                kill(self.workers, self.orphans)
            return
        self._first, self._since = came, now
        if self._failed():
            # The others are being ended already, and what failed is still to be reported.
            kill(self.workers, self.orphans)
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
        guard.send((worker.pid for worker in self.workers if worker.poll() is None), number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
