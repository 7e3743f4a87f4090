"""Node ids of tests in tables: do they exist, and does `make test` run them, or `make test-extensions`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["find_problem"]

ROOT = Path(__file__).parents[3]
_LATER = {"slow", "full", "service"}
"""Marks of the tests that `make test` leaves out."""


def find_problem(test: str, *, with_extensions: bool = False) -> str | None:
    """Return why `make test` does not run a test, `file::function` or a file; None if it does.

    Args:
        test: The test.
        with_extensions: Accept what `make test-extensions` runs, too.
    """
    file, _, name = test.partition("::")
    if not (ROOT / file).is_file():
        return "file not found"
    body = _parse(ROOT / file).body
    marks = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if name:
        functions = [
            node
            for node in (*body, *_list_contract(body))
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        if not functions:
            return "function not found"
        marks += functions[0].decorator_list
    if any(map(_is_later, marks)):
        return "marked slow, full or service"
    is_of_core = not file.startswith("tests/extensions/")
    if is_of_core or with_extensions or any("smoke" in _list_marks(mark) for mark in marks):
        return None
    return "not marked smoke"


def _list_contract(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the definitions of a contract that a file runs too, all of whose tests it imports."""
    files = [
        ROOT / "tests" / f"{node.module.replace('.', '/')}.py"
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module and [each.name for each in node.names] == ["*"]
    ]
    return [node for file in files for node in _parse(file).body]


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _is_later(mark: ast.expr) -> bool:
    """Return whether a mark leaves a test for later, or a `parametrize` of which each value has such a mark."""
    if isinstance(mark, ast.Call) and "parametrize" in _list_marks(mark.func):
        values = mark.args[1]
        return isinstance(values, ast.List) and all(_list_marks(value) & _LATER for value in values.elts)
    return bool(_list_marks(mark) & _LATER)


def _list_marks(node: ast.AST) -> set[str]:
    """Return the names of the marks that an expression mentions: `slow` for `pytest.mark.slow`."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.value, ast.Attribute)
        and inner.value.attr == "mark"
    }
