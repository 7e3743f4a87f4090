"""Starting processes by fork from one that has torch loaded: the first half, before torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryFile

from accel_cli.errors import AccelError, UsageError, explain_os_error
from accel_cli.planning.plan import Plan

__all__ = ["exec_fork_server"]


def exec_fork_server(plan: Plan) -> int:
    """Replace this process by a fresh interpreter that imports torch once, for the agent and all processes.

    This one has modules the script must not find, and was not started with the plan's environment: a
    library that is preloaded, `PYTHON...` or the allocator's settings would come too late.

    Raises:
        UsageError: The interpreter cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        told = _write_plan(plan)
    except OSError as error:
        raise AccelError(f"the plan cannot be passed on: {explain_os_error(error)}") from error
    start = str(Path(__file__).with_name("forkserver_main.py"))
    os.set_inheritable(told, True)
    try:
        os.execve(
            plan.argv[0],
            # What was typed follows, for those who look for the script in a list of processes.
            [plan.argv[0], start, str(told), *sys.argv[1:]],
            {**os.environ, **plan.env},
        )
    except OSError as error:
        raise UsageError(f"{plan.argv[0]} cannot be executed: {error.strerror}") from error


def _write_plan(plan: Plan) -> int:
    """A descriptor the plan is read from: its values are no business of who can list command lines."""
    # Pythons that are built for old systems, as conda's, have no memfd.
    with (
        os.fdopen(os.memfd_create("plan"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile() as file
    ):
        file.write(plan.to_json().encode())
        file.seek(0)
        return os.dup(file.fileno())
