"""Type checkers read the annotations of accel as users do: from an installed package, in a script outside of this project."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import accel_runtime
from accel_runtime import utils

SCRIPT = Path(__file__).parents[1] / "data" / "types"
"""A script with the types that its author expects, and mistakes that a checker must find: an unused ignore is an error."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker",
    [
        pytest.param(
            ["mypy", "--strict", "--config-file=", "--cache-dir=.cache"], id="mypy", marks=pytest.mark.full
        ),
        # Pyright with the interpreter of its language in a package, where pyright itself downloads one.
        pytest.param(
            ["basedpyright", "--project", "pyrightconfig.json", "--pythonpath", sys.executable], id="pyright"
        ),
    ],
)
def test_a_type_checker_accepts_a_script_and_finds_its_mistakes(tmp_path, checker):
    folder = shutil.copytree(SCRIPT, tmp_path / "script")
    files = ["training.py"] if checker[0] == "mypy" else []  # pyright reads those of its project
    result = subprocess.run(
        [sys.executable, "-m", *checker, *files], cwd=folder, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", [accel_runtime, utils])
def test_a_type_checker_sees_the_names_that_are_imported_on_first_use(module):
    tree = ast.parse(Path(module.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = (node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {}
    for node in block.body:
        source = importlib.import_module(node.module)
        names = [alias.name for alias in node.names]
        seen |= {name: getattr(source, name) for name in (source.__all__ if names == ["*"] else names)}
    assert seen == {name: getattr(module, name) for name in module.__all__}
