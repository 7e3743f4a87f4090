"""The connection to a host: the process of ssh, the frames of its supervisor, and the screens that show their output."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from accel_cli import console
from accel_cli.extensions.ssh.hosts import Host
from accel_cli.extensions.ssh.supervisor import CONTROL, HEADER, MARK
from accel_cli.launchers.node_launch import NodeEnd
from accel_cli.runner.output import LinePrefixer, write_all

__all__ = ["Connection", "Screen"]

_EXIT_S = 2
"""Seconds that ssh may take to exit after the end of its output."""
_CHUNK = 1 << 16
_KEPT_LINES = 20
_MAX_WAITING = 64
"""Pieces of output that wait for a screen before the connections are no longer read."""
_NOT_EXECUTABLE, _NOT_FOUND, _SSH_FAILED = 126, 127, 255
"""Exit codes of a shell, and of ssh itself."""
_SSH_CURES = (
    (
        re.compile(r"host key verification failed|host identification has changed|host key is known", re.IGNORECASE),
        "Connect once by hand and compare the key: ssh {0}. A key that was replaced is removed by ssh-keygen -R {1}",
    ),
    (
        re.compile(r"permission denied|too many authentication failures", re.IGNORECASE),
        "Load your key into the agent (ssh-add), or copy it to the host (ssh-copy-id {0})",
    ),
    (re.compile(r"could not resolve", re.IGNORECASE), "Check the name, or add it to ~/.ssh/config"),
)  # fmt: skip
"""Cures by ssh's message, with the destination and the name of the host."""


class Screen:
    """Standard output or error, written by a thread: a stopped terminal must not stop the requests to the hosts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.error: OSError | None = None
        """The reason why the stream takes no more output."""
        self._queue: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._write_all, daemon=True).start()

    @property
    def is_full(self) -> bool:
        """True if much output waits."""
        return self._queue.qsize() > _MAX_WAITING

    @property
    def is_idle(self) -> bool:
        """True if all output has been written."""
        return self._queue.unfinished_tasks == 0

    def write(self, data: bytes) -> None:
        """Write data after the output that waits; drop it after an error."""
        if data and self.error is None:
            self._queue.put(data)

    def _write_all(self) -> None:
        while True:
            data = self._queue.get()
            try:
                if self.error is None:
                    write_all(self.fd, data)
            except OSError as error:
                self.error = error
            self._queue.task_done()


class Connection:
    """The ssh process of one host, and the state that its supervisor has reported."""

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        number: int,
        screens: Mapping[int, Screen],
        *,
        prefixed: bool,
    ) -> None:
        self.host, self.number, self._screens = host, number, screens
        self.facts: Mapping[str, Any] | None = None
        """The description of the host by its supervisor; None until that has started."""
        self.problem: str | None = None
        """The reply to the last check; empty if the host passed it."""
        self.exit: NodeEnd | None = None
        """The end of `accel launch`; None until it has ended."""
        self.ended_at: float | None = None
        self.heard_at = time.monotonic()
        """The time of the last output or reply."""
        self.is_silent = False
        """True if the host did not answer for `lost_after` seconds."""
        self.messages: deque[str] = deque(maxlen=_KEPT_LINES)
        """The last lines of ssh and of the login shell."""
        self._data = b""
        self._has_mark = False
        self._prefixers = {
            screen: LinePrefixer(
                number,
                coloured=console.use_color() and os.isatty(screen),
                progress_bars=number == 0,
                label=host.name,
            )
            for screen in (1, 2)
            if prefixed
        }
        # In its own session, so that Ctrl-C of the terminal does not end the connection.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def is_lost(self) -> bool:
        """True if the connection ended before `accel launch`."""
        return self.ended_at is not None and self.exit is None

    @property
    def failed(self) -> bool:
        """True if `accel launch` failed, or the connection is lost."""
        return self.is_lost or bool(self.exit and self.exit.code)

    def send(self, **request: Any) -> None:
        """Send a request to the supervisor; without one, show that the launcher is alive."""
        assert self.process.stdin
        if self.ended_at is not None:
            return
        with suppress(OSError):  # the connection is lost, which is noticed when its output ends
            self.process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self.process.stdin.flush()

    def receive(self) -> bool:
        """Read frames, print output, and return False at the end of the connection."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), _CHUNK)
        self.heard_at = time.monotonic()
        self._data += data
        if not self._has_mark:
            _, mark, rest = self._data.partition(MARK)
            if mark:
                self._has_mark, self._data = True, rest
        while self._has_mark and len(self._data) >= HEADER.size:
            channel, length = HEADER.unpack_from(self._data)
            end = HEADER.size + length
            if len(self._data) < end:
                break
            content, self._data = self._data[HEADER.size : end], self._data[end:]
            self._take(channel, content)
        return bool(data)

    def receive_messages(self) -> bool:
        """Read lines of ssh, and return False at their end."""
        assert self.process.stderr
        data = os.read(self.process.stderr.fileno(), _CHUNK)
        self.messages += [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        return bool(data)

    def _take(self, channel: int, content: bytes) -> None:
        if channel != CONTROL:
            self._print(channel, content)
            return
        for kind, value in json.loads(content).items():
            if kind == "host":
                self.facts = value
            elif kind == "problem":
                self.problem = value
            elif kind == "exit":
                self.exit = NodeEnd(*value)

    def _print(self, screen: int, data: bytes) -> None:
        prefixer = self._prefixers.get(screen)
        self._screens[screen].write(prefixer.feed(data) if prefixer else data)

    def flush(self, *, end: bool = False) -> None:
        """Print a line that has waited long enough for its end."""
        for screen, prefixer in self._prefixers.items():
            self._screens[screen].write(prefixer.flush_partial(end=end))

    def postpone(self) -> None:
        """Allow for the time in which the connection is not read."""
        self.heard_at = time.monotonic()
        for prefixer in self._prefixers.values():
            prefixer.postpone()

    def close(self) -> None:
        """End the connection: the supervisor then ends the processes of its host."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                if stream:
                    stream.close()
        self.process.kill()
        self.process.wait()

    def _wait(self) -> int:
        """Wait until ssh has exited, read its last messages, and return its exit code."""
        try:
            code = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        assert self.process.stderr
        os.set_blocking(self.process.stderr.fileno(), False)
        with suppress(BlockingIOError):  # a shared connection keeps it open
            while self.receive_messages():
                pass
        return code

    def describe_end(self, python: str) -> str:
        """Return why the connection ended, with the cure."""
        code, destination = self._wait(), self.host.destination
        line = self.messages[-1] if self.messages else f"ssh ended with exit code {code}"
        if self.is_silent:
            line = "no answer within launcher.lost_after"
        if self.facts:
            return f"the connection was lost: {line}. Check the host and the network"
        if code == _SSH_FAILED:
            text = "\n".join(self.messages)
            cure = next((cure for pattern, cure in _SSH_CURES if pattern.search(text)), None)
            cure = cure or "Check that the host is up and that ssh reaches it: ssh {0}"
            return f"{line.rstrip('.')}. {cure.format(destination, self.host.name)}"
        if code in {_NOT_EXECUTABLE, _NOT_FOUND}:
            return f"cannot run {python}: {line}. Install Python with accel there, or set launcher.python"
        return (
            f"accel cannot start with {python}: {line}. Install the same accel there, or set launcher.python"
        )
