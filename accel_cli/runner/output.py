"""What the ranks of this machine write, on its way to the screen and into each rank's log."""

from __future__ import annotations

import fcntl
import os
import selectors
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_cli import console
from accel_cli.runner.run_dir import RankFolder, RunFolder

__all__ = ["LinePrefixer", "LogWarning", "OutputChannel", "RankOutputs", "get_file_identity"]


_SCREENS = {"stdout": 1, "stderr": 2}
_PATIENCE_S = 1.0
_QUIET_S = 0.3
"""How long nothing has to come, once all have ended, from a process that a script left behind."""
_DRAIN_S = 5.0
"""How long such a process is listened to at most."""


class LogWarning:
    """The one warning of a run that its logs are not complete: they are best effort, and training continues.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._given = False

    def give(self, why: str) -> None:
        """Give the warning with its reason, unless it was given already."""
        if not self._given:
            self._given = True
            console.note(
                f"the logs in {console.short(str(self.folder.path))} are not complete: {why}. The run itself continues; free "
                "space there, or choose another folder by --log-dir."
            )


class RankOutputs:
    """The output of one attempt: some ranks on the screen, all in their logs.

    One rank alone is shown byte for byte, through a pseudo-terminal if the screen is one, so that the script
    sees what it would see without a launcher. Of several, whole lines are shown, each behind its rank, and progress bars
    that move of the first of them only. A rank that is not shown writes straight into its log.
    """

    def __init__(self, warning: LogWarning, *, prefixed: bool, coloured: bool) -> None:
        self.prefixed = prefixed
        """Whether lines stand behind their rank."""
        self._warning = warning
        self._coloured = coloured
        self._first: int | None = None
        """The lowest rank on the screen."""
        self._hidden: list[Path] = []
        self._channels: list[OutputChannel] = []
        self._folders: list[RankFolder] = []
        self._reader: threading.Thread | None = None
        self._ended = -1
        self._started = False

    def route(self, folder: RankFolder, rank: int, *, shown: bool) -> None:
        """Leave in a rank's folder what its process connects to; it waits for `stderr`, where it runs already."""
        self._folders.append(folder)
        try:
            folder.output.touch(mode=0o600)
        except OSError as error:
            self._warning.give(f"{folder.output} cannot be made: {error.strerror}")
        seen: dict[object, str] = {}
        for stream, screen in _SCREENS.items():
            name = folder.path / stream
            first = seen.setdefault(get_file_identity(screen), stream)
            if not shown:
                name.symlink_to(folder.output.name)
                self._hidden.append(name)
            elif first != stream:
                # Together on the screen they are one channel, so that their order stays.
                name.symlink_to(first)
            else:
                lines = self._lines(rank, screen) if self.prefixed else None
                self._channels.append(
                    OutputChannel.open(name, folder.output, screen, lines, self._warning.give)
                )
        if self._reader:
            os.write(self._ended, b"+")
        elif self._started:
            self.start()

    def _lines(self, rank: int, screen: int) -> LinePrefixer:
        self._first = rank if self._first is None else min(self._first, rank)
        return LinePrefixer(rank, coloured=self._coloured and os.isatty(screen), bars=rank == self._first)

    def start(self) -> None:
        """Begin to pass on, in a thread of its own."""
        self._started = True
        if self._channels:
            waits, self._ended = os.pipe()
            self._reader = threading.Thread(target=self._read, args=(waits,), name="output", daemon=True)
            self._reader.start()

    def resize(self) -> None:
        """Give the ranks' terminals the size of the screen."""
        for channel in self._channels:
            channel.resize()

    def drain(self) -> list[RankFolder]:
        """Once the processes have ended: pass on the rest, and take away what they were connected to.

        Returns:
            The folders whose logs are whole now.
        """
        if self._reader:
            os.close(self._ended)
            self._reader.join()
            self._reader = None
        for channel in self._channels:
            channel.close()
        # A process that could not write its log has removed the link to it.
        if lost := sorted({link.parent.name for link in self._hidden if not link.is_symlink()}):
            self._warning.give(f"{', '.join(lost)} could not write")
        self._hidden = []
        for folder in self._folders:
            for stream in _SCREENS:
                (folder.path / stream).unlink(missing_ok=True)
        whole, self._folders = self._folders, []
        return whole

    def end_line(self) -> None:
        """Begin a new line on the screen, if the last thing a rank wrote to it is no whole line."""
        for channel in self._channels:
            if (
                channel.unfinished
                and channel.screen
                and get_file_identity(channel.screen) == get_file_identity(2)
            ):
                with suppress(OSError):
                    os.write(2, b"\n")
                return

    def _read(self, waits: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(waits, selectors.EVENT_READ)
            self._listen(selector)
            while waits in selector.get_map():
                self._pass_on(selector, _PATIENCE_S if self._some_wait() else None)
            self._finish(selector)
        os.close(waits)
        for channel in self._channels:
            channel.wait(end=True)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        """To channels that are new."""
        for channel in self._channels:
            if channel.read >= 0 and channel.read not in selector.get_map():
                selector.register(channel.read, selectors.EVENT_READ, channel)

    def _finish(self, selector: selectors.BaseSelector) -> None:
        """Pass on what is still in the channels."""
        for channel in self._channels:
            channel.release()
        late = time.monotonic() + _DRAIN_S
        while selector.get_map() and time.monotonic() < late and self._pass_on(selector, _QUIET_S):
            pass

    def _pass_on(self, selector: selectors.BaseSelector, patience: float | None) -> bool:
        """Wait for something and pass it on; whether there was something."""
        ready = selector.select(patience)
        for key, _ in ready:
            channel: OutputChannel | None = key.data
            if channel is None and os.read(key.fd, 1):
                self._listen(selector)
            elif channel is None or not channel.copy():
                selector.unregister(key.fd)
            if channel and key.fd not in selector.get_map():
                channel.close()
        for channel in self._channels:
            channel.wait()
        return bool(ready)

    def _some_wait(self) -> bool:
        return any(channel.lines and channel.lines.waiting for channel in self._channels)


_CHUNK = 65536
_OFLAG, _LFLAG = 1, 3


def get_file_identity(number: int) -> object:
    """What a file descriptor leads to: equal for two that lead to one terminal, pipe or file."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


@dataclass
class OutputChannel:
    """What a rank writes, passed on to the screen and kept in its log."""

    name: Path
    """What the rank opens; it is there until the channel is closed."""
    read: int
    held: int
    """Our own other end: the channel has no end before the rank opens it, or between two who do."""
    log: int
    screen: int | None
    """Where it is shown, as a file descriptor of ours; None once nobody looks any more."""
    lines: LinePrefixer | None = None
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
        lines: LinePrefixer | None,
        warn: Callable[[str], None] = console.note,
    ) -> OutputChannel:
        """A pseudo-terminal if the screen is a terminal and the rank has it alone, else a pipe."""
        ends = _pipe(name) if lines or not os.isatty(screen) else _terminal(name, screen)
        os.set_blocking(ends[0], False)
        try:
            kept = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            kept = -1
            warn(f"{log} cannot be opened: {error.strerror}")
        return cls(name, *ends, kept, screen if get_file_identity(screen) else None, lines, warn)

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


_PARTIAL_LINE_S = 1.0
"""How long the beginning of a line waits for its rest, and how far apart the first states of a progress bar are shown."""
_LONGEST_PAUSE_S = 60.0
"""How far apart they are shown in the end: the time between two of them doubles."""
_COLOURS = (36, 33, 35, 32, 34, 31)
_LONGEST = 65536


class LinePrefixer:
    """Takes the bytes of a rank as they come, and gives lines that begin with the rank.

    Args:
        rank: The rank.
        coloured: If its number is coloured.
        bars: If a progress bar is shown while it moves; only its last state is shown otherwise.
    """

    def __init__(self, rank: int, *, coloured: bool, bars: bool = True) -> None:
        name = f"[{rank}]"
        self._prefix = (
            f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m " if coloured else f"{name} "
        ).encode()
        self._begun = b""
        self._since = 0.0
        self._bars = bars
        self._next_bar = 0.0
        self._pause = _PARTIAL_LINE_S

    @property
    def waiting(self) -> bool:
        """Whether the beginning of a line is held back."""
        return bool(self._begun)

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole now."""
        *whole, begun = (self._begun + data).split(b"\n")
        if whole or not self._begun:
            self._since = time.monotonic()
        self._begun = begun
        shown = b"".join(self._line(line) for line in whole)
        if len(begun) > _LONGEST:
            return shown + self.rest(end=True)
        return shown + (self._redrawn() if b"\r" in begun else b"")

    def rest(self, *, end: bool = False) -> bytes:
        """The beginning of a line, such as a question, that has waited long enough for its rest."""
        if not self._begun or (b"\r" in self._begun and not end):
            return b""
        if not end and time.monotonic() - self._since < _PARTIAL_LINE_S:
            return b""
        begun, self._begun = self._begun, b""
        return self._line(begun)

    def _redrawn(self) -> bytes:
        """The newest whole state of a progress bar, now and then; the states between are in the log."""
        *states, newest = self._begun.split(b"\r")
        now = time.monotonic()
        state = next((state for state in reversed(states) if state.strip()), b"")
        if not state or not self._bars or now < self._next_bar:
            # What a bar drew over is never shown: only its newest states are kept.
            self._begun = b"\r".join([state, newest])
            return b""
        # Still a bar's: without its carriage return it would be the beginning of a line that waits for its rest.
        self._next_bar, self._begun = now + self._pause, b"\r" + newest
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return self._line(state)

    def _line(self, line: bytes) -> bytes:
        """A line with its prefix; of what was drawn over itself, the last state."""
        states = [state for state in line.split(b"\r") if state.strip()]
        return self._prefix + (states[-1] if states else b"") + b"\n"
