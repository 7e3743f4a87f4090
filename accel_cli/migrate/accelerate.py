"""Conversion of scripts for Hugging Face Accelerate: imports, and the names that differ."""

from __future__ import annotations

import ast
import functools
from importlib.util import find_spec
from pathlib import Path

import libcst as cst

from accel_cli.migrate.edits import Edits
from accel_cli.migrate.findings import Finding
from accel_cli.migrate.script import Script, to_code

__all__ = ["convert_accelerate"]

_SUBMODULES = {"utils": ("__init__", "utils/__init__", "utils/imports")}
"""The files whose names a module provides, for those that provide names of others."""
_TABLE = "See the table of unsupported names on the page Migrate from Accelerate"


def convert_accelerate(text: str) -> tuple[str, tuple[Finding, ...]]:
    """Return a script for Accelerate after its conversion; unchanged, with findings, if it uses an unsupported name."""
    script = Script(text)
    edits = Edits()
    findings: list[Finding] = []
    for node in script.nodes:
        if isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
            _convert_import_from(script, edits, node, findings)
        elif isinstance(node, cst.Import):
            _convert_import(script, edits, node, findings)
        elif isinstance(node, (cst.Attribute, cst.Name)):
            _convert_reference(script, edits, node, findings)
        elif isinstance(node, cst.Comparison):
            _convert_comparison(edits, node)
    findings += _find_unsupported_members(script)
    if findings:
        return text, tuple(sorted(set(findings)))
    return edits.apply(script.module).code, ()


def _rename(node: cst.BaseExpression) -> cst.BaseExpression:
    return cst.parse_expression(to_code(node).replace("accelerate", "accel_runtime", 1))


def _is_accelerate(name: str) -> bool:
    return name == "accelerate" or name.startswith("accelerate.")


def _convert_import_from(script: Script, edits: Edits, node: cst.ImportFrom, findings: list[Finding]) -> None:
    assert node.module is not None
    module = to_code(node.module)
    if not _is_accelerate(module):
        return
    known = read_names(module)
    if known is None:
        findings.append(Finding(script.line(node), f"accel has no module for {module}. {_TABLE}."))
    elif not isinstance(node.names, cst.ImportStar):
        for alias in node.names:
            name = to_code(alias.name)
            if name not in known and read_names(f"{module}.{name}") is None:
                findings.append(Finding(script.line(node), f"accel has no {name}. {_TABLE}."))
    edits.change(node, lambda one: one.with_changes(module=_rename(one.module)))


def _convert_import(script: Script, edits: Edits, node: cst.Import, findings: list[Finding]) -> None:
    for alias in node.names:
        name = to_code(alias.name)
        if _is_accelerate(name):
            if read_names(name) is None:
                findings.append(Finding(script.line(node), f"accel has no module for {name}. {_TABLE}."))
            edits.change(alias, lambda one: one.with_changes(name=_rename(one.name)))


def _convert_reference(
    script: Script, edits: Edits, node: cst.Attribute | cst.Name, findings: list[Finding]
) -> None:
    """Rename the package in `accelerate.Accelerator` and in the version that a script compares."""
    if isinstance(node, cst.Attribute):
        name = script.qualified_name(node)
        if name == "accelerate.__version__":
            edits.change(node, lambda one: one.with_changes(attr=cst.Name("accelerate_version")))
        elif _is_accelerate(name) and not isinstance(
            script.parents.get(node), (cst.Attribute, cst.Import, cst.ImportFrom, cst.ImportAlias)
        ):
            module, _, last = name.rpartition(".")
            known = read_names(module)
            if known is not None and last not in known and read_names(name) is None:
                findings.append(Finding(script.line(node), f"accel has no {last}. {_TABLE}."))
    elif node.value == "accelerate" and script.qualified_name(node) == "accelerate":
        parent = script.parents.get(node)
        if isinstance(parent, cst.Attribute) and parent.value is node and not _is_in_import(script, node):
            edits.change(node, lambda one: one.with_changes(value="accel_runtime"))


def _is_in_import(script: Script, node: cst.CSTNode) -> bool:
    return script.find_ancestor(node, (cst.Import, cst.ImportFrom)) is not None


def _convert_comparison(edits: Edits, node: cst.Comparison) -> None:
    """Replace `accelerator.is_main_process is True`, whose value is not the object True in accel."""
    if len(node.comparisons) == 1 and isinstance(node.comparisons[0].operator, cst.Is):
        value = to_code(node.comparisons[0].comparator)
        if value == "True" and to_code(node.left).endswith(
            ("is_main_process", "is_local_main_process", "is_last_process")
        ):
            edits.change(node, lambda one: one.left)


def _find_unsupported_members(script: Script) -> list[Finding]:
    """Return the attributes of the Accelerator, and its arguments, that accel does not have."""
    members = _read_members()
    accelerators = {
        variable
        for variable, entries in script.assigned.items()
        for _, value in entries
        if isinstance(value, cst.Call)
        and script.qualified_name(value.func)
        in {"accelerate.Accelerator", "accelerate.accelerator.Accelerator"}
    }
    found = []
    for node in script.nodes:
        if (
            isinstance(node, cst.Attribute)
            and script.variable(node.value) in accelerators
            and node.attr.value not in members
        ):
            found.append(
                Finding(script.line(node), f"The Accelerator of accel has no {node.attr.value}. {_TABLE}.")
            )
        elif isinstance(node, cst.Call) and script.qualified_name(node.func).endswith(
            "accelerate.Accelerator"
        ):
            found += [
                Finding(
                    script.line(arg), f"Accelerator() of accel has no argument {arg.keyword.value}. {_TABLE}."
                )
                for arg in node.args
                if arg.keyword is not None and arg.keyword.value not in _read_parameters()
            ]
    return found


# The names of accel, read from its sources without importing them


@functools.cache
def _find_package() -> Path:
    spec = find_spec("accel_runtime")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def read_names(module: str) -> frozenset[str] | None:
    """Return the names of the module of accel for a module of Accelerate; None without such a module."""
    path = module.replace(".", "/").removeprefix("accelerate").strip("/")
    if path == "accelerator":
        return frozenset({"Accelerator"})
    files = _SUBMODULES.get(path) or (path or "__init__",)
    names: set[str] = set()
    for file in files:
        source = next(
            (
                one
                for one in (_find_package() / f"{file}.py", _find_package() / file / "__init__.py")
                if one.is_file()
            ),
            None,
        )
        if source is None:
            return None
        names |= _list_names(source)
    return frozenset(names)


def _list_names(source: Path) -> set[str]:
    names: set[str] = set()
    module = ast.parse(source.read_text(encoding="utf-8"))
    module.body = [
        one
        for one in module.body
        if not isinstance(one, ast.Assign) or ast.unparse(one.targets[0]) != "_ABSENT"
    ]
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return names


@functools.cache
def _read_classes() -> list[ast.ClassDef]:
    """Return the class of the Accelerator and its bases."""
    sources = [*(_find_package() / "accelerator").glob("*.py"), _find_package() / "state.py"]
    return [
        node
        for source in sources
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (source.stem != "state" or node.name == "ProcessMethods")
    ]


@functools.cache
def _read_members() -> frozenset[str]:
    """Return the methods and attributes of the Accelerator."""
    names: set[str] = set()
    for node in (node for cls in _read_classes() for node in ast.walk(cls)):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return frozenset(names)


@functools.cache
def _read_parameters() -> frozenset[str]:
    """Return the parameters of the constructor of the Accelerator."""
    constructors = [
        node
        for cls in _read_classes()
        for node in cls.body
        if cls.name == "Accelerator" and isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    return frozenset(
        arg.arg
        for node in constructors
        for arg in (*node.args.args, *node.args.kwonlyargs)
        if arg.arg != "self"
    )
