"""`accel logs` and `accel stacks`: output and progress of the ranks of a run."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from accel_cli import console
from accel_cli.commands.options import CommandApp
from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from accel_cli.runner.run_dir import RunFolder

__all__ = ["app"]

app = CommandApp(rich_help_panel="Run")


@app.command("logs", epilog="Example: accel logs -f --rank 1")
def logs(  # noqa: PLR0913, PLR0917 - one parameter an option
    rank: Annotated[
        int | None,
        typer.Option(metavar="N", help="Print the log of this rank; by default the lowest of this machine."),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="K", help="Print this attempt, counted from 0; by default the last.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Print this run of --list; by default the last that started processes."
        ),
    ] = None,
    list_runs: Annotated[bool, typer.Option("--list", help="List the runs that are kept.")] = False,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the log until the run ends.")
    ] = False,
    log_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Read runs that accel launch --log-dir wrote here.")
    ] = None,
) -> None:
    """Print the log of a rank; without options, of rank 0 of the last run.

    The launchers torchrun and xla keep the output of all ranks of this machine.
    """
    from accel_cli.planning import planner
    from accel_cli.planning.machine import Machine
    from accel_cli.planning.options import Request
    from accel_cli.runner import run_dir

    if not log_dir:
        launcher = planner.resolve(Request(""), os.environ, Machine(1)).profile.launcher
        log_dir = getattr(launcher, "log_dir", None)
    home = run_dir.get_log_home(os.environ, log_dir)
    if list_runs:
        runs = run_dir.find_recent_runs(home)
        if not runs:
            console.note(f"no runs found in {home}")
        _print_runs(runs)
        return
    selected = run_dir.find_run(home, run)
    newest = run_dir.find_recent_runs(home)[0]
    if run is None and newest != selected:
        console.note(
            f"{newest.path.name} started no process ({newest.state}); these are the logs of {selected.path.name}"
        )
    for data in run_dir.read_log(selected, attempt, rank, follow=follow):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _print_runs(runs: list[RunFolder]) -> None:
    rows = []
    for run in runs:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.record["started"]))
        rows.append((run.path.name, started, run.state, str(len(run.attempts))))
    console.table(("RUN", "STARTED", "STATE", "ATTEMPTS"), rows)


@app.command("stacks", epilog="Example: accel stacks --rank 0")
def stacks(
    name: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="NAME", help="Show this run of accel logs --list; by default the newest."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Show only this rank.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all threads, and frames of libraries.")] = False,
) -> None:
    """Show the progress and Python stack of every process in a running job.

    The job is not interrupted. Only processes on this machine are shown.
    """
    from accel_cli.runner import stalls

    run = _find_running(name)
    folders = run.list_ranks(run.attempts[-1]) if run.attempts else {}
    if rank is not None:
        if rank not in folders:
            ranks = ", ".join(map(str, folders)) or "none"
            raise UsageError(
                f"Rank {rank} of {run.path.name} does not run on this machine. Local ranks: {ranks}."
            )
        folders = {rank: folders[rank]}
    console.plain(f"{run.path.name}\n{stalls.format_stall(folders, full=full)}")


def _find_running(name: str | None) -> RunFolder:
    """Return the newest running run, or the one of this name."""
    from accel_cli.runner import run_dir

    home = run_dir.get_log_home(os.environ)
    runs = run_dir.find_recent_runs(home)
    running = {run.path.name: run for run in runs if run.is_running}
    if name is None:
        if not running:
            raise UsageError(f"No run of accel launch is in progress on this machine (searched {home}).")
        return next(iter(running.values()))
    if name not in running:
        ended = any(run.path.name == name for run in runs)
        raise UsageError(
            f"Run {name!r} {'has ended' if ended else 'not found'}. Running: {', '.join(running) or 'none'}."
        )
    return running[name]
