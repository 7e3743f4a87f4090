"""One way from a rank to the screen: a pseudo-terminal or a pipe that it finds by name, and its log beside it."""

from __future__ import annotations

import fcntl
import os
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel_cli import console
from accel_cli.agent.lines import Lines

__all__ = ["Channel", "identity"]

_CHUNK = 65536
_OFLAG, _LFLAG = 1, 3


def identity(number: int) -> object:
    """What a file descriptor leads to: equal for two that lead to one terminal, pipe or file."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


@dataclass
class Channel:
    """What a rank writes, passed on to the screen and kept in its log."""

    name: Path
    """What the rank opens; it is there until the channel is closed."""
    read: int
    held: int
    """Our own other end: the channel has no end before the rank opens it, or between two who do."""
    log: int
    screen: int | None
    """Where it is shown, as a file descriptor of ours; None once nobody looks any more."""
    lines: Lines | None = None
    """What makes whole lines of it, where several ranks share the screen."""
    warn: Callable[[str], None] = console.note
    """Takes the reason if the log ends before the output."""
    unfinished: bool = False
    """Whether the last thing shown is the beginning of a line."""

    @classmethod
    def open(
        cls,
        name: Path,
        log: Path,
        screen: int,
        lines: Lines | None,
        warn: Callable[[str], None] = console.note,
    ) -> Channel:
        """A pseudo-terminal if the screen is a terminal and the rank has it alone, else a pipe."""
        ends = _pipe(name) if lines or not os.isatty(screen) else _terminal(name, screen)
        os.set_blocking(ends[0], False)
        try:
            kept = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            kept = -1
            warn(f"{log} cannot be opened: {error.strerror}")
        return cls(name, *ends, kept, screen if identity(screen) else None, lines, warn)

    def copy(self) -> bool:
        """Pass on what has come; whether more can come."""
        try:
            data = os.read(self.read, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # a pseudo-terminal's way to say that nobody has it open
            return False
        self._keep(data)
        return bool(data) and self._show(self.lines.feed(data) if self.lines else data)

    def wait(self, *, end: bool = False) -> None:
        """Show the beginning of a line whose rest does not come."""
        if self.lines:
            self._show(self.lines.rest(end=end))

    def resize(self) -> None:
        """Give a pseudo-terminal the size of the screen."""
        if self.held >= 0 and self.screen is not None and os.isatty(self.held):
            _same_size(self.screen, self.held)

    def release(self) -> None:
        """Let go of our own end, so that the channel ends with the last process that has it open."""
        if self.held >= 0:
            os.close(self.held)
            self.held = -1

    def close(self) -> None:
        """Take it away; who still writes to it finds it broken."""
        self.release()
        for number in {self.read, self.log} - {-1}:
            os.close(number)
        self.read = self.log = -1
        self.name.unlink(missing_ok=True)

    def _keep(self, data: bytes) -> None:
        if self.log < 0:
            return
        try:
            _write(self.log, data)
        except OSError as error:
            # The ranks would stand still if nobody read on.
            os.close(self.log)
            self.log = -1
            self.warn(f"{self.name.parent.name} could not write: {error.strerror}")

    def _show(self, data: bytes) -> bool:
        if self.screen is None or not data:
            return True
        try:
            _write(self.screen, data)
        except BrokenPipeError:
            return False  # as in `python train.py | head`: the script finds its output closed
        except OSError as error:
            self.screen = None  # the terminal is gone, and the log goes on
            console.note(f"output is no longer shown: {error.strerror}. The logs of the run have all of it.")
        self.unfinished = not data.endswith(b"\n")
        return True


def _write(number: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(number, data) :]
        except BlockingIOError:
            # Whoever shares the screen with us has set it so.
            os.set_blocking(number, True)


def _pipe(name: Path) -> tuple[int, int]:
    os.mkfifo(name, 0o600)
    read = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    return read, os.open(name, os.O_WRONLY)


def _terminal(name: Path, screen: int) -> tuple[int, int]:
    read, held = os.openpty()
    settings = termios.tcgetattr(held)
    settings[_OFLAG] &= ~termios.OPOST  # the screen itself turns line feeds into new lines
    settings[_LFLAG] &= ~termios.ECHO
    termios.tcsetattr(held, termios.TCSANOW, settings)
    _same_size(screen, held)
    name.symlink_to(os.ttyname(held))
    return read, held


def _same_size(screen: int, terminal: int) -> None:
    try:
        size = fcntl.ioctl(screen, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    except OSError:  # a screen without a size
        pass
