"""Pseudo-terminals that run `accel`, with the text on their screens."""

import fcntl
import os
import re
import select
import signal
import struct
import sys
import termios
import time

import pexpect
import pyte
from support.processes.commands import Accel
from support.processes.waits import limit

__all__ = ["CommandScreen", "Terminal"]

WITH_PROBE = ["-m", "accel_cli"]
WITHOUT_PROBE = [
    "-c",
    "from accel_cli import main; from accel_cli.planning import machine; machine._probe_torch = lambda _: machine.Machine(machine.count_cpus()); main.main()",
]
"""Starts `accel` without a probe of devices, which needs a process that imports torch."""


class Screen(pyte.Screen):
    """A screen that answers queries for the cursor position, as terminals do."""

    def __init__(self, columns, lines):
        super().__init__(columns, lines)
        self.answer = lambda _: None

    def write_process_input(self, data):
        self.answer(data)


class Terminal:
    """A screen that runs `accel config`, which probes the devices of this machine if `start` is `WITH_PROBE`."""

    def __init__(self, *args, columns=80, lines=40, start=WITHOUT_PROBE):
        self._screen = Screen(columns, lines)
        self._stream = pyte.Stream(self._screen)
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
        self.process = pexpect.spawn(
            sys.executable,
            [*start, "config", *args],
            dimensions=(lines, columns),
            env=environ,
            encoding="utf-8",
        )

        self._screen.answer = self.process.send

    def text(self):
        return "\n".join(line.rstrip() for line in self._screen.display).strip()

    def question(self):
        """Return the current question without spaces and the line breaks of a narrow window."""
        lines = self._screen.display
        # A question may end in a line of its own, with the question mark only.
        question_lines = [index for index, line in enumerate(lines) if re.match(r"\? +\S", line)]
        return "".join(lines[question_lines[-1] :] if question_lines else lines).replace(" ", "")

    def see(self, text, seconds=120):
        """Wait until the current question contains this text."""
        deadline = time.monotonic() + limit(seconds)
        while text.replace(" ", "") not in self.question():
            assert time.monotonic() < deadline, f"{text!r} was not shown; the screen is\n{self.text()}"
            self._read()

    def _read(self):
        try:
            self._stream.feed(self.process.read_nonblocking(4096, timeout=0.05))
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF:
            return

    def answer(self, question, keys):
        """Wait for a question, then send keys."""
        self.see(question)
        # The question is drawn shortly before it accepts keys.
        time.sleep(0.1)
        self.process.send(keys)

    def end(self):
        """Read until the command ends; return the exit code."""
        deadline = time.monotonic() + limit(120)
        while self.process.isalive() and time.monotonic() < deadline:
            self._read()
        self._read()
        self.process.close()
        return self.process.exitstatus


class CommandScreen:
    """A screen that runs `accel`, with the lines that have scrolled off it.

    Args:
        args: The arguments of `accel`.
        columns: The width of the screen.
        lines: The height of the screen.
        term: The value of `TERM`.
        start: Starts `accel`: a function like `Accel`.
    """

    def __init__(self, *args, columns=80, lines=24, term="xterm-256color", start=Accel):
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self._terminal, terminal_of_command = os.openpty()
        self.resize(columns, lines)
        environ = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        self.process = start(
            *args,
            stdin=terminal_of_command,
            stdout=terminal_of_command,
            stderr=terminal_of_command,
            env={**environ, "TERM": term},
        )
        os.close(terminal_of_command)

    def resize(self, columns, lines):
        """Change the size without reflow of the text."""
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def type(self, keys):
        os.write(self._terminal, keys.encode())

    def text(self):
        """Return the lines on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def scrolled(self):
        """Return the lines that have scrolled off the screen."""
        rows = self._screen.history.top
        return ["".join(row[column].data for column in range(self._screen.columns)).rstrip() for row in rows]

    def see(self, *texts, seconds=120):
        """Wait until all texts are on the screen."""
        deadline = time.monotonic() + limit(seconds)
        while not all(text in self.text() for text in texts):
            assert time.monotonic() < deadline, f"{texts} were not shown; the screen is\n{self.text()}"
            assert self.read(), f"{texts} were not shown before the end; the screen is\n{self.text()}"

    def read(self, seconds=0.05):
        """Read the output of some time; return False at the end of the command."""
        ready, _, _ = select.select([self._terminal], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # no process has the terminal open
            return False
        self._stream.feed(data)
        return bool(data)

    def end(self, seconds=120):
        """Read until the command ends; return the exit code."""
        deadline = time.monotonic() + limit(seconds)
        while self.read():
            assert time.monotonic() < deadline, f"it has not ended; the screen is\n{self.text()}"
        return self.process.wait(timeout=limit(seconds))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.end()
        os.close(self._terminal)
