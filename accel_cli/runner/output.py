"""Output of the ranks of this node: terminals and pipes, rank prefixes, and log files."""

from __future__ import annotations

import fcntl
import os
import selectors
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_cli import console
from accel_cli.runner import failures
from accel_cli.runs.run_dir import RankFolder, RunFolder
from accel_runtime.environment.text import encode_text

__all__ = [
    "LinePrefixer",
    "LogWarning",
    "OutputChannel",
    "RankOutputs",
    "SilenceHint",
    "get_file_identity",
    "write_all",
]

_STREAMS = {"stdout": 1, "stderr": 2}
_PARTIAL_LINE_POLL_S = 1.0
_IDLE_S = 0.3
"""After the ranks have ended, stop reading once the processes they left behind are silent for this time."""
_DRAIN_S = 5.0
"""The longest time to read from such processes."""
_SILENCE_S = 600.0


class LogWarning:
    """Warning that the logs of a run are incomplete, given once; training continues without logs."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._is_given = False

    def show(self, reason: str) -> None:
        """Print the warning with its reason, the first time it is called."""
        if not self._is_given:
            self._is_given = True
            console.note(
                f"the logs in {console.abbreviate_home(str(self.folder.path))} are not complete: {reason}. The run itself continues; "
                "free space there, or choose another folder by --log-dir."
            )

    @contextmanager
    def catch_errors(self) -> Iterator[None]:
        """Show the warning instead of raising OSError."""
        try:
            yield
        except OSError as error:
            self.show(str(error))


class RankOutputs:
    """Output of one attempt: selected ranks on the screen, all ranks in their logs.

    A single rank is shown byte for byte, through a pseudo-terminal if the screen is one. Several ranks are shown line by
    line, each line with the rank as prefix, and moving progress bars of the first rank only. A rank that is not shown
    writes to its log directly.

    Args:
        warning: The warning about incomplete logs.
        prefixed: If true, several ranks are shown.
        coloured: If true, prefixes on a terminal are coloured.
    """

    def __init__(
        self,
        warning: LogWarning,
        *,
        prefixed: bool,
        coloured: bool,
    ) -> None:
        self.prefixed = prefixed
        self._warning = warning
        self._coloured = coloured
        self._lowest_rank = sys.maxsize
        self._log_links: list[Path] = []
        self._channels: list[OutputChannel] = []
        self._folders: list[RankFolder] = []
        self._completed: set[Path] = set()
        self._reader: threading.Thread | None = None
        self._created = time.monotonic()
        self._control = -1
        """Write end of the reader's control pipe: a byte announces new channels, closing it ends the reader."""

    def route(self, folder: RankFolder, rank: int, *, shown: bool) -> None:
        """Create the files in a rank's folder to which its process writes; a running replica waits for `stderr`."""
        self._folders.append(folder)
        try:
            folder.output.touch(mode=0o600)
        except OSError as error:
            self._warning.show(f"{folder.output} cannot be created: {error.strerror}")
        stream_of: dict[object, str] = {}
        for stream, screen in _STREAMS.items():
            path = folder.path / stream
            first_stream = stream_of.setdefault(get_file_identity(screen), stream)
            if not shown:
                path.symlink_to(folder.output.name)
                self._log_links.append(path)
            elif first_stream != stream:
                # Both streams go to the same screen: one channel keeps their order.
                path.symlink_to(first_stream)
            else:
                prefixer = None
                if self.prefixed:
                    self._lowest_rank = min(rank, self._lowest_rank)
                    prefixer = LinePrefixer(
                        rank,
                        coloured=self._coloured and os.isatty(screen),
                        progress_bars=rank == self._lowest_rank,
                    )
                channel = OutputChannel(path, folder.output, screen, prefixer, self._warning.show)
                self._channels.append(channel)
        if self._reader:
            os.write(self._control, b"+")

    @property
    def last_output(self) -> float:
        """The time of the newest output on the screen, or of the start of the attempt, on the monotonic clock."""
        return max([self._created, *(channel.last_output for channel in self._channels)])

    def start(self) -> None:
        """Start the thread that copies output to the screen and the logs."""
        control, self._control = os.pipe()
        reader = threading.Thread(target=self._read, args=(control,), name="output", daemon=True)
        reader.start()
        # It is joined at the end, unless the system cannot start a thread.
        self._reader = reader

    def resize(self) -> None:
        """Give the terminals of the ranks the size of the screen."""
        for channel in self._channels:
            channel.resize()

    def complete_log(self, folder: RankFolder) -> None:
        """Append the failure of a rank to its log, once."""
        if folder.path not in self._completed:
            self._completed.add(folder.path)
            with self._warning.catch_errors():
                failures.complete_log(folder)

    def drain(self) -> None:
        """Copy the remaining output once the processes have ended, and complete their logs."""
        if self._reader:
            os.close(self._control)
            self._reader.join()
            self._reader = None
        for channel in self._channels:
            channel.close()
        # A process that could not write its log has removed the link.
        if failed := sorted({link.parent.name for link in self._log_links if not link.is_symlink()}):
            self._warning.show(f"{', '.join(failed)} could not write")
        complete, self._folders, self._log_links = self._folders, [], []
        for folder in complete:
            for stream in _STREAMS:
                (folder.path / stream).unlink(missing_ok=True)
            self.complete_log(folder)

    def end_line(self) -> None:
        """Begin a new line on stderr if the output of a rank does not end with one."""
        for channel in self._channels:
            screen = channel.screen
            if screen and channel.is_line_partial and get_file_identity(screen) == get_file_identity(2):
                with suppress(OSError):
                    os.write(2, b"\n")
                channel.is_line_partial = False
                return

    def _read(self, control: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            self._register_channels(selector)
            while control in selector.get_map():
                is_waiting = any(
                    channel.prefixer and channel.prefixer.has_partial for channel in self._channels
                )
                self._copy(selector, _PARTIAL_LINE_POLL_S if is_waiting else None)
            for channel in self._channels:
                channel.release()
            deadline = time.monotonic() + _DRAIN_S
            while selector.get_map() and time.monotonic() < deadline and self._copy(selector, _IDLE_S):
                pass
        os.close(control)
        for channel in self._channels:
            channel.flush_partial(end=True)

    def _register_channels(self, selector: selectors.BaseSelector) -> None:
        for channel in self._channels:
            if channel.read >= 0 and channel.read not in selector.get_map():
                selector.register(channel.read, selectors.EVENT_READ, channel)

    def _copy(self, selector: selectors.BaseSelector, timeout: float | None) -> bool:
        """Wait for output and copy it; return True if there was some."""
        ready = selector.select(timeout)
        for key, _ in ready:
            channel: OutputChannel | None = key.data
            if channel is None and os.read(key.fd, 1):
                self._register_channels(selector)
            elif channel is None or not channel.copy():
                selector.unregister(key.fd)
            if channel and key.fd not in selector.get_map():
                channel.close()
        for channel in self._channels:
            channel.flush_partial()
        return bool(ready)


_CHUNK = 65536
_OFLAG, _LFLAG = 1, 3


def get_file_identity(fd: int) -> object:
    """Return an identity of the terminal, pipe or file of a descriptor; None if it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


class OutputChannel:
    """Pseudo-terminal or pipe to which a rank writes, copied to the screen and to its log.

    The rank opens `path`, which is removed when the channel is closed. `prefixer` is for ranks that share the screen; `warn`
    is called with the reason if the log is incomplete.
    """

    def __init__(
        self, path: Path, log: Path, screen: int, prefixer: LinePrefixer | None, warn: Callable[[str], None]
    ) -> None:
        self._path, self.prefixer, self._warn = path, prefixer, warn
        # A pseudo-terminal if the screen is a terminal and shows this rank only.
        self._is_terminal = not prefixer and os.isatty(screen)
        if self._is_terminal:
            self.read, self._write = _open_terminal(path, screen)
        else:
            os.mkfifo(path, 0o600)
            self.read = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            # It keeps the channel open while no rank has it open.
            self._write = os.open(path, os.O_WRONLY)
        os.set_blocking(self.read, False)
        self._log = -1
        try:
            self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            warn(f"{log} cannot be opened: {error.strerror}")
        self.screen = screen if get_file_identity(screen) else None
        """The descriptor of the screen; None once it is closed."""
        self.last_output = 0.0
        """The time of the newest output on the screen, on the monotonic clock."""
        self.is_line_partial = False
        """True if the last output on the screen does not end with a newline."""

    def copy(self) -> bool:
        """Copy available output; return False once the channel has ended."""
        try:
            data = os.read(self.read, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # a pseudo-terminal that no process has open
            return False
        try:
            if self._log >= 0:
                write_all(self._log, data)
        except OSError as error:
            # Continue without a log: ranks would block on a channel that is not read.
            os.close(self._log)
            self._log = -1
            self._warn(f"{self._path.parent.name} could not write: {error.strerror}")
        return bool(data) and self._write_screen(self.prefixer.feed(data) if self.prefixer else data)

    def flush_partial(self, *, end: bool = False) -> None:
        """Show a partial line that has waited long enough; at the end, any."""
        if self.prefixer:
            self._write_screen(self.prefixer.flush_partial(end=end))

    def resize(self) -> None:
        """Give a pseudo-terminal the size of the screen."""
        if self._is_terminal and self._write >= 0 and self.screen is not None:
            _copy_size(self.screen, self._write)

    def release(self) -> None:
        """Close the write end, so that the channel ends with the last process that has it open."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def close(self) -> None:
        """Close the channel; a process that still writes to it gets an error."""
        self.release()
        for fd in {self.read, self._log} - {-1}:
            os.close(fd)
        self.read = self._log = -1
        self._path.unlink(missing_ok=True)

    def _write_screen(self, data: bytes) -> bool:
        if self.screen is None or not data:
            return True
        try:
            write_all(self.screen, data)
        except BrokenPipeError:
            return False  # as in `python train.py | head`, the script gets a closed output
        except OSError as error:
            self.screen = None  # the terminal is closed; the log continues
            console.note(f"output is no longer shown: {error.strerror}. The logs of the run have all of it.")
        self.is_line_partial = not data.endswith(b"\n")
        self.last_output = time.monotonic()
        return True


def write_all(fd: int, data: bytes) -> None:
    """Write all data to a descriptor."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            # Another process that shares the screen has made it non-blocking.
            os.set_blocking(fd, True)


def _open_terminal(path: Path, screen: int) -> tuple[int, int]:
    read, write = os.openpty()
    settings = termios.tcgetattr(write)
    settings[_OFLAG] &= ~termios.OPOST  # the screen itself converts newlines
    settings[_LFLAG] &= ~termios.ECHO
    termios.tcsetattr(write, termios.TCSANOW, settings)
    _copy_size(screen, write)
    path.symlink_to(os.ttyname(write))
    return read, write


def _copy_size(screen: int, terminal: int) -> None:
    with suppress(OSError):  # the screen has no size
        size = fcntl.ioctl(screen, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


_PARTIAL_LINE_S = 1.0
"""Seconds until a partial line is shown, and at first between two states of a progress bar."""
_MAX_PAUSE_S = 60.0
"""The longest time between two states of a progress bar; it doubles with each."""
_COLOURS = (36, 33, 35, 32, 34, 31)
_MAX_LINE = 65536


class LinePrefixer:
    """Converts the output of a rank to lines that begin with the rank; of a progress bar, maybe the last state only.

    Args:
        rank: The rank, which selects the colour.
        coloured: Print the prefix in colour.
        progress_bars: Show intermediate states of progress bars.
        prefixed: Begin lines with the prefix.
        label: The text of the prefix instead of the rank.
    """

    def __init__(
        self, rank: int, *, coloured: bool, progress_bars: bool = True, prefixed: bool = True, label: str = ""
    ) -> None:
        colour, label = _COLOURS[rank % len(_COLOURS)], label or str(rank)
        prefix = f"\x1b[{colour}m[{label}]\x1b[0m " if coloured else f"[{label}] "
        self._prefix = encode_text(prefix) if prefixed else b""
        self._partial = b""
        self._partial_since = 0.0
        self._progress_bars = progress_bars
        self._next_state_at = 0.0
        self._pause = _PARTIAL_LINE_S

    @property
    def has_partial(self) -> bool:
        """Return True if a partial line waits for its end."""
        return bool(self._partial)

    def feed(self, data: bytes) -> bytes:
        """Take output of the rank, and return the lines that are complete now."""
        *lines, partial = (self._partial + data).split(b"\n")
        if lines or not self._partial:
            self._partial_since = time.monotonic()
        self._partial = partial
        output = b"".join(self._format_line(line) for line in lines)
        if len(partial) > _MAX_LINE:
            return output + self.flush_partial(end=True)
        return output + (self._sample_progress() if b"\r" in partial else b"")

    def flush_partial(self, *, end: bool = False) -> bytes:
        """Return a partial line, such as a question, that has waited long enough; at the end, any."""
        if not self._partial or (b"\r" in self._partial and not end):
            return b""
        if not end and time.monotonic() - self._partial_since < _PARTIAL_LINE_S:
            return b""
        partial, self._partial = self._partial, b""
        return self._format_line(partial)

    def postpone(self) -> None:
        """Wait again for the end of a partial line, after a time in which no output was read."""
        self._partial_since = time.monotonic()

    def _sample_progress(self) -> bytes:
        """Return the newest complete state of a progress bar if the pause since the last one is over."""
        *states, newest = self._partial.split(b"\r")
        now = time.monotonic()
        state = next((state for state in reversed(states) if state.strip()), b"")
        if not state or not self._progress_bars or now < self._next_state_at:
            # Older states are never shown.
            self._partial = b"\r".join([state, newest])
            return b""
        # The carriage return marks the rest as part of a progress bar, which is not flushed as a partial line.
        self._next_state_at, self._partial = now + self._pause, b"\r" + newest
        self._pause = min(2 * self._pause, _MAX_PAUSE_S)
        return self._format_line(state)

    def _format_line(self, line: bytes) -> bytes:
        """Return a line with its prefix; of a progress bar, the last state."""
        states = [state for state in line.split(b"\r") if state.strip()]
        return self._prefix + (states[-1] if states else b"") + b"\n"


class SilenceHint:
    """A note, given once, if a run shows no output for a long time.

    Args:
        seconds: The time without output until the note is given.
        detects_stalls: If true, the note does not suggest `--stall-timeout`.
    """

    def __init__(self, *, seconds: float = _SILENCE_S, detects_stalls: bool = False) -> None:
        self._seconds, self._detects_stalls = seconds, detects_stalls
        self._is_given = False

    def check(self, activity: Collection[float]) -> None:
        """Print the note if the newest of these times, on the monotonic clock, is long ago."""
        if self._is_given or time.monotonic() - max(activity) < self._seconds:
            return
        self._is_given = True
        cures = ["Watch the run with accel top", "show its stacks with accel stacks"]
        cures += [] if self._detects_stalls else ["set --stall-timeout to detect stalls"]
        duration = console.format_duration(self._seconds)
        console.note(f"no output for {duration}. {', '.join(cures[:-1])}, or {cures[-1]}.")
