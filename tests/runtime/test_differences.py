"""The lists of missing names and parameters, which the reference has, name every difference of the two interfaces, and no other."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from unittest import mock

import pytest
from support.sources.describe_surface import PATH, describe_object

from accel_runtime.accelerate.package import PACKAGE_NAMES
from accel_runtime.environment.accelerate.missing_names import MISSING_NAMES, PARAMETERS
from accel_runtime.tracking import TRACKERS

PLACED = {"POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD"}
REFUSED = {"MegatronLMDummyScheduler"}
"""Classes that can be imported but not created: their members and parameters are not compared."""


@pytest.fixture(scope="module")
def accelerate():
    """The description of Accelerate 1.15.0, as `describe_surface.py` wrote it, without the names that accel takes from it."""
    modules = json.loads(PATH.read_text(encoding="utf-8"))
    taken = {name: PACKAGE_NAMES.get(f"accelerate.{name}".rstrip("."), ()) for name in modules}
    return {
        module: {name: entry for name, entry in names.items() if name not in taken[module]}
        for module, names in modules.items()
    }


@pytest.fixture
def differences(accelerate, monkeypatch):
    """Return all differences: `name`, `module.name`, `Class.member`, `function(parameter)`."""
    packages = {tracker.package for tracker in TRACKERS.values()} - {None, "tensorboard"}
    for name in [*packages, "dvclive.plots", "mlflow.utils", "mlflow.utils.validation"]:
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    for tracker in TRACKERS.values():
        if tracker.package in packages:
            monkeypatch.delitem(sys.modules, f"accel_runtime.{tracker.module}", raising=False)
    classes = {tracker.class_name: tracker.load() for tracker in TRACKERS.values()}
    names = set(list_differences(accelerate, classes))
    for tracker in TRACKERS.values():
        if tracker.package in packages:
            del sys.modules[f"accel_runtime.{tracker.module}"]
    return names


def list_differences(accelerate, classes):
    our_names = {
        module: {name: classes.get(name) or get_own(module, name) for name in names}
        for module, names in accelerate.items()
    }
    present = {name for names in our_names.values() for name, value in names.items() if value is not None}
    for module, names in accelerate.items():
        if import_module_or_none(module) is None:
            yield f"accelerate.{module}"
            continue
        for name, their_entry in names.items():
            value = our_names[module][name]
            if value is None or name in REFUSED:
                yield f"{module}.{name}" if name in present - REFUSED else name
            else:
                yield from compare(name, their_entry, describe_object(value, "accel_runtime"), value)


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


def compare(name, their_entry, our_entry, value):
    our_members = our_entry.get("members", {})
    for member, parameters in their_entry.get("members", {}).items():
        if member not in our_members and not hasattr(value, member):
            yield f"{name}.{member}"
        elif parameters and our_members.get(member) is not None:
            yield from find_required(f"{name}.{member}", parameters, our_members[member])
            yield from compare_parameters(f"{name}.{member}", parameters, our_members[member])
    their_parameters, our_parameters = their_entry.get("parameters", []), our_entry.get("parameters", [])
    yield from compare_parameters(name, their_parameters, our_parameters)
    if not inspect.isclass(value):
        yield from find_required(name, their_parameters, our_parameters)


def find_required(name, their_parameters, our_parameters):
    """Yield parameters that accel alone has and requires."""
    known = {parameter for parameter, *_ in their_parameters}
    for parameter, kind, default in our_parameters:
        if parameter not in known and default is None and not kind.startswith("VAR_"):
            yield f"{name}({parameter})"


def compare_parameters(name, their_parameters, our_parameters):
    """Yield parameters that cannot be passed as in Accelerate, or that have another default."""
    by_name = {parameter: default for parameter, _, default in our_parameters}
    kinds = {kind for _, kind, _ in our_parameters}
    our_positions = [parameter for parameter, kind, _ in our_parameters if kind in PLACED]
    their_positions = [parameter for parameter, kind, _ in their_parameters if kind in PLACED]
    for parameter, kind, default in their_parameters:
        if parameter.startswith("_"):
            continue
        if kind.startswith("VAR_"):
            if kind not in kinds:
                yield f"{name}({'**' if kind == 'VAR_KEYWORD' else '*'}{parameter})"
            continue
        index = their_positions.index(parameter) if kind in PLACED else None
        moved = index is not None and our_positions[index : index + 1] != [parameter]
        if moved or parameter not in by_name or not is_same_default(by_name[parameter], default):
            yield f"{name}({parameter})"


def is_same_default(our_default, their_default):
    """Return whether two defaults mean the same, as far as their texts show."""
    if their_default is None or "..." in {our_default, their_default}:
        return True
    return our_default is not None and ast.literal_eval(our_default) == ast.literal_eval(their_default)


def list_documented_names():
    """Return the names of both lists, one for each parameter."""
    names = [name for entry in MISSING_NAMES for name in entry.names]
    names += [name for entry in PARAMETERS for name in entry.functions]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return {spelled for name in names for spelled in spell_out(name)}


def spell_out(name):
    """Return the names that a name with a list of parameters means: `f(a, b)` is `f(a)` and `f(b)`."""
    function, bracket, parameters = name.partition("(")
    return (
        [f"{function}({parameter})" for parameter in parameters.rstrip(")").split(", ")]
        if bracket
        else [name]
    )


def test_the_lists_have_every_difference_and_no_other(differences):
    named = list_documented_names()
    missing, obsolete = sorted(differences - named), sorted(named - differences)
    assert not missing, "differences that no list has"
    assert not obsolete, "names in a list that do not differ"
