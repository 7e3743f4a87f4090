"""Positions of calls in the script: the loops that a call stands in, and those through which it reads.

Bytecode is read, since it is the only description of the running code that always exists. What is not recognized there is
"unknown" for the caller, never an error.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

__all__ = ["CallStack", "find_generator_loops", "is_in_body", "is_same_place", "read_call_stack"]


class Position(NamedTuple):
    """Position in a frame. A frame itself would keep the script's variables alive."""

    frame: int
    """Identity of the frame, valid as long as it exists."""
    code: CodeType
    instruction: int


CallStack = tuple[Position, ...]
"""Positions of the frames of a call, outermost first."""


def read_call_stack(callers: int = 0) -> CallStack:
    """Return the positions of the function that calls this one, without `callers` of the innermost, and of its callers."""
    frame: FrameType | None = sys._getframe(1 + callers)  # noqa: SLF001 - `inspect.currentframe` with its callers
    positions = []
    while frame is not None:
        positions.append(Position(id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(positions))


class _ForLoop(NamedTuple):
    """Instructions of a `for` statement or a `yield from`."""

    start: int
    exit: int
    repeats: bool
    """True if the loop always begins again after its end, as in `while True: yield from loader`."""
    may_repeat: bool
    """True if the loop stands in another loop."""


@lru_cache(maxsize=256)
def _find_for_loop(code: CodeType, instruction: int) -> _ForLoop | None:
    """Return the loop whose iterator is advanced at an instruction, or None."""
    instructions = list(dis.get_instructions(code))
    # The last instruction may be one of its inline caches.
    index = max(index for index, each in enumerate(instructions) if each.offset <= max(instruction, 0))
    found = instructions[index]
    if found.opname not in {"FOR_ITER", "SEND", "YIELD_FROM"}:
        return None
    # The `yield from` of Python 3.10 continues with the next instruction at its end.
    end = instructions[index + 1].offset if found.opname == "YIELD_FROM" else found.argval
    enclosing = [
        each.argval for each in instructions if _is_jump(each) and each.argval < found.offset < each.offset
    ]
    return _ForLoop(found.offset, end, _returns_to(instructions, end, found.offset), bool(enclosing))


def _is_jump(instruction: dis.Instruction) -> bool:
    return "JUMP" in instruction.opname and isinstance(instruction.argval, int)


def _returns_to(instructions: Sequence[dis.Instruction], start: int, target: int) -> bool:
    """Return whether the code at `start` reaches the instruction `target` again without a condition."""
    by_offset = {each.offset: index for index, each in enumerate(instructions)}
    index, visited = by_offset[start], set[int]()
    while index < len(instructions) and index not in visited:
        visited.add(index)
        each = instructions[index]
        if each.offset == target:
            return True
        if each.opname.startswith(
            ("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE", "YIELD", "FOR_ITER", "SEND")
        ):
            return False
        if _is_jump(each):
            if each.opname not in {"JUMP_FORWARD", "JUMP_ABSOLUTE"} and "BACKWARD" not in each.opname:
                return False
            if "_IF_" in each.opname:
                return False
            index = by_offset[each.argval]
        else:
            index += 1
    return False


def _is_generator(position: Position) -> bool:
    return bool(position.code.co_flags & inspect.CO_GENERATOR)


def _find_header(reader: CallStack) -> int | None:
    """Return the index of the outermost position whose `for` reads the loader, directly or through generators."""
    header = None
    for index in range(len(reader) - 1, -1, -1):
        position = reader[index]
        if _find_for_loop(position.code, position.instruction) is None:
            return header
        header = index
        if not _is_generator(position):
            return header
    return header


def _count_common(first: CallStack, second: CallStack) -> int:
    """Return the number of outermost positions that two stacks share."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def is_in_body(call: CallStack, reader: CallStack) -> bool:
    """Return whether a call stands in the body of the `for` that reads a loader from `reader`."""
    header = _find_header(reader)
    index = _count_common(call, reader)
    if header is None or not header <= index < min(len(call), len(reader)):
        return False
    at, position = reader[index], call[index]
    loop = _find_for_loop(at.code, at.instruction)
    return at.frame == position.frame and loop is not None and loop.start < position.instruction < loop.exit


def find_generator_loops(reader: CallStack, other: CallStack) -> Iterator[_ForLoop]:
    """Yield the loops of generators through which one loader is read, and not the other."""
    for position in reversed(reader[_count_common(reader, other) :]):
        loop = _find_for_loop(position.code, position.instruction)
        if loop is None or not _is_generator(position):
            return
        yield loop


def is_same_place(first: CallStack, second: CallStack) -> bool:
    """Return whether two calls were made at the same lines, also in different frames."""
    return [each[1:] for each in first] == [each[1:] for each in second]
