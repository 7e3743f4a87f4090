"""Compile the operators of DeepSpeed on this node before its ranks start, so that they do not wait for each other."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from accel_cli.errors import AccelError
from accel_runtime.environment.layouts import SettingsError
from accel_runtime.environment.settings import Settings
from accel_runtime.extensions.deepspeed.settings import DeepSpeed

__all__ = ["compile_operators"]

COMMAND = ("-m", "accel_runtime.extensions.deepspeed.compiled_operators")
"""Arguments of the interpreter."""
_EXIT_S = 5
"""Seconds that the compilation has to end after an interrupt."""


def compile_operators(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Compile the operators that the options of DeepSpeed need, in a process of the interpreter of the script.

    Args:
        argv: The command of a rank.
        environ: Its environment.

    Raises:
        AccelError: DeepSpeed is not installed, or an operator cannot be compiled.
    """
    try:
        is_used = DeepSpeed.of(Settings.from_env(environ)).is_used
    except SettingsError:
        return  # reported by the ranks
    if not is_used or not Path(argv[0]).name.startswith("python"):
        return
    # In a session of its own, so that the compilers end with it.
    with subprocess.Popen(
        [argv[0], *COMMAND],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate()
        except BaseException:
            # ninja ends its compilers, which are in groups of their own, if it is interrupted and not killed.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        reason = (
            text.strip()
            or f"the compilation of DeepSpeed's operators ended with exit code {process.returncode}"
        )
        raise AccelError(reason)
