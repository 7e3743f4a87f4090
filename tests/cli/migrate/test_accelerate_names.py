"""The names that `accel migrate` converts are those of `accel_runtime`, compared also with Accelerate 1.15."""

import importlib
import inspect
import json

import pytest
from support.sources import describe_surface

from accel_cli.migrate.accelerate_names import MEMBERS, NAMES, PARAMETERS
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


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_the_table_can_be_imported(module):
    assert not [name for name in NAMES[module] if not has(import_or_none(module), name)]


@pytest.mark.parametrize("path", SURFACE)
def test_every_name_of_accelerate_that_accel_has_is_in_the_table(path):
    name = f"accelerate.{path}".rstrip(".")
    module = import_or_none(name)
    assert (module is not None) == (name in NAMES)
    if module is not None:
        public = describe_surface.list_public_names(module) if path.partition(".")[0] in {"", "utils"} else ()
        assert {*public, *(one for one in SURFACE[path] if has(module, one))} <= NAMES[name]


def test_the_members_and_parameters_of_the_table_are_those_of_the_accelerator(cwd):
    members = {name for name in SURFACE[""]["Accelerator"]["members"] if has(Accelerator, name)}
    assert members | {name for name in dir(Accelerator) if not name.startswith("_")} <= MEMBERS
    accelerator = Accelerator()
    assert not [name for name in MEMBERS if not hasattr(accelerator, name)]
    assert set(inspect.signature(Accelerator).parameters) == PARAMETERS
