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
    "RequestError",
    "check_same_directory",
    "describe_error",
    "errors_on_all_ranks",
    "format_names",
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


class CollectiveStep:
    """Value of a step on this rank and, after the step, on all ranks."""

    def __init__(self) -> None:
        self._value: Any = None
        self.values: Sequence[Any] = ()
        """Values in rank order, None of a rank that shared none; set after the step."""

    def share(self, value: Any) -> None:
        """Set the value of this rank, which all ranks receive after the step."""
        self._value = value

    def exchange(self, all_gather: AllGatherObjects, problem: str | None) -> Sequence[str | None]:
        """End the step with the problem of this rank, if any, and return those of all ranks; collective."""
        problems, self.values = zip(*all_gather((problem, self._value)), strict=True)
        return problems


@contextmanager
def errors_on_all_ranks(all_gather: AllGatherObjects) -> Iterator[CollectiveStep]:
    """Raise `CheckpointError` on every rank if the block fails on any rank; else exchange the values that it shares."""
    step, error = CollectiveStep(), None
    try:
        yield step
    except Exception as raised:  # noqa: BLE001 - the other ranks wait for the outcome, whatever it is
        error = raised
    problems = step.exchange(all_gather, None if error is None else describe_error(error))
    failed = {rank: text for rank, text in enumerate(problems) if text is not None}
    if not failed:
        return
    equal = len(failed) == len(problems) and len(set(failed.values())) == 1
    if equal and isinstance(error, CheckpointError):
        raise error
    text = "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    raise CheckpointError(next(iter(failed.values())) if equal else text) from error


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
        return f"{reason}. {_CURES.get(error.errno, 'Check the file system, and try again.')}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def format_names(names: Sequence[str], limit: int = 3) -> str:
    """Format the first names of a list, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
