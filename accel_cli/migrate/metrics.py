"""Metrics of evaluation loops: the samples of all processes are gathered before they are counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import libcst as cst

from accel_cli.migrate.raw import Conversion
from accel_cli.migrate.script import Role, Script, Variable, descendants, get_method, list_elements, to_code

__all__ = [
    "ADVICE",
    "accumulates",
    "check_loaders",
    "convert_evaluation",
    "find_other_uses",
    "list_evaluations",
]

_TENSOR_METHODS = {
    "argmax", "max", "topk", "softmax", "log_softmax", "sigmoid", "size", "data", "detach", "cpu", "numpy", "float",
    "shape", "view", "squeeze", "reshape", "sum", "mean", "item", "round", "long", "eq", "numel", "tolist", "view_as", "flatten",
}  # fmt: skip
"""Attributes of a tensor in an evaluation loop; an output with others is an object with fields."""
_HARMLESS = {"len", "print", "isinstance", "enumerate", "hasattr", "type"}
ADVICE = "Gather the outputs and targets with accelerator.gather_for_metrics before counting."


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
        return name.startswith("builtins.") and not _is_known_read(script, call, name)
    if isinstance(parent, (cst.Element, cst.DictElement)):
        outer = script.parents[script.parents[parent]]
        is_unpacked = isinstance(outer, cst.Assign) and all(
            isinstance(one.target, cst.Tuple) for one in outer.targets
        )
        return not (is_unpacked or isinstance(outer, (cst.Return, cst.AssignTarget)))
    return False


def _is_known_read(script: Script, call: cst.Call, name: str) -> bool:
    """Return whether a loader is read by `next(iter(loader))`, an iterator in a variable, or `len(list(loader))`.

    Each process may read a first batch, which starts and leaves an epoch as the loader before did.
    """
    outer = script.parents.get(call)
    if isinstance(outer, cst.Assign):
        return name == "builtins.iter" and script.kind_of(outer.targets[0].target) == "iterator"
    reader = {"builtins.iter": "builtins.next", "builtins.list": "builtins.len"}.get(name)
    return (
        reader is not None and isinstance(outer, cst.Arg) and script.is_call_of(script.parents[outer], reader)
    )


def find_other_uses(conversion: Conversion) -> None:
    """Report comprehensions and functions of other files that compute with a part of the samples; a test stays whole there."""
    script = conversion.script
    training = conversion.find_training_loaders()
    for node in script.nodes:
        if isinstance(node, cst.BaseComp):
            loader = script.loader_of(node.for_in.iter)
            if (
                loader
                and conversion.is_prepared(loader.origins)
                and any(map(script.is_model_call, descendants(node)))
            ):
                conversion.finding(node, f"This counts the samples of one process. {ADVICE}")
        elif isinstance(node, cst.Call) and _is_foreign(script, node):
            roles = [role for arg in node.args if isinstance(role := script.role_of(arg.value), Role)]
            loaders = {one for role in roles if role.kind == "loader" for one in role.origins}
            if not loaders or not any(role.kind == "model" for role in roles):
                continue
            conversion.unprepared |= loaders - training
            if loaders & training:
                conversion.finding(
                    node,
                    f"{to_code(node.func)} gets a prepared loader, which has the samples of one process only. {ADVICE}",
                )


def _is_foreign(script: Script, call: cst.Call) -> bool:
    """Return whether a call is that of a function which is neither in the script nor one of Python or torch."""
    name = script.qualified_name(call.func)
    known = call in script.callees or call in script.constructed or script.is_progress_bar(call)
    return bool(name) and not known and not name.startswith(("builtins.", "torch."))


# Evaluation


def convert_evaluation(conversion: Conversion) -> None:
    """Gather what the metrics of an evaluation loop are computed from; a loader whose loop is not understood stays whole."""
    script = conversion.script
    for loop in list_evaluations(conversion):
        role = script.loader_of(loop.iter)
        assert role is not None
        if not conversion.is_prepared(role.origins) or script.function_of(loop) in conversion.collective:
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
    if _pads_batches(script, loop):
        return "The batches are padded to their longest sample, and gathered ones must have one shape: see accelerator.pad_across_processes."
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
        conversion.finding(loop, f"{problem} The metrics are those of one process. {ADVICE}")
        return
    conversion.unprepared |= origins
    conversion.finding(
        loop,
        f"{problem} The loader is not prepared, so every process evaluates all samples. Prepare it. {ADVICE}",
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
    if shape := _find_fixed_shape(script, loop, later):
        return f"A batch is given the shape {shape}, and a gathered batch has more rows: write -1 for them."
    inside = set(descendants(call))
    names = [node for node in later if isinstance(node, cst.Name) and node not in inside]
    if problem := _find_problem(script, loop, names, outputs, set(later)):
        return problem
    conversion.gathered.add(loop)
    assigned = {node.value for node in names if isinstance(script.parents[node], cst.AssignTarget)}
    parts = dict.fromkeys(
        node.value for node in names if script.kind_of(node) == "batch" and node.value not in assigned
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


def _pads_batches(script: Script, loop: cst.For) -> bool:
    """Return whether the loader of a loop pads its batches in a function, each to a length of its own."""
    role = script.loader_of(loop.iter)
    for origin in role.origins if role is not None else ():
        for _, value in script.assigned.get(origin, []):
            collate = next(
                (
                    arg.value
                    for one in descendants(value)
                    if isinstance(one, cst.Call)
                    for arg in one.args
                    if arg.keyword is not None and arg.keyword.value == "collate_fn"
                ),
                None,
            )
            if collate is None or to_code(collate) == "None":
                continue
            variable = script.variable(collate)
            function = next(
                (one for one in script.functions if variable == Variable(script.scopes[one], one.name.value)),
                None,
            )
            words = to_code(function.body) if function is not None else "pad"
            return "pad" in words or "max(" in words
    return False


def _find_fixed_shape(script: Script, loop: cst.For, later: list[cst.CSTNode]) -> str:
    """Return the shape that the script gives a value of a batch if its number of rows is that of one process."""
    for node in later:
        if (
            not isinstance(node, cst.Call)
            or get_method(node) not in {"view", "reshape", "expand"}
            or not node.args
        ):
            continue
        rows = node.args[0].value
        rows = list_elements(rows)[0] if isinstance(rows, (cst.Tuple, cst.List)) else rows
        code = to_code(rows)
        is_own = any(word in code for word in ("size", "shape", "len(")) and not isinstance(
            rows, cst.Attribute
        )
        is_setting = "batch_size" in code or (
            isinstance(rows, cst.Integer) and code != "1" and len(node.args) > 1
        )
        if is_setting and not (is_own and script.variables(rows) & _list_batch_variables(script, loop)):
            return f"({', '.join(to_code(arg.value) for arg in node.args)})"
    return ""


def _list_batch_variables(script: Script, loop: cst.For) -> set[Variable]:
    """Return the variables of a loop that depend on its batches."""
    known = script.variables(script.batch_target(loop) or loop.target)
    return known | _find_derived(script, loop, descendants(loop.body))


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
