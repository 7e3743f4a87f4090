"""Signals that end the launcher before it starts processes: while it imports its modules and torch.

The kernel discards signals to process 1 of a container for which it has no handler, so that `docker stop` in the first seconds
would be lost. The launcher executes another interpreter, where a handler is missing again: signals are blocked meanwhile, and
the kernel keeps them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["block_signals", "exit_on_signals", "raise_on_ctrl_c"]

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)


def exit_on_signals() -> None:
    """Exit at once with 128 + n at signal n, also if it has arrived since `block_signals`; ignored signals stay ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def raise_on_ctrl_c() -> None:
    """Raise KeyboardInterrupt at SIGINT again, for commands that clean up; ignored signals stay ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def block_signals() -> Iterator[None]:
    """Block the signals until `exit_on_signals` in the program that replaces this one, or until that has failed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
