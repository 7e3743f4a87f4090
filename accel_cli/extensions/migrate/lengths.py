"""Numbers of batches that differ between one process and several, and the divisors of sums."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import Script, Variable, descendants, to_code

__all__ = ["check_lengths", "is_number_of_samples", "list_divisors"]

_SAMPLES = re.compile(r"^len\([\w.]*(?:dataset|data|_set)\)$")
_SAME_NUMBER = {"builtins.int", "builtins.max", "builtins.min", "builtins.round", "math.ceil", "math.floor"}
"""Functions whose result is a number of batches like their argument."""
_PASSES = (
    cst.Arg,
    cst.ComparisonTarget,
    cst.BinaryOperation,
    cst.UnaryOperation,
    cst.IfExp,
    cst.BooleanOperation,
)
"""Expressions whose value is computed from such a number."""


def check_lengths(conversion: Conversion) -> None:
    """Report numbers of batches that are wrong on several processes."""
    for call in conversion.script.calls:
        if to_code(call.func) == "len" and len(call.args) == 1:
            _check_length(conversion, call)


def _check_length(conversion: Conversion, call: cst.Call) -> None:
    """Report a number of batches that is counted on the wrong side of `prepare` for its use.

    A prepared scheduler advances once for each process in each step, so that its number is that before `prepare`. Steps that
    the script counts itself are fewer on several processes, and their number is that after `prepare`.
    """
    script = conversion.script
    role = script.role_of(call.args[0].value)
    counted: cst.BaseExpression = call
    is_loader = getattr(role, "kind", "") == "loader" and conversion.is_prepared(role.origins)  # type: ignore[union-attr]
    if not is_loader:
        division = _find_division(conversion, call)
        if division is None:
            return
        counted = division
    is_divided = is_loader and (
        script.find_ancestor(call, cst.Lambda) is not None or conversion.is_after_prepare(call, role)
    )
    uses = set(_list_uses(conversion, counted, set()))
    if is_divided and "scheduler" in uses:
        conversion.finding(
            call,
            "A prepared scheduler advances once for each process in each step, and this number of batches is that of one process. Multiply it by accelerator.num_processes.",
        )
    elif not is_divided and "steps" in uses:
        conversion.finding(
            call,
            "Several processes take fewer steps than this number of batches. Use len(loader) after accelerator.prepare.",
        )


def _find_division(conversion: Conversion, call: cst.Call) -> cst.BinaryOperation | None:
    """Return the number of batches that is computed from the length of a dataset; None for another length."""
    script = conversion.script
    cls = script.class_of(script.function_of(call))
    if (cls is not None and script.is_torch_class(cls)) or not conversion.find_training_loaders():
        return None
    for one in script.ancestors(call):
        if isinstance(one, cst.BinaryOperation) and isinstance(one.operator, (cst.FloorDivide, cst.Divide)):
            is_left = call in set(descendants(one.left))
            return one if is_left and "batch" in to_code(one.right).lower() else None
        if isinstance(one, (cst.BaseSmallStatement, cst.BaseSuite)):
            return None
    return None


def _list_uses(conversion: Conversion, node: cst.CSTNode, seen: set[Any]) -> Iterator[str]:
    """Yield what a number is used for: `scheduler`, and `steps` where a count of steps is compared or divided."""
    script = conversion.script
    if _is_in_schedule(conversion, node):
        yield "scheduler"
        return
    for one in script.ancestors(node):
        if isinstance(one, (cst.Comparison, cst.AugAssign)) or _is_divisor(one, node, script):
            yield "steps"
        elif isinstance(one, cst.Call) and one in script.callees:
            yield from _follow_argument(conversion, one, node, seen)
        elif isinstance(one, cst.Assign):
            for variable in filter(None, (script.variable(target.target) for target in one.targets)):
                yield from _follow(conversion, variable, seen)
        elif not isinstance(one, _PASSES) and not (
            isinstance(one, cst.Call) and script.qualified_name(one.func) in _SAME_NUMBER
        ):
            return
        else:
            continue
        return


def _is_in_schedule(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a number is an argument of a scheduler, or is read by a function that is one."""
    script = conversion.script
    return any(
        (isinstance(one, cst.Call) and script.kind_of(one) == "scheduler" and one not in script.callees)
        or (isinstance(one, cst.FunctionDef) and _is_schedule(conversion, one))
        for one in script.ancestors(node)
    )


def _is_divisor(node: cst.CSTNode, inner: cst.CSTNode, script: Any) -> bool:
    """Return whether a number divides a count or a sum."""
    return (
        isinstance(node, cst.BinaryOperation)
        and isinstance(node.operator, (cst.Divide, cst.Modulo))
        and (node.right is inner or node.right in set(script.ancestors(inner)))
    )


def _is_schedule(conversion: Conversion, function: cst.FunctionDef) -> bool:
    """Return whether a function is passed to a scheduler."""
    script = conversion.script
    references = script.references.get(function, [])
    return bool(references) and all(
        any(script.kind_of(one) == "scheduler" for one in script.ancestors(node) if isinstance(one, cst.Call))
        for node in references
    )


def _follow(conversion: Conversion, variable: Variable, seen: set[Any]) -> Iterator[str]:
    """Yield the uses of a variable."""
    script = conversion.script
    if variable in seen:
        return
    seen.add(variable)
    for node in script.list_reads(variable):
        yield from _list_uses(conversion, node, seen)


def _follow_argument(
    conversion: Conversion, call: cst.Call, node: cst.CSTNode, seen: set[Any]
) -> Iterator[str]:
    script = conversion.script
    function = script.callees[call]
    outer = {node, *script.ancestors(node)}
    for name, arg in script.bind(call, function).items():
        if arg in outer:
            yield from _follow(conversion, script.parameter(function, name), seen)


# Means


def list_divisors(script: Script, variable: Variable) -> list[cst.BaseExpression]:
    """Return the expressions that a variable is divided by."""
    found = []
    for node in script.nodes:
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            total, divisor = node.left, node.right
        elif isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign):
            total, divisor = node.target, node.value
        else:
            continue
        if script.variable(total) == variable:
            found.append(divisor)
    return found


def is_number_of_samples(node: cst.BaseExpression) -> bool:
    """Return whether an expression is the length of a dataset."""
    return _SAMPLES.search(to_code(node)) is not None
