"""The fork server: a copy of this process, with torch loaded and one thread, that forks processes on demand.

multiprocessing has a fork server too, but what it starts is a child of the server that knows it (its
`current_process()`, its resource tracker, its stdin). Here a process is a child of the launcher, and
nothing but its memory remembers where it came from.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from accel_cli.forkserver import process

__all__ = ["Request", "Server", "ServerError", "start"]

_LENGTH = struct.Struct("!Q")
_BORN = struct.Struct("=ii")
"""What a process says of itself: the place of its request, and its id."""
_STDERR = 2
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class ServerError(Exception):
    """The server cannot fork; the message says why."""


@dataclass(frozen=True)
class Request:
    """What one forked process is to run."""

    argv: tuple[str, ...]
    """The command that would have been executed: interpreter, worker, and the worker's arguments."""
    environ: Mapping[str, str]
    """Its whole environment."""

    @property
    def arguments(self) -> list[str]:
        """What the worker is told."""
        return list(self.argv[2:])

    def enter(self) -> None:
        """Make this process what the request says; called once, before anything of the script's runs."""
        process.settle(self.environ)


class Server:
    """The server as its launcher sees it."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link = link
        self._pid = pid

    def fork(self, argv: Sequence[str], environs: Sequence[Mapping[str, str]]) -> list[int]:
        """Start a process for each environment, as children of this one; their ids.

        Raises:
            ServerError: The server does not answer, or cannot fork.
        """
        asked = json.dumps({"argv": list(argv), "environs": [dict(e) for e in environs]}).encode()
        with _adopting():
            try:
                self._link.sendall(_LENGTH.pack(len(asked)) + asked)
                answer = json.loads(_received(self._link))
            except (OSError, EOFError):
                raise ServerError("the fork server has ended") from None
        pids: list[int] = answer["pids"]
        if len(pids) < len(environs):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise ServerError(f"the fork server could not fork: {os.strerror(answer['errno'])}")
        return pids

    def close(self) -> None:
        """End the server; the processes go on."""
        self._link.close()
        os.waitpid(self._pid, 0)


def start() -> Server | Request:
    """Fork the server off; returns in this process, and again in every process the server forks."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Server(ours, pid)
    ours.close()
    return _serve(theirs)


@contextmanager
def _adopting() -> Iterator[None]:
    """While this holds, a process whose parent ends becomes a child of this one."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _serve(link: socket.socket) -> Request:
    """The server's whole life; returns only in a process it has forked."""
    # A Ctrl-C is the launcher's and the scripts' affair, and so is a signal that a scheduler sends to all.
    os.setsid()
    _close_inherited()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, process.SIGNALS)
    while True:
        try:
            asked = json.loads(_received(link))
        except (OSError, EOFError):
            os._exit(0)
        argv = tuple(asked["argv"])
        requests = [Request(argv, environ) for environ in asked["environs"]]
        forked = _fork(requests, link, mask)
        if forked:
            return forked


def _close_inherited() -> None:
    """Close what the launcher's own parent left open: it does not pass an exec by the agent either."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        # ServerError is the one that listed them.
        with suppress(OSError):
            if fd > _STDERR and os.get_inheritable(fd):
                os.close(fd)


def _fork(
    requests: Sequence[Request], link: socket.socket, mask: set[int | signal.Signals]
) -> Request | None:
    """Fork a process a request and tell their ids; None in the server, its request in a forked process.

    A child in between forks them and ends, so that they become children of the launcher, whom the kernel
    then tells how each one ended. They begin when that has happened.
    """
    go, begin = os.pipe()
    born, announce = os.pipe()
    between = os.fork()
    if not between:
        for place, request in enumerate(requests):
            try:
                pid = os.fork()
            except OSError as error:
                os._exit(error.errno or 1)
            if not pid:
                link.close()
                os.close(begin)
                os.close(born)
                _wait_for_start(place, announce, go, mask)
                return request
        os._exit(0)
    os.close(go)
    os.close(announce)
    with os.fdopen(born, "rb") as said:
        places = dict(_BORN.iter_unpack(said.read()))
    failed = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    pids = [pid for _, pid in sorted(places.items())]
    answer = json.dumps({"pids": pids, "errno": failed}).encode()
    # Processes whose pipe closes without a byte were forked by a server that was killed, and end.
    with suppress(BrokenPipeError, ConnectionResetError):
        link.sendall(_LENGTH.pack(len(answer)) + answer)
        os.write(begin, bytes(len(pids)))
    os.close(begin)
    return None


def _wait_for_start(place: int, announce: int, go: int, mask: set[int | signal.Signals]) -> None:
    """Become a session that takes signals; say so; and wait until the launcher is the parent."""
    process.detach(mask)
    os.write(announce, _BORN.pack(place, os.getpid()))
    os.close(announce)
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)


def _received(link: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    return _exactly(link, length)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
