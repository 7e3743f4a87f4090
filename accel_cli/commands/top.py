"""`accel top`: watch a run of this machine, or a submitted job."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from accel_cli import console
from accel_cli.commands.jobs import JobProfile, JobSettings, LauncherKind, Service, has_service, open_jobs
from accel_cli.commands.runs import LogDir, complete_runs, find_log_home
from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from accel_cli.runs.run_dir import RunFolder
    from accel_cli.runs.screen import Controls, View

__all__ = ["app"]

app = typer.Typer()

_COLUMNS = 120
"""Columns of the output for other programs, unless COLUMNS is set."""


@app.command("top", rich_help_panel="Watch", epilog="Example: accel top")
def top(  # noqa: PLR0913, PLR0917 - options of the command
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Watch this run of accel runs: its id, the beginning of it, or a script; or the job with this id. By "
            "default the newest run in progress.",
            autocompletion=complete_runs,
        ),
    ] = None,
    shows_all: Annotated[bool, typer.Option("--all", help="Show every rank, also of more than 8.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a snapshot as JSON, and exit.")] = False,
    log_dir: LogDir = None,
    launcher: LauncherKind = None,
    profile: JobProfile = None,
    assignments: JobSettings = None,
) -> None:
    """Watch the ranks of a run: steps, speed, memory, location and logged metrics.

    The run is not disturbed. Press q or Ctrl-C to leave, and ? for the keys and columns. Without a terminal, one snapshot is printed.
    """
    service = Service(launcher, profile, assignments or ())
    run = _find_run(name, log_dir, service)
    if run is None:
        assert name is not None
        _show_job(name, service, as_json=as_json)
        return
    from accel_cli.runs import live_view, screen
    from accel_cli.runs.snapshot import read_snapshot

    if as_json:
        console.print_json(read_snapshot(run).to_json())
        return
    is_ascii = not live_view.supports_blocks(sys.stdout.encoding)

    def draw(width: int, height: int | None, controls: Controls) -> View:
        snapshot = read_snapshot(run)
        if controls.shows_help and height and snapshot.is_running:
            body = live_view.build_help(width, height, first=controls.first)
        else:
            controls = replace(controls, has_keys=controls.has_keys and snapshot.is_running)
            body = live_view.build_view(snapshot, width, height, controls=controls, is_ascii=is_ascii)
        return screen.View(body, is_final=not snapshot.is_running)

    is_live = _is_interactive() and run.read_status().is_running
    last = (
        screen.watch(draw, shows_all=shows_all)
        if is_live
        else draw(*_get_size(), screen.Controls(shows_all=shows_all))
    )
    if last:
        _print_view(last)


def _find_run(name: str | None, log_dir: str | None, service: Service) -> RunFolder | None:
    """Return the run with a name, or without a name the newest in progress; None if the name is that of a job."""
    from accel_cli.runs import run_dir

    if service.launcher or service.profile or service.assignments:
        if name is None:
            raise UsageError("The id of the job is missing. List the jobs with accel jobs list.")
        return None
    base = find_log_home(log_dir)
    if name is None:
        return run_dir.find_running_run(base)
    try:
        return run_dir.find_run(base, name)
    except UsageError:
        if not has_service(service):
            raise
        return None


def _show_job(job_id: str, service: Service, *, as_json: bool) -> None:
    from accel_cli.launchers.job_view import JobView
    from accel_cli.runs import screen

    with open_jobs(service) as jobs:
        view = JobView(jobs, job_id)
        if as_json:
            console.print_json(view.to_json())
            return
        is_final = view.job.finished or not _is_interactive()
        last = (
            view.draw(*_get_size())
            if is_final
            else screen.watch(lambda width, height, _: view.draw(width, height))
        )
        if last:
            _print_view(last)


def _is_interactive() -> bool:
    return sys.stdout.isatty() and not console.is_dumb_terminal()


def _get_size() -> tuple[int, int | None]:
    """Return the columns for one print, and any number of lines."""
    if sys.stdout.isatty():
        return console.get_terminal_size(sys.stdout.fileno()).columns, None
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else _COLUMNS, None


def _print_view(view: View) -> None:
    from accel_cli.runs import live_view
    from accel_runtime.environment.text import encode_text

    is_coloured = sys.stdout.isatty() and console.use_color()
    lines = live_view.render_lines(view.body, _get_size()[0], is_coloured=is_coloured)
    # The view itself has escaped all texts, and has colours of its own.
    console.write_content(encode_text("\n".join([*lines, ""])))
