"""Conversion of training scripts to accel: the text after the change, and the places that are not converted."""

from __future__ import annotations

import ast
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import libcst as cst

from accel_cli.extensions.migrate import (
    devices,
    distributed,
    lengths,
    loop,
    metrics,
    output,
    training_metrics,
)
from accel_cli.extensions.migrate.accelerate import convert_accelerate
from accel_cli.extensions.migrate.batches import find_own_batches, find_unseeded_draws
from accel_cli.extensions.migrate.collectives import check_parallelism, find_collectives
from accel_cli.extensions.migrate.edits import add_import, drop_unused_imports, list_unbound_names
from accel_cli.extensions.migrate.fabric import convert_fabric
from accel_cli.extensions.migrate.fabric_uses import uses_fabric
from accel_cli.extensions.migrate.findings import Finding, MissingModelError, Parts, UnsafeError
from accel_cli.extensions.migrate.preparation import check_creations, place_accelerator, prepare_objects
from accel_cli.extensions.migrate.raw import Conversion, strip_wrappers, thread_accelerator
from accel_cli.extensions.migrate.saving import convert_saving
from accel_cli.extensions.migrate.script import Script, to_code
from accel_cli.extensions.migrate.spawn import map_lines, replace_spawn
from accel_cli.extensions.migrate.trainers import find_trainer
from accel_cli.extensions.migrate.wrappers import convert_wrappers

__all__ = ["Migration", "migrate_script"]

_OPTIMIZER = re.compile(r"\boptim\.[A-Z]\w*\(|\b(?:SGD|AdamW?|RMSprop|Adagrad)\(")
_OTHER_LIBRARIES = {"keras", "tensorflow", "tf_keras"}
"""Libraries whose optimizers have the names of torch's."""
_LIGHTNING = {"lightning", "lightning_fabric"}
_STANDARD = {"nullcontext": "contextlib", "Path": "pathlib"}
"""Names of the standard library that converted scripts for Fabric use."""


@dataclass(frozen=True)
class Migration:
    """The result for one file."""

    text: str
    findings: tuple[Finding, ...] = ()
    """Places that are not converted."""
    notes: tuple[Finding, ...] = ()
    """Places that are converted, and behave differently on several processes."""
    library: str = ""
    """The library whose scripts `accel launch` runs as they are: `Accelerate`, or a Trainer; empty for others."""
    parts: Parts | None = None
    """The parts of a training, if the file does not have all of it."""


def migrate_script(text: str, read_elsewhere: AbstractSet[str] = frozenset()) -> Migration:
    """Return a script after its conversion to accel.

    Args:
        text: The script.
        read_elsewhere: Names of functions, variables and attributes that other files read, and that must stay.

    Raises:
        libcst.ParserSyntaxError: The text is not Python.
    """
    tree = ast.parse(text)
    if ("Trainer" in text or "LightningModule" in text) and (trainer := find_trainer(tree)):
        return Migration(text, library=trainer)
    packages = _list_packages(tree)
    if "accelerate" in packages:
        return Migration(*convert_accelerate(text), library="Accelerate")
    if "accel_runtime" in packages or _gets_accelerator(text, tree):
        return Migration(text, output.find_rest(Script(text)))
    if packages & _LIGHTNING and uses_fabric(script := Script(text)):
        return _migrate_fabric(text, script)
    return _migrate_raw_loop(text, read_elsewhere)


def _gets_accelerator(text: str, tree: ast.Module) -> bool:
    """Return whether a script trains with an Accelerator that another file creates."""
    return "accelerator.backward(" in text and any(
        isinstance(node, ast.Attribute) and ast.unparse(node).endswith("accelerator.backward")
        for node in ast.walk(tree)
    )


def _list_packages(tree: ast.Module) -> set[str]:
    """Return the packages that a script imports, without functions that it can do without."""
    optional = {
        id(one)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any(_catches_import_error(handler) for handler in node.handlers)
        for statement in node.body
        for one in ast.walk(statement)
        if isinstance(one, ast.ImportFrom) and all(alias.name != "Accelerator" for alias in one.names)
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in optional]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    names = (
        [ast.unparse(one) for one in ast.walk(handler.type)] if handler.type is not None else ["Exception"]
    )
    return bool({"ImportError", "ModuleNotFoundError", "Exception"} & set(names))


def _check_objects(text: str) -> Migration:
    """Report the optimizer of a script without a backward pass, whose training is elsewhere."""
    script = Script(text) if _OPTIMIZER.search(text) else None
    created = [call for call in script.calls if _creates_optimizer(script, call)] if script else []
    if script is None or not created:
        return Migration(text)
    line = min(map(script.line, created))
    advice = "An optimizer is created here, and this file has no backward pass. If another file or a library trains with it, prepare the objects with accelerator.prepare before they are passed on. See the page Migrate several files."
    models = [
        script.line(node)
        for variable in script.trained
        for node, value in script.assigned.get(variable, [])
        if isinstance(strip_wrappers(script, value), cst.Call)
    ]
    finding = Finding(line, advice)
    parts = Parts(finding, model=min(models, default=0), optimizer=line)
    return Migration(text, (finding,), parts=parts)


def _creates_optimizer(script: Script, call: cst.Call) -> bool:
    name = script.qualified_name(call.func)
    is_known = script.kind_of(call) == "optimizer" or bool(_OPTIMIZER.search(f"{name}("))
    is_other = call in script.callees or name.partition(".")[0] in _OTHER_LIBRARIES
    return is_known and not is_other


def _find_parts(conversion: Conversion, finding: Finding) -> Parts:
    """Return the parts of a training whose model is not in its file."""
    script = conversion.script
    stepped = script.list_owners("step")
    values = [value for one in stepped & script.list_owners("zero_grad") for value in script.find_values(one)]
    sources = {
        to_code(value.func).partition(".")[0] if isinstance(value, cst.Call) else ""
        for value in values
        if to_code(value) != "None"
    }
    return Parts(finding, backward=finding.line, steps=bool(stepped), sources=frozenset(sources))


def _migrate_fabric(text: str, script: Script) -> Migration:
    conversion = Conversion(script)
    module = convert_fabric(conversion)
    if conversion.findings:
        return Migration(text, tuple(sorted(set(conversion.findings))))
    others = {name: module_name for name, module_name in _STANDARD.items() if name in conversion.imports}
    imports = [f"from {module_name} import {name}" for name, module_name in others.items()]
    imports.append(_format_import(conversion.imports - others.keys()))
    return _finish(text, conversion, add_import(module, imports), tuple(_LIGHTNING))


def _migrate_raw_loop(text: str, read_elsewhere: AbstractSet[str]) -> Migration:
    if ".backward(" not in text:
        return _check_objects(text)
    try:
        started = replace_spawn(text)
    except UnsafeError as error:
        return Migration(text, (error.finding,))
    conversion = Conversion(Script(started), read_elsewhere)
    if not conversion.backwards:
        return Migration(text)
    try:
        module = _convert(conversion)
    except UnsafeError as error:
        findings = map_lines((error.finding,), text, started)
        is_missing = isinstance(error, MissingModelError)
        return Migration(text, findings, parts=_find_parts(conversion, findings[0]) if is_missing else None)
    result = _finish(started, conversion, module)
    return Migration(
        text if result.text == started else result.text,
        map_lines(result.findings, text, started),
        map_lines(result.notes, text, started),
    )


def _finish(
    text: str, conversion: Conversion, module: cst.Module, packages: tuple[str, ...] = ()
) -> Migration:
    """Return the result without unused imports; the text before, with a finding, if names would be missing."""
    changed = drop_unused_imports(text, module, packages).code
    try:
        compile(changed, "script", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = min(error.lineno or 1, len(text.splitlines()))
        return Migration(
            text,
            (Finding(line, f"The converted script would not be valid: {error.msg}. Convert it by hand."),),
        )
    if unbound := list_unbound_names(changed) - list_unbound_names(text):
        name = min(unbound)
        uses = [one for one in text.splitlines() if one in changed and re.search(rf"\b{name}\b", one)]
        line = text.splitlines().index(uses[-1]) + 1 if uses else 1
        advice = f"The conversion removes {name}, which is used here. Remove this use."
        return Migration(text, (Finding(line, advice),))
    return Migration(changed, tuple(sorted(set(conversion.findings))), tuple(sorted(set(conversion.notes))))


def _convert(conversion: Conversion) -> cst.Module:
    _check_names(conversion)
    check_parallelism(conversion)
    check_creations(conversion)
    find_own_batches(conversion)
    place_accelerator(conversion)
    distributed.convert_process_group(conversion)
    distributed.convert_ranks(conversion)
    distributed.convert_samplers(conversion)
    loop.convert_precision(conversion)
    loop.convert_backward(conversion)
    loop.convert_clipping(conversion)
    metrics.check_loaders(conversion)
    training_metrics.convert_training_metrics(conversion)
    metrics.find_other_uses(conversion)
    loop.convert_accumulation(conversion)
    metrics.convert_evaluation(conversion)
    distributed.convert_reductions(conversion)
    find_collectives(conversion)
    devices.convert_devices(conversion)
    prepare_objects(conversion)
    convert_wrappers(conversion)
    output.reduce_losses(conversion)
    training_metrics.find_conditions(conversion)
    find_unseeded_draws(conversion)
    convert_saving(conversion)
    output.convert_output(conversion)
    devices.find_devices_left(conversion)
    output.find_places(conversion)
    lengths.check_lengths(conversion)
    thread_accelerator(conversion)
    conversion.create_accelerator()
    module = conversion.edits.apply(conversion.script.module)
    return add_import(module, [_format_import(conversion.imports)])


def _check_names(conversion: Conversion) -> None:
    """Raise an error if the script uses the name of the Accelerator for something else than a device, which it replaces."""
    script = conversion.script
    for node in script.nodes:
        if not isinstance(node, cst.Name) or node.value not in {"accelerator", "Accelerator"}:
            continue
        parent = script.parents.get(node)
        is_member = (
            isinstance(parent, cst.Attribute) and parent.attr is node and to_code(parent.value) != "self"
        )
        if not is_member and script.kind_of(node) != "device":
            raise conversion.unsafe(node, f"The name {node.value} is used already. Rename it.")


def _format_import(names: set[str]) -> str:
    return f"from accel_runtime import {', '.join(sorted({'Accelerator', *names}))}"
