"""Metrics of training loops, and conditions on values of a batch that must be equal on all processes."""

from __future__ import annotations

from typing import Any

import libcst as cst

from accel_cli.migrate.metrics import ADVICE, accumulates
from accel_cli.migrate.raw import Conversion
from accel_cli.migrate.script import Variable, descendants, get_method, to_code

__all__ = ["convert_training_metrics", "find_conditions", "find_samples"]

_ADDING = {"append", "extend", "update", "add"}
_DEPTH = 4
"""Values are followed through this many assignments."""
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
    for loop in (node for node in script.nodes if isinstance(node, cst.For)):
        if script.batch_target(loop) is None or script.loader_of(loop.iter) is None:
            continue
        inside = set(descendants(loop.body))
        backwards = [call for call in conversion.backwards if call in inside]
        if backwards and script.function_of(loop) not in conversion.collective:
            _convert_loop(conversion, loop, backwards)


def _convert_loop(conversion: Conversion, loop: cst.For, backwards: list[cst.Call]) -> None:
    script = conversion.script
    samples = find_samples(conversion, loop)
    counting = [node for node in descendants(loop.body) if _counts(conversion, node, samples)]
    if not counting:
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
    if first is None or calls_model or any(node not in nodes_later for node in counting):
        conversion.finding(counting[0], f"This counts the samples of one process. {ADVICE}")
        return
    tail = later[later.index(first) :]
    names = _list_read_names(conversion, tail, samples)
    if any(samples[variable] == "unknown" for variable in names):
        conversion.finding(counting[0], f"This counts the samples of one process. {ADVICE}")
        return
    conversion.gathered.add(loop)
    targets = ", ".join(names.values())
    values = ", ".join(
        f"{name}.detach()" if samples[variable] == "output" else name for variable, name in names.items()
    )
    values = f"({values})" if len(names) > 1 else values
    conversion.edits.insert_before(
        first, f"{targets} = {conversion.accelerator(loop)}.gather_for_metrics({values})"
    )


def _find_block(conversion: Conversion, call: cst.Call) -> Any:
    for one in conversion.script.ancestors(call):
        if isinstance(one, cst.IndentedBlock) and not isinstance(conversion.script.parents[one], cst.With):
            return one
    return conversion.script.module


def find_samples(conversion: Conversion, loop: cst.For) -> dict[Variable, str]:
    """Return the variables of a loop with a value for each sample: batches, outputs, and unknown values of both."""
    script = conversion.script
    samples: dict[Variable, str] = {}
    losses = {
        script.variable(loss)
        for loss in conversion.losses.values()
        if isinstance(loss, (cst.Name, cst.Attribute))
    }
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
    reads = {script.variable(one) for one in descendants(value) if isinstance(one, cst.Name)} & samples.keys()
    if not reads:
        return ""
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


def _counts(conversion: Conversion, node: Any, samples: dict[Variable, str]) -> bool:
    """Return whether a node adds to a metric what is computed from samples."""
    if isinstance(node, cst.AugAssign):
        value: cst.CSTNode = node.value
    elif get_method(node) in _ADDING and node.args:
        value = cst.Tuple([cst.Element(arg.value) for arg in node.args])
    elif isinstance(node, cst.Assign) and accumulates(node):
        roots = {conversion.script.variable(one) for one in descendants(node.targets[0].target)}
        losses = {conversion.script.variable(loss) for loss in conversion.losses.values()}
        if roots & (losses - {None}) or any(samples.get(one) in {"batch", "output"} for one in roots if one):
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
    """Report conditions on values of a batch that leave a loop, step or save: processes may take different branches."""
    script = conversion.script
    losses = {script.variable(loss) for loss in conversion.losses.values()}
    for loop in (node for node in script.nodes if isinstance(node, cst.For)):
        if script.loader_of(loop.iter) is None or not set(descendants(loop.body)) & set(conversion.backwards):
            continue
        if loop in conversion.gathered:
            continue
        known = script.variables(script.batch_target(loop) or loop.target)
        for _ in range(_DEPTH):
            for node in descendants(loop.body):
                known |= _list_derived(conversion, node, known) - losses
        function = script.function_of(loop)
        for node in script.nodes:
            if (
                isinstance(node, (cst.If, cst.While))
                and script.function_of(node) is function
                and any(script.variable(one) in known for one in descendants(node.test))
                and _changes_course(node)
            ):
                conversion.finding(
                    node,
                    "This condition depends on the batches of one process, and may differ between processes. Compute it with accelerator.reduce or accelerator.gather_for_metrics.",
                )


def _list_derived(conversion: Conversion, node: Any, known: set[Any]) -> set[Any]:
    """Return the variables to which a statement passes a value of known variables."""
    script = conversion.script
    if isinstance(node, cst.Assign):
        targets: list[cst.CSTNode] = [one.target for one in node.targets]
        value: cst.CSTNode = node.value
    elif isinstance(node, (cst.AugAssign, cst.NamedExpr)):
        targets, value = [node.target], node.value
    elif get_method(node) in _ADDING:
        targets, value = [node.func.value], cst.Tuple([cst.Element(arg.value) for arg in node.args])
    else:
        return set()
    if not any(
        script.variable(one) in known
        for one in descendants(value)
        if isinstance(one, (cst.Name, cst.Attribute))
    ):
        return set()
    return {variable for one in targets for part in descendants(one) if (variable := script.variable(part))}


def _changes_course(node: cst.If | cst.While) -> bool:
    """Return whether a condition leaves a loop, steps or saves, so that all processes must take the same branch."""
    return any(
        isinstance(one, (cst.Break, cst.Return, cst.Continue))
        or (
            isinstance(one, cst.Call) and to_code(one.func).rpartition(".")[2] in {"step", "save", "backward"}
        )
        for one in descendants(node.body)
    )
