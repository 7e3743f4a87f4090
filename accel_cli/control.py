"""The connection of `accel launch` to another machine that has started it.

Requests are lines of JSON on a descriptor that `ACCEL_CONTROL` names: a signal, or nothing, as a sign of life. The end of the
requests ends the launch like SIGTERM, and so does their absence, since a broken network closes no connection. Replies are lines of
JSON after a mark in the standard output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from accel_runtime.environment import settings as env

__all__ = ["REPLY", "Control", "ReplyReader", "reply", "report_failure"]

REPLY = "-"
"""The name of a file for a reason: it is sent as a reply."""
_MARK = b"\0accel:"
"""The bytes before a reply."""
_LOST = "the connection was lost: no sign of life from the machine that has started this launch"
_BEAT_S = 5.0
"""Seconds between two signs of life, unless a connection counts as lost earlier."""
_MARGIN_S = 5
"""Seconds beyond `shutdown_timeout` that this process has to exit."""
_CHUNK = 1 << 16


def reply(**content: Any) -> None:
    """Write a reply; an empty one is a sign of life."""
    data = _MARK + json.dumps(content).encode("ascii") + b"\n"
    with suppress(OSError):  # nobody reads it
        while data:
            data = data[os.write(1, data) :]


def report_failure(code: int, reason: str = "") -> None:
    """Send the end of a launch that has failed before its `Control`; nothing if no other machine has started it."""
    if os.environ.get(env.CONTROL):
        reply(**({"reason": reason} if reason else {}), exit=code)


class ReplyReader:
    """Separates the replies of a launch from its output."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Take standard output, and return the output without replies, and the replies."""
        output, replies, data = [], [], self._data + data
        while (start := data.find(_MARK)) >= 0 and (end := data.find(b"\n", start)) >= 0:
            output.append(data[:start])
            with suppress(ValueError):  # output of a script with these bytes
                content = json.loads(data[start + len(_MARK) : end])
                replies += [content] if isinstance(content, dict) else []
            data = data[end + 1 :]
        if start < 0:
            # The last bytes may be the begin of a mark.
            start = max(data.rfind(_MARK[:1], 1 - len(_MARK)), -1)
            start = start if start >= 0 and _MARK.startswith(data[start:]) else len(data)
        self._data = data[start:]
        return b"".join([*output, data[:start]]), replies


class Control:
    """The requests of the machine that has started this launch, followed by a thread, and the replies to it.

    Args:
        value: The value of `ACCEL_CONTROL`: the descriptor, and the seconds of silence after which the connection is lost.
        shutdown_timeout: The seconds that processes have to exit after a signal.
    """

    def __init__(self, value: str, shutdown_timeout: float) -> None:
        fd, lost_after = map(int, value.split(","))
        os.set_inheritable(fd, False)
        self._fd, self._lost_after, self._shutdown_timeout = fd, lost_after, shutdown_timeout
        self._is_lost, self._has_ended = False, threading.Event()
        # Writes may block while the other machine does not read.
        for target in (self._follow, self._beat):
            threading.Thread(target=target, daemon=True).start()

    def report_end(self, code: int) -> None:
        """Send the exit code; after a lost connection, that is the reason."""
        self._has_ended.set()
        if self._is_lost:
            reply(reason=_LOST)
        reply(exit=1 if self._is_lost else code)

    def _follow(self) -> None:
        """Raise the signals that arrive, until the connection is lost."""
        data = b""
        while select.select([self._fd], [], [], self._lost_after)[0] and (chunk := os.read(self._fd, _CHUNK)):
            *lines, data = (data + chunk).split(b"\n")
            for line in lines:
                if number := json.loads(line).get("signal"):
                    os.kill(os.getpid(), number)
        self._end()

    def _end(self) -> None:
        """End this process, which has time for an orderly end."""
        self._is_lost = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._shutdown_timeout + _MARGIN_S)
        # Then the guard ends the ranks.
        os.kill(os.getpid(), signal.SIGKILL)

    def _beat(self) -> None:
        reply()
        while not self._has_ended.wait(min(_BEAT_S, self._lost_after / 3)):
            reply()
