"""Signal handlers of replicas: their scripts run beside the main thread, where Python lets nobody set one."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["HANDLED", "Handlers"]

HANDLED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""What the launcher passes on."""


class Handlers:
    """Takes the place of `signal.signal` and `signal.getsignal`, so that a script may call them on a replica.

    A handler of a replica is called in the main thread, as everywhere; where replicas are threads of one process, those
    of all of them. Until a script sets one, a signal ends the process: an exception in the main thread, such as
    KeyboardInterrupt, would not reach the script.

    Args:
        mine: The number of the replica that asks, among those of this process.
        failed: Called with what a handler raises, in place of raising it in the main thread.
    """

    def __init__(self, mine: Callable[[], int], failed: Callable[[BaseException], None]) -> None:
        self._mine = mine
        self._failed = failed
        self._set = signal.signal
        self._get = signal.getsignal
        self._own: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def install(self) -> None:
        """Take their place; in the main thread, before replicas start."""
        for number in HANDLED:
            if self._get(number) is not signal.SIG_IGN:
                self._set(number, self._came)
        signal.signal = self._signal  # type: ignore[assignment]
        signal.getsignal = self._getsignal  # type: ignore[assignment]

    def _signal(self, number: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return self._set(number, handler)
        if number not in HANDLED:
            raise ValueError(
                f"{signal.Signals(number).name}: on a replica of torch_xla, whose script does not run in the main thread, "
                f"only {', '.join(known.name for known in HANDLED)} can be handled"
            )
        if not callable(handler) and handler not in {signal.SIG_IGN, signal.SIG_DFL}:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        before = self._getsignal(number)
        self._own[number][self._mine()] = handler
        return before

    def _getsignal(self, number: int) -> Any:
        if number not in HANDLED or threading.current_thread() is threading.main_thread():
            return self._get(number)
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        return self._own[number].get(self._mine(), default)

    def _came(self, number: int, frame: FrameType | None) -> None:
        handlers = list(self._own[number].values())
        if not any(callable(handler) or handler is signal.SIG_IGN for handler in handlers):
            self._set(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        for handler in handlers:
            if callable(handler) and handler is not signal.default_int_handler:
                try:
                    handler(number, frame)
                except BaseException as error:  # noqa: BLE001 - SystemExit too: it would end nothing in this thread
                    self._failed(error)
