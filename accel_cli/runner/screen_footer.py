"""Lines that stay at the bottom of the terminal while the output of a run scrolls above them (`--live`)."""

from __future__ import annotations

import io
import math
import os
import re
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from typing_extensions import Self, override

from accel_cli import console
from accel_cli.runner.output import get_file_identity, write_all
from accel_cli.runs.run_dir import RunFolder

__all__ = ["ScreenFooter", "create_footer"]

_INTERVAL_S = 0.5
_TERMINAL = 2
"""The footer is on the terminal of stderr."""
_MIN_OUTPUT_LINES = 2
"""Lines of the screen that the footer leaves to the output."""
_CURSOR_MOVES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[78cDEHM])")
"""All escape sequences but those of colours."""
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_ERASE_BELOW, _ERASE_LINE = b"\r\x1b[J", b"\x1b[2K"
_LOCAL_FLAGS = 3
_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a table about unexpected data; a signal raises an exception too, which ends the run."""


class ScreenFooter:
    """Draws lines below the output of a run, and moves them down with each line of output.

    The cursor rests at the beginning of the first line of the footer, so that erasing all below it removes the footer, also
    after the terminal has changed its size. The main thread draws the footer, and every thread that writes output erases
    and redraws it. While the footer is used, `sys.stderr` writes through it.

    Args:
        build: Returns the lines for a number of columns and lines.
    """

    def __init__(self, build: Callable[[int, int], list[str]]) -> None:
        self._build = build
        self._lock = threading.RLock()
        self._lines: list[bytes] = []
        self._size = (0, 0)
        self._is_drawn = False
        self._next_refresh = 0.0
        self._partial = b""
        """Output without a newline, which is held until its end."""
        self._identity = get_file_identity(_TERMINAL)
        self._stderr: Any = None
        self._terminal_mode: list[Any] | None = None

    def __enter__(self) -> Self:
        self._stderr, sys.stderr = sys.stderr, _FooterStream(self, sys.stderr)
        # Echoed keys would move the footer.
        with suppress(OSError, termios.error):
            if _is_foreground(0):
                self._terminal_mode = termios.tcgetattr(0)
                self._set_local_flags(self._terminal_mode[_LOCAL_FLAGS] & ~termios.ECHO)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(OSError):
            self.hide()
        sys.stderr = self._stderr
        if self._terminal_mode:
            with suppress(OSError, termios.error):
                self._set_local_flags(self._terminal_mode[_LOCAL_FLAGS])

    def _set_local_flags(self, flags: int) -> None:
        """Set the local flags of the terminal, unless this process is in the background: then the shell uses it."""
        # A process is stopped if it changes the terminal in the background, where it may arrive after the check.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            if _is_foreground(0):
                mode = termios.tcgetattr(0)
                mode[_LOCAL_FLAGS] = flags
                termios.tcsetattr(0, termios.TCSADRAIN, mode)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def refresh(self) -> None:
        """Redraw the footer if it is due; do nothing while the terminal takes no output."""
        now = time.monotonic()
        if now < self._next_refresh or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_refresh = now + _INTERVAL_S
            # A terminal that is stopped by Ctrl-S, or a lost connection, must not block the launcher.
            if select.select([], [_TERMINAL], [], 0)[1]:
                self._size = console.get_terminal_size(_TERMINAL)
                columns, lines = self._size
                shown = self._build(columns, max(1, lines - _MIN_OUTPUT_LINES))
                encoding = self._stderr.encoding or "utf-8"
                self._lines = [line.encode(encoding, "replace") for line in shown]
                self._is_drawn = True
                write_all(_TERMINAL, self._format())
        except OSError:  # the terminal is closed
            self._stop()
        except _DATA_ERRORS as error:
            # A table must not end the run that it shows. The run records no such data, but other programs may change files.
            self.hide()
            self._stop()
            console.note(f"the table is no longer shown: {type(error).__name__}: {error}. The run continues.")
        finally:
            self._lock.release()

    def _stop(self) -> None:
        self._lines, self._next_refresh = [], math.inf

    def hide(self) -> None:
        """Erase the footer until the next refresh, and write output that has no newline yet."""
        with self._lock:
            data = (_ERASE_BELOW if self._is_drawn else b"") + self._partial
            self._is_drawn, self._partial = False, b""
            if data:
                write_all(_TERMINAL, data)

    def write(self, fd: int, data: bytes) -> None:
        """Write output of ranks or of the launcher, above the footer if it is for this terminal.

        Raises:
            OSError: The output cannot be written.
        """
        if get_file_identity(fd) != self._identity:
            write_all(fd, data)
            return
        with self._lock:
            complete, newline, rest = (self._partial + data).rpartition(b"\n")
            output, self._partial = _CURSOR_MOVES.sub(b"", complete + newline), rest
            if not self._is_drawn:
                output, self._partial = output + rest, b""
                write_all(fd, output)
            elif output:
                # After a change of the size, only a refresh knows which lines fit.
                self._is_drawn = console.get_terminal_size(_TERMINAL) == self._size
                write_all(fd, _ERASE_BELOW + output + (self._format() if self._is_drawn else b""))

    def _format(self) -> bytes:
        """Return the footer, followed by the move of the cursor to its beginning."""
        if not self._lines:
            return _ERASE_BELOW
        *lines, last = self._lines
        move = b"\x1b[%dA" % len(lines) if lines else b""
        upper = b"".join(b"\r" + _ERASE_LINE + line + b"\r\n" for line in lines)
        return _NO_WRAP + upper + _ERASE_BELOW + last + _WRAP + b"\r" + move


def _is_foreground(fd: int) -> bool:
    """Return True if this process is in the foreground of a terminal, which is its own."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


def create_footer(folder: RunFolder) -> ScreenFooter:
    """Return a footer with the table of the ranks of a run."""
    from accel_cli.runs import live_view  # noqa: PLC0415 - imports rich, which is slow
    from accel_cli.runs.snapshot import read_snapshot  # noqa: PLC0415

    def build(columns: int, lines: int) -> list[str]:
        return live_view.render_footer(read_snapshot(folder), columns, lines, encoding=sys.stderr.encoding)

    return ScreenFooter(build)


class _FooterStream(io.TextIOBase):
    """The stream `sys.stderr` while there is a footer."""

    def __init__(self, footer: ScreenFooter, stream: Any) -> None:
        self._footer, self._stream = footer, stream

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    @override
    def fileno(self) -> int:
        return int(self._stream.fileno())

    @override
    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, text: str) -> int:
        self._footer.write(_TERMINAL, text.encode(self.encoding, "backslashreplace"))
        return len(text)
