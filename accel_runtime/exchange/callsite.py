"""Where in the user's code a call of ours comes from."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import NamedTuple

__all__ = ["CallSite", "call_site"]

_PACKAGE = f"{Path(__file__).parent.parent}/"


class CallSite(NamedTuple):
    """A line of code, named so that machines with other paths agree."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def call_site(*libraries: str) -> CallSite:
    """The innermost line outside of accel, and of the folders of other libraries."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, *libraries)):
        frame = frame.f_back
    if frame is None:
        return CallSite("?", 0, "?")
    path = frame.f_code.co_filename
    return CallSite(path[path.rfind("/") + 1 :], frame.f_lineno, frame.f_code.co_name)
