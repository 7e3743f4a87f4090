"""The log of the kernel, which containers and other users often cannot read."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["read_kernel_log"]

_MAX_LINE = 8192


def read_kernel_log() -> Iterator[bytes]:
    """Yield the lines of the log that the kernel still has.

    Raises:
        OSError: The log cannot be opened.
    """
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                yield os.read(log, _MAX_LINE)
            except BrokenPipeError:  # the kernel has overwritten this line
                continue
            except OSError:  # the end of the log, or no permission
                return
    finally:
        os.close(log)
