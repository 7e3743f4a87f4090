"""Signal handlers of replicas: their scripts run beside the main thread, where Python lets nobody set one."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

from accel_cli.forkserver.process import SIGNALS
from accel_cli.replica.threads import Threads

__all__ = ["Handlers"]


class Handlers:
    """Takes the place of `signal.signal` and `signal.getsignal`, so that a script may call them on a replica.

    A handler of a replica is called in the main thread, as everywhere; where replicas are threads of one process, those
    of all of them. Until a script sets one, a signal ends the process: an exception in the main thread, such as
    KeyboardInterrupt, would not reach the script.

    Args:
        threads: The replicas of this process.
        failed: Called with the number of a replica whose handler raised, and what.
    """

    def __init__(self, threads: Threads, failed: Callable[[int, BaseException], None]) -> None:
        self._threads = threads
        self._failed = failed
        self._set = signal.signal
        self._get = signal.getsignal
        self._own: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def install(self) -> None:
        """Take their place; in the main thread, before replicas start."""
        for number in SIGNALS:
            if self._get(number) is not signal.SIG_IGN:
                self._set(number, self._came)
        signal.signal = self._signal  # type: ignore[assignment]
        signal.getsignal = self._getsignal  # type: ignore[assignment]

    def _signal(self, number: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return self._set(number, handler)
        if number not in SIGNALS:
            raise ValueError(
                f"{signal.Signals(number).name}: on a replica of torch_xla, whose script does not run in the main thread, "
                f"only {', '.join(known.name for known in SIGNALS)} can be handled"
            )
        if not callable(handler) and handler not in {signal.SIG_IGN, signal.SIG_DFL}:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        before = self._getsignal(number)
        self._own[number][self._threads.mine()] = handler
        return before

    def _getsignal(self, number: int) -> Any:
        if number not in SIGNALS or threading.current_thread() is threading.main_thread():
            return self._get(number)
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        return self._own[number].get(self._threads.mine(), default)

    def _came(self, number: int, frame: FrameType | None) -> None:
        own = {
            replica: handler
            for replica, handler in self._own[number].items()
            if handler is not signal.SIG_DFL
        }
        if all(handler is signal.default_int_handler for handler in own.values()):
            self._set(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raised = [
            found
            for replica, handler in own.items()
            if (found := self._called(replica, handler, number, frame))
        ]
        if raised:
            self._failed(*min(raised, key=lambda found: isinstance(found[1], SystemExit)))

    def _called(
        self, replica: int, handler: Any, number: int, frame: FrameType | None
    ) -> tuple[int, BaseException] | None:
        """What a handler raised, and on which replica: it would end nothing in this thread."""
        if callable(handler) and handler is not signal.default_int_handler:
            try:
                with self._threads.acting_for(replica):
                    handler(number, frame)
            except BaseException as error:  # noqa: BLE001 - SystemExit too
                return replica, error
        return None
