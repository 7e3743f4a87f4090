"""The command `accel`: its subcommands, and the conversion of errors to messages."""

from __future__ import annotations

import inspect
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
import typer.main
from typing_extensions import override

from accel_cli import console
from accel_cli.commands.options import AccelGroup, CommandApp, get_summary
from accel_cli.errors import AccelError, explain_os_error, explain_process_limit
from accel_cli.launchers import Registry
from accel_cli.planning.options import normalize_option

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: Registry[typer.Typer] = Registry(
    {
        "launch": "accel_cli.commands.launch:app",
        "runs": "accel_cli.commands.runs:app",
        "logs": "accel_cli.commands.runs:app",
        "top": "accel_cli.commands.top:app",
        "test": "accel_cli.commands.launch:app",
        "stacks": "accel_cli.commands.runs:app",
        "report": "accel_cli.commands.report:app",
        "tpu-pod": "accel_cli.commands.tpu_pod:app",
        "checkpoint": "accel_cli.commands.checkpoint:app",
        "jobs": "accel_cli.commands.jobs:app",
        "config": "accel_cli.commands.config:app",
        "estimate": "accel_cli.commands.estimate:app",
        "migrate": "accel_cli.commands.migrate:app",
        "env": "accel_cli.commands.env:app",
    },
    group="accel.commands",
)
"""The typer application of each command, by name."""


class LazyCommands(Mapping[str, Any]):
    """The commands of `accel` by name; the module of each is imported when it is looked up."""

    @override
    def __getitem__(self, name: str) -> Any:
        holder = CommandApp()
        holder.add_typer(COMMANDS[name])
        group: Any = typer.main.get_command(holder)
        return group.commands[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS.names)

    @override
    def __len__(self) -> int:
        return len(COMMANDS.names)


class LazyGroup(AccelGroup):
    """The command `accel`, whose subcommands are built when they are used."""

    @override
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands()  # type: ignore[assignment]

    @override
    def list_summaries(self, ctx: Any) -> Iterator[tuple[str, str, str]]:
        # Without building the commands, which takes longer than importing their modules.
        for name in COMMANDS.names:
            commands = COMMANDS[name]
            infos: list[Any] = [commands.info, *commands.registered_commands]
            info = next(info for info in infos if info.name == name)
            yield str(commands.rich_help_panel), name, get_summary(info.help or inspect.getdoc(info.callback))


app = CommandApp(
    name="accel",
    cls=LazyGroup,
    add_completion=True,
    epilog="A first run: accel launch --nproc-per-node 2 train.py --epochs 3",
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # All commands inherit it: they accept `--nproc_per_node`, the spelling of torchrun and Accelerate.
        "token_normalize_func": normalize_option,
    },
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        from accel_runtime.environment.settings import __version__

        console.plain(f"accel {__version__}")
        raise typer.Exit


@app.callback()
def accel(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run a raw PyTorch training script, unchanged, anywhere."""


_ParsingError: Any = typer.BadParameter.__base__
"""The error of a command line that typer rejects; typer does not export its name."""


def main(arguments: list[str] | None = None) -> None:
    """Run `accel`; errors of the user become one message and an exit code, without a traceback.

    Args:
        arguments: The arguments after `accel`; None for those of the command line.
    """
    try:
        _open_missing_streams()
        _escape_unencodable_characters()
        _reset_sigchld()
        code = app(arguments, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)  # another package's command may return a value
    except (KeyboardInterrupt, typer.Abort):
        # No process was started, so there is nothing to report.
        sys.exit(128 + 2)
    except _ParsingError as error:
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


def _format_parsing_error(error: Any) -> str:
    """Return the message for a command line that typer rejects; empty for a group alone, which has printed its help."""
    text: str = error.format_message()
    if not text:
        return ""
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError):
        from accel_cli.profile.validation_errors import describe

        text = f"{text.partition(': ')[0]}: {describe(error.__cause__)}"
    end = "" if text.endswith((".", "?")) else "."
    command = f"{error.ctx.command_path} " if error.ctx else ""
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
