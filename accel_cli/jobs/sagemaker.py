"""The training jobs of an account of AWS in one region, from SageMaker; what they print, from CloudWatch Logs."""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self, override

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.jobs.base import Job, Jobs, Pace
from accel_cli.launchers.sagemaker.aws import Account, is_no_job

if TYPE_CHECKING:
    from accel_cli.jobs.cloudwatch import CloudWatchLog

__all__ = ["SageMakerJobs", "described"]

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_LISTED = 50
_SINCE = dt.timedelta(days=90)
_CODES = {"Completed": 0, "Failed": 1, "Stopped": 2}
"""What each end of a job comes to; a job in any other state has not ended."""
_STOPPED = {
    "MaxRuntimeExceeded": ("max_run", "MaxRuntimeInSeconds"),
    "MaxWaitTimeExceeded": ("max_wait", "MaxWaitTimeInSeconds"),
}
"""Limits of a job: the key of the profile, and SageMaker's."""


class SageMakerJobs(Jobs):
    """What SageMaker says of the jobs of an account, in one region."""

    # Calls are counted, for all who use the account; lines take seconds to arrive.
    pace: ClassVar[Pace] = Pace(read_s=2.0, ask_s=(2.0, 10.0), late_s=15.0)

    def __init__(self, account: Account, *, options: str = "") -> None:
        self._account = account
        self.options = options

    @override
    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        return cls(Account(values.get("launcher.region"), values.get("launcher.aws_profile")))

    @override
    def list(self) -> list[Job]:
        """The newest 50 of the last 90 days, whoever of the account submitted them."""
        since = dt.datetime.now(dt.timezone.utc) - _SINCE
        pages = self._account.client("sagemaker").get_paginator("list_training_jobs")
        with self._account.speaking("list the training jobs"):
            found = pages.paginate(
                SortBy="CreationTime",
                SortOrder="Descending",
                CreationTimeAfter=since,
                PaginationConfig={"MaxItems": _LISTED, "PageSize": _LISTED},
            ).build_full_result()
        return [described(said) for said in reversed(found["TrainingJobSummaries"])]

    @override
    def status(self, job_id: str) -> Job:
        return described(self._told(job_id))

    @override
    def log(self, job: Job) -> CloudWatchLog:
        from accel_cli.jobs.cloudwatch import CloudWatchLog  # noqa: PLC0415 - boto3 may be missing, which is said first

        self._account.client("logs")
        return CloudWatchLog(self._account, job.id, coloured=sys.stdout.isatty() and console.coloured())

    @override
    def stop(self, job_id: str) -> None:
        _check(job_id)
        client = self._account.client("sagemaker")
        with self._account.speaking(f"stop job {job_id}"):
            client.stop_training_job(TrainingJobName=job_id)

    @override
    def download(self, job_id: str, into: Path) -> Path:
        told = self._told(job_id)
        job = described(told)
        if not job.done:
            raise UsageError(
                f"job {job_id} is {job.state}: what it leaves is there once it has ended. accel jobs logs {job_id} -f"
                f"{self.options} waits for that"
            )
        from accel_cli.jobs.artifacts import bring  # noqa: PLC0415 - as above

        return bring(self._account, told, into)

    def _told(self, job_id: str) -> Mapping[str, Any]:
        """What SageMaker says of a job.

        Raises:
            UsageError: It knows none of this name.
        """
        _check(job_id)
        client = self._account.client("sagemaker")
        with self._account.speaking(f"ask about job {job_id}"):
            try:
                told: Mapping[str, Any] = client.describe_training_job(TrainingJobName=job_id)
            except client.exceptions.ClientError as error:
                if not is_no_job(error):
                    raise
                raise UsageError(
                    f"SageMaker knows no training job {job_id} in {self._account.region}; accel jobs list"
                    f"{self.options} shows the newest"
                ) from None
        return told


def described(told: Mapping[str, Any]) -> Job:
    """A job, from what SageMaker says of it; a list says less than the job's own description."""
    status = told["TrainingJobStatus"]
    state = told.get("SecondaryStatus") or status
    name = told["TrainingJobName"]
    resources = told.get("ResourceConfig", {})
    began = told.get("TrainingStartTime")
    return Job(
        id=name,
        name=name,
        # A job that is to stop goes on saying what it does.
        state=status if status == "Stopping" else state,
        done=status in _CODES,
        exit_code=_CODES.get(status),
        reason=_reason(told, status, state),
        where=_where(resources, spot=bool(told.get("EnableManagedSpotTraining"))),
        restarts=sum(step["Status"] == "Interrupted" for step in told.get("SecondaryStatusTransitions", [])),
        submitted=told["CreationTime"].astimezone().isoformat(timespec="seconds"),
        elapsed=_elapsed(told, began),
        log=f"CloudWatch Logs, group /aws/sagemaker/TrainingJobs, streams {name}/",
        hosts=_count(resources) if began else 0,
        cost=_cost(told, _count(resources)),
    )


def _reason(told: Mapping[str, Any], status: str, state: str) -> str:
    if told.get("FailureReason"):
        return str(told["FailureReason"])
    if state in _STOPPED:
        key, name = _STOPPED[state]
        limit = told.get("StoppingCondition", {}).get(name)
        return f"stopped: {key}{f' of {limit} s' if limit else ''} was reached"
    steps = told.get("SecondaryStatusTransitions", [])
    return str(steps[-1].get("StatusMessage", "")) if steps and status not in _CODES else ""


def _groups(resources: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return resources.get("InstanceGroups") or ([resources] if "InstanceType" in resources else [])


def _where(resources: Mapping[str, Any], *, spot: bool) -> str:
    said = " + ".join(f"{group['InstanceCount']} x {group['InstanceType']}" for group in _groups(resources))
    return f"{said}, spot" if said and spot else said


def _count(resources: Mapping[str, Any]) -> int:
    return sum(group["InstanceCount"] for group in _groups(resources))


def _elapsed(told: Mapping[str, Any], began: dt.datetime | None) -> str:
    """How long it has trained; a list does not say since when, and tells the time since it was submitted."""
    seconds = told.get("TrainingTimeInSeconds")
    if seconds is None:
        # A job that ended without having trained has no end of its own.
        over = told["LastModifiedTime"] if told["TrainingJobStatus"] in _CODES else None
        end = told.get("TrainingEndTime") or over or dt.datetime.now(dt.timezone.utc)
        seconds = max(0, (end - (began or told["CreationTime"])).total_seconds())
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def _cost(told: Mapping[str, Any], hosts: int) -> str:
    paid, trained = told.get("BillableTimeInSeconds"), told.get("TrainingTimeInSeconds")
    if paid is None:
        return ""
    said = f"{paid} billable seconds" + (f" on each of {hosts} instances" if hosts > 1 else "")
    if told.get("EnableManagedSpotTraining") and trained:
        said += f", spot saved {100 * (1 - paid / trained):.0f} %"
    return said


def _check(job_id: str) -> None:
    if not _NAME.fullmatch(job_id):
        raise UsageError(
            f"a training job has a name of letters, digits and hyphens, 63 at most; it got {job_id!r}"
        )
