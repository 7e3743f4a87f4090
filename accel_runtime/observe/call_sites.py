"""Lines of the script that led to a call of accel."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from types import FrameType
from typing import NamedTuple

__all__ = ["CallSite", "call_site", "call_site_of_frame", "find_user_frame", "user_call_sites"]

_IGNORED = (f"{Path(__file__).parents[1]}/", contextlib.__file__)
"""accel, and the module between a context manager of accel and the script."""


class CallSite(NamedTuple):
    """Line of code, without its directory, so that nodes with other paths have equal ones."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})" if self.line else "an unknown line"


def call_site(*libraries: str) -> CallSite:
    """Return the innermost line outside of accel, and of the directories of other libraries."""
    return call_site_of_frame(inspect.currentframe(), *libraries)


def find_user_frame(frame: FrameType | None, *libraries: str) -> FrameType | None:
    """Return the innermost frame of a stack outside of accel, and of the directories of other libraries."""
    while frame is not None and frame.f_code.co_filename.startswith((*_IGNORED, *libraries)):
        frame = frame.f_back
    return frame


def call_site_of_frame(frame: FrameType | None, *libraries: str) -> CallSite:
    """Return the innermost line of a stack outside of accel, and of the directories of other libraries."""
    frame = find_user_frame(frame, *libraries)
    if frame is None:
        return CallSite("?", 0, "?")
    return _build_site(frame)


def user_call_sites() -> tuple[CallSite, ...]:
    """Return all lines outside of accel that led to this call, innermost first."""
    frame, sites = inspect.currentframe(), []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_IGNORED):
            sites.append(_build_site(frame))
        frame = frame.f_back
    return tuple(sites)


def _build_site(frame: FrameType) -> CallSite:
    path = frame.f_code.co_filename
    return CallSite(path[path.rfind("/") + 1 :], frame.f_lineno, frame.f_code.co_name)
