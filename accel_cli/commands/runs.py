"""`accel logs`: what the ranks of a run wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accel_cli.runner.run_dir import RunFolder

__all__ = ["LOGS_EXAMPLE", "STACKS_EXAMPLE", "logs", "stacks"]


LOGS_EXAMPLE = "Example: accel logs -f --rank 1"


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
    from accel_cli.planning import planner
    from accel_cli.planning.machine import Machine

    start = planner.resolve(planner.Request(""), environ, Machine(1)).profile.start
    return getattr(start, "log_dir", None)


def _list(found: list[RunFolder]) -> None:
    import time

    from accel_cli import console

    rows = []
    for run in found:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.about["started"]))
        rows.append((run.path.name, started, run.state, str(len(run.attempts))))
    console.table(("RUN", "STARTED", "STATE", "ATTEMPTS"), rows)


STACKS_EXAMPLE = "Example: accel stacks --rank 0"


def stacks(
    name: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="The run, by the name of its folder; else the newest."),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Only this process.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All threads, and the frames of libraries too.")
    ] = False,
) -> None:
    """Show how far the processes of a running job are, and their Python stacks.

    The job goes on. Processes on this machine are shown.
    """
    from accel_cli import console
    from accel_cli.errors import UsageError
    from accel_cli.runner import stalls

    run = _running(name)
    folders = run.ranks(run.attempts[-1]) if run.attempts else {}
    if rank is not None and rank not in folders:
        known = ", ".join(map(str, folders)) or "none yet"
        raise UsageError(f"--rank: {run.path.name} has no rank {rank} on this machine; it has {known}")
    if rank is not None:
        folders = {rank: folders[rank]}
    console.plain(f"{run.path.name}\n{stalls.format_stall(folders, full=full)}")


def _running(name: str | None) -> RunFolder:
    import os

    from accel_cli.errors import UsageError
    from accel_cli.runner import run_dir

    home = run_dir.get_log_home(os.environ)
    known = run_dir.find_recent_run(home)
    running = [run for run in known if run.running]
    if name is None:
        if not running:
            raise UsageError(f"no run of `accel launch` is under way here (runs are kept in {home})")
        return running[0]
    named = [run for run in known if run.path.name == name]
    if not named:
        there = ", ".join(run.path.name for run in running) or "none"
        raise UsageError(f"--run: there is no run {name!r}; under way: {there}")
    if named[0] not in running:
        raise UsageError(f"--run: {name} is over; its processes are gone")
    return named[0]
