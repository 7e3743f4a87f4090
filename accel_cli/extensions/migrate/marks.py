"""Comments of a converted script at the places that are left, which `--check` finds until they are removed."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable

from accel_cli.extensions.migrate.findings import Finding

__all__ = ["add_marks", "find_marks", "match_lines"]

_MARK = "# accel migrate: "
_MANY_LINES = 2000
"""The number of lines from which difflib ignores frequent ones, since its time grows with their number squared."""


def add_marks(before: str, after: str, findings: Iterable[Finding]) -> str:
    """Return a converted script with a comment above each statement that a finding of the script before is about."""
    lines = after.splitlines(keepends=True)
    starts = _map_statements(after)
    places: dict[int, list[str]] = {}
    positions = match_lines(before, after)
    for finding in findings:
        line = starts.get(positions.get(finding.line, 1), 1)
        places.setdefault(line, []).append(" ".join(finding.text.split()))
    for line in sorted(places, reverse=True):
        code = lines[line - 1]
        indent = code[: len(code) - len(code.lstrip())]
        lines[line - 1 : line - 1] = [f"{indent}{_MARK}{text}\n" for text in places[line]]
    return "".join(lines)


def find_marks(text: str) -> tuple[Finding, ...]:
    """Return the places of a converted script whose comments are left."""
    return tuple(
        Finding(number, line.strip().removeprefix(_MARK))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip().startswith(_MARK)
    )


def _map_statements(text: str) -> dict[int, int]:
    """Return the first line of the innermost statement of each line."""
    found: dict[int, int] = {}
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    for node in sorted(statements, key=lambda one: (one.lineno, -(one.end_lineno or 0))):
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(one.lineno for one in decorators)])
        found |= dict.fromkeys(range(start, (node.end_lineno or start) + 1), start)
    return found


def match_lines(before: str, after: str) -> dict[int, int]:
    """Return the line of each line of a text, counted from 1, in the text after its change."""
    lines = before.splitlines()
    matcher = difflib.SequenceMatcher(None, lines, after.splitlines(), autojunk=len(lines) > _MANY_LINES)
    return {
        line + 1: min(first + line - start, max(last - 1, first)) + 1
        for _, start, end, first, last in matcher.get_opcodes()
        for line in range(start, end)
    }
