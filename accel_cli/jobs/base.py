"""What can be asked of every service that runs jobs, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from accel_cli.errors import AccelError

__all__ = ["Job", "Jobs", "Log", "UnreachableError"]


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


class Log(ABC):
    """What a job prints, from its first byte on."""

    @abstractmethod
    def read(self) -> bytes:
        """What has come since the last call; nothing if there is nothing yet.

        Raises:
            UnreachableError: The service does not answer now.
        """


class Jobs(ABC):
    """The jobs of one service, as far as they are yours."""

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
