"""The command line: profiles, the wizard, and launchers that turn a profile into processes."""

import time

__all__ = ["STARTED"]

STARTED = time.monotonic()
"""The start of the command on the monotonic clock, before its imports.

The start of the process would be that of a shell whose last command is `exec accel launch`.
"""
