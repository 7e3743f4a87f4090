"""The start of the command, before its imports."""

import time

__all__ = ["STARTED"]

STARTED = time.monotonic()
"""The start of the command on the monotonic clock.

The start of the process would be that of a shell whose last command is `exec accel launch`.
"""
