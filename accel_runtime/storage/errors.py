"""Errors of checkpoints, and their agreement: a step that fails on one rank raises on every rank. Imports no torch."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accel_runtime.environment.text import escape_controls

__all__ = [
    "AbsentError",
    "AllGatherObjects",
    "CheckpointError",
    "CollectiveStep",
    "DamageError",
    "NodePartError",
    "RequestError",
    "StoreError",
    "catch_error",
    "check_same_directory",
    "convert_store_errors",
    "describe_error",
    "errors_on_all_ranks",
    "format_names",
    "format_problems",
    "raise_problem",
]

_CURES: dict[int | None, str] = {
    errno.ENOSPC: "Free space, or choose another directory.",
    errno.EDQUOT: "Free space or raise the quota, or choose another directory.",
    errno.EROFS: "Choose a directory that is writable.",
    errno.EACCES: "Change the permissions, or choose another directory.",
    errno.EPERM: "Change the permissions, or choose another directory.",
}
AllGatherObjects = Callable[[Any], list[Any]]
"""Collective call that returns the objects of all ranks, in rank order."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file or item, and the cure.

    The control characters of names in a checkpoint are escaped, since Python prints the message to the terminal.
    """

    def __init__(self, text: str) -> None:
        super().__init__(escape_controls(text))


class RequestError(CheckpointError):
    """A request names something that does not exist or would do harm; nothing is damaged or changed."""


class AbsentError(CheckpointError):
    """No checkpoint was ever completed under a key, or it was removed; a save may be under way."""


class DamageError(CheckpointError):
    """Files of a checkpoint do not have their checksums."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class NodePartError(CheckpointError):
    """The parts of a checkpoint on the disks of the nodes lack what a rank needs; raised on all ranks, and nothing has changed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Cannot load the part of one node: {reason}. Load a checkpoint of the project directory, or use the ranks and nodes "
            "of the save."
        )
        self.reason = reason
        """Why the parts do not suffice, as the part of a sentence."""


class StoreError(OSError):
    """A call to a remote store has failed, after all retries.

    Args:
        key: URL of the file.
        reason: The reason, without a period at its end.
        cure: The cure, as a sentence.
    """

    def __init__(self, key: str, reason: str, cure: str) -> None:
        super().__init__(errno.EIO, reason, key)
        self.cure = cure
        """The cure, as a sentence."""


class CollectiveStep:
    """Value of a step on this rank and, after the step, on all ranks."""

    def __init__(self) -> None:
        self.value: Any = None
        """Value of this rank."""
        self.error: Exception | None = None
        """Why the step failed on this rank."""
        self.values: Sequence[Any] = ()
        """Values in rank order, None of a rank that shared none; set after the step."""

    def share(self, value: Any) -> None:
        """Set the value of this rank, which all ranks receive after the step."""
        self.value = value

    @property
    def problem(self) -> str | None:
        """Description of the error of this rank."""
        return None if self.error is None else describe_error(self.error)


@contextmanager
def catch_error() -> Iterator[CollectiveStep]:
    """Run a step whose error the other ranks wait for, whatever it is."""
    step = CollectiveStep()
    try:
        yield step
    except Exception as error:  # noqa: BLE001 - raised after the exchange
        step.error = error


@contextmanager
def errors_on_all_ranks(all_gather: AllGatherObjects) -> Iterator[CollectiveStep]:
    """Raise `CheckpointError` on every rank if the block fails on any rank; else exchange the values that it shares."""
    with catch_error() as step:
        yield step
    # A step without a problem and a value sends no data.
    is_empty = step.problem is None and step.value is None
    gathered = all_gather(None if is_empty else (step.problem, step.value))
    problems, step.values = zip(*((None, None) if each is None else each for each in gathered), strict=True)
    raise_problem(format_problems(problems), step.error)


def format_problems(problems: Sequence[str | None]) -> str | None:
    """Return the problems of all ranks as one text; None if there are none."""
    failed = {rank: text for rank, text in enumerate(problems) if text is not None}
    if not failed:
        return None
    if len(failed) == len(problems) and len(set(failed.values())) == 1:
        return next(iter(failed.values()))
    return "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


def raise_problem(text: str | None, error: Exception | None) -> None:
    """Raise `CheckpointError` with a text that all ranks have, if there is one; `error` is that of this rank."""
    if text is None:
        return
    if isinstance(error, CheckpointError) and str(error) == text:
        raise error
    raise CheckpointError(text) from error


def check_same_directory(operation: str, directories: Sequence[str | None]) -> None:
    """Raise `CheckpointError` if the directories that the ranks passed to an operation differ."""
    if len(set(directories)) > 1:
        listed = ", ".join(f"rank {rank}: {path or 'none'}" for rank, path in enumerate(directories))
        raise CheckpointError(
            f"{operation}() received different directories ({listed}). Pass the same one on every rank."
        )


def describe_error(error: Exception) -> str:
    """Return the reason of a failed step, with the cure."""
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        cure = getattr(error, "cure", "") or _CURES.get(error.errno, "Check the file system, and try again.")
        return f"{reason}. {cure}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@contextmanager
def convert_store_errors() -> Iterator[None]:
    """Raise `CheckpointError` with the cure for an error of the file system or the object store."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(describe_error(error)) from error


def format_names(names: Sequence[str], limit: int = 3) -> str:
    """Format the first names of a list, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
