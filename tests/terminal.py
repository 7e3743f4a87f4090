"""A screen on which `accel config` runs: a real pseudo-terminal, read as a person reads it."""

import os
import sys
import time

import pexpect
import pyte

__all__ = ["Terminal"]

REAL = ["-m", "accel_cli"]
WITHOUT_DEVICES = [
    "-c",
    "from accel_cli import main; from accel_cli.planning import machine; machine._probe_torch = lambda _: machine.Machine(machine.count_cpus()); main.main()",
]
"""Starts `accel` on a machine that is known to have no devices: to find out takes a process that imports torch."""


class Screen(pyte.Screen):
    """A screen that answers where its cursor is, as terminals do."""

    def __init__(self, columns, lines):
        super().__init__(columns, lines)
        self.answer = lambda _: None

    def write_process_input(self, data):
        self.answer(data)


class Terminal:
    """A screen on which `accel config` runs, which looks for the devices of this machine if `start` is `REAL`."""

    def __init__(self, *args, columns=80, lines=40, start=WITHOUT_DEVICES):
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
        """The question in hand, without the line breaks that a narrow window makes, and spaces."""
        lines = self._screen.display
        asked = [index for index, line in enumerate(lines) if line.startswith("? ")]
        return "".join(lines[asked[-1] :] if asked else lines).replace(" ", "")

    def see(self, text, seconds=120):
        """Wait until the question in hand shows this text."""
        end = time.monotonic() + seconds
        while text.replace(" ", "") not in self.question():
            assert time.monotonic() < end, f"{text!r} did not come; the screen is\n{self.text()}"
            self._read()

    def _read(self):
        try:
            self._stream.feed(self.process.read_nonblocking(4096, timeout=0.05))
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF:
            return

    def answer(self, question, keys):
        """Wait for a question, then press keys."""
        self.see(question)
        # The question is drawn a moment before its keys are heard.
        time.sleep(0.1)
        self.process.send(keys)

    def end(self):
        """Read to the end; the exit code."""
        end = time.monotonic() + 120
        while self.process.isalive() and time.monotonic() < end:
            self._read()
        self._read()
        self.process.close()
        return self.process.exitstatus
