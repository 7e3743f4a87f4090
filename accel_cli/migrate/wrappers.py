"""Wrappers of models: `DataParallel` is removed, and a loss must be computed by the forward of the prepared one."""

from __future__ import annotations

from functools import partial
from typing import Any

import libcst as cst

from accel_cli.migrate.raw import Conversion, strip_wrappers
from accel_cli.migrate.script import WRAPPERS, get_method, list_children, to_code

__all__ = ["OF_MODULES", "convert_wrappers"]

OF_MODULES = {
    "apply", "bfloat16", "buffers", "children", "clone", "cpu", "cuda", "double", "eval", "float", "forward", "get_parameter", "half", "modules",
    "named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "requires_grad_", "state_dict", "to", "train",
}  # fmt: skip
"""Methods of each module that compute no outputs."""


def convert_wrappers(conversion: Conversion) -> None:
    """Remove `DataParallel`, and replace `model.module` by `unwrap_model`; members of a model are those of its wrapper too."""
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
    for call in _find_parts_of_losses(conversion):
        _check_loss(conversion, call)


def _call_on_value(node: cst.Attribute, function: str) -> cst.Call:
    return cst.Call(cst.parse_expression(function), [cst.Arg(node.value)])


def _check_loss(conversion: Conversion, call: cst.Call) -> None:
    """Report a loss that is computed by another method of the model than its forward."""
    name = get_method(call)
    if name in OF_MODULES or not name:
        return
    assert isinstance(call.func, cst.Attribute)
    if conversion.script.kind_of(call.func.value) == "model":
        conversion.finding(
            call,
            f"The gradients are not averaged over the processes, since {name} is not the model's forward. Call the model.",
        )


def _find_parts_of_losses(conversion: Conversion) -> set[cst.Call]:
    """Return the calls from whose values the losses of the backward passes are computed, in the same function."""
    script = conversion.script
    found: set[cst.Call] = set()
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
