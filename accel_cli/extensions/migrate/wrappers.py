"""Wrappers of models: `DataParallel` is removed, and a loss must be computed by the forward of the prepared one."""

from __future__ import annotations

from functools import partial
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.raw import Conversion, strip_wrappers
from accel_cli.extensions.migrate.script import (
    NO_VARIABLE,
    WRAPPERS,
    Role,
    Script,
    Variable,
    descendants,
    get_method,
    list_children,
    to_code,
)

__all__ = ["OF_MODULES", "convert_wrappers", "runs_without_gradients"]

OF_MODULES = {
    "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "eval", "float", "forward", "get_parameter", "half", "modules",
    "named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "requires_grad_", "state_dict", "to", "train",
}  # fmt: skip
"""Methods of each module that compute no outputs."""
_FUNCTIONAL = {"torch.func.functional_call", "torch.nn.utils.stateless.functional_call"}
"""Functions that compute the outputs of a module with other parameters."""
_OF_COPIES = {"clone", "functional_call"}
"""Functions for a model with changed parameters, as in meta-learning, which the model cannot call itself."""


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
    _find_bypassed(conversion)


def _call_on_value(node: cst.Attribute, function: str) -> cst.Call:
    return cst.Call(cst.parse_expression(function), [cst.Arg(node.value)])


def _find_bypassed(conversion: Conversion) -> None:
    """Report the first call of a step that computes a loss with a model which the step does not call, once for each model.

    A model that is called too has its gradients averaged, also those of its other calls in the step.
    """
    script = conversion.script
    seen: set[Variable] = set()
    for backward, loss in conversion.losses.items():
        region = script.find_ancestor(backward, (cst.For, cst.While, cst.FunctionDef)) or script.module
        parts = _list_parts(script, loss)
        calls = [one for one in (*descendants(region), *parts) if script.is_model_call(one)]
        called = seen.union(*(_get_origins(script, one.func) for one in calls))
        for call in sorted(parts, key=script.end):
            name = get_method(call)
            owner: Any = call.func.value if name else call.func  # type: ignore[attr-defined]
            if script.qualified_name(call.func) in _FUNCTIONAL and call.args:
                name, owner = "functional_call", call.args[0].value
            models = _get_origins(script, owner) or _find_holders(script, owner)
            held = _find_held_models(conversion, owner)
            if name in OF_MODULES or not models | held or (models | held) & called:
                continue
            codes = " and ".join(sorted(one.code for one in models | held))
            seen |= models | held
            called |= models | held
            conversion.finding(
                call, _describe_bypass(codes, to_code(owner), name or to_code(owner), is_held=bool(held))
            )


def _describe_bypass(models: str, owner: str, function: str, *, is_held: bool) -> str:
    problem = f"The gradients of {models} are not averaged over the processes, since"
    if is_held:
        return f"{problem} {owner} holds a model as it is before accelerator.prepare. Let {owner} be a module, pass it to accelerator.prepare too, and compute the loss by calling it."
    problem = f"{problem} the loss is computed by {function}, and not by calling the model."
    if function in _OF_COPIES:
        return f'{problem} Leave the model out of accelerator.prepare, move it to accelerator.device, and write before the step: for one in {models}.parameters(): one.grad = accelerator.reduce(one.grad, "mean").'
    return f"{problem} Call {function} in its forward, and call the model."


def _get_origins(script: Script, node: cst.BaseExpression) -> frozenset[Variable]:
    """Return the variables to which a trained model goes back; empty for another expression."""
    role = script.role_of(node)
    return role.origins if isinstance(role, Role) and role.kind == "model" else frozenset()


def _find_holders(script: Script, node: cst.BaseExpression) -> frozenset[Variable]:
    """Return the trained models that were created with a model that is not trained itself."""
    variable = script.variable(node)
    return frozenset(
        holder
        for holder, entries in script.assigned.items()
        if variable is not None and script.roles.get(holder, Role("")).kind == "model"
        for _, value in entries
        for arg in getattr(strip_wrappers(script, value), "args", ())
        if script.variable(arg.value) == variable
    )


def _find_held_models(conversion: Conversion, node: cst.BaseExpression) -> set[Variable]:
    """Return the trained models that an object of another file was created with before they are prepared."""
    script = conversion.script
    created = [
        strip_wrappers(script, one)
        for _, one in script.assigned.get(script.variable(node) or NO_VARIABLE, [])
    ]
    return {
        origin
        for call in created
        if isinstance(call, cst.Call) and script.is_foreign_call(call)
        for arg in call.args
        if isinstance(role := script.role_of(arg.value), Role)
        and role.kind == "model"
        and not conversion.is_after_prepare(arg.value, role)
        for origin in role.origins
    }


def _list_parts(script: Script, loss: cst.BaseExpression) -> set[cst.Call]:
    """Return the calls from whose values a loss is computed with gradients, also in functions of the script."""
    found: set[cst.Call] = set()
    pending: list[cst.CSTNode] = [loss]
    seen: set[Any] = set()
    while pending:
        one = pending.pop()
        if isinstance(one, cst.SubscriptElement) or get_method(one) in {"detach", "item"}:
            continue  # the choice of a part, and numbers, have no gradients to average
        if isinstance(one, cst.Call) and not runs_without_gradients(script, one):
            found.add(one)
        if script.is_model_call(one):
            continue  # what goes into the model may be no tensor
        callee = script.callees.get(one) if isinstance(one, cst.Call) else script.named_functions.get(one)
        if callee is not None and callee not in seen:
            seen.add(callee)
            pending += script.returned_values(callee)
        pending += list_children(one)
        variable = script.variable(one)
        if variable is not None and variable not in seen:
            seen.add(variable)
            function = script.function_of(one)
            entries = [*script.assigned.get(variable, []), *script.additions.get(variable, [])]
            pending += [value for node, value in entries if script.function_of(node) is function]
    return found


def runs_without_gradients(script: Script, call: cst.Call) -> bool:
    """Return whether a call runs in `no_grad` or `inference_mode`."""
    return any("no_grad" in code or "inference_mode" in code for code in map(to_code, script.contexts(call)))
