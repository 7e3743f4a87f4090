"""Jobs of a Slurm cluster: submission by sbatch, status from scontrol and sacct, logs, cancellation."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.job_service import (
    FileLog,
    Job,
    Jobs,
    Log,
    PollIntervals,
    UnreachableError,
    follow_submission,
)
from accel_cli.planning.plan import JobPlan, Plan

__all__ = ["SlurmJobPlan", "SlurmJobs", "parse_job_line", "submit_job"]

_TIMEOUT_S = 60
_FINAL_STATES = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
_BLOCKED = {
    "PartitionNodeLimit": "the job needs more nodes than the partition allows",
    "PartitionTimeLimit": "the time limit is longer than the partition allows",
    "BadConstraints": "no nodes satisfy the constraints",
    "InvalidAccount": "the account is invalid",
    "InvalidQOS": "the quality of service is invalid",
    "JobHeldUser": "it is held until scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "DependencyNeverSatisfied": "a job that it depends on failed",
}
"""Descriptions of the reasons that do not end by waiting."""
_EXPLAINED = {
    "PartitionConfig": "the partition does not have the nodes, CPUs, memory or GPUs of the job now; sinfo shows what it has",
    "JobArrayTaskLimit": "as many tasks of the array run as %N in launcher.array allows",
}
"""Descriptions of other reasons whose names do not tell enough."""
_MAX_TASKS = 8
"""The number of tasks of an array that a message names."""
_SIGKILL_EXIT_CODE = 137
_MAX_SIGNAL = 64
# The name of a job may contain anything, also text that looks like another field.
_JOB = re.compile(
    r"JobId=(\d+)\S* (?:ArrayJobId=(\d+) ArrayTaskId=(\S+) )?.*?JobName=(.*) UserId=[^ (]*\((\d+)\) (.*)"
)
# A banner of the site may surround the id, and a wrapper of sbatch may leave out --parsable.
_SUBMITTED = re.compile(r"^(?:.*\bSubmitted batch job )?0*([1-9]\d*)(?:;\S+| on cluster \S+)?$")
_ACCOUNTING = re.compile(r"(.*)\|([A-Z_]+)[^|]*\|(\d+:\d+)\|([^|]*)\|([^|]*)\|([^|]*)")
"""Matches the line of a job in the output of sacct; the name may contain the separator."""
_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOST_ANSWERS = ("timed out", "Zero Bytes were transmitted", "Message receive failure")
"""Words of the errors of sbatch after which the controller may have taken the job."""
_FIELD = re.compile(r"(?:^| )([A-Z]\w*)=")
_EMPTY_VALUES = frozenset({"(null)", "None", "N/A", "Unknown", "NonZeroExitCode"})
"""Values that mean nothing, or repeat that the exit code is not zero."""


@dataclass(frozen=True, kw_only=True)
class SlurmJobPlan(JobPlan):
    """A job of Slurm."""

    script: str
    """The batch script, which is the standard input of the plan's command."""
    array: str = ""
    """The indexes of the tasks of a job array; empty for one job."""

    @override
    def describe(self) -> list[str]:
        return ["batch script:", self.script.rstrip("\n")]


class SlurmJobs(Jobs):
    """The user's jobs as `scontrol` reports them; Slurm forgets a job a few minutes after its end."""

    # The last lines arrive late on a shared file system.
    intervals: ClassVar[PollIntervals] = PollIntervals(log_s=0.2, status_s=(0.5, 5.0), last_output_s=1.0)
    output_location = "on the file system of the cluster, where its script wrote them. Copy them from there."

    @override
    def list(self) -> list[Job]:
        lines = _run("scontrol", "show", "job", "--oneliner").splitlines()
        return [job for job, user in filter(None, map(parse_job_line, lines)) if user == os.getuid()]

    @override
    def status(self, job_id: str) -> Job:
        _check_id(job_id)
        try:
            lines = _run("scontrol", "show", "job", "--oneliner", job_id).splitlines()
        except _UnknownJobError:
            return _read_accounting(job_id)
        found = [job for job, _ in filter(None, map(parse_job_line, lines))]
        if not found:
            raise UnreachableError(f"Cannot read job {job_id}: scontrol printed {_quote(lines)}.")
        if found[0].id != job_id and found[0].id.startswith(f"{job_id}_"):
            found.sort(key=_get_task)
            tasks = ", ".join(f"{job.id} {job.state}" for job in found[:_MAX_TASKS])
            more = f" and {len(found) - _MAX_TASKS} more" if len(found) > _MAX_TASKS else ""
            raise UsageError(
                f"Job {job_id} is an array: {tasks}{more}. Name one of its tasks, such as {job_id}_{_get_task(found[0])}; accel jobs stop "
                "takes the id of the array too."
            )
        return found[0]

    @override
    def open_log(self, job: Job) -> Log:
        if not job.log:
            raise UsageError(
                f"Cannot find the log of job {job.id}: Slurm no longer reports its path. Look for slurm-{job.id}.out in "
                "launcher.output_dir, relative to the folder where accel launch ran."
            )
        return FileLog(Path(job.log))

    @override
    def stop(self, job_id: str) -> None:
        _check_id(job_id)
        _run("scancel", job_id)


class _UnknownJobError(UsageError):
    """Slurm does not know the job, or no longer."""


def parse_job_line(line: str) -> tuple[Job, int] | None:
    """Return a job and its user id from a line of `scontrol show job --oneliner`, or None for other lines."""
    match = _JOB.match(line)
    if not match:
        return None
    number, array, task, name, user, rest = match.groups()
    # A task has a number of its own, and the name that users know; tasks that wait are one line, such as 2-9%2.
    job_id = f"{array}_{task if task.isdigit() else f'[{task}]'}" if array else number
    parts = _FIELD.split(rest)
    pairs = zip(parts[1::2], map(str.strip, parts[2::2]), strict=True)
    fields = {key: value for key, value in pairs if value not in _EMPTY_VALUES}
    state, reason = fields["JobState"], fields.get("Reason", "")
    if reason in _BLOCKED:
        reason += f": {_BLOCKED[reason]}; the job does not start unless that changes"
    elif reason in _EXPLAINED:
        reason += f": {_EXPLAINED[reason]}"
    else:  # scontrol writes sentences without spaces
        reason = reason.replace("_", " ")
    finished = state in _FINAL_STATES
    return Job(
        id=job_id,
        name=name,
        state=state,
        finished=finished,
        exit_code=_parse_exit_code(state, fields.get("ExitCode", "0:0")) if finished else None,
        reason=reason,
        nodes=fields.get("NodeList", ""),
        restarts=int(fields.get("Restarts", 0)),
        submitted=fields.get("SubmitTime", ""),
        elapsed=fields.get("RunTime", ""),
        # Newer versions of Slurm report the pattern instead of the path.
        log=fields.get("StdOut", "")
        .replace("%j", number)
        .replace("%A", array or number)
        .replace("%a", task or ""),
    ), int(user)


def _parse_exit_code(state: str, text: str) -> int:
    """Return the exit code of `ExitCode=code:signal`; never 0 for a job that did not complete."""
    code, _, signal = text.partition(":")
    if state == "COMPLETED":
        return 0
    if state == "OUT_OF_MEMORY":
        return _SIGKILL_EXIT_CODE
    if int(code):
        return int(code)
    return 128 + int(signal) if 0 < int(signal or 0) <= _MAX_SIGNAL else 1


def _read_accounting(job_id: str) -> Job:
    """Return a finished job that the controller has forgotten."""
    fields = "JobName,State,ExitCode,Submit,Elapsed,NodeList"
    try:
        lines = _run("sacct", "-X", "-n", "-P", f"--format={fields}", "-j", job_id).splitlines()
    except (UsageError, UnreachableError):
        lines = []
    if not (matches := [match for match in map(_ACCOUNTING.fullmatch, lines) if match]):
        raise UsageError(
            f"Unknown Slurm job {job_id}: Slurm forgets a job a few minutes after its end. Run accel jobs list to see yours."
        )
    name, state, code, submitted, elapsed, nodes = matches[-1].groups()
    finished = state in _FINAL_STATES
    return Job(
        id=job_id, name=name, state=state, finished=finished, nodes=nodes, submitted=submitted, elapsed=elapsed,
        exit_code=_parse_exit_code(state, code) if finished else None,
    )  # fmt: skip


def _check_id(job_id: str) -> None:
    if not re.fullmatch(r"\d+(_\d+)?", job_id, re.ASCII):
        raise UsageError(
            f"Invalid Slurm job id {job_id!r}: expected a number, or that of an array and of its task as in 6_1."
        )


def _get_task(job: Job) -> int:
    """Return the index of a task of an array, the first one of several."""
    found = re.match(r"\d+_\[?(\d+)", job.id)
    return int(found[1]) if found else 0


def _run(program: str, *args: str) -> str:
    """Return the output of a Slurm command; raise UnreachableError if the cluster does not answer now."""
    try:
        result = subprocess.run(
            (program, *args), capture_output=True, text=True, errors="surrogateescape", timeout=_TIMEOUT_S, check=False
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError(
            f"Slurm is not available here ({program} not found). Log in to a node of the cluster, or load its module."
        ) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"Slurm did not answer {program} within {_TIMEOUT_S} s.") from None
    message = result.stderr.strip()
    if not result.returncode:
        return result.stdout
    if "Invalid job id" in message:
        raise _UnknownJobError(f"Unknown Slurm job: {message}. Run accel jobs list to see yours.")
    if "denied" in message or "Invalid" in message:
        raise UsageError(f"Slurm rejects {program}: {message}")
    raise UnreachableError(f"{program} failed: {message.splitlines()[-1] if message else 'no message'}")


def submit_job(plan: Plan) -> int:
    """Submit a job and return 0 if the plan detaches; otherwise follow the job to its end and return its exit code."""
    submission = plan.job
    assert isinstance(submission, SlurmJobPlan)
    # Slurm drops a job without a message if it cannot create the log.
    try:
        Path(submission.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"Cannot create launcher.output_dir {submission.output_dir}: {error.strerror}. Set another folder."
        ) from None
    find = f"Find it with accel jobs list{submission.jobs_options} or squeue --me before you submit it again"
    try:
        result = subprocess.run(
            plan.argv,
            input=os.fsencode(submission.script),
            capture_output=True,
            check=False,
            env={**os.environ, **plan.env},
        )
    except FileNotFoundError:
        raise UsageError(
            "Cannot submit the job: sbatch not found. Log in to a node of a Slurm cluster, or load its module. --dry-run "
            "shows the batch script on any machine."
        ) from None
    except KeyboardInterrupt:
        console.note(f"The submission was interrupted, and the job may be running. {find}.")
        raise
    output, message = (stream.decode(errors="replace") for stream in (result.stdout, result.stderr))
    # A lone number counts only if sbatch has succeeded: a banner may have one.
    number = _find_job_id(output)
    job_id = _find_job_id(f"{output}\n{message}", with_words=True) or (None if result.returncode else number)
    if job_id is None:
        printed = f"sbatch printed {_quote(output.splitlines())}"
        if not result.returncode:
            raise AccelError(f"Cannot find the id of the job, which may be running: {printed}. {find}.")
        reason = message.strip() or printed
        if number or result.returncode < 0 or any(words in message for words in _LOST_ANSWERS):
            raise AccelError(f"sbatch failed, and the job may be running: {reason}. {find}.")
        raise UsageError(f"Slurm rejects the job: {reason}")
    if result.returncode:
        console.note(f"sbatch exited with code {result.returncode}: {message.strip() or 'no message'}")
    if submission.array:
        return _report_array(submission, job_id)
    log = Path(submission.output_dir, f"slurm-{job_id}.out").absolute()
    note = f"the log of job {job_id}: {console.abbreviate_home(str(log))}"
    return follow_submission(SlurmJobs(), job_id, submission, note=note)


def _report_array(submission: SlurmJobPlan, job_id: str) -> int:
    """Report a submitted array, whose tasks have a log each; it is not followed."""
    options = submission.jobs_options
    task = re.split(r"\D", submission.array)[0]
    console.note(
        f"array {job_id} is submitted, with the tasks {submission.array}. See them with accel jobs list{options}, follow one with accel "
        f"jobs logs {job_id}_{task} -f{options} or stop all with accel jobs stop {job_id}{options}"
    )
    if submission.detach:
        console.plain(job_id)
    return 0


def _find_job_id(output: str, *, with_words: bool = False) -> str | None:
    """Return the id of the job from the output of sbatch; None if no line has one.

    Args:
        output: The output.
        with_words: Accept only lines with the words of sbatch, no lone numbers.
    """
    lines = [line.strip() for line in _COLORS.sub("", output).splitlines()]
    matches = [match for match in map(_SUBMITTED.fullmatch, lines) if match]
    ids = [match[1] for match in matches if not with_words or "Submitted" in match[0]]
    return ids[-1] if ids else None


def _quote(lines: list[str]) -> str:
    """Return the last line with text in quotes."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return repr(last) if last else "nothing"
