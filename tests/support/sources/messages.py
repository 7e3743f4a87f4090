"""The messages of a package, read from its sources: the texts of its errors, warnings and notes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.sources.syntax import parse

__all__ = ["list_messages"]

ROOT = Path(__file__).parents[3]
REPORTERS = {"error", "note", "warn", "warning", "warning_once"}
"""Methods of consoles, loggers and `warnings` whose argument is a message."""


@cache
def list_messages(package: str) -> str:
    """Return the messages of a package, such as `accel_runtime/data`, by module, in the order of the sources.

    Each line has what is raised or called and the text; an expression inside a text is in braces.
    """
    folder = ROOT / package
    # The packages of the two roots have files of their own.
    modules = sorted(folder.rglob("*.py") if "/" in package else folder.glob("*.py"))
    parts = []
    for module in modules:
        lines = [f"{name}: {text}" for name, text in _find_messages(parse(module))]
        if lines:
            parts.append("\n".join([f"[{module.relative_to(ROOT).as_posix()}]", *lines]) + "\n")
    return "\n".join(parts)


def _find_messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in _walk_in_order(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if isinstance(node, ast.Raise) or name in REPORTERS:
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                text = _render(argument)
                if text and " " in text.strip():
                    yield name, text.replace("\n", "\\n")


def _walk_in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk_in_order(child)


def _render(node: ast.expr) -> str | None:
    """Return the text of an expression that is a literal text, or a sum or choice of such; None for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _render(node.left), _render(node.right)
        if left is None and right is None:
            return None
        return (left or f"{{{ast.unparse(node.left)}}}") + (right or f"{{{ast.unparse(node.right)}}}")
    if isinstance(node, ast.IfExp):
        return f"{_render(node.body)} | {_render(node.orelse)}"
    return None
