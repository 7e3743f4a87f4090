"""What can be asked of every service that runs jobs, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from accel_cli.errors import AccelError

__all__ = ["Job", "Jobs", "Log", "Pace", "UnreachableError"]


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
