"""Pairs of scripts for the findings of `accel migrate`: one on which a finding is true, and one on which it must be silent."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import accel_cli.extensions.migrate
from accel_cli.extensions.migrate.conversion import migrate_script
from accel_cli.extensions.migrate.shell import migrate_shell

_FOLDER = Path(accel_cli.extensions.migrate.__file__).parent
_NO_SENTENCE = re.compile(r"""\(\?|\$|\\n|^["'][\w ]+["']$""")
"""Regular expressions, templates of code, and lists of names."""


@dataclass(frozen=True)
class Pair:
    """A finding, by a part of its text, with a script on which it is true and the near miss."""

    finding: str
    script: str
    near_miss: str


@functools.cache
def list_texts(script):
    """Return the findings and notes of a script; one that begins with `#!` is a shell script."""
    if script.startswith("#!"):
        return tuple(one.text for one in migrate_shell(script)[1])
    result = migrate_script(script)
    return tuple(one.text for one in (*result.findings, *result.notes))


def list_unsaid(module, pairs):
    """Return the sentences of a module of `accel_cli/extensions/migrate` that no script of the pairs gets."""
    said = "\n".join(text for pair in pairs for text in list_texts(pair.script))
    tree = ast.parse((_FOLDER / module).read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        and id(node) not in documentation | inner
        and not _NO_SENTENCE.search(ast.unparse(node))
        and len(re.findall(r"\\ [a-z]{2}", pattern := _build_pattern(node))) > 2
        and not re.search(pattern, said, re.DOTALL)
    ]


def _build_pattern(node):
    """Return a regular expression for the texts of a string or f-string; empty for other constants."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(
        ".+?"
        if not isinstance(part, ast.Constant)
        else re.escape(part.value)
        if isinstance(part.value, str)
        else ""
        for part in parts
    )
