"""`accel jobs`: what was submitted to a scheduler, how it is doing, what it printed, and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accel_cli.jobs.base import Job, Jobs

__all__ = ["app"]

app = typer.Typer(
    help="List, look at, follow and stop jobs of a scheduler.",
    no_args_is_help=True,
    epilog="Example: accel jobs list",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

_Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as accel launch said it.")]
_Launcher = Annotated[
    str | None,
    typer.Option(
        "--launcher", metavar="KIND", help="Whose jobs: slurm. Else those of the profile in force, or slurm."
    ),
]


@app.command("list", epilog="Example: accel jobs list")
def list_(launcher: _Launcher = None) -> None:
    """List your jobs that the scheduler still knows, the oldest first."""
    from accel_cli import console

    rows = [
        (job.id, job.name, job.state, job.elapsed, job.where or job.reason) for job in _jobs(launcher).list()
    ]
    if not rows:
        console.note("there are no jobs of yours")
        return
    console.table(("ID", "NAME", "STATE", "TIME", "WHERE"), rows)


@app.command("status", epilog="Example: accel jobs status 12")
def status(job_id: _Id, launcher: _Launcher = None) -> None:
    """Show what the scheduler says of a job."""
    from accel_cli import console

    job = _jobs(launcher).status(job_id)
    console.table(("", ""), [(name, value) for name, value in _facts(job).items() if value])


@app.command("logs", epilog="Example: accel jobs logs 12 -f")
def logs(
    job_id: _Id,
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Go on until the job is done, and end with its exit code."),
    ] = False,
    launcher: _Launcher = None,
) -> None:
    """Print what a job has printed."""
    from accel_cli import console
    from accel_cli.jobs import follow as following

    jobs = _jobs(launcher)
    job = jobs.status(job_id)
    if follow:
        raise typer.Exit(following.follow(jobs, job))
    log, some = jobs.log(job), False
    while following.pass_on(log):
        some = True
    if not some:
        console.note(f"job {job.id} has printed nothing; it is {job.state}")


@app.command("stop", epilog="Example: accel jobs stop 12")
def stop(job_id: _Id, launcher: _Launcher = None) -> None:
    """End a job; its scripts get SIGTERM, and some time to save."""
    from accel_cli import console

    jobs = _jobs(launcher)
    job = jobs.status(job_id)
    if job.done:
        console.note(f"job {job.id} is {job.state} already")
        return
    jobs.stop(job_id)
    console.note(f"job {job.id} is asked to end")


def _jobs(kind: str | None) -> Jobs:
    from accel_cli.errors import UsageError
    from accel_cli.jobs import SERVICES, service

    if kind is not None and kind not in SERVICES:
        raise UsageError(
            f"--launcher takes {' or '.join(SERVICES)}, whose scripts run as jobs; it got {kind!r}"
        )
    return service(kind or _in_force() or next(iter(SERVICES)))


def _in_force() -> str | None:
    """The launcher of the profile in force, if it submits jobs."""
    import os
    from pathlib import Path

    from accel_cli.jobs import SERVICES
    from accel_cli.profile import layers
    from accel_cli.profile.store import Store

    said = layers.stack(Store.from_env(os.environ, Path.cwd()), os.environ, None)
    kinds = [layer.values["launcher.kind"] for layer in said if "launcher.kind" in layer.values]
    return kinds[-1] if kinds and kinds[-1] in SERVICES else None


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
    }
