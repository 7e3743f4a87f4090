"""Metrics of training and evaluation loops: the samples of all processes are gathered before they are counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import libcst as cst

from accel_cli.migrate.raw import Conversion
from accel_cli.migrate.script import Script, Variable, descendants, get_method, list_elements, to_code

__all__ = [
    "accumulates",
    "check_loaders",
    "convert_evaluation",
    "convert_training_metrics",
    "find_conditions",
    "find_other_uses",
    "find_samples",
    "list_evaluations",
]

_TENSOR_METHODS = {
    "argmax", "max", "topk", "softmax", "log_softmax", "sigmoid", "size", "data", "detach", "cpu", "numpy", "float",
    "shape", "view", "squeeze", "reshape", "sum", "mean", "item", "round", "long", "eq", "numel", "tolist", "view_as", "flatten",
}  # fmt: skip
"""Attributes of a tensor in an evaluation loop; an output with others is an object with fields."""
_HARMLESS = {"len", "print", "isinstance", "enumerate", "hasattr", "type"}
_ADVICE = "Gather the outputs and targets with accelerator.gather_for_metrics before counting."
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


# Loaders


def check_loaders(conversion: Conversion) -> None:
    """Leave loaders unprepared that are read under another name; raise an error if they train."""
    script = conversion.script
    training = conversion.find_training_loaders()
    for node in script.nodes:
        role = script.role_of_variable(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
        if role is None or role.kind != "loader" or not conversion.is_prepared(role.origins):
            continue
        if not _is_alias(script, node):
            continue
        if role.origins & training:
            raise conversion.unsafe(
                node,
                "The loader that trains is read in a way that is not understood. Read it in a for loop by its own name.",
            )
        conversion.unprepared |= role.origins
        conversion.finding(
            node,
            "The loader is read in a way that is not understood. The loader is not prepared, so every process evaluates all samples. Read it in a for loop by its own name.",
        )


def _is_alias(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a loader is an argument of a function of Python, or a part of a collection."""
    parent = script.parents.get(node)
    while isinstance(parent, cst.Arg) and isinstance(call := script.parents[parent], cst.Call):
        name = script.qualified_name(call.func)
        known = call in script.callees or call in script.constructed
        if known or name.removeprefix("builtins.") in _HARMLESS or script.is_progress_bar(call):
            return False
        if isinstance(script.parents.get(call), (cst.For, cst.CompFor)):
            return name == "builtins.zip"
        if name == "builtins.iter" and isinstance(outer := script.parents.get(call), cst.Arg):
            # Each process may read a first batch, which starts and leaves an epoch as the loader before did.
            return not script.is_call_of(script.parents[outer], "builtins.next")
        return name.startswith("builtins.")
    if isinstance(parent, (cst.Element, cst.DictElement)):
        outer = script.parents[script.parents[parent]]
        is_unpacked = isinstance(outer, cst.Assign) and all(
            isinstance(one.target, cst.Tuple) for one in outer.targets
        )
        return not (is_unpacked or isinstance(outer, (cst.Return, cst.AssignTarget)))
    return False


def find_other_uses(conversion: Conversion) -> None:
    """Report loaders that are read in other ways than by a loop, and leave them whole for an evaluation."""
    script = conversion.script
    for node in script.nodes:
        if (
            isinstance(node, cst.CompFor)
            and (role := script.loader_of(node.iter))
            and conversion.is_prepared(role.origins)
        ):
            conversion.finding(node.iter, f"This counts the samples of one process. {_ADVICE}")
        elif isinstance(node, cst.Call) and node not in script.callees:
            name = script.qualified_name(node.func)
            if not name or name.startswith(("builtins.", "torch.")) or script.is_progress_bar(node):
                continue
            if (
                any(script.kind_of(arg.value) == "loader" for arg in node.args)
                and node not in script.constructed
            ):
                conversion.finding(
                    node,
                    f"{to_code(node.func)} gets a loader, and is not in this script. If it counts metrics, they are those of one process. {_ADVICE}",
                )


# Evaluation


def convert_evaluation(conversion: Conversion) -> None:
    """Gather what the metrics of an evaluation loop are computed from; a loader whose loop is not understood stays whole."""
    script = conversion.script
    for loop in list_evaluations(conversion):
        role = script.loader_of(loop.iter)
        assert role is not None
        if not conversion.is_prepared(role.origins):
            continue
        problem = _gather(conversion, loop)
        if problem:
            _leave_unprepared(conversion, loop, role.origins, problem)


def list_evaluations(conversion: Conversion) -> list[cst.For]:
    """Return the loops over loaders without a backward pass."""
    script = conversion.script
    found = []
    for node in script.nodes:
        if (
            isinstance(node, cst.For)
            and script.batch_target(node) is not None
            and script.loader_of(node.iter)
        ):
            inside = set(descendants(node))
            trains = any(call in inside for call in conversion.backwards) or any(
                call in inside and callee in conversion.training for call, callee in script.callees.items()
            )
            if not trains:
                found.append(node)
    return found


def _gather(conversion: Conversion, loop: cst.For) -> str:
    """Insert a gather after the model's call in an evaluation loop; return the reason if it is not understood."""
    script = conversion.script
    calls = [node for node in descendants(loop.body) if script.is_model_call(node)]
    if not any(accumulates(node) for node in descendants(loop.body)):
        return ""
    if len(calls) != 1:
        return "This loop counts metrics without one call of the model."
    call = calls[0]
    blocks = [
        one
        for one in (call, *script.ancestors(call))
        if isinstance(script.parents.get(one), cst.IndentedBlock)
    ]
    statement: Any = blocks[0]
    outer = blocks[: [script.parents[one] for one in blocks].index(loop.body) + 1]
    if any(not isinstance(one, (cst.With, cst.SimpleStatementLine)) for one in outer) or not isinstance(
        statement, cst.SimpleStatementLine
    ):
        return "The model is called under a condition or in another loop."
    return _insert_gather(conversion, loop, call, statement, outer)


def _leave_unprepared(
    conversion: Conversion, loop: cst.For, origins: frozenset[Variable], problem: str
) -> None:
    if origins & conversion.find_training_loaders():
        conversion.finding(loop, f"{problem} The metrics are those of one process. {_ADVICE}")
        return
    conversion.unprepared |= origins
    conversion.finding(
        loop,
        f"{problem} The loader is not prepared, so every process evaluates all samples. Prepare it. {_ADVICE}",
    )


def accumulates(node: cst.CSTNode) -> bool:
    """Return whether a statement adds to a metric, or fills a part of one."""
    if isinstance(node, cst.Assign):
        targets = [one.target for one in node.targets]
        names = {to_code(one) for one in targets}
        parts: tuple[cst.CSTNode, ...] = (node.value,) if isinstance(node.value, cst.BinaryOperation) else ()
        parts = tuple(node.value.args) if isinstance(node.value, cst.Call) else parts
        is_added = any(
            isinstance(one, cst.Name) and one.value in names for part in parts for one in descendants(part)
        )
        return is_added or any(isinstance(one, cst.Subscript) for one in targets)
    return isinstance(node, cst.AugAssign) or (get_method(node) in {"append", "extend", "update"})


def _insert_gather(
    conversion: Conversion, loop: cst.For, call: cst.Call, statement: Any, outer: list[Any]
) -> str:
    """Gather the outputs and the parts of the batch that are read later; return the reason if this is not possible."""
    script = conversion.script
    assign = statement.body[0]
    later = _list_later(script, outer)
    if loss := _find_loss(conversion, assign, later):
        return f"The model returns a loss ({loss}), which is a mean over the batch."
    is_assigned = (
        isinstance(assign, cst.Assign)
        and assign.value is call
        and isinstance(assign.targets[0].target, cst.Name)
    )
    if is_assigned:
        outputs = assign.targets[0].target.value
    else:
        used = {node.value for node in script.nodes if isinstance(node, cst.Name)}
        outputs = next(name for name in ("outputs", "predictions", "model_outputs") if name not in used)
        later = [*descendants(statement), *later]
    inside = set(descendants(call))
    names = [node for node in later if isinstance(node, cst.Name) and node not in inside]
    if problem := _find_problem(script, loop, names, outputs, set(later)):
        return problem
    conversion.gathered.add(loop)
    parts = dict.fromkeys(
        node.value
        for node in names
        if script.kind_of(node) == "batch" and not isinstance(script.parents[node], cst.AssignTarget)
    )
    gathered = ", ".join([outputs, *parts])
    value = f"({gathered})" if parts else gathered
    code = f"{gathered} = {conversion.accelerator(loop)}.gather_for_metrics({value})"
    if is_assigned:
        conversion.edits.insert_after(statement, code)
    else:
        _hoist(conversion, call, statement, outputs)
        conversion.edits.insert_before(statement, code)
    return ""


def _find_problem(
    script: Script, loop: cst.For, names: list[cst.Name], outputs: str, later: set[cst.CSTNode]
) -> str:
    """Return why the values that are read after the model's call cannot be gathered."""
    derived = _find_derived(script, loop, [node for node in descendants(loop.body) if node not in later])
    for node in names:
        parent = script.parents[node]
        if node.value != outputs:
            if _is_computed(script, loop, node, derived):
                return f"{node.value} is computed from the batch before the model is called."
        elif isinstance(parent, cst.AssignTarget):
            return f"{outputs} is assigned again."
        elif isinstance(parent, cst.Attribute) and parent.attr.value not in _TENSOR_METHODS:
            return f"The output of the model has fields ({outputs}.{parent.attr.value})."
    return ""


def _find_loss(conversion: Conversion, assign: cst.CSTNode, later: list[cst.CSTNode]) -> str:
    """Return the name of a scalar that the model returns: a name of the trained loss, or a value with one item."""
    losses = {to_code(loss) for loss in conversion.losses.values()}
    scalars = {
        to_code(node.value) for node in later if isinstance(node, cst.Attribute) and node.attr.value == "item"
    }
    targets = [one.target for one in assign.targets] if isinstance(assign, cst.Assign) else []
    names = {to_code(name) for target in targets for name in list_elements(target)}
    is_output = (
        isinstance(assign, cst.Assign)
        and isinstance(assign.value, cst.Call)
        and (conversion.script.kind_of(assign.value.func) == "model")
    )
    return min(names & (losses | scalars), default="") if is_output else ""


def _find_derived(script: Script, loop: cst.For, nodes: Iterable[cst.CSTNode]) -> set[Variable]:
    """Return the variables that are computed from the batch in these nodes."""
    known = script.variables(script.batch_target(loop) or loop.target)
    found: set[Variable] = set()
    for node in nodes:
        if isinstance(node, (cst.Assign, cst.NamedExpr)) and any(
            script.variable(one) in known for one in descendants(node.value)
        ):
            targets = [one.target for one in node.targets] if isinstance(node, cst.Assign) else [node.target]
            names = set().union(*map(script.variables, targets))
            known |= names
            found |= names
    return found


def _is_computed(script: Script, loop: cst.For, node: cst.Name, derived: set[Variable]) -> bool:
    """Return whether a name that is read has a value computed from the batch, and is not a part of it."""
    if isinstance(script.parents[node], cst.AssignTarget):
        return False
    if script.kind_of(node) == "batch":
        return not _is_of_batch(script, loop, node)
    return script.variable(node) in derived


def _is_of_batch(script: Any, loop: cst.For, node: cst.Name) -> bool:
    """Return whether a name is a batch or a part of one, and not a number computed from it."""
    variable = script.variable(node)
    target = script.batch_target(loop)
    if any(isinstance(one, cst.Name) and script.variable(one) == variable for one in descendants(target)):
        return True
    entries = [
        value for assign, value in script.assigned.get(variable, []) if assign in set(descendants(loop))
    ]
    unpacked = any(
        isinstance(one, cst.Assign)
        and isinstance(one.targets[0].target, cst.Tuple)
        and script.kind_of(one.value) == "batch"
        and any(script.variable(element.value) == variable for element in one.targets[0].target.elements)
        for one in descendants(loop.body)
    )
    return unpacked or (bool(entries) and all(script.kind_of(value) == "batch" for value in entries))


def _hoist(conversion: Conversion, call: cst.Call, statement: Any, outputs: str) -> None:
    """Assign the value of a call to a variable before its statement."""
    changed: list[cst.CSTNode] = []

    def take(node: cst.CSTNode) -> cst.Name:
        changed.append(node)
        return cst.Name(outputs)

    conversion.edits.change(call, take)
    conversion.edits.insert_before(statement, lambda: f"{outputs} = {to_code(changed[0])}")


def _list_later(script: Any, outer: list[Any]) -> list[cst.CSTNode]:
    """Return the nodes that run after each of these nested statements, in its block."""
    found: list[cst.CSTNode] = []
    for one in outer:
        block = script.parents[one]
        position = list(block.body).index(one)
        for later in block.body[position + 1 :]:
            found += descendants(later)
    return found


# Training


def convert_training_metrics(conversion: Conversion) -> None:
    """Gather the samples from which training loops count metrics; report the loops that are not understood."""
    script = conversion.script
    for loop in (node for node in script.nodes if isinstance(node, cst.For)):
        if script.batch_target(loop) is None or script.loader_of(loop.iter) is None:
            continue
        inside = set(descendants(loop.body))
        backwards = [call for call in conversion.backwards if call in inside]
        if backwards:
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
        conversion.finding(counting[0], f"This counts the samples of one process. {_ADVICE}")
        return
    tail = later[later.index(first) :]
    names = _list_read_names(conversion, tail, samples)
    if any(samples[variable] == "unknown" for variable in names):
        conversion.finding(counting[0], f"This counts the samples of one process. {_ADVICE}")
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
