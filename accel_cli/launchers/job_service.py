"""The interface of services that run jobs, and following a job until it ends."""

from __future__ import annotations

import getpass
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.planning.plan import JobPlan, quote_for_bash

__all__ = [
    "FileLog",
    "Job",
    "Jobs",
    "Log",
    "PollIntervals",
    "UnreachableError",
    "follow",
    "follow_submission",
    "format_commands",
    "format_options",
    "get_user",
    "print_new_output",
]


class UnreachableError(AccelError):
    """The service does not answer now; a later call may succeed."""


@dataclass(frozen=True)
class Job:
    """The state of a job as its service reports it."""

    id: str
    name: str
    state: str
    """The state in the service's terms."""
    finished: bool
    """True if the job has ended and the service will not restart it."""
    exit_code: int | None = None
    """The exit code of a command that waits for the job; None until it has finished."""
    reason: str = ""
    """The reason for the state, if the service reports one."""
    nodes: str = ""
    """The nodes it runs on."""
    restarts: int = 0
    """The number of times the service has restarted it."""
    submitted: str = ""
    """The time of its submission."""
    elapsed: str = ""
    """Its run time."""
    log: str = ""
    """The location of its log."""
    hosts: int = 0
    """The number of hosts that write to its log; 0 until they have started."""
    cost: str = ""
    """The billed time, if the service reports it."""


@dataclass(frozen=True)
class PollIntervals:
    """Seconds between calls to a service: short for a local file, long for a service that limits calls."""

    log_s: float
    """Interval between reads of a log."""
    status_s: tuple[float, float]
    """First and longest interval between reads of a job's status; it grows until the status changes."""
    last_output_s: float
    """Time that the last lines of a log may take to arrive."""


class Log(ABC):
    """Reads the output of a job from its first byte."""

    _complete = False
    """True if all output has been read."""
    first_error = ""
    """The first error of accel in the output since the last restart, for services that report no reason; others follow from it."""

    _partial_line = b""

    @abstractmethod
    def read(self) -> bytes:
        """Return the output written since the last call, which may be empty.

        Raises:
            UnreachableError: The service does not answer now; a later call returns the missing output.
        """

    def is_complete(self, job: Job) -> bool:  # noqa: ARG002 - subclasses may need the job
        """Return True if all output of a finished job is known to have been read."""
        return self._complete

    def forget_error(self) -> None:
        """Forget the first error, since the job has started again."""
        self.first_error = ""

    def find_error(self, output: bytes) -> None:
        """Record the first error of accel in new output; a line may be in two parts."""
        *lines, rest = (self._partial_line + output).split(b"\n")
        self._partial_line = rest[-_MAX_LINE:]
        match = next(filter(None, map(_ERROR.match, lines)), None)
        if match and not self.first_error:
            self.first_error = match[1].decode(errors="replace").strip().rstrip(".")


class FileLog(Log):
    """A log file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    @override
    def read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0  # a restart has truncated the file
                file.seek(self._position)
                output = file.read(_LOG_CHUNK)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UsageError(
                f"Cannot read the log {self._path}: {error.strerror}. Check its permissions and its file system."
            ) from None
        self._position += len(output)
        self.find_error(output)
        return output


class Jobs(ABC):
    """The jobs of one service that the user may see."""

    intervals: ClassVar[PollIntervals]
    jobs_options: str = ""
    """The options with which `accel jobs` finds the same jobs again."""
    output_location: ClassVar[str] = "where its script wrote them."
    """The location of a job's files and how to get them, for a service that keeps none to download."""

    @abstractmethod
    def list(self) -> list[Job]:
        """Return the user's jobs, oldest first.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: The service is not available here.
        """

    @abstractmethod
    def status(self, job_id: str) -> Job:
        """Return the current state of a job.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: The job is unknown, or the service is not available here.
        """

    @abstractmethod
    def open_log(self, job: Job) -> Log:
        """Return a reader of a job's output.

        Raises:
            UsageError: The location of the log is unknown.
        """

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """Request the end of a job, without waiting for it.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: The job is unknown, or belongs to another user.
        """

    def download(self, job_id: str, into: Path) -> Path:  # noqa: ARG002 - for services that keep output files
        """Download the output files of a job into a new folder of the job's name.

        Returns:
            The folder, which is created only if the download is complete.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: The job has no output files to download, or the folder exists.
        """
        raise UsageError(f"Cannot download job {job_id}: its files are {self.output_location}")


_T = TypeVar("_T")

_LOG_CHUNK = 1 << 20
_ERROR = re.compile(rb"(?:\([^)]*\) )?accel: error: (.*)")
"""An error of accel, also with the name of a node before it: `(worker1, pid=7) accel: error: ...`."""
_MAX_LINE = 4096
"""Bytes of a line without an end that are kept."""
_INTERRUPTED = 130
_MAX_OUTAGE_S = 600
"""Time for which the service of a running job may be unreachable."""
_MAX_FINAL_OUTAGE_S = 60
"""The same for a finished job, of which only the rest of the log is missing."""
_BACKOFF = 1.2


def get_user() -> str:
    """Return the name of the user; `unknown` for a user id without an account."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def format_options(profile: str | None, assignments: Iterable[str]) -> str:
    """Return the options with which `accel jobs` finds a job again, each with a space before it."""
    options = [("--profile", profile)] if profile else []
    for text in assignments:
        key, _, value = text.partition("=")
        options.append(("--launcher", value) if key == "launcher.kind" else ("--set", text))
    return "".join(f" {option} {quote_for_bash(value)}" for option, value in options)


def format_commands(job_id: str, options: str) -> str:
    """Return how to follow and stop a job, as a sentence with the options of `format_options`."""
    return f"Follow it with accel jobs logs {job_id} -f{options} or stop it with accel jobs stop {job_id}{options}"


def follow_submission(jobs: Jobs, job_id: str, plan: JobPlan, *, note: str = "") -> int:
    """Report a submitted job, with an additional note; then follow it, or print its id if the plan detaches.

    Returns:
        0 if the plan detaches, otherwise as `follow`.
    """
    jobs.jobs_options = plan.jobs_options
    # Before the next call to the service, since from here on there is a job to stop.
    console.note(f"job {job_id} is submitted. {format_commands(job_id, plan.jobs_options)}")
    if note:
        console.note(note)
    if plan.detach:
        console.plain(job_id)
        return 0
    try:
        job = jobs.status(job_id)
    except (UnreachableError, UsageError) as error:
        _raise_with_commands(error, job_id, jobs.jobs_options)
    return follow(jobs, job)


def follow(jobs: Jobs, job: Job) -> int:
    """Print the output and the state of a job until it has finished; Ctrl-C leaves it running.

    Returns:
        The exit code of the job, or 130 after Ctrl-C.

    Raises:
        UnreachableError: The service has not answered for a long time.
        UsageError: The service rejects a call, for example because credentials have expired.
    """
    try:
        job = _Follower(jobs, job).run()
    except KeyboardInterrupt:
        console.note(f"job {job.id} keeps running. {format_commands(job.id, jobs.jobs_options)}")
        return _INTERRUPTED
    except (UnreachableError, UsageError) as error:
        _raise_with_commands(error, job.id, jobs.jobs_options)
    code, cost = job.exit_code or 0, f"; {job.cost}" if job.cost else ""
    if code:
        reason = f": {job.reason}" if job.reason else ""
        console.error(
            f"job {job.id} ended as {job.state} with exit code {code}{reason}; its log: {job.log or 'unknown'}{cost}"
        )
    else:
        console.note(f"job {job.id} is {job.state} after {job.elapsed}{cost}")
    return code


def _raise_with_commands(error: AccelError, job_id: str, options: str) -> NoReturn:
    """Raise the error of a call about a submitted job, with the commands that follow and stop it."""
    raise type(error)(
        f"{_strip(error)}. Job {job_id} may still be running. {format_commands(job_id, options)}"
    ) from error


def print_new_output(log: Log) -> bool:
    """Write the new output of a log to stdout, and return True if the log had any."""
    output = log.read()
    if output:
        console.write_content(output)
    return bool(output)


class _Follower:
    """Polls one job, and repeats calls while its service is unreachable."""

    def __init__(self, jobs: Jobs, job: Job) -> None:
        self._jobs, self._job, self._log = jobs, job, jobs.open_log(job)
        self._interval, self._updated_at = jobs.intervals.status_s[0], time.monotonic()
        self._max_outage_s = _MAX_OUTAGE_S
        self._outages: dict[str, float] = {}
        """The start of the outage of each call that fails."""

    def run(self) -> Job:
        _print_state(self._job)
        while not self._job.finished:
            self._print_log()
            time.sleep(self._jobs.intervals.log_s)
            if time.monotonic() - self._updated_at >= self._interval:
                self._update()
        self._print_rest()
        job = self._job
        return replace(job, reason=self._log.first_error) if job.exit_code and not job.reason else job

    def _update(self) -> None:
        new = self._call("status", lambda: self._jobs.status(self._job.id))
        self._updated_at = time.monotonic()
        first, longest = self._jobs.intervals.status_s
        self._interval = min(self._interval * _BACKOFF, longest)
        if new is None:
            return
        old, self._job = self._job, new
        if old.restarts != new.restarts:
            self._log.forget_error()
        if (old.state, old.reason, old.restarts) != (new.state, new.reason, new.restarts):
            self._interval = first
            _print_state(new)

    def _print_log(self) -> bool:
        """Print the new output; return False if the log has no new output, True also if it cannot be read now."""
        printed, start = False, time.monotonic()
        # The limit is for jobs that print faster than their log can be read: they are polled too.
        while time.monotonic() - start < self._interval:
            more = self._call("log", lambda: print_new_output(self._log))
            printed = printed or more is not False
            if not more:
                break
        return printed

    def _print_rest(self) -> None:
        """Print the output that arrives after the end of the job."""
        self._max_outage_s = _MAX_FINAL_OUTAGE_S
        last, intervals = time.monotonic(), self._jobs.intervals
        try:
            while True:
                if self._print_log():
                    last = time.monotonic()
                if self._log.is_complete(self._job) or time.monotonic() - last >= intervals.last_output_s:
                    return
                time.sleep(intervals.log_s)
        except UnreachableError as error:
            console.note(f"{_strip(error)}. The end of the log of job {self._job.id} is missing.")

    def _call(self, name: str, function: Callable[[], _T]) -> _T | None:
        """Return the result of a call, or None if the service is unreachable; raise if it has been for too long."""
        try:
            result = function()
        except UnreachableError as error:
            if not self._outages:
                console.note(f"{_strip(error)}. Trying again.")
            start = self._outages.setdefault(name, time.monotonic())
            if time.monotonic() - start >= self._max_outage_s:
                raise
            return None
        if self._outages.pop(name, None) is not None and not self._outages:
            console.note(f"the service of job {self._job.id} answers again")
        return result


def _print_state(job: Job) -> None:
    if job.finished:
        return
    reason = f" ({job.reason})" if job.reason else ""
    nodes = f" on {job.nodes}" if job.nodes else ""
    restarts = f", restart {job.restarts}" if job.restarts else ""
    console.note(f"job {job.id} is {job.state}{reason}{nodes}{restarts}")


def _strip(error: Exception) -> str:
    """Return the message of an error, without its final period."""
    return str(error).rstrip(".")
