"""The jobs of a Slurm cluster, from `scontrol`; what Slurm has forgotten, from `sacct` where it answers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.jobs.base import Job, Jobs, Log, Pace, UnreachableError, follow
from accel_cli.planning.plan import Plan

__all__ = ["SlurmJobs", "parsed", "submit_job"]


_TIMEOUT_S = 60
_DONE = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
"""States a job does not leave by itself."""
_STUCK = {
    "PartitionNodeLimit": "the partition gives fewer nodes to a job",
    "PartitionTimeLimit": "the partition gives less time to a job",
    "BadConstraints": "no nodes are as it asks",
    "InvalidAccount": "the account may not be used",
    "InvalidQOS": "the quality of service may not be used",
    "JobHeldUser": "it is held until scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "DependencyNeverSatisfied": "what it waits for did not end well",
}
"""Reasons that do not go away by waiting, in words."""
_KILLED = 137
_HIGHEST_SIGNAL = 64
# A job's name may hold anything, also what looks like another field.
_JOB = re.compile(r"JobId=(\d+)\S* .*?JobName=(.*) UserId=[^ (]*\((\d+)\) (.*)")
_FIELD = re.compile(r"(?:^| )([A-Z]\w*)=")
_CHUNK = 1 << 20
_ACCOUNTED = "JobName,State,ExitCode,Submit,Elapsed,NodeList"


class SlurmJobs(Jobs):
    """What `scontrol` says of your jobs; Slurm forgets a job a few minutes after its end."""

    # The last lines come late on a shared file system.
    pace: ClassVar[Pace] = Pace(read_s=0.2, ask_s=(0.5, 5.0), late_s=1.0)

    @override
    def list(self) -> list[Job]:
        said = _scontrol("show", "job", "--oneliner")
        return [job for job, user in _jobs(said) if user == os.getuid()]

    @override
    def status(self, job_id: str) -> Job:
        _check(job_id)
        try:
            said = _scontrol("show", "job", "--oneliner", job_id)
        except _UnknownJobError:
            return _accounted(job_id)
        return next(job for job, _ in _jobs(said))

    @override
    def log(self, job: Job) -> Log:
        if not job.log:
            raise UsageError(
                f"Slurm does not say any more where the log of job {job.id} is; "
                f"look for slurm-{job.id}.out in launcher.output_dir, below the folder it was launched from"
            )
        return FileLog(Path(job.log))

    @override
    def stop(self, job_id: str) -> None:
        _check(job_id)
        _run("scancel", job_id)

    @override
    def download(self, job_id: str, into: Path) -> Path:
        raise UsageError(
            f"there is nothing to bring home: what Slurm job {job_id} wrote is in the file system that its machines "
            "and this one share, where its script put it"
        )


class FileLog(Log):
    """A log that a job writes into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    @override
    def read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0  # a restart began the file anew
                file.seek(self._position)
                new = file.read(_CHUNK)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UsageError(f"the log {self._path} cannot be read here: {error.strerror}") from None
        self._position += len(new)
        return new


class _UnknownJobError(UsageError):
    """Slurm does not know the job, or not any more."""


def parsed(line: str) -> tuple[Job, int] | None:
    """A job and its user's number, from a line of `scontrol show job --oneliner`; None if it is no job's."""
    matched = _JOB.match(line)
    if not matched:
        return None
    job_id, name, user, rest = matched.groups()
    parts = _FIELD.split(rest)
    fields = dict(zip(parts[1::2], parts[2::2], strict=True))
    state = fields["JobState"]
    return Job(
        id=job_id,
        name=name,
        state=state,
        done=state in _DONE,
        exit_code=_code(state, fields.get("ExitCode", "0:0")) if state in _DONE else None,
        reason=_reason(_word(fields, "Reason")),
        where=_word(fields, "NodeList"),
        restarts=int(fields.get("Restarts", 0)),
        submitted=_word(fields, "SubmitTime"),
        elapsed=_word(fields, "RunTime"),
        # Newer versions show the pattern that was asked for.
        log=_word(fields, "StdOut").replace("%j", job_id),
    ), int(user)


def _jobs(said: str) -> Iterator[tuple[Job, int]]:
    yield from filter(None, map(parsed, said.splitlines()))


def _word(fields: Mapping[str, str], name: str) -> str:
    value = fields.get(name, "").strip()
    # The exit code says itself that it is not zero.
    return "" if value in {"(null)", "None", "N/A", "Unknown", "NonZeroExitCode"} else value


def _reason(word: str) -> str:
    return f"{word}: {_STUCK[word]}; it does not start as it is" if word in _STUCK else word


def _code(state: str, said: str) -> int:
    """What `ExitCode=code:signal` comes to; a job that did not complete never comes to 0."""
    code, _, sent = said.partition(":")
    if state == "COMPLETED":
        return 0
    if state == "OUT_OF_MEMORY":
        return _KILLED
    if int(code):
        return int(code)
    return 128 + int(sent) if 0 < int(sent or 0) <= _HIGHEST_SIGNAL else 1


def _accounted(job_id: str) -> Job:
    """The job as the accounting remembers it.

    Raises:
        UsageError: There is no accounting, or it does not know the job either.
    """
    try:
        said = _run("sacct", "-X", "-n", "-P", f"--format={_ACCOUNTED}", "-j", job_id)
        # A name may hold the separator.
        name, state, code, submitted, elapsed, where = said.splitlines()[0].rsplit("|", 5)
    except (UsageError, UnreachableError, IndexError, ValueError):
        raise UsageError(
            f"Slurm knows no job {job_id}; it forgets jobs some minutes after their end. accel jobs list shows yours"
        ) from None
    state = state.split()[0]  # `CANCELLED by 1000`
    done = state in _DONE
    return Job(
        id=job_id, name=name, state=state, done=done, exit_code=_code(state, code) if done else None, where=where,
        submitted=submitted, elapsed=elapsed,
    )  # fmt: skip


def _check(job_id: str) -> None:
    if not job_id.isascii() or not job_id.isdigit():
        raise UsageError(f"a Slurm job has a number for its id; it got {job_id!r}")


def _scontrol(*args: str) -> str:
    return _run("scontrol", *args)


def _run(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        UnreachableError: The cluster does not answer now.
        UsageError: There is no such command here, or it refuses.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="surrogateescape", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise UsageError(
            f"{command[0]} was not found: this is no machine of a Slurm cluster. Log in to one, or load its module"
        ) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"Slurm has not answered {command[0]} for {_TIMEOUT_S} s") from None
    if done.returncode:
        _refused(command[0], done.stderr.strip())
    return done.stdout


def _refused(program: str, said: str) -> None:
    if "Invalid job id" in said:
        raise _UnknownJobError(f"Slurm knows no such job: {said}")
    if "denied" in said or "Invalid" in said:
        raise UsageError(f"{program} refuses: {said}")
    raise UnreachableError(
        f"{program} does not answer: {said.splitlines()[-1] if said else 'it says nothing'}"
    )


def submit_job(plan: Plan) -> int:
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
