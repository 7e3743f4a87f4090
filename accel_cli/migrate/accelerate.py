"""Conversion of scripts for Hugging Face Accelerate: imports, and the names that differ."""

from __future__ import annotations

import libcst as cst

from accel_cli.migrate.accelerate_names import MEMBERS, NAMES, PARAMETERS
from accel_cli.migrate.edits import Edits
from accel_cli.migrate.findings import Finding
from accel_cli.migrate.script import Script, to_code

__all__ = ["convert_accelerate"]

_PROPERTIES = {"is_main_process", "is_local_main_process", "is_last_process"}
_TABLE = "See the table of unsupported names on the page Migrate from Accelerate"


def convert_accelerate(text: str) -> tuple[str, tuple[Finding, ...]]:
    """Return a script for Accelerate after its conversion; unchanged, with findings, if it uses an unsupported name.

    An import under a condition that has no counterpart stays there, with a finding, and the rest is converted.
    """
    script = Script(text)
    edits = Edits()
    findings: list[Finding] = []
    kept: list[Finding] = []
    for node in script.nodes:
        if isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
            kept += _convert_import_from(script, edits, node, findings)
        elif isinstance(node, cst.Import):
            _convert_import(script, edits, node, findings)
        elif isinstance(node, (cst.Attribute, cst.Name)):
            _convert_reference(script, edits, node, findings)
        elif isinstance(node, cst.Call):
            _convert_call(edits, node)
    findings += _find_unsupported_members(script)
    if findings:
        return text, tuple(sorted(set(findings)))
    return edits.apply(script.module).code, tuple(sorted(kept))


def _rename(node: cst.BaseExpression) -> cst.BaseExpression:
    return cst.parse_expression(to_code(node).replace("accelerate", "accel_runtime", 1))


def _is_accelerate(name: str) -> bool:
    return name == "accelerate" or name.startswith("accelerate.")


def _convert_import_from(
    script: Script, edits: Edits, node: cst.ImportFrom, findings: list[Finding]
) -> list[Finding]:
    """Rename the module of an import; return the finding of one that stays under its condition."""
    assert node.module is not None
    module = to_code(node.module)
    known = NAMES.get(module)
    if not _is_accelerate(module) or (known is None and script.is_optional(node)):
        return []
    names = [] if isinstance(node.names, cst.ImportStar) else [to_code(alias.name) for alias in node.names]
    missing = [name for name in names if name not in (known or ()) and f"{module}.{name}" not in NAMES]
    if (known is None or missing) and _is_guarded(script, node):
        advice = f"accel has no counterpart of {module if known is None else missing[0]}. This import stays, and needs Accelerate where its condition holds."
        return [Finding(script.line(node), advice)]
    if known is None:
        findings.append(Finding(script.line(node), f"accel has no module for {module}. {_TABLE}."))
    else:
        findings += [Finding(script.line(node), f"accel has no {name}. {_TABLE}.") for name in missing]
    edits.change(node, lambda one: one.with_changes(module=_rename(one.module)))
    return []


def _is_guarded(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an import runs under a condition, other than that of the main module."""
    return any(
        isinstance(one, cst.If) and "__name__" not in to_code(one.test) for one in script.ancestors(node)
    )


def _convert_import(script: Script, edits: Edits, node: cst.Import, findings: list[Finding]) -> None:
    for alias in node.names:
        name = to_code(alias.name)
        if _is_accelerate(name):
            if name not in NAMES:
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
            if module in NAMES and last not in NAMES[module] and name not in NAMES:
                findings.append(Finding(script.line(node), f"accel has no {last}. {_TABLE}."))
    elif node.value == "accelerate" and script.qualified_name(node) == "accelerate":
        parent = script.parents.get(node)
        if isinstance(parent, cst.Attribute) and parent.value is node and not _is_in_import(script, node):
            edits.change(node, lambda one: one.with_changes(value="accel_runtime"))


def _is_in_import(script: Script, node: cst.CSTNode) -> bool:
    return script.find_ancestor(node, (cst.Import, cst.ImportFrom)) is not None


def _convert_call(edits: Edits, node: cst.Call) -> None:
    """Replace `accelerator.is_main_process()`, a method in the first releases of Accelerate, by the property."""
    if isinstance(node.func, cst.Attribute) and not node.args and node.func.attr.value in _PROPERTIES:
        edits.change(node, lambda one: one.func)


def _find_unsupported_members(script: Script) -> list[Finding]:
    """Return the attributes of the Accelerator, and its arguments, that accel does not have."""
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
            and node.attr.value not in MEMBERS
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
                if arg.keyword is not None and arg.keyword.value not in PARAMETERS
            ]
    return found
