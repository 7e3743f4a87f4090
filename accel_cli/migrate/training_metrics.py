"""Metrics of training loops, and conditions on values of a batch that must be equal on all processes."""

from __future__ import annotations

from typing import Any

import libcst as cst

from accel_cli.migrate.metrics import ADVICE, accumulates
from accel_cli.migrate.raw import Conversion
from accel_cli.migrate.script import Script, Variable, descendants, get_method, list_elements, to_code
from accel_cli.migrate.wrappers import OF_MODULES

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
    used = _find_used(conversion, loop)
    counting = [node for node in descendants(loop.body) if _counts(conversion, node, samples, used)]
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
    elif isinstance(node, cst.Assign) and accumulates(node):
        roots = {conversion.script.variable(one) for one in descendants(node.targets[0].target)}
        losses = {conversion.script.variable(loss) for loss in conversion.losses.values()}
        if roots & ((losses | used) - {None}) or any(
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
    """Report conditions on losses and outputs after which processes would take different steps."""
    script = conversion.script
    losses = {variable for loss in conversion.losses.values() if (variable := script.variable(loss))}
    loops = {
        loop
        for call in conversion.backwards
        for loop in script.ancestors(call)
        if isinstance(loop, (cst.For, cst.While))
    }
    for loop in loops - conversion.gathered:
        known = set(losses)
        for _ in range(_DEPTH):
            for node in descendants(loop.body):
                if isinstance(node, (cst.Assign, cst.NamedExpr)) and _reads_output(
                    conversion, node.value, known
                ):
                    targets = node.targets if isinstance(node, cst.Assign) else [node]
                    known |= {
                        variable
                        for target in targets
                        for one in list_elements(target.target)
                        if (variable := script.variable(one))
                    }
        for node in descendants(loop.body):
            if (
                isinstance(node, cst.If)
                and _reads_output(conversion, node.test, known)
                and _changes_steps(script, node)
            ):
                conversion.finding(
                    node,
                    'This condition may differ between processes, and all must take the same steps. Compute its value with accelerator.reduce(..., "mean").',
                )


def _reads_output(conversion: Conversion, value: cst.CSTNode, known: set[Variable]) -> bool:
    """Return whether a value is computed from a loss or an output of the model, and is not reduced over the processes."""
    nodes = list(descendants(value))
    if any(node in conversion.reduced for node in nodes):
        return False
    script = conversion.script
    return any(
        script.variable(node) in known
        or script.is_model_call(node)
        or (
            bool(get_method(node))
            and script.kind_of(node.func.value) == "model"
            and get_method(node) not in OF_MODULES
        )
        for node in nodes
    )


def _changes_steps(script: Script, node: cst.If) -> bool:
    """Return whether the body of a condition leaves or continues the loop around it, returns or steps."""
    loop = script.find_ancestor(node, (cst.For, cst.While))
    return any(
        (
            isinstance(one, (cst.Break, cst.Continue))
            and script.find_ancestor(one, (cst.For, cst.While)) is loop
        )
        or isinstance(one, cst.Return)
        or get_method(one) in {"step", "backward"}
        for one in descendants(node.body)
    )
