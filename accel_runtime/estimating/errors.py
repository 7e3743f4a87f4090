"""What a person can mend: one message, and no traceback of ours."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["EstimateError", "raised"]

_OURS = str(Path(__file__).parent.parent)


class EstimateError(Exception):
    """What was asked for cannot be estimated; the message says why and what to do."""


def raised(error: BaseException) -> str:
    """What somebody's code raised, and the line of theirs that did: not one of a library, where there is another."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _OURS))
    ]
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    message = str(error).strip().split("\n")[0]
    return f"{place}{type(error).__name__}{': ' if message else ''}{message}"
