"""Check that a script assigns the results of `prepare` in the order of its arguments.

Two loaders or two models that are exchanged train without an error. See docs/design/checks.md.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Iterator
from types import FrameType

from accel_runtime.observe.call_sites import call_site_of_frame, find_user_frame

__all__ = ["check_result_order"]


def check_result_order() -> None:
    """Raise ValueError if the line of the script that calls `prepare` assigns results to the names of other arguments."""
    frame = find_user_frame(inspect.currentframe())
    if frame is None:
        return
    for call, targets in _find_assignments(frame):
        names, assigned = _read_names(call.args), _read_names(targets.elts)
        if names != assigned and sorted(names) == sorted(assigned) and len(set(names)) == len(names):
            arguments = ", ".join(ast.unparse(item) for item in call.args)
            ordered = ", ".join(ast.unparse(targets.elts[assigned.index(name)]) for name in names)
            raise ValueError(
                f"Cannot assign the results of prepare() at {call_site_of_frame(frame)} to {ast.unparse(targets)}: they have the order "
                f"of its arguments, {arguments}. Write {ordered} = {ast.unparse(call)}."
            )


def _find_assignments(frame: FrameType) -> Iterator[tuple[ast.Call, ast.Tuple | ast.List]]:
    """Yield the calls of `prepare` in the current lines of a frame, with the targets that their results are unpacked to."""
    first, last = _find_lines(frame)
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    try:
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (SyntaxError, ValueError, SystemError):
        # A part of a statement, a cell of a notebook with magics, a file that has changed; Python 3.11 fails if two threads parse.
        return
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "prepare"
            and isinstance(node.targets[0], (ast.Tuple, ast.List))
        ):
            yield node.value, node.targets[0]


def _find_lines(frame: FrameType) -> tuple[int, int]:
    """Return the first and the last line of the call that a frame makes."""
    line = frame.f_lineno
    first, last, *_ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return first or line, last or line


def _read_names(items: list[ast.expr]) -> list[str]:
    """Return the names of variables or attributes, without the objects that have the attributes."""
    return [item.attr if isinstance(item, ast.Attribute) else ast.unparse(item) for item in items]
