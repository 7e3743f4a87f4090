"""Call the `accel` command in this process: for tests of its output and files, not of its start and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

from accel_cli.main import main

__all__ = ["run"]


def run(capfd, *args, env=None):
    """Call the command as if it ran without a terminal.

    Args:
        capfd: The fixture of pytest that captures the output of this process and its children.
        args: The arguments of `accel`.
        env: The environment; None for that of this process.

    Returns:
        The exit code and output, as `subprocess.run` returns them.
    """
    environ = {"COLUMNS": "80", **(os.environ if env is None else env)}
    command = ["accel", *map(str, args)]
    capfd.readouterr()
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(
            sys.modules["__main__"], "__package__", None
        ),  # otherwise the program name is `python -m pytest`
    ):
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
    out, err = capfd.readouterr()
    return subprocess.CompletedProcess(command, code, out, err)
