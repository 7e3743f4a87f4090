"""Devices: moves of models and batches, parameters for the device, and the option `--device`."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.edits import drop_last_comma, drop_parameters
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    SETTINGS,
    WRAPPERS,
    Role,
    Script,
    Variable,
    descendants,
    get_method,
    is_device_name,
    to_code,
)

__all__ = ["convert_devices", "find_devices_left"]

_UNMOVED = {
    "parameters",
    "named_parameters",
    "train",
    "eval",
    "to",
    "cuda",
    "load_state_dict",
    "state_dict",
    "apply",
}
"""Methods of a model that do not depend on its device."""
_VISIBLE = re.compile(r"environ\[.CUDA_VISIBLE_DEVICES.\]$")


def convert_devices(conversion: Conversion) -> None:
    """Remove moves of prepared models and batches, and replace the device by that of the Accelerator."""
    script = conversion.script
    dropped = _drop_parameters(conversion)
    for call in script.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in {"to", "cuda"}:
            _convert_move(conversion, call, dropped)
    for node in script.nodes:
        if _is_device_use(conversion, node, dropped):
            conversion.edits.replace(node, _format_device(conversion, node))
        elif _is_inline_device(conversion, node, dropped):
            conversion.edits.replace(node, f"{conversion.accelerator(node)}.device")
    for node in script.nodes:
        if isinstance(node, cst.Assign) and node not in conversion.edits.removed:
            _remove_self_assignment(conversion, node)
    _remove_device_option(conversion)


def _drop_parameters(conversion: Conversion) -> set[Variable]:
    """Remove parameters for the device from functions that get the Accelerator; return those that stay."""
    script = conversion.script
    kept: set[Variable] = set()
    for function in script.functions:
        cls = script.class_of(function)
        for param in (*function.params.params, *function.params.kwonly_params):
            variable = script.parameter(function, param.name.value)
            role = script.roles.get(variable)
            if role is None or role.kind != "device":
                continue
            calls = script.calls_of(function)
            bound = [
                arg
                for call in calls
                if (arg := script.bind(call, function).get(param.name.value))
                and script.kind_of(arg.value) == "device"
            ]
            definition = cls if cls is not None and function.name.value == "__init__" else function
            is_only_called = len(script.references.get(definition, [])) == len(calls)
            is_module = cls is not None and script.is_torch_class(cls)
            passed = [call for call in calls if param.name.value in script.bind(call, function)]
            if not passed and function is conversion.home:
                conversion.note(
                    param,
                    f"The parameter {param.name.value} has no effect. Use accel launch --cpu to train on the CPU.",
                )
                continue
            if param in function.params.kwonly_params:
                continue
            if (
                not calls
                or function.name.value in conversion.read_elsewhere
                or len(bound) != len(calls)
                or not (function is conversion.home or conversion.can_get(function.body.body[0]))
                or not is_only_called
                or is_module
                or script.find_ancestor(function, cst.FunctionDef)
            ):
                kept.add(variable)
                continue
            conversion.edits.change(function, partial(drop_parameters, names={param.name.value}))
            for call, arg in zip(calls, bound, strict=True):
                conversion.edits.change(call, partial(_without_argument, index=list(call.args).index(arg)))
                conversion.dropped |= set(descendants(arg))
    return kept


def _without_argument(call: cst.Call, index: int) -> cst.Call:
    # Arguments that were inserted before stand in front of those of the script.
    args = list(call.args)
    del args[index]
    return call.with_changes(args=drop_last_comma(args))


def _is_device_use(conversion: Conversion, node: cst.CSTNode, kept: set[Variable]) -> bool:
    script = conversion.script
    if not isinstance(node, (cst.Name, cst.Attribute)) or node in conversion.dropped:
        return False
    parent = script.parents.get(node)
    while isinstance(parent, (cst.Element, cst.Tuple)):
        parent = script.parents.get(parent)
    is_kept = script.kind_of(node) == "device" and not conversion.can_get(node)
    if (
        is_kept
        or isinstance(parent, (cst.AssignTarget, cst.Param, cst.AnnAssign, cst.NameItem))
        or any(one in conversion.edits.removed for one in script.ancestors(node))
    ):
        return False
    if isinstance(parent, cst.Attribute) and parent.attr is node:
        return False
    if isinstance(parent, cst.Arg) and parent.keyword is node:
        return False
    if script.is_settings_device(node):
        return True
    variable = script.variable(node)
    role = script.roles.get(variable) if variable else None
    return role is not None and role.kind == "device" and variable not in kept and not (role.origins & kept)


def _is_inline_device(conversion: Conversion, node: cst.CSTNode, kept: set[Variable]) -> bool:
    """Return whether a node is a device of the rank that is computed where it is used, as in `device=f"cuda:{rank}"`, or a fixed one."""
    script = conversion.script
    if node in conversion.dropped or not _is_argument_for_device(script, node):
        return False
    if _is_fixed(script, node):
        return conversion.can_get(node)
    if not isinstance(node, (cst.FormattedString, cst.Call)) or node in script.callees:
        return False
    is_own = any(
        isinstance(one, cst.FormattedStringExpression) or script.kind_of(one) in {"local_rank", "rank"}
        for one in descendants(node)
    ) or (isinstance(node, cst.Call) and bool(script.variables(node)))
    return (
        is_own
        and script.kind_of(node) == "device"
        and not script.variables(node) & kept
        and conversion.can_get(node)
    )


def _is_argument_for_device(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is an argument of `to`, or one for the device of a function of torch."""
    arg = script.parents.get(node)
    call: Any = script.parents[arg] if isinstance(arg, cst.Arg) else None
    if not isinstance(call, cst.Call) or not isinstance(arg, cst.Arg):
        return False
    keyword = arg.keyword.value if arg.keyword is not None else ""
    name = script.qualified_name(call.func)
    return (
        (get_method(call) == "to" and (keyword == "device" or arg is call.args[0]))
        or (keyword in {"device", "map_location"} and name.startswith("torch."))
        or (keyword == "device" and isinstance(node, cst.FormattedString))
        or name == "torch.set_default_device"
    )


def _format_device(conversion: Conversion, node: cst.CSTNode) -> str:
    """Return the expression for a device; for a string that is compared or joined, that of its type."""
    script = conversion.script
    device = f"{conversion.accelerator(node)}.device"
    parent: Any = script.parents.get(node)
    if isinstance(parent, cst.ComparisonTarget):
        parent = script.parents[parent]
    call = script.parents.get(parent) if isinstance(parent, cst.Arg) else None
    is_joined = isinstance(parent, cst.BinaryOperation)
    is_method = isinstance(parent, cst.Attribute) and parent.attr.value in dir(str)
    is_format = isinstance(call, cst.Call) and script.qualified_name(call.func).endswith("autocast")
    if not (isinstance(parent, cst.Comparison) or is_joined or is_method or is_format) or not _is_text(
        script, node
    ):
        return device
    texts = [to_code(one) for one in descendants(parent) if isinstance(one, cst.SimpleString)]
    return f"str({device})" if any(":" in text for text in texts) and not is_joined else f"{device}.type"


def _is_text(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a device is a string in the script."""
    variable = script.variable(node)
    role = script.roles.get(variable) if variable else None
    variables = {variable, *(role.origins if role else ())}
    values = [value for one in variables if one is not None for _, value in script.assigned.get(one, [])]
    if not values:
        return script.is_settings_device(node)
    return not any(
        script.is_call_of(one, "torch.device", "torch.accelerator.current_accelerator")
        and not isinstance(script.parents[one], cst.Attribute)
        for value in values
        for one in descendants(value)
    )


def _convert_move(conversion: Conversion, call: cst.Call, kept: set[Variable]) -> None:
    script, func = conversion.script, call.func
    assert isinstance(func, cst.Attribute)
    is_cuda = func.attr.value == "cuda"
    target = call.args[0].value if call.args else None
    role = script.role_of(target) if target is not None else None
    is_device = (
        getattr(role, "kind", "") in {"device", "rank", "local_rank"}
        or (target is not None and (_is_fixed(script, target) or _is_item(target)))
        or (isinstance(target, cst.SimpleString) and to_code(target)[1:-1] in {"cuda", "mps"})
    )
    if not is_cuda and not is_device:
        return
    variable = script.variable(target) if target is not None else None
    if variable in kept or (role is not None and getattr(role, "origins", frozenset()) & kept):
        return
    owner = script.role_of(func.value)
    is_prepared = (
        isinstance(owner, Role) and owner.kind in {"model", "batch"} and conversion.is_prepared(owner.origins)
    ) and script.keeps_role(func.value)
    others = [arg for arg in call.args[1:] if arg.keyword is None or arg.keyword.value != "non_blocking"]
    is_model = _creates_trained_model(conversion, call) or (isinstance(owner, Role) and owner.kind == "model")
    if (is_prepared or is_model) and not others and not (is_model and _is_read_before(conversion)):
        _strip(conversion, call)
        return
    if not conversion.can_get(call):
        return
    device = f"{conversion.accelerator(call)}.device"
    if is_cuda:
        conversion.edits.change(
            call,
            lambda node: node.with_changes(
                func=node.func.with_changes(attr=cst.Name("to")),
                args=[cst.Arg(cst.parse_expression(device)), *node.args[1:]],
            ),
        )
    elif target is not None and getattr(role, "kind", "") != "device":
        conversion.edits.replace(target, device)


def _is_read_before(conversion: Conversion) -> bool:
    """Return whether a model is copied, called or passed on before it is prepared, so that it must be moved already."""
    script = conversion.script
    creations = {node for nodes in conversion.creations.values() for node in nodes}
    if any(
        one in script.constructed
        for variable in conversion.creations
        if script.roles[variable].kind == "optimizer"
        for _, value in script.assigned.get(variable, [])
        for one in descendants(value)
    ):
        return True  # an optimizer of the script may copy the weights
    for variable, nodes in conversion.creations.items():
        if script.roles[variable].kind != "model":
            continue
        home = script.function_of(nodes[0])
        last = max(script.line(one) for one in creations if script.function_of(one) is home)
        for node in script.nodes:
            if script.function_of(node) is not home or not script.line(nodes[0]) < script.line(node) <= last:
                continue
            parent = script.parents.get(node)
            is_attribute = isinstance(parent, cst.Attribute) and parent.attr.value in _UNMOVED
            if (
                isinstance(node, (cst.Name, cst.Attribute))
                and script.variable(node) == variable
                and not is_attribute
                and not isinstance(parent, (cst.AssignTarget, cst.Attribute))
                and not creations & set(script.ancestors(node))
            ):
                return True
    return False


def _creates_trained_model(conversion: Conversion, call: cst.Call) -> bool:
    script = conversion.script
    assign = script.find_ancestor(call, (cst.Assign, cst.AnnAssign, cst.Return, cst.Expr))
    outer = script.parents[call]
    while isinstance(outer, cst.Arg) and script.is_call_of(script.parents[outer], *WRAPPERS):
        outer = script.parents[script.parents[outer]]
    if isinstance(assign, cst.Return):
        return script.kind_of(call) == "model"
    return any(
        assign in nodes
        and script.roles[variable].kind == "model"
        and variable not in conversion.unprepared
        and outer is assign
        for variable, nodes in conversion.creations.items()
    )


def _strip(conversion: Conversion, call: cst.Call) -> None:
    """Replace `x.to(device)` by `x`, and remove the statement if it is nothing else."""
    statement = conversion.script.parents[call]
    if isinstance(statement, cst.Expr):
        conversion.edits.remove(statement)
        return
    conversion.stripped.add(call)
    conversion.dropped |= {node for arg in call.args for node in descendants(arg)}
    conversion.edits.change(call, lambda node: node.func.value)


def _remove_self_assignment(conversion: Conversion, node: cst.Assign) -> None:
    """Remove `x = x.to(device)` and `batch = {k: v.to(device) for k, v in batch.items()}` of prepared objects."""
    stripped = [one for one in descendants(node.value) if one in conversion.stripped]
    if not stripped or len(node.targets) != 1:
        return
    target = to_code(node.targets[0].target)
    value = node.value
    if isinstance(value, cst.DictComp):
        source = to_code(value.for_in.iter)
        same = to_code(value.for_in.target) == f"{to_code(value.key)}, {_strip_code(conversion, value.value)}"
        if source == f"{target}.items()" and same and not value.for_in.ifs:
            conversion.edits.remove(node)
    elif isinstance(value, (cst.ListComp, cst.GeneratorExp)):
        is_same = to_code(value.for_in.target) == _strip_code(conversion, value.elt) and not value.for_in.ifs
        if is_same and to_code(value.for_in.iter) == target:
            conversion.edits.remove(node)
        elif is_same and isinstance(node.targets[0].target, cst.Tuple):
            conversion.edits.change(value, lambda one: one.for_in.iter)
    elif isinstance(value, cst.Tuple):
        each = ", ".join(_strip_code(conversion, element.value) for element in value.elements)
        if each == target.strip("()"):
            conversion.edits.remove(node)
    elif _strip_code(conversion, value) == target:
        conversion.edits.remove(node)


def _strip_code(conversion: Conversion, node: cst.BaseExpression) -> str:
    while node in conversion.stripped and isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        node = node.func.value
    return to_code(node)


def _remove_device_option(conversion: Conversion) -> None:
    """Remove the option `--device` of argparse if nothing reads it any more."""
    script = conversion.script
    uses = [node for node in script.nodes if script.is_settings_device(node)]
    left = [node for node in uses if not _is_gone(conversion, node)]
    for call in script.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "add_argument" and call.args:
            first = call.args[0].value
            statement = script.parents[call]
            if (
                isinstance(first, cst.SimpleString)
                and to_code(first)[1:-1] in {"--device", "-device"}
                and isinstance(statement, cst.Expr)
                and uses
                and not left
            ):
                conversion.edits.remove(statement)
                conversion.note(
                    call,
                    f"The option {to_code(first)[1:-1]} was removed. Use accel launch --cpu to train on the CPU.",
                )


def _is_gone(conversion: Conversion, node: cst.CSTNode) -> bool:
    return (
        node in conversion.edits.changes
        or node in conversion.dropped
        or any(
            one in conversion.edits.removed or one in conversion.stripped
            for one in conversion.script.ancestors(node)
        )
    )


# Places that are not converted


def find_devices_left(conversion: Conversion) -> None:
    """Report devices that are not converted, and keep parts of batches on the CPU."""
    for node in conversion.script.nodes:
        _check_device(conversion, node)
        if isinstance(node, cst.For):
            _keep_on_host(conversion, node)
        elif isinstance(node, cst.AssignTarget) and _VISIBLE.search(to_code(node.target)):
            conversion.finding(
                node,
                "The visible GPUs are chosen by the script. Remove this: accel launch assigns a GPU to each process.",
            )


def _check_device(conversion: Conversion, node: cst.CSTNode) -> None:
    """Report a fixed device where the Accelerator is out of reach."""
    script = conversion.script
    if _is_argument_for_device(script, node) and _is_fixed(script, node) and not _is_gone(conversion, node):
        conversion.finding(
            node,
            f'All processes use the device {to_code(node)} here. Write "cuda", which is the GPU of each process.',
        )


def _is_fixed(script: Script, value: cst.CSTNode) -> bool:
    """Return whether a value is one GPU: its number or name, also in a variable or argument, or in the settings."""
    if isinstance(value, cst.Attribute) and to_code(value.value) in SETTINGS:
        return value.attr.value in {"gpu", "gpu_id", "gpu_ids", "device_id", "local_rank"}
    if isinstance(value, (cst.Name, cst.Attribute)) and not script.kind_of(value):
        variable = script.variable(value)
        return variable is not None and any(_is_number(one) for one in script.find_values(variable))
    return _is_number(value)


def _is_number(value: cst.CSTNode) -> bool:
    is_text = isinstance(value, cst.SimpleString) and is_device_name(value)
    return isinstance(value, cst.Integer) or (is_text and ":" in to_code(value))


def _is_item(value: cst.CSTNode) -> bool:
    """Return whether a value is the item `device` of a dictionary."""
    return isinstance(value, cst.Subscript) and to_code(value.slice[0])[1:-1] in {"device", "gpu"}


def _keep_on_host(conversion: Conversion, loop: cst.For) -> None:
    """Move the parts of a batch that the script leaves on the CPU back to it, where they meet values that it moves there."""
    script = conversion.script
    role, target = script.loader_of(loop.iter), script.batch_target(loop)
    if role is None or not conversion.is_prepared(role.origins) or not isinstance(target, cst.Tuple):
        return
    parts = {script.variable(one.value) for one in target.elements} - {None}
    nodes = list(descendants(loop.body))
    moves = [node for node in nodes if get_method(node) in {"to", "cuda", "cpu"}]
    moved = {script.variable(one) for call in moves for one in descendants(call.func)}
    returns = [node for node in nodes if get_method(node) in {"cpu", "numpy"}]
    if not returns or not parts & moved:
        return
    on_host = {
        script.variable(target.target)
        for node in nodes
        if isinstance(node, cst.Assign) and any(one in returns for one in descendants(node.value))
        for target in node.targets
    } - {None}
    for node in nodes:
        if (
            isinstance(node, cst.Name)
            and script.variable(node) in parts - moved
            and _meets_host(script, node, on_host)
        ):
            conversion.edits.replace(node, f"{node.value}.cpu()")


def _meets_host(script: Script, node: cst.Name, on_host: set[Any]) -> bool:
    """Return whether a part of a batch is collected, converted to NumPy, or used in one expression with values on the CPU."""
    parent = script.parents[node]
    if isinstance(parent, cst.Attribute):
        return parent.attr.value == "numpy"
    outer = script.find_ancestor(node, (cst.Call, cst.Comparison, cst.BinaryOperation))
    if outer is None:
        return False
    others = [one for one in descendants(outer) if one is not node]
    is_collected = get_method(outer) in {"append", "extend"} and isinstance(parent, cst.Arg)
    return is_collected or any(script.variable(one) in on_host or get_method(one) == "cpu" for one in others)
