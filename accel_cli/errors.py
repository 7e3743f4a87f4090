"""Errors a person sees.

AccelError           the run cannot go on                     exit code 1
├── ElsewhereError   it ended on another machine              exit code 1
└── UsageError       what was asked for cannot be done        exit code 2
    └── ProfileError a profile says something we cannot use   exit code 2
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from typing_extensions import override

__all__ = [
    "SHOWN",
    "AccelError",
    "ElsewhereError",
    "Problem",
    "ProfileError",
    "UsageError",
    "explain_address_space",
    "explain_os_error",
    "explain_torch_error",
]

SHOWN = 50
"""The mistakes of a profile that are shown; a file that has more is not a profile."""
_CURES: Mapping[int, str] = MappingProxyType(
    {
        errno.EMFILE: "Raise the limit on open files (ulimit -n).",
        errno.EFBIG: "Raise the limit on file sizes (ulimit -f).",
        errno.EAGAIN: "Raise the limit on processes (ulimit -u).",
        errno.ENOSPC: "Free space there.",
        errno.EDQUOT: "Free space there.",
        errno.ENOMEM: "Free memory.",
    }
)


def explain_os_error(error: OSError | MemoryError) -> str:
    """Return what the system refused, where, and what to do."""
    if isinstance(error, MemoryError):
        return f"memory cannot be allocated. {explain_address_space() or _CURES[errno.ENOMEM]}"
    try:
        os.getcwd()  # noqa: PTH109 - as cheap as it can be
    except FileNotFoundError:
        return "the working directory does not exist any more. Change to another one (cd)."
    place = f"{error.filename}: " if error.filename else ""
    cure = _CURES.get(error.errno or 0, "")
    if error.errno in {errno.ENOMEM, errno.EAGAIN}:
        cure = explain_address_space() or cure
    return f"{place}{error.strerror or error}. {cure}".strip()


def explain_torch_error(error: BaseException | str) -> str:
    """Return why torch cannot be imported, and what to do."""
    said = str(error) or type(error).__name__
    if "No module named 'torch'" in said:
        return f"{said}. Install torch in this environment: {sys.executable} -m pip install torch"
    again = f"Install it again: {sys.executable} -m pip install --force-reinstall torch"
    return f"torch cannot be imported: {said}. {explain_address_space() or again}"


def explain_address_space() -> str:
    """Return how to raise the limit on address space; empty where there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"The address space of a process is limited to {limit >> 20} MiB; raise it: ulimit -v unlimited"


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
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        super().__init__("\n".join([*map(str, problems[:SHOWN]), *more]))
