"""Starting processes by fork from one that has torch loaded: the first half, before torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from accel_cli.errors import UsageError
from accel_cli.plan import Plan

__all__ = ["become"]


def become(plan: Plan) -> int:
    """Replace this process by a fresh interpreter that imports torch once, for the agent and all processes.

    This one has modules the script must not find, and was not started with the plan's environment: a
    library that is preloaded, `PYTHON...` or the allocator's settings would come too late.

    Raises:
        UsageError: The interpreter cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Not on the command line, where everybody can read it, nor on a disk.
    told = os.memfd_create("accel-plan", 0)
    os.write(told, plan.to_json().encode())
    os.lseek(told, 0, os.SEEK_SET)
    start = str(Path(__file__).with_name("start.py"))
    try:
        os.execve(
            plan.argv[0],
            # What was typed follows, for those who look for the script in a list of processes.
            [plan.argv[0], start, str(told), *sys.argv[1:]],
            {**os.environ, **plan.env},
        )
    except OSError as error:
        raise UsageError(f"{plan.argv[0]} cannot be executed: {error.strerror}") from error
