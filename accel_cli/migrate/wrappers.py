"""Wrappers of models: `DataParallel` is removed, and members of a model are read from inside of that of the Accelerator."""

from __future__ import annotations

from functools import partial
from typing import Any

import libcst as cst

from accel_cli.migrate.raw import Conversion, strip_wrappers
from accel_cli.migrate.script import NO_VARIABLE, WRAPPERS, Role, Script, descendants, list_children, to_code

__all__ = ["convert_wrappers"]

_OF_MODULES = {
    "add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "double", "eval", "extra_repr", "float", "forward",
    "get_buffer", "get_parameter", "get_submodule", "half", "load_state_dict", "modules", "mtia", "named_buffers", "named_children",
    "named_modules", "named_parameters", "parameters", "register_buffer", "register_forward_hook", "register_forward_pre_hook",
    "register_full_backward_hook", "requires_grad_", "share_memory", "state_dict", "to", "train", "training", "type", "xpu", "zero_grad",
}  # fmt: skip
"""Members of each module of torch, which its wrapper for several processes has too."""
_OF_WRAPPERS = {"module", "no_sync", "join", "register_comm_hook", "require_backward_grad_sync"}


def convert_wrappers(conversion: Conversion) -> None:
    """Remove `DataParallel`, and replace `model.module` and members of the script's own model by those of `unwrap_model`."""
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
            conversion.edits.change(node, partial(_call_on_value, function=function))
        elif isinstance(node, cst.Attribute) and _is_own_member(conversion, node):
            _convert_member(conversion, node)


def _call_on_value(node: cst.Attribute, function: str) -> cst.Call:
    return cst.Call(cst.parse_expression(function), [cst.Arg(node.value)])


def _is_own_member(conversion: Conversion, node: cst.Attribute) -> bool:
    """Return whether a prepared model is asked for a member that its wrapper for several processes does not have."""
    script = conversion.script
    role = script.role_of(node.value)
    if node.attr.value in _OF_MODULES | _OF_WRAPPERS or not isinstance(role, Role) or role.kind != "model":
        return False
    parts = {script.kind_of(one) for one in (node, script.parents[node])}
    return (
        not parts & {"model", "optimizer"}
        and not _is_unwrapped(script, node.value)
        and conversion.is_prepared(role.origins)
        and conversion.is_after_prepare(node, role)
    )


def _is_unwrapped(script: Script, model: cst.CSTNode) -> bool:
    """Return whether a model is the one inside of a wrapper, also of `raw = model.module if ddp else model`."""
    entries = script.assigned.get(script.variable(model) or NO_VARIABLE, [])
    return any(
        isinstance(one, cst.Attribute) and one.attr.value == "module"
        for value in (model, *(value for _, value in entries))
        for one in descendants(value)
    )


def _convert_member(conversion: Conversion, node: cst.Attribute) -> None:
    """Read a member of the model inside of its wrapper; report a loss that is computed there."""
    script, name = conversion.script, node.attr.value
    call = script.parents.get(node)
    if isinstance(call, cst.Call) and call in _find_parts_of_losses(conversion):
        conversion.finding(
            call,
            f"The gradients are not averaged over the processes, since {name} is not the model's forward. Call the model.",
        )
    elif conversion.can_get(node):
        code = f"{conversion.accelerator(node)}.unwrap_model"
        conversion.edits.change(node, lambda one: one.with_changes(value=_call_on_value(one, code)))
    else:
        conversion.finding(
            node,
            f"A model that is prepared for several processes has no {name}. Write accelerator.unwrap_model({to_code(node.value)}).{name}.",
        )


def _find_parts_of_losses(conversion: Conversion) -> set[cst.CSTNode]:
    """Return the calls from whose values the losses of the backward passes are computed, in the same function."""
    script = conversion.script
    found: set[cst.CSTNode] = set()
    for call, loss in conversion.losses.items():
        function = script.function_of(call)
        pending: list[cst.CSTNode] = [loss]
        seen: set[Any] = set()
        while pending:
            one = pending.pop()
            if script.is_model_call(one) or isinstance(one, cst.SubscriptElement):
                continue  # what goes into the model, and the choice of a part, have no gradients to average
            if isinstance(one, cst.Call):
                found.add(one)
            pending += list_children(one)
            variable = script.variable(one)
            if variable is not None and variable not in seen:
                seen.add(variable)
                entries = script.assigned.get(variable, [])
                pending += [value for node, value in entries if script.function_of(node) is function]
    return found
