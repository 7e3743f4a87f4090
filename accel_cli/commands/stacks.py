"""`accel stacks`: where the processes of a running job are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accel_cli.runner.run_dir import RunFolder

__all__ = ["EXAMPLE", "stacks"]

EXAMPLE = "Example: accel stacks --rank 0"


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
