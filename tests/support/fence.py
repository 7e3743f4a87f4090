"""The fence between the core and the extensions: the tables of the core, and the deletion of extensions from a copy of the tree."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
HALVES = ("accel_cli", "accel_runtime")
TABLES = (
    "accel_cli/launchers/__init__.py",
    "accel_cli/main.py",
    "accel_runtime/__init__.py",
    "accel_runtime/monitoring/tracking/__init__.py",
    "accel_runtime/utils/__init__.py",
)
"""The files of the core that name extensions: in each, a line with `extensions.NAME` is a row of a table, and nothing else."""
EXTENSIONS = sorted(
    {path.parent.name for half in HALVES for path in (ROOT / half / "extensions").glob("*/__init__.py")}
)


def find_extensions(text):
    """Return the names of the extensions that a text names, as `extensions.NAME` or `extensions/NAME`."""
    return {*re.findall(r"\bextensions[./](\w+)", text)} & {*EXTENSIONS}


def remove_rows(text, names):
    """Return the source of a table without the rows of some extensions."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not find_extensions(line) & {*names})


def copy_sources(tree):
    """Copy both halves into a folder, with their bytecode, so that it need not be compiled again."""
    for half in HALVES:
        shutil.copytree(ROOT / half, tree / half)


def remove_extensions(tree, names):
    """Delete extensions from a copy of the sources: their folders in both halves, and their rows in the tables."""
    for name in names:
        for half in HALVES:
            shutil.rmtree(tree / half / "extensions" / name, ignore_errors=True)
    for table in TABLES:
        path = tree / table
        path.write_text(remove_rows(path.read_text("utf-8"), names), encoding="utf-8")
