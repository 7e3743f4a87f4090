"""Steps of a training loop: backward passes, clipping, accumulation, mixed precision and the model's wrappers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import libcst as cst

from accel_cli.migrate.edits import set_function
from accel_cli.migrate.raw import Conversion, strip_wrappers
from accel_cli.migrate.script import (
    NO_VARIABLE,
    WRAPPERS,
    Variable,
    descendants,
    get_method,
    get_positional,
    to_code,
)

__all__ = [
    "convert_accumulation",
    "convert_backward",
    "convert_clipping",
    "convert_precision",
    "convert_wrappers",
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


# Gradients


def convert_backward(conversion: Conversion) -> None:
    """Replace `loss.backward()` by `accelerator.backward(loss)`."""
    script = conversion.script
    for call in conversion.backwards:
        assert isinstance(call.func, cst.Attribute)
        if any(arg.keyword is None or arg.star or arg.keyword.value == "gradient" for arg in call.args):
            raise conversion.unsafe(
                call, "backward() has a gradient as its argument. Pass a scalar loss to accelerator.backward."
            )
        loss: Any = call.func.value
        scaled = _get_scaled(conversion, loss)
        accelerator = cst.parse_expression(f"{conversion.accelerator(call)}.backward")
        if (
            scaled is None
            and isinstance(loss, (cst.Call, cst.Attribute))
            and script.kind_of(loss) == "scaler"
        ):
            raise conversion.unsafe(
                call, "The scaled loss is not understood. Pass the loss to accelerator.backward."
            )
        conversion.edits.change(
            call,
            partial(
                _build_backward,
                function=accelerator,
                is_scaled=scaled is not None and not conversion.keeps_scalers,
            ),
        )
        conversion.losses[call] = loss if scaled is None else scaled


def _check_closures(conversion: Conversion) -> None:
    """Raise an error for an optimizer that runs the backward pass itself and accumulates."""
    for call in conversion.script.calls:
        is_step = isinstance(call.func, cst.Attribute) and call.func.attr.value == "step" and bool(call.args)
        if (
            is_step
            and isinstance(call.func, cst.Attribute)
            and conversion.script.kind_of(call.func.value) == "optimizer"
        ):
            raise conversion.unsafe(
                call,
                "The optimizer gets a closure, which runs the backward passes of a cycle at once. Run the backward pass before the step.",
            )


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
            raise conversion.unsafe(
                call, f"accelerator.{name} has no argument {', '.join(extra) or '*'}. Remove it."
            )
        conversion.edits.change(call, set_function(f"{conversion.accelerator(call)}.{name}"))


def convert_wrappers(conversion: Conversion) -> None:
    """Remove `DataParallel`, and replace `model.module` by `unwrap_model`."""
    script = conversion.script
    for node in script.nodes:
        if (
            isinstance(node, cst.Call)
            and script.qualified_name(node.func) in WRAPPERS - {"torch.compile"}
            and "DataParallel" in script.qualified_name(node.func)
        ):
            assign = script.find_ancestor(node, (cst.Assign, cst.BaseSuite))
            is_plain = "SyncBatchNorm" not in to_code(node) and "torch.compile" not in to_code(node)
            if (
                is_plain
                and isinstance(assign, cst.Assign)
                and to_code(assign.targets[0].target) == to_code(strip_wrappers(script, assign.value))
            ):
                conversion.edits.remove(assign)
            else:
                conversion.edits.change(node, lambda one: one.args[0].value)
        elif (
            isinstance(node, cst.Attribute)
            and node.attr.value == "module"
            and script.kind_of(node.value) == "model"
        ):
            function = f"{conversion.accelerator(node)}.unwrap_model"
            conversion.edits.change(
                node,
                partial(_call_on_value, function=function),
            )


def _call_on_value(node: cst.Attribute, function: str) -> cst.Call:
    return cst.Call(cst.parse_expression(function), [cst.Arg(node.value)])


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
    if steps:
        _check_closures(conversion)
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
        if get_method(call) == "step":
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
    conversion.cycles.append((loop, node))
    cycle = set(descendants(node.body))
    for one in descendants(loop.body):
        is_reset = get_method(one) == "zero_grad"
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
        if conversion.script.is_model_call(node):
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
    if count.isdigit() or is_known_before(conversion, root):
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
    """Replace autocast and GradScaler by `mixed_precision`."""
    script = conversion.script
    formats: set[str] = set()
    if not _trains_in_autocast(conversion):
        _convert_scaler_format(conversion)
        if not conversion.keeps_scalers:
            _remove_scalers(conversion)
        return
    for call in script.calls:
        if script.is_call_of(call, *_AUTOCAST):
            formats.add(_read_autocast(conversion, call))
            accelerator = conversion.accelerator(call)
            conversion.edits.replace(call, f"{accelerator}.autocast()")
    if len(formats) > 1:
        call = next(call for call in script.calls if script.is_call_of(call, *_AUTOCAST))
        raise conversion.unsafe(
            call, f"autocast is used with {' and '.join(sorted(formats))}. Use the same format."
        )
    if formats:
        conversion.arguments["mixed_precision"] = formats.pop()
    _remove_scalers(conversion)


def _trains_in_autocast(conversion: Conversion) -> bool:
    """Return whether the trained models are called in autocast, whose format the Accelerator can set for all of them.

    Other contexts stay: a model that is prepared runs in them as before. A scaler without one around all calls is an error.
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
    covered = [call for call in calls if _is_in_autocast(conversion, call)]
    uses_scaler = any(role.kind == "scaler" for role in script.roles.values())
    is_named = any(not isinstance(script.parents[call], (cst.WithItem, cst.Decorator)) for call in contexts)
    if is_named or (not uses_scaler and (not inside & set(contexts) or len(covered) < len(calls))):
        return False
    if not calls or len(covered) < len(calls):
        missing = next((call for call in calls if call not in covered), contexts[0])
        raise conversion.unsafe(
            missing,
            "Only some calls of the trained models are in autocast, and Accelerator(mixed_precision=...) converts all. Use accelerator.autocast() for all of them.",
        )
    return True


def _convert_scaler_format(conversion: Conversion) -> None:
    """Pass the condition of a scaler whose autocast stays to the Accelerator, which then scales the loss.

    If it is not known when the Accelerator is created, the scaler stays too, and steps a prepared optimizer.
    """
    script = conversion.script
    for variable, entries in script.assigned.items():
        role = script.roles.get(variable)
        for _, value in entries if role is not None and role.kind == "scaler" else ():
            if not isinstance(value, cst.Call) or script.kind_of(value) != "scaler":
                continue
            enabled = get_positional(value, 5, "enabled")
            condition = "True" if enabled is None else _read_condition(conversion, enabled)
            if condition is None:
                conversion.keeps_scalers = True
                return
            suffix = "" if condition == "True" else f' if {condition} else "no"'
            conversion.arguments["mixed_precision"] = f'"fp16"{suffix}'


def _is_in_autocast(conversion: Conversion, call: cst.Call) -> bool:
    script = conversion.script
    for one in script.ancestors(call):
        if isinstance(one, cst.With):
            contexts: list[cst.BaseExpression] = [item.item for item in one.items]
        elif isinstance(one, cst.FunctionDef):
            contexts = [decorator.decorator for decorator in one.decorators]
        else:
            continue
        if any(script.is_call_of(context, *_AUTOCAST) for context in contexts):
            return True
    return False


def _read_autocast(conversion: Conversion, call: cst.Call) -> str:
    script = conversion.script
    name = script.qualified_name(call.func)
    enabled = get_positional(call, 9, "enabled")
    dtype = get_positional(call, 1, "dtype")
    device = get_positional(call, 0, "device_type") if "cuda" not in name and "cpu" not in name else None
    condition = "True" if enabled is None else _read_condition(conversion, enabled)
    if condition is None or (device is None and "cuda" not in name and "cpu" not in name):
        raise conversion.unsafe(
            call,
            "autocast is enabled by a value that is not known when the Accelerator is created. Use accelerator.autocast() and Accelerator(mixed_precision=...).",
        )
    suffix = "" if condition == "True" else f' if {condition} else "no"'
    if dtype is not None:
        known = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}.get(
            script.qualified_name(dtype)
        )
        if known is None:
            raise conversion.unsafe(
                call,
                "The dtype of autocast is not a constant. Use accelerator.autocast() and Accelerator(mixed_precision=...).",
            )
        return f'"{known}"{suffix}'
    is_cpu = "cpu" in name or (device is not None and to_code(device)[1:-1] == "cpu")
    return f'"{"bf16" if is_cpu else "fp16"}"{suffix}'


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
    for node in script.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)) or isinstance(
            script.parents.get(node), (cst.AssignTarget, cst.Param)
        ):
            continue
        role = script.role_of_variable(node)
        if role is not None and role.kind == "scaler":
            _convert_scaler_use(conversion, node)


def _convert_scaler_use(conversion: Conversion, node: cst.CSTNode) -> None:
    script = conversion.script
    attribute = script.parents.get(node)
    call = script.parents.get(attribute) if isinstance(attribute, cst.Attribute) else None
    method = attribute.attr.value if isinstance(attribute, cst.Attribute) else ""
    statement = script.parents.get(call) if call is not None else None
    if (
        isinstance(call, cst.Call)
        and method == "scale"
        and call in {one.func.value for one in conversion.backwards if isinstance(one.func, cst.Attribute)}
    ):
        return
    if isinstance(call, cst.Call) and isinstance(statement, cst.Expr):
        if method in {"update", "unscale_"}:
            conversion.edits.remove(statement)
            return
        if method == "step" and len(call.args) == 1:
            conversion.edits.change(
                call,
                lambda one: cst.Call(cst.Attribute(one.args[0].value, cst.Name("step"))),
            )
            return
    raise conversion.unsafe(
        node,
        "The GradScaler is used in a way that is not converted. Remove it: Accelerator(mixed_precision=...) scales the loss.",
    )
