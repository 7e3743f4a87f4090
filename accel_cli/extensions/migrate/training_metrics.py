"""Metrics of training loops, and conditions on outputs of the model that must be equal on all processes."""

from __future__ import annotations

from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.batches import list_loops
from accel_cli.extensions.migrate.loop import find_report, find_terms, list_losses
from accel_cli.extensions.migrate.metrics import accumulates, is_gatherable
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    Script,
    Variable,
    descendants,
    get_method,
    list_elements,
    to_code,
)
from accel_cli.extensions.migrate.totals import Totals
from accel_cli.extensions.migrate.wrappers import OF_MODULES

__all__ = ["convert_training_metrics", "find_conditions", "find_samples"]

_ADDING = {"append", "extend", "update", "add"}
_SIZES = {"size", "shape", "numel", "num_graphs", "num_nodes", "batch_size"}
_PER_SAMPLE = {
    "argmax",
    "max",
    "topk",
    "softmax",
    "sigmoid",
    "squeeze",
    "round",
    "detach",
    "float",
    "long",
    "to",
    "cpu",
    "data",
    "view",
}


def convert_training_metrics(conversion: Conversion) -> None:
    """Gather the samples from which training loops count metrics; report the loops that are not understood."""
    script = conversion.script
    losses = list_losses(conversion) | find_terms(conversion)
    for loop in (node for node in script.nodes if isinstance(node, cst.For)):
        if script.batch_target(loop) is None or script.loader_of(loop.iter) is None:
            continue
        inside = set(descendants(loop.body))
        backwards = [call for call in conversion.backwards if call in inside]
        if backwards and script.function_of(loop) not in conversion.collective:
            _convert_loop(conversion, loop, backwards, losses)


def _convert_loop(
    conversion: Conversion, loop: cst.For, backwards: list[cst.Call], losses: set[Variable]
) -> None:
    script = conversion.script
    samples = find_samples(conversion, loop)
    used = _find_used(conversion, loop)
    counting = [node for node in descendants(loop.body) if _counts(conversion, node, samples, used)]
    added = [node for node in counting if _is_metric(script, node, samples, losses)]
    if not added:
        return
    totals = Totals(conversion, loop, counting)
    if totals.exchanges and not totals.can_be_gathered:
        totals.report(added[0])
        return
    block = _find_block(conversion, backwards[-1])
    statements = list(block.body)
    last = max(index for index, one in enumerate(statements) if set(descendants(one)) & set(backwards))
    later = statements[last + 1 :]
    nodes_later = {node for one in later for node in descendants(one)}
    first = next((one for one in later if set(descendants(one)) & _needed(conversion, counting, later)), None)
    calls_model = any(
        isinstance(node, cst.Call) and script.kind_of(node.func) == "model" for node in nodes_later
    )
    tail = later[later.index(first) :] if first is not None else []
    names = _list_read_names(conversion, tail, samples)
    if (
        first is None
        or calls_model
        or not is_gatherable(script, loop)
        or any(node not in nodes_later for node in counting)
        or any(samples[variable] in {"unknown", "size"} for variable in names)
    ):
        if totals.exchanges:
            totals.report(added[0])
            return
        conversion.finding(
            added[0],
            'This is counted from the samples of one process. Reduce it before it is reported: accelerator.reduce(torch.tensor(x, device=accelerator.device), "sum") for a sum x, or gather_object(x) of accel_runtime for a list x.',
        )
        return
    conversion.gathered.add(loop)
    conversion.complete.update(totals.exchanges)
    conversion.exchanges.append(first)
    targets = ", ".join(names.values())
    values = ", ".join(
        f"{name}.detach()" if samples[variable] == "output" else name for variable, name in names.items()
    )
    values = f"({values})" if len(names) > 1 else values
    conversion.edits.insert_before(
        first, f"{targets} = {conversion.accelerator(loop)}.gather_for_metrics({values})"
    )


def _is_metric(
    script: Script, node: cst.CSTNode, samples: dict[Variable, str], losses: set[Variable]
) -> bool:
    """Return whether a node that counts adds something else than a loss, and than numbers of samples."""
    names = [one for one in descendants(node) if isinstance(one, cst.Name)]
    if any(script.variable(one) in losses and find_report(script, one) for one in names):
        return False
    return any(script.variable(one) in samples and not _is_size(script, one, samples) for one in names)


def _is_size(script: Script, node: cst.Name, samples: dict[Variable, str]) -> bool:
    """Return whether the number of samples of a batch or output is read."""
    if samples[script.variable(node)] == "size":  # type: ignore[index]
        return True
    parent = script.parents[node]
    if isinstance(parent, cst.Attribute) and parent.value is node:
        return parent.attr.value in _SIZES
    return isinstance(parent, cst.Arg) and script.is_call_of(script.parents[parent], "builtins.len")


def _find_block(conversion: Conversion, call: cst.Call) -> Any:
    for one in conversion.script.ancestors(call):
        if isinstance(one, cst.IndentedBlock) and not isinstance(conversion.script.parents[one], cst.With):
            return one
    return conversion.script.module


def find_samples(conversion: Conversion, loop: cst.For) -> dict[Variable, str]:
    """Return the variables of a loop with a value for each sample: batches, outputs, their sizes, and unknown values."""
    script = conversion.script
    samples: dict[Variable, str] = {}
    losses = list_losses(conversion)
    target = script.batch_target(loop)
    for one in descendants(target) if target is not None else ():
        if isinstance(one, cst.Name) and (variable := script.variable(one)):
            samples[variable] = "batch"
    for node in descendants(loop.body):
        if not isinstance(node, cst.Assign):
            continue
        kind = _get_sample_kind(conversion, node.value, samples)
        for one in descendants(node.targets[0].target):
            variable = script.variable(one) if isinstance(one, cst.Name) else None
            if kind and variable is not None and variable not in losses:
                samples[variable] = (
                    kind if variable not in samples or samples[variable] == kind else samples[variable]
                )
    return samples


def _get_sample_kind(conversion: Conversion, value: cst.BaseExpression, samples: dict[Variable, str]) -> str:
    script = conversion.script
    if script.is_model_call(value):
        return "output"
    if script.kind_of(value) == "batch" or (
        isinstance(value, cst.Tuple) and all(script.kind_of(one.value) == "batch" for one in value.elements)
    ):
        return "batch"
    names = [
        one for one in descendants(value) if isinstance(one, cst.Name) and script.variable(one) in samples
    ]
    if all(_is_size(script, one, samples) for one in names):
        return "size" if names else ""
    node = value
    while isinstance(node, (cst.Call, cst.Attribute, cst.Subscript)):
        if isinstance(node, cst.Call):
            if script.variable(node.func) and script.kind_of(node.func) == "model":
                return "output"
            if script.qualified_name(node.func) == "torch.max" and node.args:
                node = node.args[0].value
                continue
            if not isinstance(node.func, cst.Attribute) or node.func.attr.value not in _PER_SAMPLE:
                return "unknown"
            node = node.func
        node = node.value
    return "output" if script.variable(node) in samples else "unknown"


def _find_used(conversion: Conversion, loop: cst.For) -> set[Variable]:
    """Return the variables from which losses and inputs of the model are computed in a loop: they are no metrics."""
    script = conversion.script
    pending: list[cst.CSTNode] = [*conversion.losses.values()]
    pending += [arg for node in descendants(loop.body) if script.is_model_call(node) for arg in node.args]
    inside = set(descendants(loop.body))
    used: set[Variable] = set()
    while pending:
        new = {variable for one in descendants(pending.pop()) if (variable := script.variable(one))} - used
        used |= new
        pending += [value for one in new for node, value in script.assigned.get(one, []) if node in inside]
    return used


def _counts(conversion: Conversion, node: Any, samples: dict[Variable, str], used: set[Variable]) -> bool:
    """Return whether a node adds to a metric what is computed from samples."""
    if isinstance(node, cst.AugAssign):
        value: cst.CSTNode = node.value
        if conversion.script.variables(node.target) & used:
            return False
    elif get_method(node) in _ADDING and node.args:
        value = cst.Tuple([cst.Element(arg.value) for arg in node.args])
        if conversion.script.variables(node.func) & used:
            return False
    elif (
        isinstance(node, cst.Assign)
        and accumulates(node)
        and (isinstance(node.targets[0].target, cst.Name) or isinstance(node.value, cst.BinaryOperation))
    ):
        roots = {conversion.script.variable(one) for one in descendants(node.targets[0].target)}
        if roots & (list_losses(conversion) | used) or any(
            samples.get(one) in {"batch", "output"} for one in roots if one
        ):
            return False
        value = node.value
    else:
        return False
    return any(
        isinstance(one, cst.Name) and conversion.script.variable(one) in samples for one in descendants(value)
    )


def _needed(conversion: Conversion, counting: list[cst.CSTNode], later: list[Any]) -> set[cst.CSTNode]:
    """Return the statements that count, and the assignments that they read."""
    script = conversion.script
    needed: set[cst.CSTNode] = set(counting)
    assigned = [node for one in later for node in descendants(one) if isinstance(node, cst.Assign)]
    for _ in assigned:
        reads = {
            script.variable(one) for node in needed for one in descendants(node) if isinstance(one, cst.Name)
        }
        needed |= {
            node
            for node in assigned
            if any(
                script.variable(one) in reads
                for one in descendants(node.targets[0].target)
                if isinstance(one, cst.Name)
            )
        }
    return needed


def _list_read_names(
    conversion: Conversion, tail: list[Any], samples: dict[Variable, str]
) -> dict[Variable, str]:
    """Return the sample variables that statements read before they assign them, with their names."""
    script = conversion.script
    names: dict[Variable, str] = {}
    assigned: set[Variable] = set()
    for statement in tail:
        nodes = list(descendants(statement))
        targets = {
            id(one)
            for node in nodes
            if isinstance(node, cst.Assign)
            for one in descendants(node.targets[0].target)
        }
        for node in nodes:
            variable = script.variable(node) if isinstance(node, cst.Name) else None
            if variable in samples and id(node) not in targets and variable not in assigned:
                names[variable] = to_code(node)
        assigned |= {
            variable
            for node in nodes
            if id(node) in targets and isinstance(node, cst.Name) and (variable := script.variable(node))
        }
    return names


def find_conditions(conversion: Conversion) -> None:
    """Report conditions on losses and outputs of the training after which processes would take different steps."""
    script = conversion.script
    loops = {loop for call in conversion.backwards for loop in list_loops(conversion, call)}
    evaluating = [
        one
        for one in script.nodes
        if isinstance(one, cst.For)
        and one not in loops
        and not script.is_call_of(one.iter, "builtins.range", "itertools.count")
    ]
    equal = {node for loop in (*evaluating, *conversion.gathered) for node in descendants(loop)}
    known = _find_own_values(conversion, equal)
    for loop in sorted(loops, key=script.start):
        conditions = [one for one in descendants(loop.body) if isinstance(one, cst.If)]
        changing = [one for one in conditions if one not in equal and _changes_steps(script, one, loop)]
        places: list[Any] = [loop, *changing] if isinstance(loop, cst.While) else changing
        for node in places:
            if _is_own_value(conversion, node.test, known, equal):
                conversion.finding(
                    node,
                    'This condition may differ between processes, and all must take the same steps. Compute its value with accelerator.reduce(tensor, "mean").',
                )


def _find_own_values(conversion: Conversion, equal: set[Any]) -> set[Variable]:
    """Return the variables with values that each process computes from its own outputs of the model."""
    script = conversion.script
    known = list_losses(conversion)
    assignments = [
        node
        for node in script.nodes
        if isinstance(node, (cst.Assign, cst.AugAssign, cst.NamedExpr))
        and node not in equal
        and not isinstance(node.value, cst.Dict)
    ]
    before = None
    while before != known:
        before = set(known)
        for node in assignments:
            if _is_own_value(conversion, node.value, known, equal):
                targets = (
                    [one.target for one in node.targets] if isinstance(node, cst.Assign) else [node.target]
                )
                elements = [one for target in targets for one in list_elements(target)]
                known |= {variable for one in elements if (variable := script.variable(one))}
    return known


def _is_own_value(conversion: Conversion, value: cst.CSTNode, known: set[Variable], equal: set[Any]) -> bool:
    """Return whether a value is computed from outputs of the model of one process, also in functions of the script."""
    script = conversion.script
    pending, seen = [value], set()
    while pending:
        nodes = list(descendants(pending.pop()))
        if any(node in conversion.reduced for node in nodes):
            continue
        for node in nodes:
            if node in equal:
                continue
            is_method = bool(get_method(node)) and get_method(node) not in OF_MODULES
            if (
                script.variable(node) in known
                or script.is_model_call(node)
                or (is_method and script.kind_of(node.func.value) == "model")
            ):
                return True
            callee = script.callees.get(node) if isinstance(node, cst.Call) else None
            if callee is not None and callee not in seen:
                seen.add(callee)
                pending += script.returned_values(callee)
    return False


def _changes_steps(script: Script, node: cst.If, loop: Any) -> bool:
    """Return whether the body of a condition leaves or continues a loop, returns or steps."""
    return any(
        (
            isinstance(one, (cst.Break, cst.Continue))
            and script.find_ancestor(one, (cst.For, cst.While)) is loop
        )
        or isinstance(one, cst.Return)
        or get_method(one) == "backward"
        or (
            get_method(one) == "step"
            and script.kind_of(one.func.value) in {"optimizer", "scheduler", "scaler"}
        )
        for one in descendants(node.body)
    )
