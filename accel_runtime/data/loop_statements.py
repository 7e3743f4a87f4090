"""Statements of the script that request batches, and those of them that are running."""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple, TypeAlias

__all__ = ["CallStack", "Caller", "capture_stack", "find_caller", "is_looping", "list_callers"]


class Caller(NamedTuple):
    """A function call, and the instruction that it executes."""

    frame: int
    """Identity of the frame; not the frame itself, which would keep the variables of the script."""
    code: CodeType
    instruction: int


CallStack: TypeAlias = Mapping[tuple[int, CodeType], int]
"""Instructions of all function calls that are running."""


def list_callers(frame: FrameType | None) -> tuple[Caller, ...]:
    """Return a frame and all that called it, innermost first."""
    callers = []
    while frame is not None:
        callers.append(Caller(id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(callers)


def capture_stack() -> CallStack:
    """Return the function calls that are running; a generator between two of its values is not one of them."""
    callers = list_callers(sys._getframe(1))  # noqa: SLF001 - as `inspect.currentframe`, which returns no caller
    return {(caller.frame, caller.code): caller.instruction for caller in callers}


def find_caller(callers: Sequence[Caller], stack: CallStack) -> Caller | None:
    """Return the innermost of some callers that is still running; None if all have returned or run in another thread."""
    return next((caller for caller in callers if (caller.frame, caller.code) in stack), None)


def is_looping(caller: Caller, stack: CallStack) -> bool:
    """Return whether the caller requested a batch by a `for` statement, whose body it executes now."""
    end = _find_ends(caller.code).get(caller.instruction)
    return end is not None and caller.instruction < stack[caller.frame, caller.code] < end


@lru_cache(maxsize=64)
def _find_ends(code: CodeType) -> dict[int, int]:
    """Return the offsets of the `for` statements of some code, with those of their ends."""
    return {each.offset: int(each.argval) for each in dis.get_instructions(code) if each.opname == "FOR_ITER"}
