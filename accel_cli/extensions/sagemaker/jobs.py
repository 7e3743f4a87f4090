"""Training jobs of an AWS account in one region: status, logs from CloudWatch, stopping, and results."""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker.aws import Account, find_job, get_error_code, import_sdk, is_unknown_job
from accel_cli.launchers.jobs import Job, Jobs, Log, PollIntervals

__all__ = ["CloudWatchLog", "SageMakerJobs", "parse_job"]

_MAX_LISTED = 50
_LISTED_AGE = dt.timedelta(days=90)
_EXIT_CODES = {"Completed": 0, "Failed": 1, "Stopped": 2}
"""Exit codes by the status of a job that has ended."""
_LIMITS = {
    "MaxRuntimeExceeded": ("max_run", "MaxRuntimeInSeconds"),
    "MaxWaitTimeExceeded": ("max_wait", "MaxWaitTimeInSeconds"),
}
"""The profile's key and SageMaker's name of a limit, by the state of a job that it stopped."""
_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
"""The log group of all training jobs of an account, which exists from the first line on."""
_LAST_LINE = re.compile(r"accel: (\S+) ended with exit code \d+")
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_MAX_EVENTS = 10_000
"""Log events that are read before they are printed."""


class SageMakerJobs(Jobs):
    """The training jobs of an AWS account in one region."""

    # Calls are limited for the whole account, and lines take seconds to arrive.
    intervals: ClassVar[PollIntervals] = PollIntervals(log_s=2.0, status_s=(2.0, 10.0), last_output_s=15.0)

    def __init__(self, account: Account) -> None:
        self._account = account

    @override
    def list(self) -> list[Job]:
        """Return the newest 50 jobs of the last 90 days, of all users of the account."""
        since = dt.datetime.now(dt.timezone.utc) - _LISTED_AGE
        pages = self._account.client("sagemaker").get_paginator("list_training_jobs")
        with self._account.translate_errors("list the training jobs"):
            result = pages.paginate(
                SortBy="CreationTime",
                SortOrder="Descending",
                CreationTimeAfter=since,
                PaginationConfig={"MaxItems": _MAX_LISTED, "PageSize": _MAX_LISTED},
            ).build_full_result()
        return [parse_job(summary) for summary in reversed(result["TrainingJobSummaries"])]

    @override
    def status(self, job_id: str) -> Job:
        return parse_job(self._describe(job_id))

    @override
    def open_log(self, job: Job) -> CloudWatchLog:
        import_sdk("logs")
        return CloudWatchLog(self._account, job.id, colored=sys.stdout.isatty() and console.use_color())

    @override
    def stop(self, job_id: str) -> None:
        client = self._account.client("sagemaker")
        with self._account.translate_errors(f"stop job {job_id}"):
            try:
                client.stop_training_job(TrainingJobName=job_id)
            except client.exceptions.ClientError as error:
                if not is_unknown_job(error):
                    raise
                raise self._build_unknown_error(job_id) from error

    @override
    def download(self, job_id: str, into: Path) -> Path:
        from accel_cli.extensions.sagemaker.s3 import download_results  # noqa: PLC0415 - other commands do not need it

        description = self._describe(job_id)
        job = parse_job(description)
        if not job.finished:
            raise UsageError(
                f"Job {job_id} is {job.state}: its results appear when it has ended. Wait with accel jobs logs {job_id} -f"
                f"{self.jobs_options}"
            )
        return download_results(self._account, description, into)

    def _describe(self, job_id: str) -> Mapping[str, Any]:
        description = find_job(self._account, job_id)
        if description is None:
            raise self._build_unknown_error(job_id)
        return description

    def _build_unknown_error(self, job_id: str) -> UsageError:
        return UsageError(
            f"No training job {job_id} found in {self._account.region}. Run accel jobs list{self.jobs_options} to see the newest."
        )


def parse_job(description: Mapping[str, Any]) -> Job:
    """Return a job from SageMaker's description, or from the shorter summary in a list."""
    status, name = description["TrainingJobStatus"], description["TrainingJobName"]
    state = description.get("SecondaryStatus") or status
    resources = description.get("ResourceConfig", {})
    # A list has no instances, and other launchers' jobs may have groups of them.
    groups = resources.get("InstanceGroups") or [resources]
    count = sum(group.get("InstanceCount", 0) for group in groups)
    instances = f"{count} x {resources['InstanceType']}" if "InstanceType" in resources else ""
    if instances and description.get("EnableManagedSpotTraining"):
        instances += ", spot"
    steps = description.get("SecondaryStatusTransitions", [])
    return Job(
        id=name,
        name=name,
        # A job that is being stopped keeps the secondary status it had.
        state=status if status == "Stopping" else state,
        finished=status in _EXIT_CODES,
        exit_code=_EXIT_CODES.get(status),
        reason=_find_reason(description, status, state),
        nodes=instances,
        restarts=sum(step["Status"] == "Interrupted" for step in steps),
        submitted=description["CreationTime"].astimezone().isoformat(timespec="seconds"),
        elapsed=_format_elapsed(description),
        log=f"CloudWatch Logs, group {_LOG_GROUP}, streams {name}/",
        hosts=count if description.get("TrainingStartTime") else 0,
        cost=_format_cost(description, count),
    )


def _find_reason(description: Mapping[str, Any], status: str, state: str) -> str:
    if description.get("FailureReason"):
        return str(description["FailureReason"])
    if state in _LIMITS:
        key, name = _LIMITS[state]
        limit = description.get("StoppingCondition", {}).get(name)
        return f"stopped: {key}{f' of {limit} s' if limit else ''} was reached"
    steps = description.get("SecondaryStatusTransitions", [])
    return str(steps[-1].get("StatusMessage", "")) if steps and status not in _EXIT_CODES else ""


def _format_elapsed(description: Mapping[str, Any]) -> str:
    """Return the training time, or the time since submission if the training time is not known."""
    seconds = description.get("TrainingTimeInSeconds")
    if seconds is None:
        # A job that ended before it trained has no end of training.
        ended = description["LastModifiedTime"] if description["TrainingJobStatus"] in _EXIT_CODES else None
        end = description.get("TrainingEndTime") or ended or dt.datetime.now(dt.timezone.utc)
        start = description.get("TrainingStartTime") or description["CreationTime"]
        seconds = max(0, (end - start).total_seconds())
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def _format_cost(description: Mapping[str, Any], count: int) -> str:
    billed, trained = description.get("BillableTimeInSeconds"), description.get("TrainingTimeInSeconds")
    if billed is None:
        return ""
    text = f"{billed} billable seconds" + (f" on each of {count} instances" if count > 1 else "")
    if description.get("EnableManagedSpotTraining") and trained:
        text += f", spot saved {100 * (1 - billed / trained):.0f} %"
    return text


class CloudWatchLog(Log):
    """The output of all hosts of a job: every line once, after the name of its host."""

    def __init__(self, account: Account, name: str, *, colored: bool = False) -> None:
        self._account, self._name, self._colored = account, name, colored
        self._positions: dict[str, Any] = {}
        """Where to read on in each stream, as sagemaker-core counts: one stream for each host and restart."""
        self._ended: dict[str, bool] = {}
        """True if the last line of a stream has been read."""
        self._pending = b""
        """Lines that were read before the network failed."""

    @override
    def read(self) -> bytes:
        sdk = import_sdk("logs")
        with self._account.translate_errors(f"read the log of job {self._name}"):
            self._find_streams(sdk)
            names = list(self._positions)
            events = sdk.multi_stream_iter(
                _EventReader(self._account.client("logs")), _LOG_GROUP, names, self._positions
            )
            for index, event in islice(events if names else (), _MAX_EVENTS):
                name, time = names[index], event["timestamp"]
                position = self._positions[name]
                count = position.skip + 1 if time == position.timestamp else 1
                self._positions[name] = sdk.Position(timestamp=time, skip=count)
                self._pending += self._format_event(name, event["message"])
        lines, self._pending = self._pending, b""
        return lines

    @override
    def is_complete(self, job: Job) -> bool:
        newest = {_parse_stream(name)[0]: name for name in sorted(self._positions, key=_parse_stream)}
        return sum(self._ended.get(name, False) for name in newest.values()) >= job.hosts

    def _find_streams(self, sdk: Any) -> None:
        """Add the streams that exist now."""
        client = self._account.client("logs")
        pages = client.get_paginator("describe_log_streams")
        try:
            for page in pages.paginate(logGroupName=_LOG_GROUP, logStreamNamePrefix=f"{self._name}/"):
                for stream in page["logStreams"]:
                    self._positions.setdefault(stream["logStreamName"], sdk.Position(timestamp=0, skip=0))
        except client.exceptions.ClientError as error:
            if get_error_code(error) != "ResourceNotFoundException":
                raise

    def _format_event(self, stream: str, message: str) -> bytes:
        host = _parse_stream(stream)[0]
        last = _LAST_LINE.fullmatch(message.strip())
        self._ended[stream] = last is not None and last[1] == host
        head = f"{host} | "
        if self._colored:
            hosts = list(dict.fromkeys(_parse_stream(name)[0] for name in self._positions))
            head = f"\x1b[{_COLORS[hosts.index(host) % len(_COLORS)]}m{host} |\x1b[0m "
        # Not splitlines: progress bars move by carriage returns.
        lines = message.removesuffix("\n").split("\n")
        return "".join(f"{head}{line}\n" for line in lines).encode(errors="replace")


def _parse_stream(name: str) -> tuple[str, int]:
    """Return the host and the start of a stream such as `job/algo-1-1700000000`."""
    host, _, start = name.partition("/")[2].rpartition("-")
    return host, int(start) if start.isdigit() else 0


class _EventReader:
    """A client of CloudWatch Logs that skips empty pages, which sagemaker-core takes for the end of a stream."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get_log_events(self, **request: Any) -> Any:
        """Return the next page that has events, or the last one."""
        while True:
            page = self._client.get_log_events(**request)
            token = page["nextForwardToken"]
            if page["events"] or token == request.get("nextToken"):
                return page
            request["nextToken"] = token
