"""Errors that are shown to users as messages without a traceback.

AccelError           the command failed                       exit code 1
├── RunEndedError    the run ended on another node            exit code 1
├── StalledError     the run made no progress                 exit code 124
└── UsageError       the command is rejected                  exit code 2
    └── ProfileError a profile is invalid                     exit code 2
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from typing_extensions import override

__all__ = [
    "MAX_PROBLEMS",
    "AccelError",
    "Problem",
    "ProfileError",
    "RunEndedError",
    "StalledError",
    "UsageError",
    "explain_address_space",
    "explain_os_error",
    "explain_process_limit",
    "explain_torch_error",
]

_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))
"""In the messages of Python and of C++ if the limit on processes is reached."""
MAX_PROBLEMS = 50
"""The most problems of a profile that are shown; a file with more is not a profile."""
_CURES: Mapping[int, str] = MappingProxyType(
    {
        errno.EMFILE: "Raise the limit on open files (ulimit -n).",
        errno.EFBIG: "Raise the limit on file sizes (ulimit -f).",
        errno.ENOSPC: "Free disk space.",
        errno.EDQUOT: "Free disk space.",
        errno.ENOMEM: "Free memory.",
    }
)


def explain_os_error(error: OSError | MemoryError) -> str:
    """Return the message for an error of the operating system, with its cure."""
    if isinstance(error, MemoryError):
        return f"Cannot allocate memory. {explain_address_space() or _CURES[errno.ENOMEM]}"
    try:
        os.getcwd()  # noqa: PTH109 - the cheapest check
    except FileNotFoundError:
        return "The working directory no longer exists. Change to another one (cd)."
    if error.errno == errno.EAGAIN:
        return explain_process_limit(error)
    path = f"{error.filename}: " if error.filename else ""
    cure = _CURES.get(error.errno or 0, "")
    if error.errno == errno.ENOMEM:
        cure = explain_address_space() or cure
    return f"{path}{error.strerror or error}. {cure}".strip()


def explain_torch_error(error: BaseException | str) -> str:
    """Return why torch cannot be imported, with the cure."""
    from accel_runtime.environment.installation import format_install  # noqa: PLC0415 - reads metadata, for errors only

    text = str(error) or type(error).__name__
    if "No module named 'torch'" in text:
        return f"{text}. Install torch in this environment: {format_install('torch')}"
    reinstall = f"Reinstall it: {format_install('torch', options='--force-reinstall')}"
    return f"Cannot import torch: {text}. {explain_address_space() or reinstall}"


def explain_process_limit(error: BaseException) -> str:
    """Return that the limit on processes is reached, with the limits, if that caused an error; else an empty string.

    Python and torch raise RuntimeError if they cannot start a thread.
    """
    link: BaseException | None = error
    while link is not None:
        is_limit = isinstance(link, OSError) and link.errno == errno.EAGAIN
        if is_limit or any(text in str(link) for text in _NO_THREAD):
            break
        link = link.__cause__ or link.__context__
    else:
        return ""
    from accel_runtime.environment import cgroup  # noqa: PLC0415 - for errors only

    return f"Cannot start another process or thread: {cgroup.explain_process_limit()}"


def explain_address_space() -> str:
    """Return how to raise the limit on address space; an empty string without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"The address space of a process is limited to {limit >> 20} MiB. Raise the limit: ulimit -v unlimited"


class AccelError(Exception):
    """An error that is shown as a message without a traceback."""

    exit_code = 1
    notes: Sequence[str] = ()
    """Sentences that are printed before the message."""


class RunEndedError(AccelError):
    """The run ended on another node, which reports the cause."""


class StalledError(AccelError):
    """The processes made no progress, and `launcher.stall_action` does not allow another attempt."""

    exit_code = 124  # as `timeout` of coreutils


class UsageError(AccelError):
    """A command that is rejected before it starts or changes anything."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One problem of a profile: its location, the expected and the actual value, and a hint."""

    where: str
    """File and line, or the option that set the value."""
    key: str
    """The dotted key; empty for a problem of the whole profile."""
    expected: str
    actual: str = ""
    hint: str = ""

    @override
    def __str__(self) -> str:
        location = f"{self.where}: {self.key}" if self.key else self.where
        actual = f", got {self.actual}" if self.actual else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{location}: {self.expected}{actual}{hint}"


class ProfileError(UsageError):
    """All problems of a profile."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        rest = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        super().__init__("\n".join([*map(str, problems[:MAX_PROBLEMS]), *rest]))
