"""The command `accel`: its subcommands, and the conversion of errors to messages."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
from typing import Annotated

import typer

from accel_cli import console
from accel_cli.commands.command import (
    HELP_OPTIONS,
    LazyGroup,
    complete_assignments_in_bash,
    format_parsing_error,
    hide_flag_types,
)
from accel_cli.errors import AccelError, UsageError, explain_os_error, explain_process_limit
from accel_cli.planning.launch_options import normalize_option
from accel_runtime.environment.registry import Registry

__all__ = ["COMMANDS", "accel", "main"]

COMMANDS: Registry[typer.Typer] = Registry(
    {
        "launch": "accel_cli.commands.launch:app",
        "test": "accel_cli.commands.launch:app",
        "top": "accel_cli.commands.top:app",
        "logs": "accel_cli.commands.runs:app",
        "runs": "accel_cli.commands.runs:app",
        "stacks": "accel_cli.commands.runs:app",
        "report": "accel_cli.extensions.report.command:app",
        "checkpoint": "accel_cli.commands.checkpoint:app",
        "jobs": "accel_cli.commands.jobs:app",
        "xla": "accel_cli.extensions.xla.tpu_pod:app",
        "config": "accel_cli.commands.config:app",
        "estimate": "accel_cli.extensions.estimate.command:app",
        "migrate": "accel_cli.extensions.migrate.command:app",
        "diff": "accel_cli.extensions.numerics.command:app",
        "env": "accel_cli.commands.env:app",
        "skill": "accel_cli.commands.skill:app",
    },
    group="accel.commands",
    error=UsageError,
)
"""The commands of `accel` by name, in the order of the help; the module of each is imported when it is looked up."""


class _Accel(LazyGroup):
    table = COMMANDS


app = typer.Typer(
    name="accel",
    cls=_Accel,
    epilog="A first run: accel launch --nproc-per-node 2 train.py --epochs 3",
    no_args_is_help=True,
    context_settings={
        "help_option_names": [*HELP_OPTIONS],
        # All commands inherit it: they accept `--nproc_per_node`, the spelling of torchrun and Accelerate.
        "token_normalize_func": normalize_option,
    },
)


def _print_version(value: bool) -> None:
    if value:
        from accel_runtime.environment.settings import __version__

        console.plain(f"accel {__version__}")
        raise typer.Exit


@app.callback()
def _train(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Train PyTorch scripts on one process, several GPUs, and clusters."""


accel = typer.main.get_command(app)
hide_flag_types(accel)
complete_assignments_in_bash()


def main(arguments: list[str] | None = None) -> None:
    """Run `accel`; errors of the user become one message and an exit code, without a traceback.

    Args:
        arguments: The arguments after `accel`; None for those of the command line.
    """
    code = _run(arguments)
    sys.exit(code if _flush_output() else code or 1)


def _run(arguments: list[str] | None) -> int:  # noqa: PLR0911 - one for each kind of error
    """Run `accel`, and return its exit code."""
    try:
        _open_missing_streams()
        _escape_unencodable_characters()
        _reset_sigchld()
        code = accel.main(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        # No process was started, so there is nothing to report.
        return 128 + 2
    except typer.TyperException as error:
        if text := format_parsing_error(error):
            console.error(text)
            _record_refusal(text)
        return error.exit_code
    except AccelError as error:
        console.print_notes(error.notes)
        console.error(str(error))
        if hint := _explain_missing_command(str(error)):
            console.note(hint)
        return error.exit_code
    except RuntimeError as error:
        if limit := explain_process_limit(error):
            console.error(limit)
            return 1
        # pathlib and platformdirs raise it for a user id without an account.
        if "home directory" not in str(error):
            raise
        console.error("Cannot determine the home directory of this user. Set HOME or ACCEL_HOME.")
        return 2
    except (OSError, MemoryError) as error:
        console.error(explain_os_error(error))
        return 1
    return code if isinstance(code, int) else 0  # another package's command may return a value


def _flush_output() -> bool:
    """Write what the standard streams have buffered; drop it if that fails, and return False if it was of the output.

    Python would exit with a message and code 120, whatever the code of the command.
    """
    is_read = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            is_read = is_read and stream is not sys.stdout
            if not isinstance(error, BrokenPipeError):
                console.error(explain_os_error(error))
    return is_read


def _record_refusal(text: str) -> None:
    """Write why a command line is refused, for the program that has started the command."""
    from accel_cli.runs.run_dir import write_reason
    from accel_runtime.environment.settings import FAILURE_FILE

    write_reason(os.environ.get(FAILURE_FILE), text)


def _explain_missing_command(message: str) -> str:
    """Return how a command that a message names is run here, if `accel` is not on PATH; empty if it is."""
    if not re.search(rf"\baccel (?:{'|'.join(COMMANDS.names)})\b", message) or shutil.which("accel"):
        return ""
    from accel_runtime.environment.installation import format_python

    return f"accel is not on PATH: run {format_python()} -m accel_cli in its place"


def _reset_sigchld() -> None:
    """Reset SIGCHLD if the parent process ignores it: the kernel would discard the exit codes of child processes."""
    if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _escape_unencodable_characters() -> None:
    """Write characters that the encoding of a standard stream lacks as escapes, unless PYTHONIOENCODING says otherwise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _open_missing_streams() -> None:
    """Open the null device for each closed standard stream, so that no other file gets its descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
