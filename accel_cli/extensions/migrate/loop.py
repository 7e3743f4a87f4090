"""Steps of a training loop: backward passes, clipping, accumulation, mixed precision and the model's wrappers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.edits import set_function
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    NO_VARIABLE,
    Script,
    Variable,
    descendants,
    get_method,
    get_positional,
    to_code,
)

__all__ = [
    "LossReport",
    "convert_accumulation",
    "convert_backward",
    "convert_clipping",
    "convert_precision",
    "find_report",
    "find_terms",
    "list_losses",
]

_AUTOCAST = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.cpu.amp.autocast",
    "torch.amp.autocast_mode.autocast",
    "torch.cuda.amp.autocast_mode.autocast",
)
_CLIPPING = {
    "torch.nn.utils.clip_grad_norm_": "clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_": "clip_grad_value_",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "clip_grad_norm_",
}

_REPORTS = {"print", "append", "extend", "add_scalar", "log", "info", "write", "update", "set_description", "set_postfix"}  # fmt: skip
_OF_LOSSES = {"detach", "cpu", "data", "item", "numpy", "tolist", "mean", "sum", "squeeze", "clone", "float"}
"""Members of a loss by which it is reported."""


# Gradients


def convert_backward(conversion: Conversion) -> None:
    """Replace `loss.backward()` by `accelerator.backward(loss)`."""
    for call in conversion.backwards:
        assert isinstance(call.func, cst.Attribute)
        if any(arg.keyword is None or arg.star or arg.keyword.value == "gradient" for arg in call.args):
            conversion.finding(
                call, "backward() has a gradient as its argument. Pass a scalar loss to accelerator.backward."
            )
            continue
        loss: Any = call.func.value
        scaled = _get_scaled(conversion, loss)
        accelerator = cst.parse_expression(f"{conversion.accelerator(call)}.backward")
        conversion.edits.change(
            call,
            partial(
                _build_backward,
                function=accelerator,
                is_scaled=scaled is not None and not conversion.keeps_scalers,
            ),
        )
        conversion.losses[call] = loss if scaled is None else scaled


def _build_backward(node: cst.Call, function: cst.BaseExpression, *, is_scaled: bool) -> cst.Call:
    assert isinstance(node.func, cst.Attribute)
    loss: Any = node.func.value
    if is_scaled:
        loss = loss.args[0].value
    if loss.lpar and isinstance(loss, (cst.BinaryOperation, cst.IfExp)):
        loss = loss.with_changes(lpar=loss.lpar[1:], rpar=loss.rpar[1:])
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")) if node.args else cst.MaybeSentinel.DEFAULT
    return node.with_changes(func=function, args=[cst.Arg(loss, comma=comma), *node.args])


def _get_scaled(conversion: Conversion, loss: Any) -> Any:
    """Return the loss in `scaler.scale(loss)`."""
    if get_method(loss) == "scale":
        role = conversion.script.role_of_variable(loss.func.value)
        if role is not None and role.kind == "scaler" and len(loss.args) == 1:
            return loss.args[0].value
    return None


def convert_clipping(conversion: Conversion) -> None:
    """Replace torch's functions that clip gradients by methods of the Accelerator."""
    script = conversion.script
    for call in script.calls:
        name = _CLIPPING.get(script.qualified_name(call.func))
        if name is None:
            continue
        extra = [
            arg.keyword.value
            for arg in call.args
            if arg.keyword and arg.keyword.value not in {"parameters", "max_norm", "norm_type", "clip_value"}
        ]
        if extra or any(arg.star for arg in call.args):
            argument = ", ".join(extra) or "*"
            conversion.finding(
                call,
                f"accelerator.{name} has no argument {argument}. Remove it, and call this method: in fp16, it unscales the gradients first.",
            )
            continue
        conversion.edits.change(call, set_function(f"{conversion.accelerator(call)}.{name}"))


# Losses


def list_losses(conversion: Conversion) -> set[Variable]:
    """Return the variables of the losses of backward passes."""
    return {variable for loss in conversion.losses.values() if (variable := conversion.script.variable(loss))}


def find_terms(conversion: Conversion) -> set[Variable]:
    """Return the terms of losses that are sums, and the variables that are sums of losses."""
    script = conversion.script
    losses = list_losses(conversion)
    found: set[Variable] = set()
    for node in script.nodes:
        if isinstance(node, cst.Assign) and isinstance(node.value, cst.BinaryOperation):
            terms = {variable for one in _list_terms(node.value) if (variable := script.variable(one))}
            target = script.variable(node.targets[0].target)
            if target in losses:
                found |= terms
            elif terms & losses and target is not None:
                found.add(target)
    return found


def _list_terms(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(node, cst.BinaryOperation) and isinstance(
        node.operator, (cst.Add, cst.Subtract, cst.Multiply, cst.Divide)
    ):
        return [*_list_terms(node.left), *_list_terms(node.right)]
    return [node]


@dataclass(frozen=True)
class LossReport:
    """The place where a loss is printed, logged or added up."""

    name: cst.BaseExpression
    node: cst.BaseExpression
    """The expression to replace: `loss.item()`, or the name."""
    is_number: bool
    """Whether the expression has the value of the loss as a number."""


def find_report(script: Script, name: Any) -> LossReport | None:
    """Return the report of a loss at a place where it is read; None for another use."""
    node: Any = name
    members: list[str] = []
    while isinstance(attribute := script.parents.get(node), cst.Attribute) and attribute.value is node:
        outer = script.parents[attribute]
        node = outer if isinstance(outer, cst.Call) and outer.func is attribute else attribute
        members.append(attribute.attr.value)
    if not set(members) <= _OF_LOSSES or isinstance(script.parents.get(node), cst.AssignTarget):
        return None
    is_plain = set(members) <= {"detach", "cpu", "data", "item"}
    arg: Any = script.parents.get(node)
    call: Any = script.parents[arg] if isinstance(arg, cst.Arg) else None
    if is_plain and "item" in members:
        return LossReport(name, node, is_number=True)
    if is_plain and script.is_call_of(call, "builtins.float"):
        return LossReport(name, call, is_number=True)
    is_number = "item" in members or (
        get_method(call) == "step" and script.kind_of(call.func.value) == "scheduler"
    )
    return LossReport(name, name, is_number) if is_number or _is_reported(script, node) else None


def _is_reported(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an expression is printed, logged, collected or added to a sum."""
    for one in script.ancestors(node):
        if isinstance(one, cst.Call) and node not in set(descendants(one.func)):
            method = to_code(one.func).rpartition(".")[2]
            if method in _REPORTS or method == "float":
                return method != "float"
        if isinstance(one, cst.AugAssign):
            return not script.variables(one.target) & script.variables(node)
        if isinstance(one, (cst.BaseSuite, cst.Assign)):
            return False
    return False


# Accumulation


def convert_accumulation(conversion: Conversion) -> None:
    """Replace steps after every n-th batch by `accelerator.accumulate`.

    A cycle of another form stays as it is: the script divides the loss and decides when the optimizer steps. It is exact on
    several processes too, and averages the gradients of each batch instead of once in a cycle.
    """
    script = conversion.script
    steps = [node for node in script.nodes if isinstance(node, cst.If) and _steps_optimizer(conversion, node)]
    cycles = [cycle for node in steps if (cycle := _read_cycle(conversion, node)) is not None]
    if len({cycle.count for cycle in cycles}) > 1 or _has_closures(conversion):
        cycles = []
    known = {cycle.condition for cycle in cycles}
    for node in steps:
        if node not in known and "%" in to_code(node.test):
            conversion.note(
                node,
                "The gradients are averaged over the processes after each batch, and not once in a cycle. For speed, use accelerator.accumulate(model) and Accelerator(gradient_accumulation_steps=...).",
            )
    for cycle in cycles:
        _convert_cycle(conversion, cycle)
    for cycle in cycles[:1]:
        _pass_steps(conversion, cycle.count, cycle.condition)


def _has_closures(conversion: Conversion) -> bool:
    """Return whether an optimizer runs the backward passes itself."""
    return any(
        get_method(call) == "step"
        and bool(call.args)
        and isinstance(call.func, cst.Attribute)
        and conversion.script.kind_of(call.func.value) == "optimizer"
        for call in conversion.script.calls
    )


def _steps_optimizer(conversion: Conversion, node: cst.If) -> bool:
    """Return whether the body of a condition in a training loop is an optimizer step, and the backward pass is not in it."""
    script = conversion.script
    nodes = set(descendants(node.body))
    if any(call in nodes for call in conversion.backwards):
        return False
    loop = script.find_ancestor(node, cst.For)
    if loop is None or not any(call in set(descendants(loop.body)) for call in conversion.backwards):
        return False
    for call in nodes:
        if get_method(call) == "step":
            owners = [call.func.value, *(arg.value for arg in call.args)]
            if any(script.kind_of(owner) == "optimizer" for owner in owners):
                return True
    return False


@dataclass(frozen=True)
class _Cycle:
    """A loop whose optimizer steps after every n-th batch."""

    loop: cst.For
    condition: cst.If
    """The condition of the step."""
    count: str
    """The code of n."""
    ends_with_epoch: bool
    """Whether the last batch of an epoch also ends a cycle in the script."""
    divisions: tuple[_Division, ...]


@dataclass(frozen=True)
class _Division:
    """The division of a loss by the number of batches of a cycle."""

    loss: cst.BaseExpression
    node: cst.CSTNode
    """The expression or statement that divides."""


def _read_cycle(conversion: Conversion, node: cst.If) -> _Cycle | None:
    """Return the cycle of a condition of the form `(i + 1) % n == 0`; None for another form."""
    script = conversion.script
    loop = script.find_ancestor(node, cst.For)
    if loop is None or node.orelse is not None:
        return None
    match = _match_condition(conversion, node, loop)
    if match is None:
        return None
    inside, own = set(descendants(loop)), set(descendants(node.body))
    if any(get_method(one) == "zero_grad" and one not in own for one in descendants(loop.body)):
        return None
    losses = [
        conversion.losses[call]
        for call in conversion.backwards
        if call in inside and call in conversion.losses
    ]
    divisions = [_find_division(conversion, loss, loop, match[1]) for loss in losses]
    found = tuple(one for one in divisions if one is not None)
    return _Cycle(loop, node, match[1], bool(match[2]), found) if len(found) == len(divisions) else None


def _match_condition(conversion: Conversion, node: cst.If, loop: cst.For) -> re.Match[str] | None:
    """Return the number of batches in `(i + 1) % n == 0`, and the rest in `or i + 1 == len(loader)`."""
    if not isinstance(loop.target, cst.Tuple):
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
    return match or re.fullmatch(rf"{re.escape(index)}\s*%\s*([\w.]+)\s*==\s*\1\s*-\s*1()", test)


def _convert_cycle(conversion: Conversion, cycle: _Cycle) -> None:
    script = conversion.script
    node, loop = cycle.condition, cycle.loop
    conversion.cycles.append((loop, node))
    if not cycle.ends_with_epoch:
        conversion.note(
            node,
            "If the number of batches is not divisible by the accumulation steps, the last cycle of an epoch now also ends with an optimizer step.",
        )
    accelerator = conversion.accelerator(node)
    conversion.edits.change(
        node,
        lambda one: one.with_changes(
            test=cst.parse_expression(f"{accelerator}.sync_gradients"),
            whitespace_before_test=cst.SimpleWhitespace(" "),
        ),
    )
    models = [variable.code for variable in conversion.creations if script.roles[variable].kind == "model"]
    names = _find_local_models(conversion, loop) or models
    arguments = ", ".join(names)

    def wrap(one: Any) -> Any:
        item = cst.WithItem(cst.parse_expression(f"{accelerator}.accumulate({arguments})"))
        return one.with_changes(body=cst.IndentedBlock([cst.With([item], one.body)]))

    conversion.edits.change(loop, wrap)
    for division in cycle.divisions:
        _remove_division(conversion, division, cycle.count)


def _find_local_models(conversion: Conversion, loop: cst.For) -> list[str]:
    """Return the trained models that a loop calls, as it names them."""
    names = []
    for node in descendants(loop.body):
        if conversion.script.is_model_call(node):
            name = to_code(node.func)
            if name not in names:
                names.append(name)
    return names


def _find_division(
    conversion: Conversion, loss: cst.BaseExpression, loop: cst.For, count: str
) -> _Division | None:
    """Return where a loss is divided by the number of batches of a cycle; None without a division."""
    script = conversion.script
    if _is_division(loss, count):
        return _Division(loss, loss)
    variable = script.variable(loss) if isinstance(loss, cst.Name) else None
    for node in descendants(loop.body):
        if isinstance(node, cst.Assign):
            divides = script.variable(node.targets[0].target) == variable and _is_division(node.value, count)
        elif isinstance(node, cst.AugAssign):
            is_operator = isinstance(node.operator, cst.DivideAssign)
            divides = (
                is_operator and script.variable(node.target) == variable and to_code(node.value) == count
            )
        else:
            continue
        if divides and variable is not None:
            return None if _is_read_after(conversion, variable, node) else _Division(loss, node)
    return None


def _is_read_after(conversion: Conversion, variable: Variable, division: cst.CSTNode) -> bool:
    """Return whether a divided loss is read for something else than a backward pass or a report."""
    script = conversion.script
    return any(
        script.start(one) > script.end(division)
        and find_report(script, one) is None
        and not any(outer in conversion.backwards for outer in script.ancestors(one))
        for one in script.list_reads(variable)
    )


def _remove_division(conversion: Conversion, division: _Division, count: str) -> None:
    """Remove the division of the loss by the number of batches, which `accelerator.backward` does."""
    script, node, loss = conversion.script, division.node, division.loss
    if node is loss:
        conversion.edits.change(loss, lambda one: one.left)
        return
    if isinstance(node, cst.Assign) and to_code(node.value.left) != to_code(loss):  # type: ignore[attr-defined]
        conversion.edits.change(node.value, lambda one: one.left)
    else:
        conversion.edits.remove(node)
    if variable := script.variable(loss):
        conversion.divided[variable] = count, script.start(node)


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
    if count.isdigit() or is_known_before(conversion, root):
        conversion.arguments["gradient_accumulation_steps"] = count
        return
    loop: Any = script.find_ancestor(node, cst.For)
    for one in script.ancestors(loop):
        if isinstance(one, (cst.For, cst.While)):
            loop = one
        elif isinstance(one, cst.FunctionDef):
            break
    conversion.edits.insert_before(
        loop, f"{conversion.accelerator(node)}.gradient_accumulation_steps = {count}"
    )


def is_known_before(conversion: Conversion, name: str) -> bool:
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


# Mixed precision


def convert_precision(conversion: Conversion) -> None:
    """Replace autocast and GradScaler by `mixed_precision`; both stay where they are used in a way that is not understood."""
    script = conversion.script
    is_known = all(_is_known_use(conversion, node) for node in _list_scalers(script))
    value = _read_precision(conversion) if is_known else None
    if value is None:
        conversion.keeps_scalers = True
        return
    for call in script.calls:
        if script.is_call_of(call, *_AUTOCAST):
            conversion.edits.replace(call, f"{conversion.accelerator(call)}.autocast()")
    conversion.arguments["mixed_precision"] = value
    _remove_scalers(conversion)


def _read_precision(conversion: Conversion) -> str | None:
    """Return the code of the number format of all contexts of autocast; None if they stay."""
    if not _trains_in_autocast(conversion):
        return None
    script = conversion.script
    formats = {
        _read_autocast(conversion, call) for call in script.calls if script.is_call_of(call, *_AUTOCAST)
    }
    return formats.pop() if len(formats) == 1 else None


def _trains_in_autocast(conversion: Conversion) -> bool:
    """Return whether the trained models are called in autocast, whose format the Accelerator can set for all of them.

    Other contexts stay, with their scalers: a model that is prepared runs in them as before.
    """
    script = conversion.script
    contexts = [call for call in script.calls if script.is_call_of(call, *_AUTOCAST)]
    if not contexts:
        return False
    inside: set[Any] = set()
    for call in conversion.backwards:
        region = script.find_ancestor(call, (cst.For, cst.While, cst.FunctionDef)) or script.module
        inside |= set(descendants(region))
    pending = [function for call, function in script.callees.items() if call in inside]
    while pending:
        function = pending.pop()
        if function.body not in inside:
            inside |= set(descendants(function))
            pending += [
                callee for call, callee in script.callees.items() if call in set(descendants(function))
            ]
    calls = [node for node in inside if script.is_model_call(node)]
    covered = [
        call for call in calls if any(script.is_call_of(one, *_AUTOCAST) for one in script.contexts(call))
    ]
    uses_scaler = any(role.kind == "scaler" for role in script.roles.values())
    is_named = any(not isinstance(script.parents[call], (cst.WithItem, cst.Decorator)) for call in contexts)
    if is_named or (not uses_scaler and (not inside & set(contexts) or len(covered) < len(calls))):
        return False
    return bool(calls) and len(covered) == len(calls)


def _read_autocast(conversion: Conversion, call: cst.Call) -> str | None:
    """Return the code of the number format of a context; None if it is not known when the Accelerator is created."""
    script = conversion.script
    name = script.qualified_name(call.func)
    enabled = get_positional(call, 9, "enabled")
    dtype = get_positional(call, 1, "dtype")
    device = get_positional(call, 0, "device_type") if "cuda" not in name and "cpu" not in name else None
    condition = "True" if enabled is None else _read_condition(conversion, enabled)
    if condition is None or (device is None and "cuda" not in name and "cpu" not in name):
        return None
    if dtype is not None:
        known = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}.get(
            script.qualified_name(dtype)
        )
    else:
        is_cpu = "cpu" in name or (device is not None and to_code(device)[1:-1] == "cpu")
        known = "bf16" if is_cpu else "fp16"
    if known is None:
        return None
    choice = [f'"{known}"', "if", condition, "else", '"no"']
    return choice[0] if condition == "True" else " ".join(choice)


def _read_condition(conversion: Conversion, node: cst.BaseExpression) -> str | None:
    """Return the code of a condition where the Accelerator is created; None if its value is not known there."""
    code = to_code(node)
    values = [
        value
        for _, value in conversion.script.assigned.get(conversion.script.variable(node) or NO_VARIABLE, [])
    ]
    if len(values) == 1 and to_code(values[0]) == "torch.cuda.is_available()":
        return to_code(values[0])
    if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        is_constant = isinstance(node.comparisons[0].comparator, (cst.SimpleString, cst.Integer))
        return code.strip("()") if is_constant and _read_condition(conversion, node.left) else None
    is_known = isinstance(node, (cst.Name, cst.Attribute)) and is_known_before(
        conversion, code.partition(".")[0]
    )
    return code if code in {"True", "torch.cuda.is_available()"} or is_known else None


def _remove_scalers(conversion: Conversion) -> None:
    script = conversion.script
    for variable, entries in script.assigned.items():
        role = script.roles.get(variable)
        if role is not None and role.kind == "scaler":
            for node, value in entries:
                if script.kind_of(value) == "scaler":
                    conversion.edits.remove(node)
    for node in _list_scalers(script):
        statement, call = _get_use(script, node)
        if get_method(call) in {"update", "unscale_"}:
            conversion.edits.remove(statement)
        elif get_method(call) == "step":
            conversion.edits.change(
                call,
                lambda one: cst.Call(cst.Attribute(one.args[0].value, cst.Name("step"))),
            )


def _list_scalers(script: Script) -> list[cst.CSTNode]:
    """Return the places where a scaler is read."""
    return [
        node
        for node in script.nodes
        if isinstance(node, (cst.Name, cst.Attribute))
        and not isinstance(script.parents.get(node), (cst.AssignTarget, cst.Param))
        and script.kind_of(node) == "scaler"
    ]


def _get_use(script: Script, node: cst.CSTNode) -> tuple[Any, Any]:
    """Return the statement and the call in which a method of a scaler is called."""
    attribute = script.parents.get(node)
    call = script.parents.get(attribute) if isinstance(attribute, cst.Attribute) else None
    return (script.parents.get(call) if call is not None else None), call


def _is_known_use(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a scaler scales the loss of a backward pass, or is called in a statement that can be removed."""
    statement, call = _get_use(conversion.script, node)
    if get_method(call) == "scale":
        return call in {one.func.value for one in conversion.backwards if isinstance(one.func, cst.Attribute)}
    if not isinstance(statement, cst.Expr):
        return False
    return get_method(call) in {"update", "unscale_"} or (get_method(call) == "step" and len(call.args) == 1)
