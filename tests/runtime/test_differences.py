"""The page for users of Accelerate lists every difference of the two interfaces, and no other."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from describe_surface import PATH, describe_object

from accel_runtime.tracking import TRACKERS

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-accelerate.md"
PLACED = {"POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD"}
REFUSED = {"MegatronLMDummyScheduler"}
"""Classes that can be imported but not created: their members and parameters are not compared."""


@pytest.fixture(scope="module")
def accelerate():
    """The description of Accelerate 1.15.0 that `tests/describe_surface.py` writes."""
    return json.loads(PATH.read_text(encoding="utf-8"))


@pytest.fixture
def found(accelerate, monkeypatch):
    """Return all differences: `name`, `module.name`, `Class.member`, `function(parameter)`."""
    packages = {known.package for known in TRACKERS.values()} - {None, "tensorboard"}
    for name in [*packages, "dvclive.plots", "mlflow.utils", "mlflow.utils.validation"]:
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    for known in TRACKERS.values():
        if known.package in packages:
            monkeypatch.delitem(sys.modules, f"accel_runtime.tracking.{known.module}", raising=False)
    classes = {known.class_name: known.load() for known in TRACKERS.values()}
    found = set(list_differences(accelerate, classes))
    for known in TRACKERS.values():
        if known.package in packages:
            del sys.modules[f"accel_runtime.tracking.{known.module}"]
    return found


def list_differences(accelerate, classes):
    ours = {
        module: {name: classes.get(name) or get_own(module, name) for name in names}
        for module, names in accelerate.items()
    }
    present = {name for names in ours.values() for name, value in names.items() if value is not None}
    for module, names in accelerate.items():
        if import_module_or_none(module) is None:
            yield f"accelerate.{module}"
            continue
        for name, theirs in names.items():
            value = ours[module][name]
            if value is None or name in REFUSED:
                yield f"{module}.{name}" if name in present - REFUSED else name
            else:
                yield from compare(name, theirs, describe_object(value, "accel_runtime"), value)


def import_module_or_none(name):
    try:
        return importlib.import_module(f"accel_runtime.{name}".rstrip("."))
    except ModuleNotFoundError:
        return None


def get_own(module, name):
    try:
        return getattr(import_module_or_none(module), name, None)
    except ImportError:  # with advice for the user
        return None


def compare(name, theirs, ours, value):
    mine = ours.get("members", {})
    for member, parameters in theirs.get("members", {}).items():
        if member not in mine and not hasattr(value, member):
            yield f"{name}.{member}"
        elif parameters and mine.get(member) is not None:
            yield from compare_parameters(f"{name}.{member}", parameters, mine[member])
    yield from compare_parameters(name, theirs.get("parameters", []), ours.get("parameters", []))


def compare_parameters(name, theirs, ours):
    """Yield parameters that cannot be passed as in Accelerate, or that have another default."""
    by_name = {parameter: default for parameter, _, default in ours}
    kinds = {kind for _, kind, _ in ours}
    places = [parameter for parameter, kind, _ in ours if kind in PLACED]
    given = [parameter for parameter, kind, _ in theirs if kind in PLACED]
    for parameter, kind, default in theirs:
        if parameter.startswith("_"):
            continue
        if kind.startswith("VAR_"):
            if kind not in kinds:
                yield f"{name}({'**' if kind == 'VAR_KEYWORD' else '*'}{parameter})"
            continue
        place = given.index(parameter) if kind in PLACED else None
        moved = place is not None and places[place : place + 1] != [parameter]
        if moved or parameter not in by_name or not is_same_default(by_name[parameter], default):
            yield f"{name}({parameter})"


def is_same_default(ours, theirs):
    """Return whether two defaults mean the same, as far as their texts show."""
    if theirs is None or "..." in {ours, theirs}:
        return True
    return ours is not None and ast.literal_eval(ours) == ast.literal_eval(theirs)


def read_documented_names():
    """Return the names in the column `Names` of the tables in the last two sections of the page."""
    text = PAGE.read_text(encoding="utf-8")
    names, column = [], None
    for line in text[text.index("## Unsupported names") :].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "Names" in cells:
            column = cells.index("Names")
        elif len(cells) > 1 and column is not None:
            names += re.findall(r"`([^`]+)`", cells[column])
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return {spelled for name in names for spelled in spell_out(name)}


def spell_out(name):
    """Return the names that a name with a list of parameters means: `f(a, b)` is `f(a)` and `f(b)`."""
    function, bracket, parameters = name.partition("(")
    return [f"{function}({one})" for one in parameters.rstrip(")").split(", ")] if bracket else [name]


def test_the_page_lists_every_difference_and_no_other(found):
    named = read_documented_names()
    missing, wrong = sorted(found - named), sorted(named - found)
    assert not missing, "differences that the page does not list"
    assert not wrong, "names on the page that do not differ"
