"""Training jobs of an AWS account in one region: preview, submission, status, logs from CloudWatch, stopping, and results."""

from __future__ import annotations

import datetime as dt
import json
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker import bundle, images, s3
from accel_cli.extensions.sagemaker.aws import (
    NAME_IN_USE,
    NAME_IN_USE_TEXT,
    Account,
    find_job,
    format_console_url,
    get_error_code,
    import_sdk,
    is_unknown_job,
)
from accel_cli.extensions.sagemaker.fields import CHANNEL
from accel_cli.extensions.sagemaker.images import SMDDP_TYPES
from accel_cli.extensions.sagemaker.request import (
    SageMakerJobPlan,
    Submission,
    build_request,
    check_request,
    name_job,
)
from accel_cli.extensions.sagemaker.roles import resolve_role
from accel_cli.launchers import source_files
from accel_cli.launchers.job_launcher import SentFolder
from accel_cli.launchers.job_service import Job, Jobs, Log, PollIntervals, follow_submission
from accel_cli.planning.plan import Plan
from accel_runtime.environment.settings import variable_name

__all__ = [
    "CloudWatchLog",
    "SageMakerJobs",
    "assume_submission",
    "fill_placeholders",
    "parse_job",
    "preview",
    "resolve_submission",
    "submit",
]

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
_EXIT_CODES_WITH_OUTPUT = frozenset({1, 2})
"""Exit codes of jobs that may have left logs, and a model if they were stopped."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_ACCOUNT, _ROLE = "<account>", "<role>"
"""Placeholders for what only AWS knows."""
_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}


class SageMakerJobs(Jobs):
    """The training jobs of an AWS account in one region."""

    # Calls are limited for the whole account, and lines take seconds to arrive.
    intervals: ClassVar[PollIntervals] = PollIntervals(log_s=2.0, status_s=(2.0, 10.0), last_output_s=15.0)

    def __init__(self, account: Account) -> None:
        self._account = account

    @override
    def list(self) -> list[Job]:
        """Return the newest 50 jobs of the last 90 days, of all users of the account."""
        since = dt.datetime.now(dt.UTC) - _LISTED_AGE
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
        end = description.get("TrainingEndTime") or ended or dt.datetime.now(dt.UTC)
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


def preview(plan: Plan, *, offline: bool) -> str:
    """Return what would be requested and sent; offline, the request as JSON, without a call to AWS."""
    job, now = plan.job, datetime.now(dt.UTC)
    assert isinstance(job, SageMakerJobPlan)
    account = Account(job.section.region, job.section.aws_profile)
    if offline:
        text = json.dumps(build_request(job, assume_submission(account, job, now)), indent=2)
        check_request(json.loads(fill_placeholders(text)))
        return text
    submission = resolve_submission(account, job, now)
    check_request(build_request(job, submission))
    return "\n".join(_describe(job, submission, _select_source(job)))


def submit(plan: Plan) -> int:
    """Submit the job, follow it unless the plan detaches, and return its exit code.

    If the job is not started, nothing remains in S3.
    """
    job = plan.job
    assert isinstance(job, SageMakerJobPlan)
    with _raise_on_signals():
        submission = _submit(job)
    name = submission.name
    jobs = SageMakerJobs(Account(submission.region, job.section.aws_profile))
    note = f"console: {format_console_url(submission.region, 'sagemaker/home')}#/jobs/{name}"
    code = follow_submission(jobs, name, job, note=note)
    if job.detach:
        return code
    # `accel test` has no source, and leaves no model.
    if code == 0 and job.section.download and job.source is not None:
        _download(jobs, name, Path(job.output_dir))
    elif code in _EXIT_CODES_WITH_OUTPUT:
        console.note(f"accel jobs download {name}{jobs.jobs_options} fetches what it left")
    return code


def _submit(job: SageMakerJobPlan) -> Submission:
    account, section = Account(job.section.region, job.section.aws_profile), job.section
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        try:
            submission = resolve_submission(account, job, datetime.now(dt.UTC))
            request = build_request(job, submission)
            check_request(request)
            _check_output(job, submission.name)
            architecture = "aarch64" if images.is_arm(section.instance_type) else "x86_64"
            python = images.parse_python_version(submission.image_uri)
            reason = bundle.build_bundle(job.run, _select_source(job), Path(scratch), python, architecture)
        except KeyboardInterrupt:
            console.note("The submission was interrupted. Nothing was sent.")
            raise
        if reason:
            note = f"the packages that accel needs are not sent with the job ({reason}); its hosts install what the image lacks"
            if section.network_isolation:
                raise UsageError(
                    f"{note}. With launcher.network_isolation a container has no network to fetch them."
                )
            console.note(note)
        _upload_and_start(account, request, submission, Path(scratch), job.jobs_options)
    return submission


def _upload_and_start(
    account: Account, request: Mapping[str, Any], submission: Submission, folder: Path, options: str
) -> None:
    """Create the bucket if needed, upload and start; if no job starts, remove what was created."""
    name, bucket, prefix = submission.name, submission.bucket, f"{submission.prefix}/bundle"
    if not submission.bucket_exists:
        s3.create_bucket(account, bucket)
        console.note(f"bucket {bucket} is created, for this job and later ones")
    is_sent = False
    try:
        s3.upload_bundle(account, folder, bucket, prefix, submission.account)
        is_sent = True
        with account.translate_errors(f"start job {name}"):
            account.client("sagemaker").create_training_job(**request)
    except BaseException as error:
        if is_sent and _has_started(account, submission, error, options):
            if isinstance(error, AccelError):
                return  # only the response was lost
            console.note(f"job {name} has started already; accel jobs stop {name}{options} stops it")
            raise
        remainder = s3.delete_prefix(account, bucket, prefix, submission.account)
        if not submission.bucket_exists:
            s3.delete_bucket(account, bucket)
        if isinstance(error, AccelError):
            raise type(error)(f"{error} {remainder}") from error
        console.note(f"The submission was interrupted, and no job was started. {remainder}")
        raise


def _has_started(account: Account, submission: Submission, error: BaseException, options: str) -> bool:
    """Return whether the job started although the call that starts it failed.

    Raises:
        BaseException: `error`, or an AccelError for it, if the files in S3 are to remain.
    """
    is_taken = get_error_code(error.__cause__) in NAME_IN_USE
    if isinstance(error, UsageError) and not is_taken:
        return False
    try:
        job = find_job(account, submission.name)
    except AccelError as failure:
        text = (
            f"{str(error) or 'The submission was interrupted.'} It is unknown if the job started ({failure}), so its files "
            f"remain. Run accel jobs status {submission.name}{options}"
        )
        if isinstance(error, AccelError):
            raise AccelError(text) from failure
        console.note(text)
        raise error from None
    channels = job.get("InputDataConfig", ()) if job else ()
    sources = [item["DataSource"] for item in channels if item["ChannelName"] == CHANNEL]
    uris = [source.get("S3DataSource", {}).get("S3Uri") for source in sources]
    if uris != [f"{submission.uri}/bundle/"]:
        return False
    response: Mapping[str, Any] = getattr(error.__cause__, "response", None) or {}
    if is_taken and not response.get("ResponseMetadata", {}).get("RetryAttempts"):
        raise error  # another launch under this name, at the same moment: the files are that job's
    return True


def _download(jobs: Jobs, name: str, folder: Path) -> None:
    """Download the results of a job that has ended."""
    command = f"accel jobs download {name} -o {shlex.quote(str(folder))}{jobs.jobs_options}"
    try:
        console.note(f"results are in {console.abbreviate_home(str(jobs.download(name, folder)))}")
    except UsageError as error:
        # The job succeeded, and need not leave anything.
        console.note(str(error))
    except AccelError as error:
        raise type(error)(f"{error} Try again with {command}") from error
    except KeyboardInterrupt:
        console.note(f"The download was interrupted. Try again with {command}")
        raise


def _select_source(job: SageMakerJobPlan) -> source_files.Selection:
    """Select the files to send, and raise UsageError if one that the job needs is missing."""
    section, run = job.section, job.run
    if job.source is None:
        return source_files.Selection(Path.cwd(), ())
    script = run["target"] if run["kind"] == "script" else None
    include, exclude = tuple(section.include), tuple(section.exclude)
    selection = SentFolder(job.source, include, exclude, run["cwd"], script).select(run["settings"])
    console.print_notes(selection.notes)
    if run["requirements"]:
        source_files.check_selected(selection, run["requirements"])
    bundle.check_size(selection, section.max_upload_size)
    return selection


def _check_output(job: SageMakerJobPlan, name: str) -> None:
    """Raise UsageError if the results could not be downloaded at the end."""
    folder = Path(job.output_dir)
    if not job.section.download or job.detach:
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"Invalid launcher.output_dir: {folder} is not a folder.")
    if (folder / name).exists():
        raise UsageError(
            f"{folder / name} exists already, and the model would be downloaded there. Choose another --job-name."
        )


@contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a submission as an error does, so that what was sent is deleted."""

    def raise_exit(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, raise_exit) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None: a handler that was installed before Python started, and that it cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _describe(
    job: SageMakerJobPlan, submission: Submission, selection: source_files.Selection
) -> Iterator[str]:
    """Yield lines about a job that would be submitted."""
    section = job.section
    created = "" if submission.bucket_exists else "  (the bucket does not exist, and would be created)"
    limits = f"for at most {_format_time(section.max_run)}"
    if section.total_limit is not None:
        limits += f", spot: including waits at most {_format_time(section.total_limit)}"
    if section.keep_alive:
        limits += f", kept for {_format_time(section.keep_alive)} afterwards"
    if section.training_plan:
        limits += f", from training plan {section.training_plan.rpartition('/')[2]}"
    yield f"training job: {submission.name}"
    yield f"account: {submission.account} in {submission.region}, as {submission.caller}"
    yield f"instances: {section.instance_count} x {section.instance_type}, {limits}"
    yield f"role: {submission.role_arn}"
    yield f"image: {submission.image_uri}"
    inputs = {
        name: source if isinstance(source, str) else source.uri for name, source in section.inputs.items()
    }
    yield from _list_values("inputs", inputs)
    yield from _list_values("metrics", section.metrics)
    yield from _list_values("secrets, read by the job from Secrets Manager", section.secrets)
    yield f"bundle: {submission.uri}/bundle/{created}"
    if job.source is not None:
        yield from (f"  {line}" for line in source_files.describe_selection(selection))
    yield f"checkpoints: {section.checkpoint_uri or f'{submission.uri}/checkpoints'}"
    folder = console.abbreviate_home(str(Path(job.output_dir, submission.name)))
    yield f"output: {submission.uri}/output{f', downloaded to {folder}' if section.download else ''}"
    yield (
        "checked: role, bucket and job name in AWS; the request against the limits of SageMaker that boto3 knows. Quotas and the "
        "permission to submit show only at submission"
    )
    yield "nothing was sent or changed"


def _list_values(title: str, values: Mapping[str, str]) -> Iterator[str]:
    if values:
        yield f"{title}:"
        yield from (f"  {name}: {value}" for name, value in values.items())


def _format_time(seconds: int) -> str:
    """Return seconds as text such as `1d 1h`."""
    words = []
    for unit, size in _UNITS.items():
        count, seconds = divmod(seconds, size)
        words += [f"{count}{unit}"] if count else []
    return " ".join(words)


def resolve_submission(account: Account, job: SageMakerJobPlan, now: datetime) -> Submission:
    """Look up in AWS what a job needs; nothing is changed there."""
    section, region = job.section, account.region
    image = _choose_image(job, region)
    with account.translate_errors("identify the caller"):
        caller = account.client("sts").get_caller_identity()
    owner, name = str(caller["Account"]), _choose_name(job, now)
    if section.job_name and find_job(account, name) is not None:
        raise UsageError(f"Cannot use job name {name!r}: {NAME_IN_USE_TEXT}")
    default = f"sagemaker-{region}-{owner}"
    bucket = section.bucket or default
    exists = s3.check_bucket(account, bucket, owner)
    if section.bucket and not exists:
        raise UsageError(
            f"Bucket not found: {bucket} (launcher.bucket). Remove the key to use {default}, or create it: "
            f"aws s3 mb s3://{bucket} --region {region}"
        )
    return Submission(
        name=name,
        region=region,
        account=owner,
        role_arn=resolve_role(account, section.role),
        bucket=bucket,
        image_uri=image,
        caller=str(caller["Arn"]),
        bucket_exists=exists,
    )


def assume_submission(account: Account, job: SageMakerJobPlan, now: datetime) -> Submission:
    """Return the same without a call to AWS, with the placeholders `<account>` and `<role>`."""
    section, region = job.section, account.region
    partition = next((name for start, name in _PARTITIONS.items() if region.startswith(start)), "aws")
    role = section.role or _ROLE
    return Submission(
        name=_choose_name(job, now),
        region=region,
        account=_ACCOUNT,
        role_arn=role if role.startswith("arn:") else f"arn:{partition}:iam::{_ACCOUNT}:role/{role}",
        bucket=section.bucket or f"sagemaker-{region}-{_ACCOUNT}",
        image_uri=_choose_image(job, region),
    )


def fill_placeholders(text: str) -> str:
    """Replace the placeholders of an assumed submission by values of the right form."""
    return text.replace(_ACCOUNT, "0" * 12).replace(_ROLE, "role")


def _choose_name(job: SageMakerJobPlan, now: datetime) -> str:
    section = job.section
    return section.job_name or name_job(section.base_job_name, job.run["target"], now)


def _choose_image(job: SageMakerJobPlan, region: str) -> str:
    """Return the image of a job; raise UsageError if its instances cannot do what the settings ask for."""
    section, settings = job.section, job.run["settings"]
    instance_type = section.instance_type
    images.check_type(instance_type, allow_unknown=section.allow_unknown_instance)
    backend = settings[variable_name("process_group_backend")]
    device = settings[variable_name("device")]
    if backend == "smddp" and instance_type not in SMDDP_TYPES:
        raise UsageError(
            f"process_group_backend: smddp needs launcher.instance_type {' or '.join(SMDDP_TYPES)}, got "
            f"{instance_type!r}. Choose one of these types, or remove the setting."
        )
    if not images.has_gpu(instance_type) or device == "cpu":
        reason = "device: cpu uses none" if device == "cpu" else f"{instance_type} has none"
        if device == "cuda":
            raise UsageError(
                f"device: cuda needs GPUs, and launcher.instance_type {reason}. Use cpu or auto, or another type."
            )
        if backend in {"nccl", "smddp"}:
            raise UsageError(f"process_group_backend: {backend} needs GPUs, and {reason}. Use gloo or auto.")
        if settings[variable_name("mixed_precision")] == "fp16":
            raise UsageError(f"mixed_precision: fp16 needs GPUs, and {reason}. Use bf16 or no.")
    if section.image_uri:
        return str(section.image_uri)
    try:
        # Of the installed torch, which is not imported.
        pytorch_version = section.pytorch_version or version("torch")
    except PackageNotFoundError:
        raise UsageError(
            "Cannot choose an image: torch is not installed here. Set launcher.pytorch_version to one of "
            f"{', '.join(images.list_versions())}, or set launcher.image_uri."
        ) from None
    return images.find_image(pytorch_version, region, instance_type)
