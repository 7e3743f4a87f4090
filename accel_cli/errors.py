"""Errors a person sees.

AccelError           the run cannot go on                     exit code 1
├── ElsewhereError   it ended on another machine              exit code 1
└── UsageError       what was asked for cannot be done        exit code 2
    └── ProfileError a profile says something we cannot use   exit code 2
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

__all__ = ["AccelError", "ElsewhereError", "Problem", "ProfileError", "UsageError"]


class AccelError(Exception):
    """Something a person should read: a message, and no traceback of ours."""

    exit_code = 1


class ElsewhereError(AccelError):
    """The run ended on another machine, which says why."""


class UsageError(AccelError):
    """What was asked for cannot be done; nothing was started or changed."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a profile: where it stands, what was expected, what came, and what may be meant."""

    where: str
    """File and line, or the option that said it."""
    key: str
    """The dotted key, empty where the whole is meant."""
    expected: str
    came: str = ""
    hint: str = ""

    @override
    def __str__(self) -> str:
        place = f"{self.where}: {self.key}" if self.key else self.where
        came = f", got {self.came}" if self.came else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}: {self.expected}{came}{hint}"


class ProfileError(UsageError):
    """Everything that is wrong with a profile, at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))
