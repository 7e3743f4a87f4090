"""The `accel` command: its subcommands, and the boundary where errors become messages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from accel_cli.commands import checkpoint, config, env, estimate, jobs, launch, logs, stacks, test

__all__ = ["app", "main"]

_GROUP = "Set up"
_RUN = "Run"

app = typer.Typer(
    name="accel",
    help="Run a raw PyTorch training script, unchanged, anywhere.",
    epilog="A first run: accel launch --nproc-per-node 2 train.py --epochs 3",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("launch", rich_help_panel=_RUN, **launch.SETTINGS)(launch.launch)
app.command("logs", rich_help_panel=_RUN, epilog=logs.EXAMPLE)(logs.logs)
app.command("test", rich_help_panel=_RUN, epilog=test.EXAMPLE)(test.test)
app.command("stacks", rich_help_panel=_RUN, epilog=stacks.EXAMPLE)(stacks.stacks)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=_RUN)
app.add_typer(jobs.app, name="jobs", rich_help_panel=_RUN)
app.add_typer(config.app, name="config", rich_help_panel=_GROUP)
app.command("estimate", rich_help_panel=_GROUP, epilog=estimate.EXAMPLE)(estimate.estimate)
app.command("env", rich_help_panel=_GROUP, epilog=env.EXAMPLE)(env.env)


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
    from accel_cli.errors import AccelError

    try:
        app(arguments)
    except KeyboardInterrupt:
        # Nothing runs yet: there is nothing to say.
        sys.exit(128 + 2)
    except AccelError as error:
        from accel_cli import console

        console.error(str(error))
        sys.exit(error.exit_code)
