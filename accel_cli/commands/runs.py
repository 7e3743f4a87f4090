"""`accel logs`, `accel runs` and `accel stacks`: the runs of this user, and the output and progress of their ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli import console
from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from accel_cli.runs.run_dir import RunFolder

__all__ = ["LogDir", "app", "complete_runs", "find_log_home"]

app = typer.Typer()


def complete_runs(ctx: typer.Context) -> list[str]:
    """Return the ids of runs, the newest first."""
    from accel_cli.runs.run_dir import find_recent_runs, get_log_home

    return [run.path.name for run in find_recent_runs(get_log_home(os.environ, ctx.params.get("log_dir")))]


LogDir = Annotated[
    str | None,
    typer.Option("--log-dir", metavar="DIR", help="Read runs that accel launch --log-dir wrote here."),
]


def find_log_home(log_dir: str | None) -> Path:
    """Return the folder of all runs: `log_dir`, that of the active profile, or the default one."""
    from accel_cli.planning.launch_options import Request
    from accel_cli.planning.machine import Machine
    from accel_cli.profile import planner
    from accel_cli.runs import run_dir

    if not log_dir:
        resolved = planner.resolve(Request(""), os.environ, Machine(1), reads_engine_file=False)
        console.print_notes(resolved.notes)
        log_dir = getattr(resolved.profile.launcher, "log_dir", None)
    return run_dir.get_log_home(os.environ, log_dir)


@app.command("logs", rich_help_panel="Watch", epilog="Example: accel logs -f --rank 1")
def logs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Print the log of this run of accel runs: its id, the beginning of it, or a script; by default the "
            "last that kept output.",
            autocompletion=complete_runs,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", metavar="N", help="Print the log of this rank; by default the lowest of this machine."
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt", metavar="K", help="Print this attempt, counted from 0; by default the last."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")
    ] = False,
    log_dir: LogDir = None,
) -> None:
    """Print the log of a rank; without options, of rank 0 of the last run.

    The launchers torchrun and xla keep the output of all ranks of this machine.
    """
    from accel_cli.runs import run_dir

    home = find_log_home(log_dir)
    selected = run_dir.find_run(home, run, has_logs=True)
    newest = run_dir.find_recent_runs(home)[0]
    if run is None and newest != selected:
        status = newest.read_status()
        reason = "kept no output" if status.replaces_process else "started no process"
        console.note(
            f"{newest.path.name} {reason} ({status.state}); these are the logs of {_describe_age(selected)}"
        )
    elif run is None and not newest.read_status().replaces_process:
        console.note(f"logs of {_describe_age(selected)}")
    for data in run_dir.read_log(selected, attempt, rank, follow=follow):
        console.write_content(data)


def _describe_age(run: RunFolder) -> str:
    """Return the name of a run, its age and its end: a launch that was rejected before this command has no run."""
    status = run.read_status()
    started = status.record.get("started")
    age = "" if started is None else f"{console.format_duration(max(0.0, time.time() - started))} ago, "
    code = status.record.get("exit_code")
    return f"{run.path.name} ({age}{status.state if code is None else f'exit code {code}'})"


@app.command("runs", rich_help_panel="Watch", epilog="Example: accel runs -n 5")
def runs(
    count: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Show the last N runs.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    log_dir: LogDir = None,
) -> None:
    """List the last runs of this user on this machine, newest first."""
    from accel_cli.runs import run_dir

    home = find_log_home(log_dir)
    entries = [_describe_run(run) for run in run_dir.find_recent_runs(home)[:count]]
    if as_json:
        console.print_json(entries)
        return
    if not entries:
        console.note(f"no runs found in {home}")
        return
    rows = [_format_row(entry) for entry in entries]
    console.table(
        ("RUN", "SCRIPT", "STARTED", "DURATION", "RANKS", "EXIT"),
        rows,
        fixed=("RUN", "STARTED", "DURATION", "RANKS"),
        cropped=("SCRIPT",),
        optional=("STARTED", "SCRIPT", "RANKS", "DURATION"),  # the id of a run contains the first two
    )


def _describe_run(run: RunFolder) -> dict[str, Any]:
    """Return the facts of a run that `accel runs` shows."""
    status = run.read_status()
    record = status.record
    started, ended = record.get("started"), time.time() if status.is_running else status.ended
    attempts = run.attempts
    ranks = len(run.list_ranks(attempts[-1])) if attempts else 0
    return {
        "run": run.path.name,
        "path": str(run.path),
        "script": record.get("target") or run.stem,
        "arguments": record.get("arguments", []),
        "launcher": record.get("launcher"),
        "host": record.get("host"),
        "started": started,
        "duration": None if ended is None or started is None else max(0.0, ended - started),
        "ranks": record.get("world_size", ranks),
        "attempts": len(attempts),
        "state": status.state,
        "is_running": status.is_running,
        "exit_code": record.get("exit_code"),
    }


def _format_row(entry: dict[str, Any]) -> tuple[str, ...]:
    duration = "-" if entry["duration"] is None else console.format_duration(entry["duration"])
    code = entry["exit_code"]
    return (
        entry["run"],
        Path(entry["script"]).name,
        _format_time(entry["started"]),
        duration,
        str(entry["ranks"] or "-"),
        entry["state"] if code is None else str(code),
    )


def _format_time(started: float) -> str:
    """Return a local time: of today the hour, of this year without the year."""
    local, now = time.localtime(started), time.localtime()
    if local[:3] == now[:3]:
        return time.strftime("%H:%M:%S", local)
    return time.strftime("%b %d %H:%M" if local.tm_year == now.tm_year else "%Y-%m-%d", local)


@app.command("stacks", rich_help_panel="Watch", epilog="Example: accel stacks --rank 0")
def stacks(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Show this run of accel runs: its id, the beginning of it, or a script; by default the newest that "
            "is in progress.",
            autocompletion=complete_runs,
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Show only this rank.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all threads, and frames of libraries.")] = False,
    log_dir: LogDir = None,
) -> None:
    """Show the progress and Python stack of every process in a running job.

    The job is not interrupted. Only processes on this machine are shown.
    """
    from accel_cli.runner import stalls
    from accel_cli.runs import run_dir

    selected = run_dir.find_running_run(find_log_home(log_dir), run)
    folders = selected.list_ranks(selected.attempts[-1]) if selected.attempts else {}
    if rank is not None:
        if rank not in folders:
            ranks = ", ".join(map(str, folders)) or "none"
            raise UsageError(
                f"Rank {rank} of {selected.path.name} does not run on this machine. Local ranks: {ranks}."
            )
        folders = {rank: folders[rank]}
    console.plain(f"{selected.path.name}\n{stalls.format_stall(folders, full=full)}")
