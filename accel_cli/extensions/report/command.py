"""`accel report`: runs as one HTML file with plots."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accel_cli import console
from accel_cli.commands.runs import LogDir, find_log_home
from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from accel_cli.extensions.report.data import RunData

__all__ = ["app"]

app = typer.Typer()

_PACKAGES = ("plotly", "jinja2")
_WATCH_S = 10.0
"""Seconds between two reports of a run in progress."""
_MARK = b'<meta name="generator" content="accel report">'
_MARK_RANGE = 1024
"""The bytes at the start of a report that contain its mark."""


@app.command("report", rich_help_panel="Watch", epilog="Example: accel report -o report.html")
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Show these runs: ids of accel runs, paths of run folders, or .jsonl files of the jsonl tracker; by "
            "default the last run.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write this file; by default report-RUN.html, or report.html for several runs.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that accel report did not write.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Write the file again every 10 seconds while a run is in progress; its page reloads.",
        ),
    ] = False,
    log_dir: LogDir = None,
) -> None:
    """Write metrics, step times, memory and events of runs to an HTML file.

    Several runs are drawn over each other. The file needs no network.
    """
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        from accel_runtime.environment.installation import format_install

        raise UsageError(
            f"Cannot draw a report: {' and '.join(missing)} not installed. Run: {format_install(*_PACKAGES, extra='report')}"
        )
    selected = _read_runs(runs or (), log_dir)
    file = output or Path(f"report-{selected[0].name}.html" if len(selected) == 1 else "report.html")
    _check_output(file, force=force)
    _write_page(file, selected, is_watched=watch)
    console.plain(str(file))
    with suppress(KeyboardInterrupt):
        while watch and any(run.is_running for run in selected):
            time.sleep(_WATCH_S)
            selected = _read_runs(runs or (), log_dir)
            _write_page(file, selected, is_watched=watch)


def _write_page(file: Path, selected: Sequence[RunData], *, is_watched: bool) -> None:
    """Write the report of runs; that of a run in progress reloads itself if it is watched."""
    from accel_cli.extensions.report.page import render_report

    is_running = is_watched and any(run.is_running for run in selected)
    page = render_report(selected, refresh_s=_WATCH_S if is_running else None)
    target = file.resolve()  # a symbolic link stays
    new = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        new.write_text(page, encoding="utf-8", errors="replace")
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _read_runs(names: Sequence[str], log_dir: str | None) -> list[RunData]:
    """Read the runs with these names or paths, each once."""
    from accel_cli.extensions.report.data import read_run, read_tracker_file
    from accel_cli.runs import run_dir

    if not names:
        return [read_run(run_dir.find_run(find_log_home(log_dir)))]
    found: dict[Path, list[RunData]] = {}
    for name in names:
        path = Path(name).expanduser()
        if name.endswith(".jsonl"):
            if not path.is_file():
                raise UsageError(
                    f"Cannot read {name!r}: no such file. Pass the file of the jsonl tracker, or a run of accel runs."
                )
            found.setdefault(path.resolve(), read_tracker_file(path))
            continue
        if os.sep in name:
            if not path.is_dir():
                raise UsageError(
                    f"Cannot read {name!r}: no such folder. Pass a run folder, or a run of accel runs."
                )
            run = run_dir.RunFolder(path.resolve())
        else:
            run = run_dir.find_run(find_log_home(log_dir), name)
        found.setdefault(run.path.resolve(), [read_run(run)])
    return [data for runs in found.values() for data in runs]


def _check_output(file: Path, *, force: bool) -> None:
    """Raise if the file cannot be written, or exists and is not a report."""
    if not file.parent.is_dir():
        raise UsageError(f"Cannot write {str(file)!r}: no such folder {str(file.parent)!r}. Create it first.")
    if file.is_dir():
        raise UsageError(f"Cannot write {str(file)!r}: it is a folder. Name a file with -o FILE.")
    if not file.exists():
        return
    if not file.is_file():  # replacing a device such as /dev/stdout would remove it
        raise UsageError(
            f"Cannot write {str(file)!r}: it is not a regular file. Name another one with -o FILE."
        )
    if force:
        return
    with file.open("rb") as old:
        is_report = _MARK in old.read(_MARK_RANGE)
    if not is_report:
        raise UsageError(
            f"{str(file)!r} exists and is not a report of accel. Pass --force to replace it, or -o FILE."
        )
