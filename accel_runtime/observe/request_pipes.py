"""Pipes in the folder of a rank in which the launcher requests something of it. Standard library only."""

from __future__ import annotations

import _thread
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["send_request", "serve_requests"]

_MAX_DESCRIPTORS, _NUM_HIGH = 4096, 16
"""The highest descriptor that is used, and the number of those below a lower limit that are used: a script that closes all files
and opens others gets lower numbers."""
_MAX_REQUESTS = 1 << 10
"""Requests that have arrived in the meantime have one answer."""


def serve_requests(pipe: Path, answer: Callable[[], None]) -> None:
    """Create a pipe, and call a function in a thread, which sleeps otherwise, at each request that arrives there.

    The thread is not one of `threading`: a script may join all threads that are listed there.
    """
    with contextlib.suppress(OSError):  # no pipes on this file system
        os.mkfifo(pipe)
        # For writing too: a pipe without writers is at its end.
        descriptor = _move_descriptor(os.open(pipe, os.O_RDWR | os.O_CLOEXEC))
        _thread.start_new_thread(_serve, (descriptor, answer))


def send_request(pipe: Path, earlier_answer: Path | None = None) -> bool:
    """Send a request; return False if the process does not serve them: it starts, has ended, or has closed the pipe.

    Args:
        pipe: The pipe.
        earlier_answer: A file that is removed before.
    """
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            if earlier_answer:
                earlier_answer.unlink(missing_ok=True)
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _move_descriptor(descriptor: int) -> int:
    """Return a copy of a descriptor with a high number, which replaces it."""
    import fcntl  # noqa: PLC0415 - not on all systems
    import resource  # noqa: PLC0415 - as above

    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_DESCRIPTORS)
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, limit - _NUM_HIGH)
    finally:
        os.close(descriptor)


def _serve(pipe: int, answer: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the script has closed the pipe, or the folder is gone
        identity = os.fstat(pipe).st_ino
        # Not from a file that the script has opened under this number since.
        while os.fstat(pipe).st_ino == identity and os.read(pipe, _MAX_REQUESTS):
            answer()
