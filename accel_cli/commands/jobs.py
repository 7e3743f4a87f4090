"""`accel jobs`: list, show, follow and stop submitted jobs, and download their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from accel_cli import console
from accel_cli.profile.options import complete_assignments, complete_profile_names

if TYPE_CHECKING:
    from accel_cli.launchers.job_service import Jobs

__all__ = ["JobProfile", "JobSettings", "LauncherKind", "Service", "app", "has_service", "open_jobs"]

_PANEL = "Service"

LauncherKind = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="KIND",
        help="Look for jobs of this launcher; by default that of the active profile, or else the first that submits jobs.",
        rich_help_panel=_PANEL,
    ),
]
JobProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Look for jobs of the launcher of this profile.",
        autocompletion=complete_profile_names,
        rich_help_panel=_PANEL,
    ),
]
JobSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value of the profile; can be repeated.",
        autocompletion=complete_assignments,
        rich_help_panel=_PANEL,
    ),
]
_JobId = Annotated[str, typer.Argument(metavar="ID", help="Id of the job, as printed by accel launch.")]


class Service(NamedTuple):
    """The job service of a command: by default that of the active profile."""

    launcher: str | None = None
    profile: str | None = None
    assignments: Sequence[str] = ()


app = typer.Typer(no_args_is_help=True, rich_help_panel="Manage", epilog="Example: accel jobs list")


@app.callback()
def jobs() -> None:
    """List, show, follow and stop submitted jobs, and download their results.

    accel launch follows the job that it submits: output on stdout, state on stderr, its exit code.
    Ctrl-C ends accel launch with exit code 130, not the job, and prints how to follow it again.
    With --detach, accel launch only prints the id of the job on stdout.
    """


@app.command("list", epilog="Example: accel jobs list")
def list_(launcher: LauncherKind = None, profile: JobProfile = None, assignments: JobSettings = None) -> None:
    """List jobs, oldest first."""
    with open_jobs(Service(launcher, profile, assignments or ())) as jobs:
        rows = [(job.id, job.name, job.state, job.elapsed, job.nodes or job.reason) for job in jobs.list()]
    if not rows:
        console.note("no jobs found")
        return
    console.table(("ID", "NAME", "STATE", "TIME", "NODES"), rows)


@app.command("status", epilog="Example: accel jobs status 12")
def status(
    job_id: _JobId, launcher: LauncherKind = None, profile: JobProfile = None, assignments: JobSettings = None
) -> None:
    """Show the details of a job."""
    with open_jobs(Service(launcher, profile, assignments or ())) as jobs:
        job = jobs.status(job_id)
    fields = {
        name: value for name, value in asdict(job).items() if value or (name == "exit_code" and job.finished)
    }
    console.table(("", ""), [(name.replace("_", " "), str(value)) for name, value in fields.items()])


@app.command("logs", epilog="Example: accel jobs logs 12 -f")
def logs(
    job_id: _JobId,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Follow the log until the job ends, and exit with its exit code."
        ),
    ] = False,
    launcher: LauncherKind = None,
    profile: JobProfile = None,
    assignments: JobSettings = None,
) -> None:
    """Print the log of a job."""
    from accel_cli.launchers.job_service import follow as follow_job
    from accel_cli.launchers.job_service import print_new_output

    with open_jobs(Service(launcher, profile, assignments or ())) as jobs:
        job = jobs.status(job_id)
        if follow:
            raise typer.Exit(follow_job(jobs, job))
        log, printed = jobs.open_log(job), False
        while print_new_output(log):
            printed = True
    if not printed:
        console.note(f"job {job.id} has no output; it is {job.state}")


@app.command("stop", epilog="Example: accel jobs stop 12")
def stop(
    job_id: _JobId, launcher: LauncherKind = None, profile: JobProfile = None, assignments: JobSettings = None
) -> None:
    """Stop a job. Where the service gives them time, its processes receive SIGTERM and can save."""
    with open_jobs(Service(launcher, profile, assignments or ())) as jobs:
        job = jobs.status(job_id)
        if job.finished:
            console.note(f"job {job.id} is {job.state} already")
            return
        jobs.stop(job_id)
    console.note(f"job {job.id} is stopping")


@app.command("download", epilog="Example: accel jobs download train-20260102-030405 -o models")
def download(
    job_id: _JobId,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write the results to a new folder in DIR, named after the job.",
        ),
    ] = Path(),
    launcher: LauncherKind = None,
    profile: JobProfile = None,
    assignments: JobSettings = None,
) -> None:
    """Download the model and the other output files of a job."""
    with open_jobs(Service(launcher, profile, assignments or ())) as jobs:
        folder = jobs.download(job_id, output)
    console.note(f"results of job {job_id} are in {console.abbreviate_home(str(folder.resolve()))}")
    console.plain(str(folder))


@contextmanager
def open_jobs(service: Service) -> Iterator[Jobs]:
    """Yield the jobs of a launcher, by default of the first service; then errors name the others."""
    from accel_cli.errors import UsageError
    from accel_cli.launchers import LAUNCHERS
    from accel_cli.launchers.job_service import UnreachableError, format_options

    values, default = _read_launcher_values(service), next(filter(_submits_jobs, LAUNCHERS))
    if assumed := not _submits_jobs(values.get("launcher.kind")):
        values = {"launcher.kind": default}
    try:
        jobs = LAUNCHERS[values["launcher.kind"]].open_jobs(values)
        jobs.jobs_options = format_options(service.profile, _list_assignments(service))
        yield jobs
    except (UsageError, UnreachableError) as error:
        if not assumed:
            raise
        others = " or ".join(kind for kind in LAUNCHERS if _submits_jobs(kind) and kind != default)
        raise type(error)(
            f"{str(error).rstrip('.')}. No profile selects a launcher that submits jobs, so {default} is assumed; "
            f"use --launcher {others} for others."
        ) from None


def has_service(service: Service) -> bool:
    """Return True if the options or the active profile select a launcher that submits jobs."""
    return _submits_jobs(_read_launcher_values(service).get("launcher.kind"))


def _submits_jobs(kind: Any) -> bool:
    from accel_cli.launchers import LAUNCHERS

    return isinstance(kind, str) and kind in LAUNCHERS and LAUNCHERS[kind].location == "job"


def _check_kind(kind: Any) -> None:
    """Raise if a launcher that the command or its profile names does not submit jobs."""
    from accel_cli.errors import UsageError
    from accel_cli.launchers import LAUNCHERS

    if _submits_jobs(kind):
        return
    known = isinstance(kind, str) and kind in LAUNCHERS
    reason = "its processes end with accel launch, so it submits no jobs" if known else "it is unknown"
    kinds = " or ".join(filter(_submits_jobs, LAUNCHERS))
    raise UsageError(f"Cannot use accel jobs with launcher {kind!r}: {reason}. Use --launcher {kinds}.")


def _list_assignments(service: Service) -> list[str]:
    texts = list(service.assignments)
    return texts if service.launcher is None else [f"launcher.kind={service.launcher}", *texts]


def _read_launcher_values(service: Service) -> dict[str, Any]:
    """Return the values of the launcher in the layers of the profile, by dotted key."""
    import os

    from accel_cli.errors import ProfileError
    from accel_cli.profile import layers
    from accel_cli.profile.store import ProfileStore

    options = layers.parse_assignments(_list_assignments(service))
    values: dict[str, Any] = {}
    profiles = ProfileStore.from_env(os.environ, Path.cwd())
    console.print_notes(layers.list_unused_files(profiles, os.environ))
    for layer in layers.read_layers(profiles, os.environ, service.profile, [options]):
        if layer.problems:
            raise ProfileError(list(layer.problems))
        if layer.values.get("launcher.kind", values.get("launcher.kind")) != values.get("launcher.kind"):
            values = {}
        values |= {key: value for key, value in layer.values.items() if key.startswith("launcher.")}
    if (service.profile or "launcher.kind" in options.values) and "launcher.kind" in values:
        _check_kind(values["launcher.kind"])
    return values
