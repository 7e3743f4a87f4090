"""What can be asked of every service that runs jobs, and what it answers."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from typing_extensions import Self

from accel_cli import console
from accel_cli.errors import AccelError, UsageError

__all__ = ["Job", "Jobs", "Log", "Pace", "UnreachableError", "follow", "pass_on"]


class UnreachableError(AccelError):
    """The service does not answer now; it may answer later."""


@dataclass(frozen=True)
class Job:
    """What a service says of a job."""

    id: str
    name: str
    state: str
    """The service's own word."""
    done: bool
    """Whether it has ended, and will not run again by itself."""
    exit_code: int | None = None
    """What the job's end comes to as the exit code of a command; None while it is not done."""
    reason: str = ""
    """Why it is in this state, where the service says."""
    where: str = ""
    """The machines it runs on."""
    restarts: int = 0
    """How often the service has run it again."""
    submitted: str = ""
    elapsed: str = ""
    """How long it has run."""
    log: str = ""
    """Where its output goes."""
    hosts: int = 0
    """How many machines print into its log; 0 before there are any."""
    cost: str = ""
    """What is paid for, in words, where the service says."""


@dataclass(frozen=True)
class Pace:
    """How a service is followed: what suits a file every moment is too often for one that counts its calls."""

    read_s: float
    """How long after one reading of a log the next is."""
    ask_s: tuple[float, float]
    """How long after one question about a job the next is: at the start, and at most; it grows between."""
    late_s: float
    """How long the last lines of a log may take to arrive."""


class Log(ABC):
    """What a job prints, from its first byte on."""

    @abstractmethod
    def read(self) -> bytes:
        """What has come since the last call; nothing if there is nothing yet.

        Raises:
            UnreachableError: The service does not answer now; what was not read is read by a later call.
        """

    def whole(self, job: Job) -> bool:  # noqa: ARG002 - for those that can tell
        """Whether all that a job that is done will ever print has been read, where that can be told."""
        return False


class Jobs(ABC):
    """The jobs of one service, as far as they are yours."""

    pace: ClassVar[Pace]
    options: str = ""
    """What `accel jobs ...` has to be told, beside a job's id, to find the same jobs again."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:  # noqa: ARG003 - for those that are told something
        """The jobs that a profile's launcher submits.

        Args:
            values: What the profile says, by dotted key; empty where no profile is of this service.

        Raises:
            UsageError: There is no such service here.
        """
        return cls()

    @abstractmethod
    def list(self) -> list[Job]:
        """Your jobs that the service knows, the oldest first.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: There is no such service here.
        """

    @abstractmethod
    def status(self, job_id: str) -> Job:
        """One job.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: It knows no job of this name, or there is no such service here.
        """

    @abstractmethod
    def log(self, job: Job) -> Log:
        """What a job prints.

        Raises:
            UsageError: Nobody knows where that is.
        """

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """Ask for the end of a job; it may take a while over it.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: The job is not known, or not yours.
        """

    @abstractmethod
    def download(self, job_id: str, into: Path) -> Path:
        """Bring home what a job has left, into a folder of its name that is not there yet.

        Returns:
            That folder; it is there as a whole, or not at all.

        Raises:
            UnreachableError: The service does not answer now.
            UsageError: The job has left nothing yet, or not here, or the folder is there already.
        """


_T = TypeVar("_T")

_INTERRUPTED = 130
_SILENT_S = 600
"""How long a service may not answer before that is the end."""
_SILENT_AT_END_S = 60
"""The same once the job has ended, and only the rest of its log is missing."""
_SLOWER = 1.2
"""How much the time between two questions grows."""


def follow(jobs: Jobs, job: Job) -> int:
    """Pass on what a job prints until it is done; Ctrl-C leaves it running.

    Returns:
        What the job's end comes to, or 130 after Ctrl-C.

    Raises:
        UnreachableError: The service has not answered for a long time.
        UsageError: The job is not known any more, or the service refuses to say more.
    """
    again = f"accel jobs logs {job.id} -f{jobs.options} follows it again"
    try:
        job = _Following(jobs, job).until_done()
    except KeyboardInterrupt:
        console.note(f"job {job.id} goes on; {again}, accel jobs stop {job.id}{jobs.options} ends it")
        return _INTERRUPTED
    except (UnreachableError, UsageError) as error:
        # Credentials expire, for one; the job has others.
        raise type(error)(
            f"{error}; job {job.id} is not followed any more, and may go on: {again}"
        ) from error
    return _end(job)


def pass_on(log: Log) -> bool:
    """Print what is new in a log; whether there was anything."""
    new = log.read()
    if new:
        # Bytes, since a log may hold what is no text.
        sys.stdout.flush()
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()
    return bool(new)


class _Following:
    """One job that is followed."""

    def __init__(self, jobs: Jobs, job: Job) -> None:
        self._jobs, self._job, self._log = jobs, job, jobs.log(job)
        self._silence = _Silence(job.id, _SILENT_S)
        self._asked, self._pause = time.monotonic(), jobs.pace.ask_s[0]

    def until_done(self) -> Job:
        _say(self._job)
        while not self._job.done:
            self._read()
            time.sleep(self._jobs.pace.read_s)
            if time.monotonic() - self._asked >= self._pause:
                self._ask()
        self._drain()
        return self._job

    def _ask(self) -> None:
        new = self._silence.heard(self._status)
        self._asked, self._pause = time.monotonic(), min(self._pause * _SLOWER, self._jobs.pace.ask_s[1])
        if new is None:
            return
        if _changed(self._job, new):
            _say(new)
            self._pause = self._jobs.pace.ask_s[0]
        self._job = new

    def _read(self) -> bool:
        """Print what is new; whether there was anything, or may be behind a network that is down."""
        some, begun = False, time.monotonic()
        # A job that prints faster than can be read is still asked about.
        while time.monotonic() - begun < self._pause:
            new = self._silence.heard(self._pass_on)
            some = some or new is not False
            if not new:
                break
        return some

    def _status(self) -> Job:
        return self._jobs.status(self._job.id)

    def _pass_on(self) -> bool:
        return pass_on(self._log)

    def _drain(self) -> None:
        """Print what comes after the end."""
        self._silence.longest = _SILENT_AT_END_S
        last = time.monotonic()
        try:
            while True:
                if self._read():
                    last = time.monotonic()
                if self._log.whole(self._job) or time.monotonic() - last >= self._jobs.pace.late_s:
                    return
                time.sleep(self._jobs.pace.read_s)
        except UnreachableError as error:
            console.note(f"{error}; the end of the log of job {self._job.id} is not shown")


class _Silence:
    """Bears with a service that does not answer, and says so once, and once more when all of it answers again."""

    def __init__(self, job_id: str, longest: float) -> None:
        self.longest = longest
        self._job_id = job_id
        self._since: dict[Callable[[], object], float] = {}
        """Which questions are not answered, and since when."""

    def heard(self, ask: Callable[[], _T]) -> _T | None:
        """What a service answers, or None while it does not.

        Raises:
            UnreachableError: It has not answered for the longest time that is borne with.
        """
        try:
            answer = ask()
        except UnreachableError as error:
            if not self._since:
                console.note(f"{error}; job {self._job_id} is asked about again")
            since = self._since.setdefault(ask, time.monotonic())
            if time.monotonic() - since >= self.longest:
                raise
            return None
        if self._since.pop(ask, None) is not None and not self._since:
            console.note(f"there are answers again about job {self._job_id}")
        return answer


def _changed(old: Job, new: Job) -> bool:
    return (old.state, old.reason, old.restarts) != (new.state, new.reason, new.restarts)


def _say(job: Job) -> None:
    if job.done:
        return
    why = f" ({job.reason})" if job.reason else ""
    where = f" on {job.where}" if job.where else ""
    again = f", restart {job.restarts}" if job.restarts else ""
    console.note(f"job {job.id} is {job.state}{why}{where}{again}")


def _end(job: Job) -> int:
    """The last line on the screen, and the exit code."""
    code = job.exit_code or 0
    cost = f"; {job.cost}" if job.cost else ""
    if code:
        why = f": {job.reason}" if job.reason else ""
        console.error(
            f"job {job.id} ended as {job.state} with exit code {code}{why}; its log: {job.log or 'unknown'}{cost}"
        )
    else:
        console.note(f"job {job.id} is {job.state} after {job.elapsed}{cost}")
    return code
