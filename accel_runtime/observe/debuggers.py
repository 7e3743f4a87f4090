"""Debuggers in processes without a standard input of their own. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from accel_runtime.observe.import_hooks import call_after_import

__all__ = ["skip_debuggers"]


def skip_debuggers(report: Callable[[str], None]) -> None:
    """Let pdb, and debuggers derived from it, continue where they would read the standard input of this process.

    Args:
        report: Called once, with the place: ` at FILE:LINE`, or an empty text.
    """
    call_after_import("pdb", lambda module: _skip_interaction(module, report))


def _skip_interaction(pdb: ModuleType, report: Callable[[str], None]) -> None:
    if not hasattr(pdb, "Pdb"):  # a module of the script
        return
    interact: Any = pdb.Pdb.interaction
    is_reported = False

    @wraps(interact)
    def interaction(debugger: Any, frame: FrameType | None, *args: Any, **options: Any) -> None:
        nonlocal is_reported
        # Debuggers behind a port have streams of their own.
        if debugger.stdin is not sys.__stdin__:
            interact(debugger, frame, *args, **options)
            return
        if not is_reported:
            is_reported = True
            report(_format_place(frame))
        if debugger.mainpyfile:
            # `python -m pdb` would start the script again and again: it reads the end of its input.
            interact(debugger, frame, *args, **options)
        else:
            debugger.set_continue()

    pdb.Pdb.interaction = interaction


def _format_place(frame: FrameType | None) -> str:
    """Format the line of a frame, or of the script if torch (`torch.distributed.breakpoint`) has started the debugger."""
    while frame and frame.f_back and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
