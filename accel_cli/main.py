"""The `accel` command: its subcommands, and the boundary where errors become messages."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from accel_cli.commands import checkpoint, config, env, estimate, jobs, launch, runs, test
from accel_cli.commands.options import ForeignCommand, normalize_option

__all__ = ["app", "main"]

_GROUP = "Set up"
_RUN = "Run"

app = typer.Typer(
    name="accel",
    help="Run a raw PyTorch training script, unchanged, anywhere.",
    epilog="A first run: accel launch --nproc-per-node 2 train.py --epochs 3",
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 80,
        # Commands below inherit it: `--nproc_per_node`, as torchrun and Accelerate spell options, is accepted.
        "token_normalize_func": normalize_option,
    },
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("launch", rich_help_panel=_RUN, **launch.SETTINGS)(launch.launch)
app.command("logs", rich_help_panel=_RUN, epilog=runs.LOGS_EXAMPLE)(runs.logs)
app.command("test", cls=ForeignCommand, rich_help_panel=_RUN, epilog=test.EXAMPLE)(test.test)
app.command("stacks", rich_help_panel=_RUN, epilog=runs.STACKS_EXAMPLE)(runs.stacks)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=_RUN)
app.add_typer(jobs.app, name="jobs", rich_help_panel=_RUN)
app.add_typer(config.app, name="config", rich_help_panel=_GROUP)
app.command("estimate", rich_help_panel=_GROUP, epilog=estimate.EXAMPLE)(estimate.estimate)
app.command("env", cls=ForeignCommand, rich_help_panel=_GROUP, epilog=env.EXAMPLE)(env.env)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"accel {version('accel')}")
        raise typer.Exit


@app.callback()
def accel(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run a raw PyTorch training script, unchanged, anywhere."""


def main(arguments: list[str] | None = None) -> None:
    """Run `accel`; what a person can mend ends in one message and an exit code, not in a traceback.

    Args:
        arguments: What follows `accel`; None takes the command line's.
    """
    from accel_cli.errors import AccelError, explain_os_error

    try:
        _open_missing_streams()
        _reset_sigchld()
        app(arguments)
    except KeyboardInterrupt:
        # Nothing runs yet: there is nothing to say.
        sys.exit(128 + 2)
    except AccelError as error:
        from accel_cli import console

        console.error(str(error))
        sys.exit(error.exit_code)
    except (OSError, MemoryError) as error:
        from accel_cli import console

        console.error(explain_os_error(error))
        sys.exit(1)


def _reset_sigchld() -> None:
    """Let the kernel keep exit codes of children: a parent that ignores SIGCHLD passes that on, and codes are lost."""
    if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _open_missing_streams() -> None:
    """Open the null device where a standard stream is closed: its number would go to the next file that is opened."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
