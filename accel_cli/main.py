"""The command `accel`: its subcommands, and the conversion of errors to messages."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys

import click

from accel_cli import console
from accel_cli.commands.command import Group
from accel_cli.commands.completion import install_completion, prepare_bash, show_completion
from accel_cli.commands.options import option
from accel_cli.errors import AccelError, UsageError, explain_os_error, explain_process_limit
from accel_cli.planning.launch_options import normalize_option
from accel_runtime.environment.registry import Registry

__all__ = ["COMMANDS", "accel", "main"]

COMMANDS: Registry[click.Command] = Registry(
    {
        "launch": "accel_cli.commands.launch:launch",
        "runs": "accel_cli.commands.runs:runs",
        "logs": "accel_cli.commands.runs:logs",
        "top": "accel_cli.commands.top:top",
        "test": "accel_cli.commands.launch:test",
        "stacks": "accel_cli.commands.runs:stacks",
        "report": "accel_cli.extensions.report.command:report",
        "tpu-pod": "accel_cli.extensions.xla.tpu_pod:tpu_pod",
        "checkpoint": "accel_cli.commands.checkpoint:checkpoint",
        "jobs": "accel_cli.commands.jobs:jobs",
        "config": "accel_cli.commands.config:config",
        "estimate": "accel_cli.extensions.estimate.command:estimate",
        "migrate": "accel_cli.extensions.migrate.command:migrate",
        "env": "accel_cli.commands.env:env",
    },
    group="accel.commands",
    error=UsageError,
)
"""The commands of `accel` by name; the module of each is imported when it is looked up."""


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from accel_runtime.environment.settings import __version__

        console.plain(f"accel {__version__}")
        ctx.exit()


@click.group(
    "accel",
    cls=Group,
    commands=COMMANDS,
    epilog="A first run: accel launch --nproc-per-node 2 train.py --epochs 3",
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # All commands inherit it: they accept `--nproc_per_node`, the spelling of torchrun and Accelerate.
        "token_normalize_func": normalize_option,
    },
)
@option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@option(
    "--install-completion",
    is_flag=True,
    expose_value=False,
    callback=install_completion,
    help="Install completion for the current shell.",
)
@option(
    "--show-completion",
    is_flag=True,
    expose_value=False,
    callback=show_completion,
    help="Show completion for the current shell, to copy it or customize the installation.",
)
def accel() -> None:
    """Train PyTorch scripts on one process, several GPUs, and clusters."""


def main(arguments: list[str] | None = None) -> None:
    """Run `accel`; errors of the user become one message and an exit code, without a traceback.

    Args:
        arguments: The arguments after `accel`; None for those of the command line.
    """
    try:
        _open_missing_streams()
        _escape_unencodable_characters()
        _reset_sigchld()
        prepare_bash()
        code = accel.main(arguments, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)  # another package's command may return a value
    except (KeyboardInterrupt, click.Abort):
        # No process was started, so there is nothing to report.
        sys.exit(128 + 2)
    except click.ClickException as error:
        if text := _format_parsing_error(error):
            console.error(text)
        sys.exit(error.exit_code)
    except AccelError as error:
        console.error(str(error))
        if hint := _explain_missing_command(str(error)):
            console.note(hint)
        sys.exit(error.exit_code)
    except RuntimeError as error:
        if limit := explain_process_limit(error):
            console.error(limit)
            sys.exit(1)
        # pathlib and platformdirs raise it for a user id without an account.
        if "home directory" not in str(error):
            raise
        console.error("Cannot determine the home directory of this user. Set HOME or ACCEL_HOME.")
        sys.exit(2)
    except (OSError, MemoryError) as error:
        console.error(explain_os_error(error))
        sys.exit(1)


def _explain_missing_command(message: str) -> str:
    """Return how a command that a message names is run here, if `accel` is not on PATH; empty if it is."""
    if not re.search(rf"\baccel (?:{'|'.join(COMMANDS.names)})\b", message) or shutil.which("accel"):
        return ""
    from accel_runtime.environment.installation import format_python

    return f"accel is not on PATH: run {format_python()} -m accel_cli in its place"


def _format_parsing_error(error: click.ClickException) -> str:
    """Return the message for a command line that click rejects; empty for a group alone, which has printed its help."""
    text = error.format_message()
    if isinstance(error, click.NoSuchOption):
        similar = ", ".join(sorted(error.possibilities or ()))
        text = f"No such option: {error.option_name}" + (f" (Possible options: {similar})" if similar else "")
    text = re.sub(r"^Got unexpected extra arguments?", "Got unexpected extra argument(s)", text)
    if not text:
        return ""
    end = "" if text.endswith((".", "?")) else "."
    context = getattr(error, "ctx", None)
    command = f"{context.command_path} " if context else ""
    return f"{text}{end} See {command}--help."


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
