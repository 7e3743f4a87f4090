"""`accel jobs`: what was submitted to a service, how it is doing, what it printed, its end, and what it left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli.commands.options import complete_profile_names

if TYPE_CHECKING:
    from accel_cli.jobs.base import Job, Jobs

__all__ = ["app"]

app = typer.Typer(
    help="List, look at, follow and stop jobs of Slurm or SageMaker, and bring home what they left.",
    no_args_is_help=True,
    epilog="Example: accel jobs list",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

_Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as accel launch said it.")]
_Launcher = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="KIND",
        help="Whose jobs: slurm or sagemaker. Else those of the profile in force, or slurm.",
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the profile; can be repeated."),
]
_Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="The named profile whose jobs these are.",
        autocompletion=complete_profile_names,
    ),
]


@app.command("list", epilog="Example: accel jobs list")
def list_(launcher: _Launcher = None, profile: _Profile = None, assignments: _Set = None) -> None:
    """List your jobs that Slurm still knows, or the newest of your AWS account, the oldest first."""
    from accel_cli import console

    with _open_jobs(launcher, profile, assignments) as jobs:
        rows = [(job.id, job.name, job.state, job.elapsed, job.where or job.reason) for job in jobs.list()]
    if not rows:
        console.note("there are no jobs of yours")
        return
    console.table(("ID", "NAME", "STATE", "TIME", "WHERE"), rows)


@app.command("status", epilog="Example: accel jobs status 12")
def status(
    job_id: _Id, launcher: _Launcher = None, profile: _Profile = None, assignments: _Set = None
) -> None:
    """Show what is known of a job."""
    from accel_cli import console

    with _open_jobs(launcher, profile, assignments) as jobs:
        job = jobs.status(job_id)
    console.table(("", ""), [(name, value) for name, value in _facts(job).items() if value])


@app.command("logs", epilog="Example: accel jobs logs 12 -f")
def logs(
    job_id: _Id,
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Go on until the job is done, and end with its exit code."),
    ] = False,
    launcher: _Launcher = None,
    profile: _Profile = None,
    assignments: _Set = None,
) -> None:
    """Print what a job has printed."""
    from accel_cli import console
    from accel_cli.jobs import base as following

    with _open_jobs(launcher, profile, assignments) as jobs:
        job = jobs.status(job_id)
        if follow:
            raise typer.Exit(following.follow(jobs, job))
        log, some = jobs.log(job), False
        while following.pass_on(log):
            some = True
    if not some:
        console.note(f"job {job.id} has printed nothing; it is {job.state}")


@app.command("stop", epilog="Example: accel jobs stop 12")
def stop(job_id: _Id, launcher: _Launcher = None, profile: _Profile = None, assignments: _Set = None) -> None:
    """End a job; its scripts get SIGTERM, and some time to save."""
    from accel_cli import console

    with _open_jobs(launcher, profile, assignments) as jobs:
        job = jobs.status(job_id)
        if job.done:
            console.note(f"job {job.id} is {job.state} already")
            return
        jobs.stop(job_id)
    console.note(f"job {job.id} is asked to end")


@app.command("download", epilog="Example: accel jobs download train-20260102-030405 -o models")
def download(
    job_id: _Id,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where a folder of the job's name is made.")
    ] = Path(),
    launcher: _Launcher = None,
    profile: _Profile = None,
    assignments: _Set = None,
) -> None:
    """Bring home the model and the other files that a job left."""
    from accel_cli import console

    with _open_jobs(launcher, profile, assignments) as jobs:
        folder = jobs.download(job_id, output)
    console.note(f"what job {job_id} left is in {console.short(str(folder.resolve()))}")
    console.plain(str(folder))


@contextmanager
def _open_jobs(kind: str | None, profile: str | None, assignments: list[str] | None) -> Iterator[Jobs]:
    """Give the jobs of a service; if none is said, they are those of the first, and an error names the others."""
    from accel_cli.errors import UsageError
    from accel_cli.jobs import SERVICES, again, service
    from accel_cli.jobs.base import UnreachableError

    if kind is not None and kind not in SERVICES:
        raise UsageError(
            f"--launcher takes {' or '.join(SERVICES)}, whose scripts run as jobs; it got {kind!r}"
        )
    typed = [*([f"launcher.kind={kind}"] if kind else []), *(assignments or ())]
    said = _in_force(profile, typed)
    assumed, *others = SERVICES
    try:
        jobs = service(said.get("launcher.kind") or assumed, said)
        jobs.options = again(profile, typed)
        yield jobs
    except (UsageError, UnreachableError) as error:
        if "launcher.kind" in said:
            raise
        raise type(error)(
            f"{str(error).rstrip('.')}. No profile says whose jobs these are, so {assumed} was looked at; use --launcher "
            f"{' or '.join(others)} for other jobs."
        ) from None


def _in_force(profile: str | None, assignments: list[str]) -> dict[str, Any]:
    """What the profile in force says of its launcher, by dotted key, if that submits jobs."""
    import os

    from accel_cli.errors import ProfileError
    from accel_cli.jobs import SERVICES
    from accel_cli.profile import layers
    from accel_cli.profile.store import Store

    values: dict[str, Any] = {}
    options = [layers.assigned(assignments)]
    for layer in layers.stack(Store.from_env(os.environ, Path.cwd()), os.environ, profile, options):
        if layer.problems:
            raise ProfileError(list(layer.problems))
        said = {key: value for key, value in layer.values.items() if key.startswith("launcher.")}
        if said.get("launcher.kind", values.get("launcher.kind")) != values.get("launcher.kind"):
            values = {}
        values |= said
    return values if values.get("launcher.kind") in SERVICES else {}


def _facts(job: Job) -> dict[str, str]:
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "exit code": "" if job.exit_code is None else str(job.exit_code),
        "where": job.where,
        "submitted": job.submitted,
        "time": job.elapsed,
        "restarts": str(job.restarts or ""),
        "log": job.log,
        "paid for": job.cost,
    }
