"""The public names, with parameters, members, fields and values, equal those of the golden file.

`test_differences.py` compares them with Accelerate 1.15; this file detects any change of the interface of accel itself.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import sys
from importlib.machinery import ModuleSpec
from unittest import mock

import pytest
from support.cases import golden
from support.sources import describe_surface

import accel_runtime
from accel_runtime import utils
from accel_runtime.accelerate.package import PACKAGE_NAMES
from accel_runtime.checkpoint.project_checkpoints import Checkpoints
from accel_runtime.storage.manifest import Checkpoint, Manifest

MODULES = (*describe_surface.MODULES, "big_modeling", "utils.deepspeed")
"""The modules of Accelerate, with those from which scripts import names of others."""
OWN = {
    "launchers": {"LaunchError"},
    "utils.deepspeed": {"DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"},
    "utils.memory": {"should_reduce_batch_size"},
}
"""Names of a module that are neither in the module of Accelerate nor in `accel_runtime.utils`."""
MADE_BY_ACCEL = {
    *(
        "AcceleratedOptimizer",
        "AcceleratedScheduler",
        "DataLoaderDispatcher",
        "DataLoaderShard",
        "Description",
    ),
    *("Checkpoints", "Checkpoint", "Manifest"),
}
"""Classes that scripts do not create: the parameters of their constructors are not public."""
INTERNAL = {
    *(
        "capture_state",
        "continue_after",
        "freeze",
        "has_used_gradients",
        "here",
        "instead",
        "is_presharded",
        "leave_out",
        "make_run",
        "parse",
        "of",
        "restore_state",
        "override_even_batches",
        "parameter_groups",
        "place",
        "restore_use",
        "select_state",
    ),
    *("source_batch_size", "unscale", "without_first_batches"),
    *(
        "AcceleratedOptimizer.parameters",
        "FullyShardedDataParallelPlugin.fully_shard",
        "ParallelismConfig.parallel",
        "TorchDynamoPlugin.name",
    ),
    *(
        f"Manifest.{name}"
        for name in (
            *("class_names", "files", "parsed", "parts", "run", "tensors", "tensors_of", "text"),
            "values_by_rank",
        )
    ),
    "Manifest.values",
}
"""Members for other modules of accel only, which may change."""
TRACKING_PACKAGES = (
    *(
        "aim",
        "clearml",
        "comet_ml",
        "dvclive",
        "dvclive.plots",
        "mlflow",
        "mlflow.utils",
        "mlflow.utils.validation",
    ),
    *("swanlab", "trackio", "wandb"),
)
"""Packages that trackers import and tests replace by stubs."""


@pytest.fixture
def _tracking_packages(monkeypatch):
    """Install stubs of the packages of trackers, and remove the modules that imported them."""
    for name in TRACKING_PACKAGES:
        package = mock.MagicMock()
        package.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("accel_runtime.tracking."):
            del sys.modules[name]


@pytest.mark.usefixtures("_tracking_packages")
def test_public_names_and_signatures_equal_the_golden_file():
    accelerate = json.loads(describe_surface.PATH.read_text(encoding="utf-8"))
    exported = {*accel_runtime.__all__, *utils.__all__}
    described, lines = {}, []
    for path in MODULES:
        module = import_or_none(path)
        if module is None:
            continue
        accelerate_names = {name for name in accelerate.get(path, ()) if has(module, name)}
        known_names = exported | set(accelerate.get(path, ())) | OWN.get(path, set())
        package_names = PACKAGE_NAMES.get(f"accelerate.{path}".rstrip("."), frozenset())
        names = set(describe_surface.list_public_names(module)) & known_names | accelerate_names
        names = sorted(names - package_names)
        if not path:
            names += ["__version__", "accelerate_version"]
        lines += ["", f"[{module.__name__}]"]
        for name in names:
            value = getattr(module, name)
            first = described.setdefault(id(value), (module.__name__, name, value))[:2]
            if first != (module.__name__, name):
                lines.append(f"{name} = {'.'.join(first)}")
            else:
                lines += describe(name, value)
    lines += ["", "[accel_runtime.Accelerator.checkpoints]"]
    lines += [
        line for value in (Checkpoints, Checkpoint, Manifest) for line in describe(value.__name__, value)
    ]
    golden.check("public_surface.txt", "\n".join(lines[1:]) + "\n")


def import_or_none(path):
    try:
        return importlib.import_module(f"accel_runtime.{path}".rstrip("."))
    except ModuleNotFoundError:
        return None


def has(module, name):
    try:
        return hasattr(module, name)
    except ImportError:  # with advice for the user
        return False


def describe(name, value):
    """Return the lines of a name: its parameters, and the fields, values and members of a class."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return [
            f"{name} (enumeration)",
            *(f"    {key} = {enum_member.value!r}" for key, enum_member in value.__members__.items()),
        ]
    if not inspect.isclass(value):
        return [name + signature_of(value) if callable(value) else name]
    if issubclass(value, Exception):
        return [f"{name} (exception: {', '.join(base.__name__ for base in value.__mro__[1:-2])})"]
    title = name if name in MADE_BY_ACCEL else f"{name}{signature_of(value)}"
    fields = {}
    if dataclasses.is_dataclass(value):
        title += " (frozen dataclass)" if value.__dataclass_params__.frozen else " (dataclass)"
        fields = {field.name: default_of(field) for field in dataclasses.fields(value)}
    members = {
        key: describe_member(value, key) for key in describe_surface.describe_members(value, "accel_runtime")
    }
    shown = {key: f"    {key}{default}" for key, default in fields.items()} | {
        key: line for key, line in members.items() if key not in fields
    }
    hidden = {key for key in shown if key.startswith("_") or {key, f"{name}.{key}"} & INTERNAL}
    return [title, *(line for key, line in shown.items() if key not in hidden)]


def describe_member(value, name):
    """Return the line of a member: a method with its parameters, a property, or an attribute."""
    member = inspect.getattr_static(value, name, None)
    if isinstance(member, property):
        return f"    {name}: {'property' if member.fset else 'read-only property'}"
    kind = {staticmethod: "static ", classmethod: "class "}.get(type(member), "")
    function = (
        describe_surface.unwrap(name, member.__func__ if kind else member)
        if callable(member) or kind
        else None
    )
    return f"    {kind}{name}{signature_of(function)}" if function else f"    {name}: attribute"


def signature_of(function):
    """Return the parameters with their defaults, without annotations."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else Shown(parameter.default),
        )
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


def default_of(field):
    """Return ` = default` of a field; without one, nothing."""
    if field.default is not dataclasses.MISSING:
        return f" = {Shown(field.default)!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f" = {Shown(field.default_factory())!r}"
    return ""


class Shown:
    """A default whose text is equal on every machine, whichever module defines its class."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        if isinstance(self.value, enum.Enum):
            return f"{type(self.value).__name__}.{self.value.name}"
        if isinstance(self.value, tuple):
            return f"({', '.join(repr(Shown(element)) for element in self.value)})"
        if isinstance(self.value, (str, int, float, list, dict, type(None))):
            return repr(self.value)
        return getattr(self.value, "__name__", f"<{type(self.value).__name__}>").replace(
            "_HAS_DEFAULT_FACTORY_CLASS", "factory"
        )
