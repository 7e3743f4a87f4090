"""The process that ssh runs on each host: it starts `accel launch` there, and ends it when the connection is lost.

Requests are lines of JSON on standard input. Standard output has `MARK`, after whatever a login shell printed, and then
frames: output of `accel launch`, and replies as JSON. The launcher sends a request at least every few seconds: silence for
`lost_after` seconds counts as a lost connection, since a broken network closes no connection. Each request is answered
while `accel launch` runs, so that the launcher notices a lost host as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from accel_cli.launchers.node_launch import NodeEnd, NodeLaunch, find_problem
from accel_cli.planning import network
from accel_runtime.environment import settings as env

__all__ = ["CONTROL", "HEADER", "MARK", "STDERR", "STDOUT", "main"]

MARK = b"\0accel-ssh\n"
"""The bytes before the first frame."""
CONTROL, STDOUT, STDERR = range(3)
"""Channels of frames: a reply as JSON, and output of `accel launch`."""
HEADER = struct.Struct(">BI")
"""Channel and length of a frame."""
_FIRST_LOST_AFTER_S = 60
"""Seconds of silence before the first request counts as a lost connection."""
_ENDING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that end this process, for example when the system ends the session of a lost connection."""
_POLL_S = 0.2
_MARGIN_S = 5
"""Seconds beyond `shutdown_timeout` that `accel launch` has to exit."""
_CHUNK = 1 << 16


def main() -> None:
    """Serve the launcher until `accel launch` has ended, or until the connection is lost."""
    HostSupervisor().serve()


class LostConnectionError(Exception):
    """The launcher has ended or cannot be reached."""


class HostSupervisor:
    """Runs one `accel launch` for the launcher at the other end of standard input and output."""

    def __init__(self) -> None:
        self._launch = NodeLaunch()
        self._lost_after = float(_FIRST_LOST_AFTER_S)
        self._shutdown_timeout = 0
        self._is_lost = False
        self._must_answer = threading.Event()
        """Set after a request; the thread that copies the output answers, since its writes may block."""
        self._closed: set[int] = set()
        """Channels that the launcher no longer shows."""
        self._lock = threading.Lock()
        # A write must not block for ever if the network is broken.
        os.set_blocking(1, False)
        for number in _ENDING_SIGNALS:
            signal.signal(number, _raise_lost)

    def serve(self) -> NoReturn:
        """Answer requests; end the processes of this host when the connection is lost."""
        try:
            self._write(MARK)
            self._reply("host", _describe_host(self._launch.reserve_port()))
            for request in self._read_requests():
                self._handle(request)
        except LostConnectionError:
            self._end_launch()
        os._exit(1)

    def _read_requests(self) -> Iterator[dict[str, Any]]:
        """Yield requests; raise LostConnectionError at the end of the input and after a long silence."""
        data = b""
        while True:
            if not select.select([0], [], [], self._lost_after)[0]:
                raise LostConnectionError
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(0, _CHUNK)
                if not chunk:
                    raise LostConnectionError
                *lines, data = (data + chunk).split(b"\n")
                yield from map(json.loads, lines)

    def _handle(self, request: Mapping[str, Any]) -> None:
        self._must_answer.set()
        if folder := request.get("create"):
            self._reply("problem", _create_folder(folder))
        if check := request.get("check"):
            self._reply("problem", find_problem(check["folder"], check["script"]))
        if start := request.get("start"):
            try:
                self._start_launch(start)
            except OSError as error:
                self._reply("exit", NodeEnd(1, f"cannot start accel launch: {error.strerror or error}"))
                self._exit(1)
        if channel := request.get("close"):
            self._closed.add(channel)
        if number := request.get("signal"):
            self._launch.send_signal(number)

    def _start_launch(self, start: Mapping[str, Any]) -> None:
        self._lost_after, self._shutdown_timeout = start["lost_after"], start["shutdown_timeout"]
        process = self._launch.start(
            start["argv"],
            start["folder"],
            {**os.environ, **start["env"]},
            serves_rendezvous=start["serves_rendezvous"],
            streams=(subprocess.PIPE, subprocess.STDOUT if start["merge"] else subprocess.PIPE),
        )
        threading.Thread(target=self._copy_output, args=(process,), daemon=True).start()

    def _copy_output(self, process: subprocess.Popen[bytes]) -> None:
        """Send the output of `accel launch`, then its exit code, and exit."""
        with selectors.DefaultSelector() as selector:
            for stream, channel in ((process.stdout, STDOUT), (process.stderr, STDERR)):
                if stream:
                    selector.register(stream, selectors.EVENT_READ, (stream, channel))
            while selector.get_map():
                has_exited = process.poll() is not None  # before the last output is read
                ready = selector.select(_POLL_S)
                if self._must_answer.is_set():
                    self._must_answer.clear()
                    self._send(CONTROL, b"{}")
                for key, _ in ready:
                    (stream, channel), data = key.data, os.read(key.fd, _CHUNK)
                    if data and channel not in self._closed:
                        self._send(channel, data)
                    else:
                        selector.unregister(stream)
                        stream.close()  # a process that still writes to it gets an error
                # Processes that the script has left running may keep the streams open.
                if not ready and has_exited:
                    break
        self._reply("exit", self._launch.wait())
        if not self._is_lost:
            self._exit(0)

    def _end_launch(self) -> None:
        """Give `accel launch` time to end its processes, then kill it: its guard ends them then."""
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._is_lost = True
        process = self._launch.process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._shutdown_timeout + _MARGIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        self._exit(1)

    def _exit(self, code: int) -> NoReturn:
        self._launch.remove_files()
        os._exit(code)

    def _reply(self, kind: str, content: Any) -> None:
        self._send(CONTROL, json.dumps({kind: content}).encode("ascii"))

    def _send(self, channel: int, data: bytes) -> None:
        self._write(HEADER.pack(channel, len(data)) + data)

    def _write(self, data: bytes) -> None:
        """Write to the launcher; drop the data once the connection is lost."""
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionError):
            while data and not self._is_lost:
                try:
                    data = data[os.write(1, data) :]
                except BlockingIOError:
                    select.select([], [1], [], _POLL_S)


def _raise_lost(*_: object) -> NoReturn:
    for number in _ENDING_SIGNALS:  # a second signal must not interrupt the end of the processes
        signal.signal(number, signal.SIG_IGN)
    raise LostConnectionError


def _describe_host(port: int) -> dict[str, Any]:
    """Return the facts that the launcher needs to know before the start."""
    server = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return {
        "version": env.__version__,
        "python": sys.executable,
        "address": server[0] if server else "",
        "own_address": network.find_own_address(),
        "port": port,
    }


def _create_folder(folder: str) -> str:
    """Create a folder, and return why that failed."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot create the folder {folder}: {error.strerror}"
    return ""
