"""The `accel` command as a call in this process: for tests of what it says and writes, not of how it starts and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

from accel_cli.main import main

__all__ = ["run"]


def run(capfd, *args, env=None):
    """Call the command as if it was typed where there is no terminal.

    Args:
        capfd: The fixture of pytest that captures this process and those that it starts.
        args: What follows `accel`.
        env: The environment; None takes that of this process.

    Returns:
        The exit code and output, as `subprocess.run` returns them.
    """
    environ = {"COLUMNS": "80", **(os.environ if env is None else env)}
    command = ["accel", *map(str, args)]
    capfd.readouterr()
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys.modules["__main__"], "__package__", None),  # or it is called `python -m pytest`
    ):
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
    out, err = capfd.readouterr()
    return subprocess.CompletedProcess(command, code, out, err)
