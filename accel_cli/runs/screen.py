"""The loop that shows a view on the whole terminal, refreshes it and reads keys."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from accel_cli import console

__all__ = ["INTERVAL_S", "NO_CONTROLS", "Controls", "View", "parse_keys", "watch"]

INTERVAL_S = 0.5
_PAGE_MARGIN = 6
"""Lines of a screen that a page does not scroll: the header and the keys."""
_END = 1 << 20
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|[^\x1b]")
"""An escape sequence of a key, or a character."""
_NAMES: Mapping[bytes, str] = MappingProxyType(
    {
        **{b"\x1b%b%b" % (lead, letter): name for lead in (b"[", b"O") for letter, name in (
            (b"A", "up"), (b"B", "down"), (b"H", "home"), (b"F", "end"),
        )},
        b"\x1b[5~": "page up",
        b"\x1b[6~": "page down",
        b"\x1b[1~": "home",
        b"\x1b[4~": "end",
        b"k": "up",
        b"j": "down",
        b" ": "page down",
        b"g": "home",
        b"G": "end",
        b"h": "?",
    }
)  # fmt: skip
_KNOWN = frozenset({*_NAMES.values(), "q", "a", "?"})


@dataclass(frozen=True)
class View:
    """Content of the screen, and whether it is the last one."""

    body: Group
    is_final: bool


@dataclass(frozen=True)
class Controls:
    """What the keys change of a view."""

    shows_all: bool = False
    """True if many ranks are not folded."""
    shows_help: bool = False
    has_keys: bool = False
    """True on a terminal whose keys are read: a line at the end of the view names them."""
    first: int = 0
    """The first row of a table that does not fit, or line of the help."""

    def press(self, key: str, *, page: int) -> Controls:
        """Return the controls after a key."""
        if key == "?":
            return replace(self, shows_help=not self.shows_help, first=0)
        if key == "a":
            return replace(self, shows_all=not self.shows_all, first=0)
        moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -_END, "end": _END}
        return replace(self, first=min(_END, max(0, self.first + moves.get(key, 0))))


class _SuspendError(BaseException):
    """Ctrl-Z was pressed; no handler of other errors catches it."""


NO_CONTROLS = Controls()
"""Those of a view without keys."""


def watch(
    draw: Callable[[int, int, Controls], View],
    interval: float = INTERVAL_S,
    *,
    shows_all: bool = False,
) -> View | None:
    """Show views on the whole terminal until one is final, which is returned; `q` or Ctrl-C return None.

    Ctrl-Z suspends the process, and SIGTERM ends it, after the terminal is restored.
    """
    controls = Controls(shows_all=shows_all, has_keys=True)
    while True:
        try:
            with _raise_signals():
                return _show_views(draw, interval, controls)
        except KeyboardInterrupt:
            return None
        except _SuspendError:
            os.kill(os.getpid(), signal.SIGTSTP)


def _show_views(
    draw: Callable[[int, int, Controls], View], interval: float, controls: Controls
) -> View | None:
    screen = Console()
    with (
        _read_keys() as read,
        Live(
            console=screen, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live,
    ):
        while True:
            # Not `screen.size`: rich takes the variables COLUMNS and LINES for the size of a terminal.
            width, height = console.get_terminal_size(sys.stdout.fileno())
            screen.size = (width, height)
            view = draw(width, height, controls)
            if view.is_final:
                return view
            live.update(view.body, refresh=True)
            keys = read(interval)
            if keys is None:
                return None
            for key in keys:
                if key == "q":
                    return None
                controls = controls.press(key, page=max(1, height - _PAGE_MARGIN))


@contextmanager
def _raise_signals() -> Iterator[None]:
    """Raise SystemExit at SIGTERM and `_SuspendError` at Ctrl-Z, each once; restore the handlers at the end."""

    def handle(number: int, _: object) -> None:
        # A second signal must not interrupt the restoration of the terminal.
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _SuspendError if number == signal.SIGTSTP else SystemExit(128 + number)

    # An ignored signal, as after nohup, stays ignored.
    numbers = [
        number for number in (signal.SIGTSTP, signal.SIGTERM) if signal.getsignal(number) == signal.SIG_DFL
    ]
    try:
        for number in numbers:
            signal.signal(number, handle)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _wait(seconds: float) -> list[str]:
    """Wait without keys."""
    time.sleep(seconds)
    return []


@contextmanager
def _read_keys() -> Iterator[Callable[[float], list[str] | None]]:
    """Yield a function that waits for keys for some seconds, and returns their names; None at the end of the input."""
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios  # noqa: PLC0415 - not on Windows
    import tty  # noqa: PLC0415

    terminal = sys.stdin.fileno()
    before: list[Any] = termios.tcgetattr(terminal)

    def read(seconds: float) -> list[str] | None:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([terminal], [], [], remaining)
            if not ready:
                continue
            data = os.read(terminal, 64)
            if not data:
                return None
            if keys := parse_keys(data):
                return keys
        return []

    try:
        # Keys that were pressed before are read too.
        tty.setcbreak(terminal, termios.TCSADRAIN)
        yield read
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def parse_keys(data: bytes) -> list[str]:
    """Return the names of keys that a terminal has sent; others are left out."""
    names = (_NAMES.get(match[0], match[0].decode("latin-1").lower()) for match in _KEY.finditer(data))
    return [name for name in names if name in _KNOWN]
