"""Totals of loops that the script reduces over the processes itself: a loop is gathered only if all of its reductions can go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    Script,
    Variable,
    descendants,
    get_method,
    get_positional,
    list_elements,
    to_code,
)

__all__ = ["REDUCTIONS", "Totals", "exchanges_values", "read_reduction"]

REDUCTIONS = ("torch.distributed.all_reduce", "torch.distributed.reduce")
_OPERATIONS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"}
_EXCHANGES = re.compile(r"all_?reduce|all_?gather|all_to_all|reduce_|_reduce|^reduce|synchroni[sz]|sync_", re.IGNORECASE)  # fmt: skip
"""Names of functions that may exchange values between processes."""
_LOCAL = ("builtins.", "functools.", "numpy.", "einops.", "math.", "operator.")
"""Packages without such functions; of torch, only torch.distributed has them."""
_SAME_VALUE = {"to", "cpu", "cuda", "float", "double", "long", "int", "item", "detach", "clone", "data", "numpy", "tolist"}  # fmt: skip
_SAME_VALUE_CALLS = {
    "builtins.int", "builtins.float", "builtins.list", "torch.tensor", "torch.as_tensor", "torch.stack", "torch.Tensor",
    "torch.FloatTensor", "torch.LongTensor", "torch.DoubleTensor",
}  # fmt: skip
_ZEROS = {"torch.zeros", "torch.zeros_like", "numpy.zeros"}
_SUMS = {"sum", "count_nonzero"}


def read_reduction(script: Script, call: cst.Call) -> tuple[Variable, str] | None:
    """Return the tensor and the operation of a reduction; None for one that stays."""
    tensor = get_positional(call, 0, "tensor")
    position = 1 if script.qualified_name(call.func).endswith(".all_reduce") else 2
    operation = get_positional(call, position, "op")
    name = "SUM" if operation is None else to_code(operation).rpartition(".")[2]
    names = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    variable = script.variable(tensor) if isinstance(tensor, cst.Name) else None
    function = script.function_of(call)
    parameters = function.params.params if function is not None else ()
    if (
        variable is None
        # callers may read their argument after it is changed in place
        or any(script.parameter(function, one.name.value) == variable for one in parameters)  # type: ignore[arg-type]
        or name not in _OPERATIONS
        or names - {"tensor", "op", "dst", "async_op"}
        or not isinstance(script.parents[call], cst.Expr)
    ):
        return None
    return variable, _OPERATIONS[name]


def exchanges_values(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is a call of torch.distributed that exchanges values between processes."""
    if not isinstance(node, cst.Call):
        return False
    package, _, name = script.qualified_name(node.func).rpartition(".")
    return package.startswith("torch.distributed") and bool(_EXCHANGES.search(name))


class Totals:
    """The variables that a loop adds to, and the exchanges between processes that their values reach.

    The values are followed by variables, without the order of statements, so that more exchanges are found than there are.
    """

    def __init__(
        self, conversion: Conversion, loop: cst.For, counting: Iterable[cst.CSTNode] | None = None
    ) -> None:
        """Follow the values of a loop; those of some of its statements if `counting` has them."""
        self.conversion = conversion
        self.script = conversion.script
        self.loop = loop
        self._inside = set(descendants(loop.body))
        self._imported = {
            to_code(one.asname.name) if one.asname else to_code(one.name).partition(".")[0]
            for one in self.script.nodes
            if isinstance(one, cst.ImportAlias)
        }
        exchanges = [call for call in self.script.calls if self._may_exchange(call)]
        self.exchanges: list[cst.Call] = []
        """The calls that may exchange values of the loop between processes."""
        if exchanges:
            reached = self._follow(self._list_written(counting))
            inside = reached | self._follow(self._list_assigned()) if counting is None else reached
            self.exchanges = [
                call for call in exchanges if self._reads(call, inside if call in self._inside else reached)
            ]

    @property
    def can_be_gathered(self) -> bool:
        """Return whether all exchanges are sums of what the gathered loop counts for all processes, and can be removed."""
        return all(map(self._is_sum_of_loop, self.exchanges))

    def report(self, node: cst.CSTNode) -> None:
        """Report that the script's own reduction stays, and that it counts padding."""
        self.conversion.finding(
            node,
            "This counts the samples of one process, and the script reduces the count itself. The last batch is padded with repeated samples, which are counted too. Count outputs and targets that accelerator.gather_for_metrics returns, and remove the reduction.",
        )

    # Values

    def _may_exchange(self, call: cst.Call) -> bool:
        """Return whether a call may exchange values between processes, also one of another file or of an object."""
        name = self.script.qualified_name(call.func)
        if call in self.script.callees or name.startswith(_LOCAL):
            return False
        if name.startswith("torch.") and not name.startswith("torch.distributed."):
            return False
        last = to_code(call.func).rpartition(".")[2]
        return _EXCHANGES.search(name.rpartition(".")[2] or last) is not None or (
            name.startswith("torch.distributed.") and "gather" in name
        )

    def _list_variables(self, node: cst.CSTNode) -> set[Variable]:
        """Return the variables of an expression whose values may be counts: no objects of the training, modules and functions."""
        found = {
            variable
            for one in descendants(node)
            if isinstance(one, (cst.Name, cst.Attribute))
            and not (isinstance(parent := self.script.parents.get(one), cst.Attribute) and parent.attr is one)
            and not (isinstance(parent, cst.Arg) and parent.keyword is one)
            and (variable := self.script.variable(one))
        }
        return {
            one
            for one in found
            if one.name != "self"
            and one.name not in self._imported
            and not ((role := self.script.roles.get(one)) and role.definition is None)
        }

    def _list_bodies(self) -> list[cst.CSTNode]:
        """Return the nodes of the loop, and of the functions of the script that it calls."""
        nodes, functions = list(descendants(self.loop.body)), set()
        for node in nodes:
            function = self.script.callees.get(node) if isinstance(node, cst.Call) else None
            if function is not None and function not in functions:
                functions.add(function)
                nodes += descendants(function.body)  # the list grows while it is read
        return nodes

    def _list_written(self, counting: Iterable[cst.CSTNode] | None) -> set[Variable]:  # noqa: C901 - one for each kind of statement
        """Return the variables that the loop adds to or changes, and those that only it assigns."""
        written: set[Variable] = set()
        nodes = self._list_bodies() if counting is None else counting
        for node in nodes:
            if isinstance(node, cst.AugAssign):
                written |= self._list_variables(node.target)
            elif isinstance(node, cst.Assign):
                for target in node.targets:
                    for one in list_elements(target.target):
                        names = self._list_variables(one)
                        if not isinstance(one, cst.Name) or names & self._list_variables(node.value):
                            written |= names
            elif isinstance(node, cst.Call):
                if isinstance(node.func, cst.Attribute) and (
                    node.args or isinstance(self.script.parents[node], cst.Expr)
                ):
                    written |= self._list_variables(node.func.value)
                if node in self.script.callees or isinstance(self.script.parents[node], cst.Expr):
                    for arg in node.args:
                        written |= self._list_variables(arg.value)
        if counting is None:
            written |= {
                one
                for one in self._list_assigned()
                if all(entry in self._inside for entry, _ in self.script.assigned.get(one, []))
            }
        return written

    def _list_assigned(self) -> set[Variable]:
        """Return the variables that the loop assigns."""
        return {
            variable
            for node in self._inside
            if isinstance(node, cst.Assign)
            for target in node.targets
            for variable in self._list_variables(target.target)
        }

    def _follow(self, start: set[Variable]) -> set[Any]:
        """Return variables, and functions of the script, whose values may be computed from variables."""
        script = self.script
        known: set[Any] = set(start)
        changed = True
        while changed:
            size = len(known)
            for node in script.nodes:
                if isinstance(node, (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
                    if node.value is not None and self._reads(node.value, known):
                        targets = [one.target for one in node.targets] if isinstance(node, cst.Assign) else [node.target]  # fmt: skip
                        known |= set().union(*map(self._list_variables, targets))
                elif isinstance(node, (cst.For, cst.CompFor)) and self._reads(node.iter, known):
                    known |= self._list_variables(node.target)
                elif isinstance(node, cst.Return) and node.value is not None and self._reads(node.value, known):  # fmt: skip
                    known.add(script.function_of(node))
                elif isinstance(node, cst.Call):
                    self._follow_call(node, known)
            changed = len(known) > size
        return known

    def _follow_call(self, call: cst.Call, known: set[Any]) -> None:
        """Add the parameters that get known values, and the object whose method does."""
        function = self.script.callees.get(call)
        if function is not None:
            for name, arg in self.script.bind(call, function).items():
                if self._reads(arg.value, known):
                    known.add(self.script.parameter(function, name))
        if isinstance(call.func, cst.Attribute) and any(self._reads(arg.value, known) for arg in call.args):
            known |= self._list_variables(call.func.value)

    def _reads(self, node: cst.CSTNode, known: set[Any]) -> bool:
        """Return whether an expression reads one of the variables, or calls a function that returns one."""
        return bool(self._list_variables(node) & known) or any(
            isinstance(one, cst.Call) and self.script.callees.get(one) in known for one in descendants(node)
        )

    # Sums

    def _is_sum_of_loop(self, call: cst.Call) -> bool:
        """Return whether a reduction sums only what this loop counts, and is not divided by the number of processes."""
        if not self.script.is_call_of(call, *REDUCTIONS) or call in self._inside:
            return False
        read = read_reduction(self.script, call)
        return (
            read is not None
            and read[1] == "sum"
            and not self._is_divided(read[0])
            and self._is_complete(read[0], call, {read[0]})
        )

    def _is_divided(self, variable: Variable) -> bool:
        """Return whether a value of a reduction is computed with the number of processes."""
        known = self._follow({variable})
        for node in self.script.nodes:
            is_computed = isinstance(node, (cst.BinaryOperation, cst.AugAssign)) or (
                isinstance(node, cst.Call) and bool(get_method(node)) and node not in self.script.callees
            )
            if (
                is_computed
                and any(self.script.kind_of(one) == "world_size" for one in descendants(node))
                and self._reads(node, known)
            ):
                return True
        return False

    def _is_complete(self, variable: Variable, call: cst.Call, seen: set[Variable]) -> bool:
        """Return whether a variable is zero before the loop, and the loop adds sums over samples to it, until a reduction."""
        is_local = not isinstance(variable.scope, cst.ClassDef)
        for node in self.script.nodes:
            is_later = (
                self.script.function_of(node) is self.script.function_of(call)
                and node not in self._inside
                and self.script.start(node) >= self.script.start(call)
                if isinstance(node, (cst.BaseSmallStatement, cst.Call, cst.For, cst.CompFor, cst.NamedExpr))
                else True
            )
            if not is_later and not self._keeps_complete(node, variable, call, seen):
                return False
        is_known = bool(self.script.assigned.get(variable))
        return is_known or not is_local

    def _keeps_complete(self, node: Any, variable: Variable, call: cst.Call, seen: set[Variable]) -> bool:  # noqa: PLR0911 - one for each kind of statement
        """Return whether a statement does not change a variable, sets it to zero or a complete value, or adds a sum over samples."""
        if isinstance(node, cst.Assign):
            targets = [one.target for one in node.targets]
            if not any(variable in self._list_variables(one) for one in targets):
                return True
            if len(targets) > 1:
                return self._is_zero(node.value)
            if isinstance(targets[0], (cst.Tuple, cst.List)):
                names, values = list_elements(targets[0]), list_elements(node.value)
                return len(names) == len(values) and all(
                    variable not in self._list_variables(name) or self._is_total(value, call, seen)
                    for name, value in zip(names, values, strict=True)
                )
            addend = self._read_addend(node, variable)
            return self._adds(node, addend) if addend is not None else self._is_total(node.value, call, seen)
        if isinstance(node, cst.AnnAssign):
            is_other = variable not in self._list_variables(node.target) or node.value is None
            return is_other or self._is_total(node.value, call, seen)
        if isinstance(node, cst.AugAssign):
            is_other = variable not in self._list_variables(node.target)
            return is_other or (isinstance(node.operator, cst.AddAssign) and self._adds(node, node.value))
        if isinstance(node, (cst.For, cst.CompFor, cst.NamedExpr)):
            return variable not in self._list_variables(node.target)
        if isinstance(node, cst.Call):
            return self._keeps_argument(node, variable)
        return not isinstance(node, cst.Del) or variable not in self._list_variables(node)

    def _keeps_argument(self, call: cst.Call, variable: Variable) -> bool:
        """Return whether a call does not change a variable, except by `zero_` and `add_` of a sum over samples."""
        owner = call.func.value if isinstance(call.func, cst.Attribute) else None
        if owner is not None and variable in self._list_variables(owner):
            method = get_method(call)
            if method == "add_" and len(call.args) == 1:
                return self._adds(call, call.args[0].value)
            return method in _SAME_VALUE | {"zero_", "sum", "size", "numel", "dim"}
        name = self.script.qualified_name(call.func)
        is_read = name.startswith(("builtins.", "torch.", "math.")) and not any(
            arg.keyword is not None and arg.keyword.value == "out" for arg in call.args
        )
        return is_read or not any(variable in self._list_variables(arg.value) for arg in call.args)

    def _read_addend(self, node: cst.Assign, variable: Variable) -> cst.BaseExpression | None:
        """Return what `x = x + value` adds; None for another statement."""
        value = node.value
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
            target = to_code(node.targets[0].target)
            if to_code(value.left) == target and variable not in self._list_variables(value.right):
                return value.right
            if to_code(value.right) == target and variable not in self._list_variables(value.left):
                return value.left
        return None

    def _adds(self, node: cst.CSTNode, value: cst.BaseExpression) -> bool:
        """Return whether a statement adds a sum over the samples of the loop, on all processes."""
        return (
            not self.conversion.is_guarded(node)
            and self._is_run_by_loop(node)
            and self._is_sum(value, frozenset())
        )

    def _is_run_by_loop(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in the loop, or in a function that only the loop calls."""
        if node in self._inside:
            return True
        function = self.script.function_of(node)
        if function is None:
            return False
        calls = self.script.calls_of(function)
        called = {call.func for call in calls}
        references = [one for one in self.script.references.get(function, []) if one not in called]
        return bool(calls) and not references and all(one in self._inside for one in calls)

    def _is_zero(self, value: cst.CSTNode) -> bool:  # noqa: PLR0911 - one for each kind of expression
        """Return whether a value has zeros only."""
        if isinstance(value, (cst.Integer, cst.Float)):
            return float(value.evaluated_value) == 0
        if isinstance(value, (cst.Tuple, cst.List)):
            return all(self._is_zero(one.value) for one in value.elements)
        if isinstance(value, cst.Dict):
            return all(
                isinstance(one, cst.DictElement) and self._is_zero(one.value) for one in value.elements
            )
        if isinstance(value, cst.Call):
            name = self.script.qualified_name(value.func)
            if name in _SAME_VALUE_CALLS and value.args:
                return self._is_zero(value.args[0].value)
            if isinstance(value.func, cst.Attribute) and value.func.attr.value in _SAME_VALUE:
                return self._is_zero(value.func.value)
            return name in _ZEROS
        return False

    def _is_total(self, value: Any, call: cst.Call, seen: set[Variable]) -> bool:  # noqa: PLR0911 - one for each kind of expression
        """Return whether a value has zeros, and totals of this loop before a reduction."""
        if self._is_zero(value):
            return True
        if isinstance(value, (cst.Tuple, cst.List)):
            return all(self._is_total(one.value, call, seen) for one in value.elements)
        if isinstance(value, cst.Subscript):
            return self._is_total(value.value, call, seen)
        if isinstance(value, cst.Call):
            if self.script.qualified_name(value.func) in _SAME_VALUE_CALLS and value.args:
                return self._is_total(value.args[0].value, call, seen)
            return get_method(value) in _SAME_VALUE and self._is_total(value.func.value, call, seen)  # type: ignore[attr-defined]
        variable = self.script.variable(value)
        if variable is None or variable in self.script.roles:
            return False
        return variable in seen or self._is_complete(variable, call, {*seen, variable})

    def _is_sum(self, value: Any, seen: frozenset[Variable]) -> bool:  # noqa: C901, PLR0911 - one for each kind of expression
        """Return whether a value is a sum over the rows of a batch, which is that of all processes for gathered samples."""
        if isinstance(value, (cst.Tuple, cst.List)):
            return bool(value.elements) and all(self._is_sum(one.value, seen) for one in value.elements)
        if isinstance(value, cst.BinaryOperation):
            if isinstance(value.operator, (cst.Add, cst.Subtract)):
                return self._is_sum(value.left, seen) and self._is_sum(value.right, seen)
            if isinstance(value.operator, cst.Multiply):
                pairs = ((value.left, value.right), (value.right, value.left))
                # a mean of the rows and their number
                return any(
                    self._is_number_of_rows(one, seen) and self._is_of_samples(other, seen)
                    for one, other in pairs
                )
            return False
        if self._is_number_of_rows(value, seen):
            return True
        if isinstance(value, cst.Call):
            name, method = self.script.qualified_name(value.func), get_method(value)
            if name in _SAME_VALUE_CALLS and value.args:
                return self._is_sum(value.args[0].value, seen)
            if any(arg.keyword and arg.keyword.value == "reduction" for arg in value.args):
                return "sum" in to_code(get_keyword(value, "reduction")) and self._is_of_samples(value, seen)
            if name in {"torch.sum", "numpy.sum", "torch.count_nonzero"}:
                dim = get_positional(value, 1, "dim") or get_keyword(value, "axis")
                is_of_rows = dim is None or to_code(dim) == "0"
                return is_of_rows and bool(value.args) and self._is_of_samples(value.args[0].value, seen)
            if method in _SUMS and not name.startswith(("torch.", "numpy.")):
                dim = get_positional(value, 0, "dim") or get_keyword(value, "axis")
                is_of_rows = dim is None or to_code(dim) == "0"
                return is_of_rows and self._is_of_samples(value.func.value, seen)  # type: ignore[attr-defined]
            if method in _SAME_VALUE:
                return self._is_sum(value.func.value, seen)  # type: ignore[attr-defined]
            return False
        return self._is_each(value, seen, self._is_sum)

    def _is_each(self, value: Any, seen: frozenset[Variable], check: Any) -> bool:
        """Return whether all values of a variable that the loop assigns, or arguments that it passes, fulfil a check."""
        variable = self.script.variable(value) if isinstance(value, cst.Name) else None
        if variable is None or variable in seen:
            return False
        values = [
            one
            for node, one in self.script.assigned.get(variable, [])
            if self._is_run_by_loop(node)
            and isinstance(node, cst.Assign)
            and isinstance(node.targets[0].target, cst.Name)
        ]
        assigned = self.script.assigned.get(variable, [])
        if any(self._is_run_by_loop(node) for node, _ in assigned) and not values:
            return False
        arguments = [
            arg.value
            for call, function in self.script.callees.items()
            if call in self._inside
            for name, arg in self.script.bind(call, function).items()
            if self.script.parameter(function, name) == variable
        ]
        found = values + arguments
        return bool(found) and all(check(one, seen | {variable}) for one in found)

    def _is_number_of_rows(self, value: Any, seen: frozenset[Variable]) -> bool:
        """Return whether a value is the number of rows or elements of a batch or output."""
        if isinstance(value, cst.Subscript):
            is_shape = isinstance(value.value, cst.Attribute) and value.value.attr.value == "shape"
            index = to_code(value.slice[0].slice)
            return is_shape and index == "0" and self._is_of_samples(value.value.value, seen)  # type: ignore[attr-defined]
        if isinstance(value, cst.Call):
            if self.script.is_call_of(value, "builtins.len") and len(value.args) == 1:
                return self._is_of_samples(value.args[0].value, seen)
            method = get_method(value)
            if method == "size" and [to_code(arg.value) for arg in value.args] == ["0"]:
                return self._is_of_samples(value.func.value, seen)  # type: ignore[attr-defined]
            return method in {"numel", "nelement"} and self._is_of_samples(value.func.value, seen)  # type: ignore[attr-defined]
        return self._is_each(value, seen, self._is_number_of_rows)

    def _is_of_samples(self, value: cst.CSTNode, seen: frozenset[Variable]) -> bool:
        """Return whether a value is computed from batches or outputs of the loop, and from no loss of one process."""
        target = self.script.batch_target(self.loop)
        batch = self.script.variables(target) if target is not None else set()
        losses = {self.script.variable(one) for one in self.conversion.losses.values()}
        is_training = any(call in self._inside for call in self.conversion.backwards)
        names = [one for one in descendants(value) if isinstance(one, cst.Name)]
        if is_training and any(self.script.variable(one) in losses for one in names):
            return False
        if any(isinstance(one, cst.Call) and self.script.is_model_call(one) for one in descendants(value)):
            return True
        return any(
            (variable := self.script.variable(one)) is not None
            and (
                variable in batch
                or self.script.kind_of(one) == "batch"
                or (variable not in seen and self._is_from_samples(variable, seen))
            )
            for one in names
        )

    def _is_from_samples(self, variable: Variable, seen: frozenset[Variable]) -> bool:
        """Return whether the loop assigns values computed from samples to a variable, or passes them as an argument."""
        seen |= {variable}
        values = [one for node, one in self.script.assigned.get(variable, []) if self._is_run_by_loop(node)]
        values += [
            arg.value
            for call, function in self.script.callees.items()
            if call in self._inside
            for name, arg in self.script.bind(call, function).items()
            if self.script.parameter(function, name) == variable
        ]
        return bool(values) and all(self._is_of_samples(one, seen) for one in values)


def get_keyword(call: cst.Call, name: str) -> Any:
    """Return an argument of a call by its name; None without it."""
    return next((arg.value for arg in call.args if arg.keyword and arg.keyword.value == name), None)
