"""Where in the user's code a call of ours comes from."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["TORCH", "CallSite", "call_site", "site_of", "user_stack"]

_PACKAGE = f"{Path(__file__).parent.parent}/"
TORCH = f"{Path(torch.__file__).parent}/"
"""The folder of torch, a library that `call_site` may leave out."""


class CallSite(NamedTuple):
    """A line of code, named so that machines with other paths agree."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def call_site(*libraries: str) -> CallSite:
    """The innermost line outside of accel, and of the folders of other libraries."""
    return site_of(inspect.currentframe(), *libraries)


def site_of(frame: FrameType | None, *libraries: str) -> CallSite:
    """Return the innermost line of a stack outside of accel, and of the folders of other libraries."""
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, *libraries)):
        frame = frame.f_back
    if frame is None:
        return CallSite("?", 0, "?")
    return _site(frame)


def user_stack() -> tuple[CallSite, ...]:
    """Return all lines outside of accel that led to this call, the innermost first."""
    frame, sites = inspect.currentframe(), []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            sites.append(_site(frame))
        frame = frame.f_back
    return tuple(sites)


def _site(frame: FrameType) -> CallSite:
    path = frame.f_code.co_filename
    return CallSite(path[path.rfind("/") + 1 :], frame.f_lineno, frame.f_code.co_name)
