"""Gradient accumulation and evaluation: loops whose results depend on the batches of all processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import libcst as cst

from accel_cli.migrate.raw import Conversion
from accel_cli.migrate.script import Script, Variable, descendants, to_code

__all__ = ["accumulates", "convert_accumulation", "convert_evaluation", "list_evaluations"]

_TENSOR_METHODS = {
    "argmax", "max", "topk", "softmax", "log_softmax", "sigmoid", "size", "data", "detach", "cpu", "numpy", "float",
    "shape", "view", "squeeze", "reshape", "sum", "mean", "item", "round", "long", "eq", "numel", "tolist", "view_as", "flatten",
}  # fmt: skip
"""Attributes of a tensor in an evaluation loop; an output with others is an object with fields."""


# Accumulation


def convert_accumulation(conversion: Conversion) -> None:
    """Replace steps after every n-th batch by `accelerator.accumulate`."""
    script = conversion.script
    steps: dict[str, cst.CSTNode] = {}
    for node in script.nodes:
        if not isinstance(node, cst.If) or not _steps_optimizer(conversion, node):
            continue
        loop = next((one for one in script.ancestors(node) if isinstance(one, cst.For)), None)
        count = _read_cycle(conversion, node, loop)
        if loop is None or count is None:
            raise conversion.unsafe(
                node,
                "The optimizer steps under this condition, which is not understood. Use accelerator.accumulate(model) and Accelerator(gradient_accumulation_steps=...).",
            )
        steps[count] = node
        _convert_cycle(conversion, node, loop, count)
    if len(steps) > 1:
        raise conversion.unsafe(
            next(iter(steps.values())),
            "Gradients are accumulated over different numbers of batches. Use one number.",
        )
    for count, node in steps.items():
        _pass_steps(conversion, count, node)


def _steps_optimizer(conversion: Conversion, node: cst.If) -> bool:
    """Return whether the body of a condition in a training loop is an optimizer step, and the backward pass is not in it."""
    script = conversion.script
    nodes = set(descendants(node.body))
    if any(call in nodes for call in conversion.backwards):
        return False
    loop = next((one for one in script.ancestors(node) if isinstance(one, cst.For)), None)
    if loop is None or not any(call in set(descendants(loop.body)) for call in conversion.backwards):
        return False
    for call in nodes:
        if (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "step"
        ):
            owners = [call.func.value, *(arg.value for arg in call.args)]
            if any(script.kind_of(owner) == "optimizer" for owner in owners):
                return True
    return False


def _read_cycle(conversion: Conversion, node: cst.If, loop: cst.For | None) -> str | None:
    """Return the number of batches of a cycle in `(i + 1) % n == 0`, also with `or i + 1 == len(loader)`."""
    if loop is None or node.orelse is not None or not isinstance(loop.target, cst.Tuple):
        return None
    index = to_code(loop.target.elements[0].value)
    if conversion.script.batch_target(loop) is None:
        return None
    start = re.search(r"enumerate\(.*,\s*(?:start\s*=\s*)?1\)+$", to_code(loop.iter))
    position = re.escape(index) if start else rf"\(\s*{re.escape(index)}\s*\+\s*1\s*\)"
    test = to_code(node.test)
    last = rf"\(?\s*{position.replace(chr(92) + '(', chr(92) + '(?').replace(chr(92) + ')', chr(92) + ')?')}\s*==\s*len\([\w.]+\)\s*\)?"
    last = rf"(?:{last}|\(?\s*{re.escape(index)}\s*==\s*len\([\w.]+\)\s*-\s*1\s*\)?)"
    match = re.fullmatch(rf"\(?{position}\s*%\s*([\w.]+)\s*==\s*0\)?(\s+or\s+{last})?", test)
    match = match or re.fullmatch(rf"not\s+{position}\s*%\s*([\w.]+)()", test)
    if match is None:
        match = re.fullmatch(rf"{re.escape(index)}\s*%\s*([\w.]+)\s*==\s*\1\s*-\s*1()", test)
    if match is None:
        return None
    if not match[2]:
        conversion.note(
            node,
            "If the number of batches is not divisible by the accumulation steps, the last cycle of an epoch now also ends with an optimizer step.",
        )
    return match[1]


def _convert_cycle(conversion: Conversion, node: cst.If, loop: cst.For, count: str) -> None:
    script = conversion.script
    cycle = set(descendants(node.body))
    for one in descendants(loop.body):
        is_reset = (
            isinstance(one, cst.Call)
            and isinstance(one.func, cst.Attribute)
            and one.func.attr.value == "zero_grad"
        )
        if is_reset and one not in cycle:
            raise conversion.unsafe(
                one,
                "zero_grad is not called with the step of the optimizer, and does nothing elsewhere in a cycle. Call it after the step.",
            )
    accelerator = conversion.accelerator(node)
    conversion.edits.change(
        node,
        lambda one: one.with_changes(
            test=cst.parse_expression(f"{accelerator}.sync_gradients"),
            whitespace_before_test=cst.SimpleWhitespace(" "),
        ),
    )
    models = [
        _get_name(variable) for variable in conversion.creations if script.roles[variable].kind == "model"
    ]
    names = _find_local_models(conversion, loop) or models
    arguments = ", ".join(names)

    def wrap(one: Any) -> Any:
        item = cst.WithItem(cst.parse_expression(f"{accelerator}.accumulate({arguments})"))
        return one.with_changes(body=cst.IndentedBlock([cst.With([item], one.body)]))

    conversion.edits.change(loop, wrap)
    for call in conversion.backwards:
        if call in set(descendants(loop)):
            _remove_division(conversion, call, loop, count)


def _get_name(variable: Variable) -> str:
    return f"self.{variable.name}" if isinstance(variable.scope, cst.ClassDef) else variable.name


def _find_local_models(conversion: Conversion, loop: cst.For) -> list[str]:
    """Return the trained models that a loop calls, as it names them."""
    names = []
    for node in descendants(loop.body):
        if (
            isinstance(node, cst.Call)
            and conversion.script.variable(node.func)
            and conversion.script.kind_of(node.func) == "model"
        ):
            name = to_code(node.func)
            if name not in names:
                names.append(name)
    return names


def _remove_division(conversion: Conversion, call: cst.Call, loop: cst.For, count: str) -> None:
    """Remove the division of the loss by the number of batches, which `accelerator.backward` does."""
    script = conversion.script
    loss = conversion.losses[call]
    if _is_division(loss, count):
        conversion.edits.change(loss, lambda node: node.left)
        return
    variable = script.variable(loss) if isinstance(loss, cst.Name) else None
    for node in descendants(loop.body):
        if (
            isinstance(node, cst.Assign)
            and script.variable(node.targets[0].target) == variable
            and _is_division(node.value, count)
        ):
            assert isinstance(node.value, cst.BinaryOperation)
            if to_code(node.value.left) == to_code(loss):
                conversion.edits.remove(node)
            else:
                conversion.edits.change(node.value, lambda one: one.left)
        elif (
            isinstance(node, cst.AugAssign)
            and isinstance(node.operator, cst.DivideAssign)
            and script.variable(node.target) == variable
            and to_code(node.value) == count
        ):
            conversion.edits.remove(node)
        else:
            continue
        assert variable is not None
        conversion.divided[variable] = count, script.start(node)
        return
    raise conversion.unsafe(
        call,
        f"The loss is not divided by {count}, and accelerator.backward divides it. Divide it by {count} first.",
    )


def _is_division(node: cst.BaseExpression, count: str) -> bool:
    return (
        isinstance(node, cst.BinaryOperation)
        and isinstance(node.operator, cst.Divide)
        and to_code(node.right) == count
    )


def _pass_steps(conversion: Conversion, count: str, node: cst.CSTNode) -> None:
    """Pass the number of batches of a cycle to the Accelerator, or set it before the loop."""
    script = conversion.script
    root = count.partition(".")[0]
    if count.isdigit() or _is_known_before(conversion, root):
        conversion.arguments["gradient_accumulation_steps"] = count
        return
    loop: Any = next(one for one in script.ancestors(node) if isinstance(one, cst.For))
    for one in script.ancestors(loop):
        if isinstance(one, (cst.For, cst.While)):
            loop = one
        elif isinstance(one, cst.FunctionDef):
            break
    conversion.edits.insert_before(
        loop, f"{conversion.accelerator(node)}.gradient_accumulation_steps = {count}"
    )


def _is_known_before(conversion: Conversion, name: str) -> bool:
    """Return whether a name is assigned before the Accelerator is created, where it is created."""
    script = conversion.script
    scope = (
        script.scopes[conversion.home.body]
        if conversion.home is not None
        else script.scopes[script.module.body[0]]
    )
    if scope is None or name not in scope:
        return False
    for assignment in scope[name]:
        node = getattr(assignment, "node", None)
        if node is None:
            return False
        if isinstance(node, cst.Param):
            continue
        if script.function_of(node) is None and conversion.home is not None:
            continue
        if script.line(node) >= conversion.home_line:
            return False
    return True


# Evaluation


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


def _leave_unprepared(
    conversion: Conversion, loop: cst.For, origins: frozenset[Variable], problem: str
) -> None:
    advice = "Gather the outputs and targets with accelerator.gather_for_metrics before counting."
    if origins & conversion.find_training_loaders():
        conversion.finding(loop, f"{problem} The metrics are those of one process. {advice}")
        return
    conversion.unprepared |= origins
    conversion.finding(
        loop,
        f"{problem} The loader is not prepared, so every process evaluates all samples. Prepare it. {advice}",
    )


def _gather(conversion: Conversion, loop: cst.For) -> str:
    """Insert a gather after the model's call in an evaluation loop; return the reason if it is not understood."""
    script = conversion.script
    calls = [
        node
        for node in descendants(loop.body)
        if isinstance(node, cst.Call) and script.variable(node.func) and script.kind_of(node.func) == "model"
    ]
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
    return isinstance(node, cst.AugAssign) or (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in {"append", "extend", "update"}
    )


def _insert_gather(
    conversion: Conversion, loop: cst.For, call: cst.Call, statement: Any, outer: list[Any]
) -> str:
    script = conversion.script
    assign = statement.body[0]
    is_plain = (
        isinstance(assign, cst.Assign)
        and assign.value is call
        and isinstance(assign.targets[0].target, cst.Name)
    )
    is_hoisted = not is_plain
    if is_plain:
        outputs = assign.targets[0].target.value
    else:
        used = {node.value for node in script.nodes if isinstance(node, cst.Name)}
        outputs = next(name for name in ("outputs", "predictions", "model_outputs") if name not in used)
    later = _list_later(script, outer)
    if is_hoisted:
        later = [*(one for one in descendants(statement)), *later]
    inside = set(descendants(call))
    derived = _find_derived(script, loop, [node for node in descendants(loop.body) if node not in set(later)])
    reads: dict[str, None] = {}
    for node in later:
        if node in inside or not isinstance(node, cst.Name):
            continue
        parent = script.parents[node]
        if (
            node.value == outputs
            and isinstance(parent, cst.Attribute)
            and parent.value is node
            and parent.attr.value not in _TENSOR_METHODS
        ):
            return f"The output of the model has fields ({outputs}.{parent.attr.value})."
        if node.value != outputs and _is_computed(script, loop, node, derived):
            return f"{node.value} is computed from the batch before the model is called."
        if script.kind_of(node) == "batch" and not isinstance(parent, cst.AssignTarget):
            reads[node.value] = None
    if any(
        isinstance(node, cst.Name)
        and node.value == outputs
        and isinstance(script.parents[node], cst.AssignTarget)
        for node in later
    ):
        return f"{outputs} is assigned again."
    conversion.gathered.add(loop)
    names = ", ".join([outputs, *reads])
    gathered = (
        f"{names} = {conversion.accelerator(loop)}.gather_for_metrics(({names}))"
        if reads
        else f"{names} = {conversion.accelerator(loop)}.gather_for_metrics({names})"
    )
    if is_hoisted:
        _hoist(conversion, call, statement, outputs)
        conversion.edits.insert_before(statement, gathered)
    else:
        conversion.edits.insert_after(statement, gathered)
    return ""


def _find_derived(script: Script, loop: cst.For, nodes: Iterable[cst.CSTNode]) -> set[Variable]:
    """Return the variables that are computed from the batch in these nodes."""
    known = {variable for one in descendants(loop.target) if (variable := script.variable(one))}
    found: set[Variable] = set()
    for node in nodes:
        if isinstance(node, (cst.Assign, cst.NamedExpr)) and any(
            script.variable(one) in known for one in descendants(node.value)
        ):
            targets = [one.target for one in node.targets] if isinstance(node, cst.Assign) else [node.target]
            names = {
                variable
                for one in targets
                for part in descendants(one)
                if (variable := script.variable(part))
            }
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
