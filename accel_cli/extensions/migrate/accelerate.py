"""Conversion of scripts for Hugging Face Accelerate: imports, and the names that differ.

`tests/extensions/migrate/test_accelerate_names.py` compares the names with `accel_runtime`, which the command does not import.
"""

from __future__ import annotations

import re

import libcst as cst

from accel_cli.extensions.migrate.edits import Edits
from accel_cli.extensions.migrate.findings import Finding
from accel_cli.extensions.migrate.script import Script, to_code
from accel_runtime.environment.accelerate import missing_names

__all__ = [
    "MISSING_MEMBERS",
    "MISSING_MODULES",
    "MISSING_NAMES",
    "PARAMETERS",
    "PRIVATE_MEMBERS",
    "convert_accelerate",
]

_NAMES = tuple(
    name for entry in missing_names.MISSING_NAMES if not entry.is_importable for name in entry.names
)
_MODULES = (
    *missing_names.MISSING_MODULES,
    *(name for name in _NAMES if name.startswith("accelerate.")),
)
MISSING_MODULES = re.compile(f"(?:{'|'.join(map(re.escape, _MODULES))})(?:\\.|$)")
MISSING_NAMES = frozenset(name for name in _NAMES if name.isidentifier())
"""The names of modules of Accelerate that accel does not have in the module of the same path."""
MISSING_MEMBERS = frozenset(
    match[1] for name in _NAMES if (match := re.fullmatch(r"Accelerator\.(\w+)", name))
)
"""The methods and attributes of Accelerate's `Accelerator` that accel's does not have."""
PRIVATE_MEMBERS = frozenset({"_models", "_optimizers", "_schedulers"})
"""Those that published scripts read, and that accel has."""
_PARAMETERS = """
    cpu dataloader_config deepspeed_plugin deepspeed_plugins device_placement dispatch_batches dynamo_backend
    dynamo_plugin fp16 fsdp_plugin global_batch_size gradient_accumulation_plugin gradient_accumulation_steps kwargs_handlers log_with
    mixed_precision parallelism_config project_config project_dir rng_types split_batches step_scheduler_with_optimizer throughput
"""
PARAMETERS = frozenset(_PARAMETERS.split())
"""The parameters of accel's `Accelerator`, which also has some of the first releases of Accelerate."""
_ACCELERATOR = {"accelerate.Accelerator", "accelerate.accelerator.Accelerator"}
_PROPERTIES = {"is_main_process", "is_local_main_process", "is_last_process"}


def convert_accelerate(text: str) -> tuple[str, tuple[Finding, ...]]:
    """Return a script for Accelerate after its conversion; unchanged, with findings, if it uses an unsupported name.

    An import under a condition that has no counterpart stays there, with a finding, and the rest is converted.
    """
    script = Script(text)
    edits = Edits()
    kept = [finding for node in script.nodes if (finding := _convert(script, edits, node))]
    missing = {
        Finding(
            script.line(node),
            f"accel has no {name}. See the table of unsupported names on the page Migrate from Accelerate.",
        )
        for node in script.nodes
        for name in _list_missing(script, node)
    }
    return (text, tuple(sorted(missing))) if missing else (edits.apply(script.module).code, tuple(kept))


def _is_accelerate(name: str) -> bool:
    return name == "accelerate" or name.startswith("accelerate.")


def _convert(script: Script, edits: Edits, node: cst.CSTNode) -> Finding | None:
    """Convert an import or a name; return the finding of an import that stays under its condition."""
    if isinstance(node, cst.ImportFrom) and (names := _list_imported(node)):
        missing = [name for name in names if _is_missing(name)]
        if missing and _is_guarded(script, node):
            advice = f"accel has no counterpart of {missing[0]}. This import stays, and needs Accelerate where its condition holds."
            return Finding(script.line(node), advice)
        if not (missing and script.is_optional(node)):
            edits.change(node, lambda one: one.with_changes(module=_rename(one.module)))
    elif isinstance(node, cst.Import):
        for alias in node.names:
            if _is_accelerate(to_code(alias.name)):
                edits.change(alias, lambda one: one.with_changes(name=_rename(one.name)))
    elif isinstance(node, cst.Call):
        # A method in the first releases of Accelerate.
        if isinstance(node.func, cst.Attribute) and not node.args and node.func.attr.value in _PROPERTIES:
            edits.change(node, lambda one: one.func)
    elif isinstance(node, (cst.Attribute, cst.Name)):
        _convert_reference(script, edits, node)
    return None


def _convert_reference(script: Script, edits: Edits, node: cst.Attribute | cst.Name) -> None:
    """Rename the package in `accelerate.Accelerator`, and the version that a script compares."""
    name = script.qualified_name(node)
    if isinstance(node, cst.Attribute) and name == "accelerate.__version__":
        edits.change(node, lambda one: one.with_changes(attr=cst.Name("accelerate_version")))
    elif (
        isinstance(node, cst.Name) and node.value == name == "accelerate" and not _is_in_import(script, node)
    ):
        edits.change(node, lambda one: one.with_changes(value="accel_runtime"))


def _list_missing(script: Script, node: cst.CSTNode) -> list[str]:
    """Return what accel does not have of an import, a name, an argument or a member."""
    names: list[str] = []
    if isinstance(node, cst.ImportFrom) and not (_is_guarded(script, node) or script.is_optional(node)):
        names = _list_imported(node)
    elif isinstance(node, cst.Import):
        names = [to_code(alias.name) for alias in node.names]
    elif isinstance(node, cst.Attribute) and not _is_in_import(script, node):
        names = [script.qualified_name(node)]
    missing = list(filter(_is_missing, names))
    if isinstance(node, cst.Attribute) and _is_accelerator(script, node.value):
        name = node.attr.value
        if name in MISSING_MEMBERS or (re.match("_[a-z]", name) and name not in PRIVATE_MEMBERS):
            missing.append(f"Accelerator.{name}")
    if isinstance(node, cst.Call) and script.qualified_name(node.func) in _ACCELERATOR:
        keywords = [arg.keyword.value for arg in node.args if arg.keyword is not None]
        missing += [f"argument {name} of Accelerator" for name in keywords if name not in PARAMETERS]
    return missing


def _list_imported(node: cst.ImportFrom) -> list[str]:
    """Return the names that are imported from Accelerate, with their modules."""
    if node.module is None or node.relative or not _is_accelerate(module := to_code(node.module)):
        return []
    aliases = [] if isinstance(node.names, cst.ImportStar) else node.names
    return [f"{module}.{to_code(alias.name)}" for alias in aliases] or [module]


def _is_missing(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return bool(MISSING_MODULES.match(name)) or (_is_accelerate(module) and last in MISSING_NAMES)


def _is_accelerator(script: Script, node: cst.BaseExpression) -> bool:
    variable = script.variable(node)
    values = [value for _, value in script.assigned.get(variable, [])] if variable else []
    return any(
        isinstance(value, cst.Call) and script.qualified_name(value.func) in _ACCELERATOR for value in values
    )


def _rename(node: cst.BaseExpression) -> cst.BaseExpression:
    return cst.parse_expression(to_code(node).replace("accelerate", "accel_runtime", 1))


def _is_guarded(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an import runs under a condition, other than that of the main module."""
    return any(
        isinstance(one, cst.If) and "__name__" not in to_code(one.test) for one in script.ancestors(node)
    )


def _is_in_import(script: Script, node: cst.CSTNode) -> bool:
    return script.find_ancestor(node, (cst.Import, cst.ImportFrom)) is not None
