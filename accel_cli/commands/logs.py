"""`accel logs`: what the ranks of a run wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accel_cli.runner.run_dir import RunFolder

__all__ = ["EXAMPLE", "logs"]

EXAMPLE = "Example: accel logs -f --rank 1"


def logs(  # noqa: PLR0913, PLR0917 - one parameter an option
    rank: Annotated[
        int | None, typer.Option(metavar="N", help="The rank; by default the lowest that ran here.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="K", help="The attempt, counted from 0; by default the last.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The run, as --list names it; by default the last that started processes."
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the runs that are kept.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
    log_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder that the launch was given with --log-dir.")
    ] = None,
) -> None:
    """Print what a rank of a run wrote; without options, rank 0 of the last run.

    Runs of the launcher torchrun are kept, with the whole output of every rank that ran on this machine.
    """
    import os
    import sys

    from accel_cli import console
    from accel_cli.runner import run_dir

    base = run_dir.get_log_home(os.environ, log_dir or _told(os.environ))
    if listed:
        _list(run_dir.find_recent_run(base))
        return
    chosen = run_dir.find_named_run(base, run)
    if run is None and (newest := run_dir.find_recent_run(base)[0]) != chosen:
        console.note(
            f"{newest.path.name} started no process ({newest.state}); these are the logs of {chosen.path.name}"
        )
    wanted = run_dir.LogSelection(chosen, attempt, rank)
    show = wanted.follow if follow else wanted.once
    for data in show():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _told(environ: Mapping[str, str]) -> str | None:
    """The folder that the profile names."""
    from accel_cli import planning
    from accel_cli.machine import Machine

    start = planning.resolve(planning.Request(""), environ, Machine(1)).profile.start
    return getattr(start, "log_dir", None)


def _list(found: list[RunFolder]) -> None:
    import time

    from accel_cli import console

    rows = []
    for run in found:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.about["started"]))
        rows.append((run.path.name, started, run.state, str(len(run.attempts))))
    console.table(("RUN", "STARTED", "STATE", "ATTEMPTS"), rows)
