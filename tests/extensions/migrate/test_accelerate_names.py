"""The names of Accelerate 1.15 that `accel migrate` refuses are those that `accel_runtime` does not have."""

import importlib
import inspect
import json
import pkgutil

import pytest
from support.sources import describe_surface

from accel_cli.extensions.migrate.accelerate import (
    MISSING_MEMBERS,
    MISSING_MODULES,
    MISSING_NAMES,
    PARAMETERS,
    PRIVATE_MEMBERS,
)
from accel_runtime import Accelerator

SURFACE = json.loads(describe_surface.PATH.read_text(encoding="utf-8"))


def import_or_none(module):
    """Import the module of accel for a module of Accelerate."""
    try:
        return importlib.import_module(module.replace("accelerate", "accel_runtime", 1))
    except ModuleNotFoundError:
        return None


def has(module, name):
    try:
        return hasattr(module, name)
    except ImportError:  # with advice for the user
        return False


@pytest.mark.parametrize("path", SURFACE)
def test_the_names_of_a_module_that_accel_does_not_have_are_refused(path):
    name = f"accelerate.{path}".rstrip(".")
    module = import_or_none(name)
    assert (module is None) == bool(MISSING_MODULES.match(name))
    if module is not None:
        assert {one for one in SURFACE[path] if not has(module, one)} == MISSING_NAMES & SURFACE[path].keys()


def test_every_refused_name_is_one_of_accelerate():
    assert set().union(*SURFACE.values()) >= MISSING_NAMES


def test_every_module_of_accelerate_is_in_accel_or_refused():
    accelerate = pytest.importorskip("accelerate")
    names = [
        module.name for module in pkgutil.walk_packages(accelerate.__path__, "accelerate.", lambda _: None)
    ]
    assert [name for name in names if import_or_none(name) is None] == [
        name for name in names if MISSING_MODULES.match(name)
    ]


def test_the_refused_members_and_parameters_are_those_that_the_accelerator_does_not_have(cwd):
    accelerator = Accelerator()
    members = SURFACE[""]["Accelerator"]["members"]
    assert {name for name in members if not hasattr(accelerator, name)} == MISSING_MEMBERS
    assert not [name for name in PRIVATE_MEMBERS if not hasattr(accelerator, name)]
    assert set(inspect.signature(Accelerator).parameters) == PARAMETERS
