"""Describe the public names of a package: modules, functions, classes, their members and parameters.

`python tests/support/sources/describe_surface.py`, where Accelerate 1.15.0 is installed, writes the description that tests compare this package with.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import textwrap
from pathlib import Path

PATH = Path(__file__).parents[2] / "data" / "accelerate-1.15.0" / "surface.json"
MODULES = (
    "",
    "utils",
    "accelerator",
    "checkpointing",
    "data_loader",
    "hooks",
    "launchers",
    "local_sgd",
    "logging",
    "memory_utils",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
    "utils.dataclasses",
    "utils.environment",
    "utils.fsdp_utils",
    "utils.imports",
    "utils.launch",
    "utils.memory",
    "utils.operations",
    "utils.other",
    "utils.random",
)
"""Modules that published scripts import from; of submodules of `utils`, only names that `utils` exports."""


def describe(package):
    """Return the description of a package: `{module: {name: entry}}`."""
    modules = {}
    exported = set(list_names(package, "utils"))
    for name in MODULES:
        names = list_names(package, name)
        if name.startswith("utils."):
            names = {key: value for key, value in names.items() if key in exported}
        modules[name] = {key: describe_object(value, package) for key, value in sorted(names.items())}
    return modules


def list_public_names(module):
    """Return the names that `import *` takes of a module."""
    return getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]


def list_names(package, name):
    """Return the public objects of a module by name: for packages all of this package, for others what they define."""
    path = f"{package}.{name}".rstrip(".")
    module = importlib.import_module(path)
    everything = {key: getattr(module, key) for key in dir(module) if not key.startswith("_")}
    public = {}
    for key, value in everything.items():
        home = getattr(value, "__module__", None) or ""
        constant = key.isupper() and not inspect.ismodule(value) and not home
        is_own = home.startswith(package) if name in {"", "utils"} else home == path
        if not inspect.ismodule(value) and (is_own or (constant and name in {"", "utils"})):
            public[key] = value
    return public


def describe_object(value, package):
    """Return parameters, and of a class the members; of an enumeration the members' values."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {"members": dict.fromkeys(value.__members__)}
    entry = {}
    if callable(value):
        entry["parameters"] = describe_parameters(value)
    if inspect.isclass(value):
        entry["members"] = describe_members(value, package)
    return entry


def describe_members(value, package):
    """Return the public members of a class, those that its methods assign too, with the parameters of methods."""
    homes = [home for home in value.__mro__ if home.__module__.startswith(package)]
    members = {name: None for home in homes for name in find_assigned_attributes(home)}
    for home in reversed(homes):
        for name in [*vars(home), *vars(home).get("__annotations__", ())]:
            member = inspect.getattr_static(value, name, None)
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            members[name] = (
                describe_parameters(unwrap(name, member))[1:] if inspect.isfunction(member) else None
            )
    return {name: members[name] for name in sorted(members) if not name.startswith("_")}


def unwrap(name, function):
    """Return the function of this name that a decorator without `functools.wraps` holds; else the function itself."""
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    return next(
        (content for content in contents if inspect.isfunction(content) and content.__name__ == name),
        function,
    )


def find_assigned_attributes(value):
    """Return the attributes that methods of a class assign to `self`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError):
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def describe_parameters(function):
    """Return the parameters of a callable as `[name, kind, default]`; a default that is no plain value is `"..."`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    return [[p.name, p.kind.name, format_default(p)] for p in signature.parameters.values()]


def format_default(parameter):
    """Return a default as text, or None without a default."""
    value = parameter.default
    if value is parameter.empty:
        return None
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str) and "/" in value:
        return "..."  # a path of the machine
    return repr(value) if isinstance(value, (str, int, float, tuple, list, dict, type(None))) else "..."


def write(described):
    """Write a description, a line for each name."""
    lines = []
    for module, names in described.items():
        rows = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in names.items()
        )
        lines.append(f" {json.dumps(module)}: {{\n{rows}\n }}" if names else f" {json.dumps(module)}: {{}}")
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write(describe("accelerate"))
