"""Syntax trees of source files: each file is parsed once for all tests of a process."""

from __future__ import annotations

import ast
from functools import cache

__all__ = ["list_nodes", "parse"]


@cache
def parse(path):
    """Return the syntax tree of a file, which nothing may change."""
    return ast.parse(path.read_text("utf-8"))


@cache
def list_nodes(path):
    """List the nodes of the syntax tree of a file."""
    return [*ast.walk(parse(path))]
