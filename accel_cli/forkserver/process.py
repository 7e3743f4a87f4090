"""What a forked process does so that nothing in it tells of the fork."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing import current_process

from accel_cli.forkserver import loaded

__all__ = ["SIGNALS", "detach", "settle"]

SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""What a launcher handles, and a process that it executes therefore finds as Python's defaults."""


def detach(mask: set[int | signal.Signals]) -> None:
    """A session of its own, and signals as after exec; what came before waits until this is done."""
    os.setsid()
    for number in SIGNALS:
        # What is ignored stays so after exec.
        if signal.getsignal(number) is not signal.SIG_IGN:
            default = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def settle(environ: Mapping[str, str]) -> None:
    """The environment, what every process draws for itself, and torch as good as not imported."""
    _set(environ)
    _draw_afresh()
    loaded.hide("torch", environ)


def _draw_afresh() -> None:
    """What every process draws for itself when it starts; Python's own generator does at a fork too."""
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    # With it a process knows its own children.
    current_process().authkey = os.urandom(32)


def _set(environ: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
