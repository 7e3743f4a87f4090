"""Checkpoints, asked of a child process: neither the runtime nor torch is ever imported here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from accel_cli.errors import AccelError, UsageError

__all__ = ["Progress", "ask"]

Progress = Callable[[str, int, int], None]
"""Told which checkpoint is read, how many bytes of it were, and how many there are (0: not known)."""
_USAGE = 2


def ask(command: str, directory: str, progress: Progress = lambda *_: None, **more: Any) -> dict[str, Any]:
    """Have something done to checkpoints.

    Args:
        command: What: `list`, `verify`, `show`, `export` or `prune`.
        directory: A project's, one that holds checkpoints, or a checkpoint.
        progress: Told now and then how far it is.
        **more: What the command takes.

    Raises:
        UsageError: The directory or a file is not what the command needs; nothing was changed.
        AccelError: A checkpoint is damaged, or a file cannot be written.
    """
    request = json.dumps({"command": command, "directory": directory, **more})
    child = [sys.executable, "-m", "accel_runtime.checkpoint", request]
    # In a session of its own: Ctrl-C would reach it twice, and interrupt its putting things in order.
    with subprocess.Popen(
        child,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as asked:
        assert asked.stdout
        assert asked.stderr
        try:
            said = _last(asked.stdout, progress)
            words = asked.stderr.read().decode(errors="replace").strip().splitlines()
        except BaseException:
            # It removes what it has begun to write.
            asked.send_signal(signal.SIGTERM)
            raise
    if said is None:
        raise AccelError(f"checkpoints could not be looked at: {words[-1] if words else 'no answer'}")
    if "error" in said:
        raise (UsageError if said["code"] == _USAGE else AccelError)(said["error"])
    found: dict[str, Any] = said["result"]
    return found


def _last(lines: Any, progress: Progress) -> dict[str, Any] | None:
    """The answer; what comes before it says how far it is."""
    for line in lines:
        said: dict[str, Any] = json.loads(line)
        if "reads" not in said:
            return said
        progress(said["reads"], said["done"], said["of"])
    return None
