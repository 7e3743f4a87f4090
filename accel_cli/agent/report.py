"""What is said of a failure: the last thing on the screen."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accel_cli import console

__all__ = ["first_failure"]


def first_failure(failures: Mapping[int, ProcessFailure], *, processes: int) -> int:
    """Say what failed first, and return its exit code: 128 + n where signal n ended it."""
    rank = min(failures, key=lambda rank: failures[rank].timestamp)
    failure = failures[rank]
    console.error(
        f"rank {rank} of {processes} on {socket.gethostname()} (pid {failure.pid}): {_how(failure)}"
    )
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def _how(failure: ProcessFailure) -> str:
    """How a process ended: its exception if it left one, else the signal or code."""
    if failure.exitcode < 0:
        return f"was ended by {signal.Signals(-failure.exitcode).name}"
    recorded = failure.error_file_data.get("message") if failure.error_file_data else None
    if isinstance(recorded, dict):
        return str(recorded["message"])
    return f"exited with code {failure.exitcode}"
