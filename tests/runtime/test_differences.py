"""The page for people who come from Accelerate names every difference of the two surfaces, and no other."""

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
"""Classes that can be imported and not made: their members and parameters say nothing."""


@pytest.fixture(scope="module")
def accelerate():
    """The description of Accelerate 1.15.0, which `tests/describe_surface.py` writes."""
    return json.loads(PATH.read_text(encoding="utf-8"))


@pytest.fixture
def found(accelerate, monkeypatch):
    """Every difference: `name`, `module.name`, `Class.member`, `function(parameter)`."""
    packages = {known.package for known in TRACKERS.values()} - {None, "tensorboard"}
    for name in [*packages, "dvclive.plots", "mlflow.utils", "mlflow.utils.validation"]:
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    for known in TRACKERS.values():
        if known.package in packages:
            monkeypatch.delitem(sys.modules, f"accel_runtime.tracking.{known.module}", raising=False)
    classes = {known.class_name: known.load() for known in TRACKERS.values()}
    found = set(differences(accelerate, classes))
    for known in TRACKERS.values():
        if known.package in packages:
            del sys.modules[f"accel_runtime.tracking.{known.module}"]
    return found


def differences(accelerate, classes):
    ours = {
        module: {name: classes.get(name) or own(module, name) for name in names}
        for module, names in accelerate.items()
    }
    present = {name for names in ours.values() for name, value in names.items() if value is not None}
    for module, names in accelerate.items():
        if module_of(module) is None:
            yield f"accelerate.{module}"
            continue
        for name, theirs in names.items():
            value = ours[module][name]
            if value is None or name in REFUSED:
                yield f"{module}.{name}" if name in present - REFUSED else name
            else:
                yield from compare(name, theirs, describe_object(value, "accel_runtime"), value)


def module_of(name):
    try:
        return importlib.import_module(f"accel_runtime.{name}".rstrip("."))
    except ModuleNotFoundError:
        return None


def own(module, name):
    try:
        return getattr(module_of(module), name, None)
    except ImportError:  # which tells what to do
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
    """Yield parameters that cannot be given here as there, or have another value where they are left out."""
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
        if moved or parameter not in by_name or not same(by_name[parameter], default):
            yield f"{name}({parameter})"


def same(ours, theirs):
    """Return whether a call without a parameter means the same, as far as the texts of the defaults tell."""
    if theirs is None or "..." in {ours, theirs}:
        return True
    return ours is not None and ast.literal_eval(ours) == ast.literal_eval(theirs)


def named_on_the_page():
    """Return what stands in the column `Names` of the tables of the page's last two sections."""
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
    """Return the names that a name with a list of parameters stands for: `f(a, b)` is `f(a)` and `f(b)`."""
    function, bracket, parameters = name.partition("(")
    return [f"{function}({one})" for one in parameters.rstrip(")").split(", ")] if bracket else [name]


def test_the_page_names_every_difference_and_no_other(found):
    named = named_on_the_page()
    missing, wrong = sorted(found - named), sorted(named - found)
    assert not missing, "differences that the page does not name"
    assert not wrong, "names on the page that do not differ"
