"""The jobs of a Ray cluster, through its job API: submission, status, log and end."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from http import HTTPStatus
from typing import Any, ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.ray.plan import RayJobPlan, write_folder
from accel_cli.launchers.job_service import (
    Job,
    Jobs,
    Log,
    PollIntervals,
    UnreachableError,
    follow_submission,
    format_commands,
    get_user,
)
from accel_cli.planning.plan import Plan
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.settings import __version__
from accel_runtime.environment.text import encode_text

__all__ = ["JobLog", "RayCluster", "RayJobs", "parse_job", "submit"]

_USER = "accel-user"
"""The metadata with the user who submitted a job."""
_NODES = "accel-nodes"
"""The metadata with the number of nodes of a job."""
_HEADERS = "RAY_JOB_HEADERS"
"""The variable with the headers of requests, as Ray's own command line reads it."""
_SIGTERM_EXIT_CODE = 143
_FIRST_S, _QUIET_S = 5.0, 0.3
"""Seconds to wait for the first output of a log, and for more: Ray sends what exists at once."""
_ERROR = "accel: error: "


class RayCluster:
    """A Ray cluster, by the address of its dashboard.

    Args:
        address: The address; `auto` is the cluster that runs on this machine.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    @cached_property
    def client(self) -> Any:
        """The client of the job API."""
        try:
            from ray.job_submission import JobSubmissionClient  # noqa: PLC0415 - takes a second
        except ImportError as error:
            raise UsageError(
                f"launcher.kind: ray needs the package ray, which cannot be imported ({error}). Run: "
                f"{format_install('ray[default]', extra='ray')}"
            ) from None
        # They write lines about each upload.
        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.WARNING)
        with self.translate_errors("connect"):
            return JobSubmissionClient(self._address, headers=_read_headers())

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Turn errors of the client into `UsageError`, or `UnreachableError` if the cluster does not answer.

        `action` follows "Cannot" in the message: `submit the job`.
        """
        try:
            yield
        except AccelError:
            raise
        except Exception as error:
            text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            code = int(match[1]) if (match := re.search(r"status code:? (\d{3})", text)) else 0
            if "Traceback (most recent call last)" in text:  # of the server
                text = str(error).strip().splitlines()[-1].strip(' "}.')
            if code == HTTPStatus.NOT_FOUND and "does not exist" in text:
                raise UsageError(
                    f"Cannot {action}: the cluster does not know it. Run accel jobs list, or set launcher.address."
                ) from error
            if "exceeds the maximum size" in text:
                raise UsageError(
                    f"Cannot {action}: its files are larger than the cluster accepts. Add files to launcher.exclude or .gitignore, or "
                    "use launcher.source: shared."
                ) from error
            if (
                isinstance(error, OSError)
                or code == HTTPStatus.TOO_MANY_REQUESTS
                or code >= HTTPStatus.INTERNAL_SERVER_ERROR
            ):
                raise UnreachableError(
                    f"Cannot {action}: the cluster does not answer: {text}. Check that it runs, and launcher.address."
                ) from error
            raise UsageError(f"Cannot {action}: {text}.") from error


def _read_headers() -> dict[str, Any] | None:
    text = os.environ.get(_HEADERS)
    if not text:
        return None
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise UsageError(f"Invalid {_HEADERS}: expected a JSON object. Correct or unset it.") from None


class RayJobs(Jobs):
    """The jobs that the user has submitted with accel, as long as their cluster runs."""

    intervals: ClassVar[PollIntervals] = PollIntervals(log_s=0.1, status_s=(1.0, 10.0), last_output_s=5.0)
    output_location = (
        "on the nodes where its script wrote them. Write them to a shared file system or to a bucket."
    )

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    @override
    def list(self) -> list[Job]:
        with self._cluster.translate_errors("list jobs"):
            jobs = [
                job
                for job in self._cluster.client.list_jobs()
                if (job.metadata or {}).get(_USER) == get_user()
            ]
        return [
            parse_job(job, self.jobs_options) for job in sorted(jobs, key=lambda job: job.start_time or 0)
        ]

    @override
    def status(self, job_id: str) -> Job:
        with self._cluster.translate_errors(f"read job {job_id}"):
            return parse_job(self._cluster.client.get_job_info(job_id), self.jobs_options)

    @override
    def open_log(self, job: Job) -> Log:
        return JobLog(self._cluster, job.id)

    @override
    def stop(self, job_id: str) -> None:
        with self._cluster.translate_errors(f"stop job {job_id}"):
            self._cluster.client.stop_job(job_id)


def parse_job(details: Any, options: str = "") -> Job:
    """Return the state of a job from the details of Ray's client.

    Args:
        details: The details.
        options: The options with which `accel jobs` finds the job.
    """
    state, message = str(details.status), details.message or ""
    code, reason = None, message if state == "PENDING" else ""
    if state == "SUCCEEDED":
        code = 0
    elif state == "STOPPED":
        code, reason = _SIGTERM_EXIT_CODE, "the job was stopped"
    elif state == "FAILED":
        code, reason = details.driver_exit_code or 1, _find_reason(message)
    start, end = details.start_time or 0, details.end_time or time.time() * 1000
    job_id = details.submission_id or details.job_id or ""
    return Job(
        id=job_id,
        name=(details.metadata or {}).get("job_name", job_id),
        state=state,
        finished=code is not None,
        exit_code=code if code is None or code >= 0 else 128 - code,
        reason=" ".join(reason.split()),
        submitted=dt.datetime.fromtimestamp(start / 1000, dt.UTC).isoformat() if start else "",
        elapsed=str(dt.timedelta(seconds=int((end - start) / 1000))) if start else "",
        log=f"accel jobs logs {job_id}{options}",
        hosts=int((details.metadata or {}).get(_NODES, 1)),
    )


def _find_reason(message: str) -> str:
    """Return the error that the driver printed last, from Ray's message with the end of its output."""
    lines = message.splitlines()
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    if errors:
        return errors[-1].rstrip(".")
    if re.search(r"No module named '?accel_cli", message):
        return "accel is not installed in launcher.python on the head node. Install the same version there and on all nodes"
    # After the first line come the last lines of the output.
    return lines[-1 if "last available logs" in message else 0] if lines else ""


class JobLog(Log):
    """The output of the driver, which has that of all nodes; Ray sends new output over a web socket."""

    def __init__(self, cluster: RayCluster, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id
        self._output: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()
        self._receiver: threading.Thread | None = None
        self._length = 0
        """Characters that were received."""

    @override
    def read(self) -> bytes:
        if self._receiver is None:
            client = self._cluster.client
            self._receiver = threading.Thread(target=lambda: asyncio.run(self._receive(client)), daemon=True)
            self._receiver.start()
        output: list[str] = []
        with suppress(queue.Empty):
            while not self._complete:
                wait_s = 0.0 if output else _QUIET_S if self._length else _FIRST_S
                item = self._output.get(timeout=wait_s)
                if isinstance(item, str):
                    output.append(item)
                elif item is None:
                    # A proxy may close the connection too.
                    self._complete = RayJobs(self._cluster).status(self._job_id).finished
                    self._receiver = None
                    break
                elif output:
                    self._output.put(item)
                    break
                else:
                    self._receiver = None
                    raise UnreachableError(
                        f"Cannot read the log of job {self._job_id}: the connection is lost: {item}."
                    ) from item
        return encode_text("".join(output))

    async def _receive(self, client: Any) -> None:
        """Put the output that was not received before, then None, or the error that ended the connection."""
        known = self._length
        try:
            async for text in client.tail_job_logs(self._job_id):
                skipped, known = text[:known], max(0, known - len(text))
                new = text[len(skipped) :]
                if new:
                    self._length += len(new)
                    self._output.put(new)
            self._output.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that reads
            self._output.put(error)


def submit(plan: Plan) -> int:
    """Submit a job and return 0 if the plan detaches; otherwise follow it to its end and return its exit code."""
    job = plan.job
    assert isinstance(job, RayJobPlan)
    cluster = RayCluster(job.address)
    job_id = f"{job.name}-{secrets.token_hex(3)}"
    if job.run.max_retries and job.run.sends_source:
        console.note(
            "checkpoints in relative folders are lost with their node: write them to storage that all nodes share"
        )
    with write_folder(job, job_id) as folder:
        metadata = {
            _USER: get_user(),
            "accel-version": __version__,
            "job_name": job_id,
            _NODES: str(job.run.nnodes),
        }
        request = job.build_request(str(folder), job_id, metadata)
        job.check_request(request)
        client = cluster.client
        try:
            with cluster.translate_errors("submit the job"):
                client.submit_job(**request)
        except (UnreachableError, KeyboardInterrupt) as error:
            _check_started(cluster, job_id, job.jobs_options, error)
    return follow_submission(RayJobs(cluster), job_id, job)


def _check_started(cluster: RayCluster, job_id: str, options: str, error: BaseException) -> None:
    """Return if only the answer to a submission was lost; otherwise raise the error of the submission.

    Raises:
        BaseException: `error`, or an AccelError with the reason why it is unknown if the job started.
    """
    commands = format_commands(job_id, options)
    try:
        RayJobs(cluster).status(job_id)
    except UnreachableError:
        if isinstance(error, AccelError):
            raise AccelError(f"{str(error).rstrip('.')}. Job {job_id} may be running. {commands}") from error
        console.note(f"The submission was interrupted, and job {job_id} may be running. {commands}")
        raise error from None
    except UsageError:  # the cluster does not know the job
        raise error from None
    if not isinstance(error, AccelError):
        console.note(f"job {job_id} is submitted. {commands}")
        raise error
