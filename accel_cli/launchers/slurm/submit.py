"""Carries a Slurm plan out: hands the batch script to `sbatch` and follows the job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.jobs.follow import follow
from accel_cli.jobs.slurm import SlurmJobs
from accel_cli.plan import Plan

__all__ = ["submit"]


def submit(plan: Plan) -> int:
    """Submit the job, and follow it to its end unless the plan says otherwise.

    Returns:
        What the job's end comes to; 130 after Ctrl-C, which leaves the job running; 0 if it is not followed.

    Raises:
        UsageError: There is no Slurm here, or it refuses the job.
        UnreachableError: The cluster does not answer any more.
    """
    _make(Path(plan.output_dir))
    job_id = _sbatch(plan)
    # Said before Slurm is asked anything more, since from now on there is something to stop.
    console.note(
        f"job {job_id} is submitted; accel jobs logs {job_id} -f follows it, accel jobs stop {job_id} ends it"
    )
    if plan.detach:
        console.plain(job_id)
        return 0
    jobs = SlurmJobs()
    job = jobs.status(job_id)
    console.note(f"the log of job {job_id}: {console.short(job.log)}")
    return follow(jobs, job)


def _make(folder: Path) -> None:
    """Slurm loses a job without a word whose log it cannot write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"launcher.output_dir {folder} cannot be made: {error.strerror}") from None


def _sbatch(plan: Plan) -> str:
    """Hand the script over; the job's id."""
    try:
        done = subprocess.run(
            plan.argv,
            input=os.fsencode(plan.script),
            capture_output=True,
            check=False,
            env={**os.environ, **plan.env},
        )
    except FileNotFoundError:
        raise UsageError(
            "sbatch was not found: launcher.kind: slurm submits jobs from a machine of a Slurm cluster. Log in to one, "
            "or load its module; --dry-run shows the batch script anywhere"
        ) from None
    if done.returncode:
        raise UsageError(f"Slurm refuses the job: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode().strip().partition(";")[0]
