"""Submission of a training job: preview, upload of the bundle, start, and clean-up if it does not start."""

from __future__ import annotations

import json
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker import bundle, images, s3
from accel_cli.extensions.sagemaker.aws import (
    NAME_IN_USE,
    Account,
    find_job,
    format_console_url,
    get_error_code,
)
from accel_cli.extensions.sagemaker.jobs import SageMakerJobs
from accel_cli.extensions.sagemaker.request import (
    SageMakerJobPlan,
    Submission,
    build_request,
    check_request,
)
from accel_cli.extensions.sagemaker.resolve import assume_submission, fill_placeholders, resolve_submission
from accel_cli.extensions.sagemaker.section import CHANNEL
from accel_cli.launchers import source_files
from accel_cli.launchers.jobs import Jobs, follow_submission
from accel_cli.planning.plan import Plan

__all__ = ["preview", "submit"]

_EXIT_CODES_WITH_OUTPUT = frozenset({1, 2})
"""Exit codes of jobs that may have left logs, and a model if they were stopped."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def preview(plan: Plan, *, offline: bool) -> str:
    """Return what would be requested and sent; offline, the request as JSON, without a call to AWS."""
    job, now = plan.job, datetime.now(timezone.utc)
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
            submission = resolve_submission(account, job, datetime.now(timezone.utc))
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
    selection = source_files.select_files(Path(job.source), section.include, section.exclude)
    for note in selection.notes:
        console.note(note)
    source_files.check_selected(selection, Path(run["cwd"], run["target"] if run["kind"] == "script" else ""))
    source_files.check_deepspeed_file(selection, run["cwd"], run["settings"])
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
