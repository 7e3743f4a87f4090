"""Scripts for Lightning Fabric: the variables that hold it, what it sets up, and how its results are used."""

from __future__ import annotations

import re

import libcst as cst

from accel_cli.extensions.migrate.metrics import accumulates, list_evaluations
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    Script,
    Variable,
    descendants,
    get_method,
    list_elements,
    to_code,
)
from accel_cli.extensions.migrate.training_metrics import find_samples

__all__ = ["FABRIC", "FabricUses", "uses_fabric"]

FABRIC = {
    "lightning.Fabric",
    "lightning.fabric.Fabric",
    "lightning.fabric.fabric.Fabric",
    "lightning_fabric.Fabric",
    "lightning_fabric.fabric.Fabric",
}
_IN_TEXT = re.compile(r"""["'](?:\w+\.)*Fabric["']""")
_STATE = re.compile(r"model|net|optim|sched", re.IGNORECASE)
"""Names of objects with a state dict."""
_PADDED = "If the samples cannot be divided evenly among the processes, the last batch is padded with repeated ones, and this counts them. Count outputs and targets that accelerator.gather_for_metrics returns, and do not reduce the count."
_SETUP = {"setup": ("model", "optimizer"), "setup_module": ("model", "model"), "setup_optimizers": ("optimizer", "optimizer")}  # fmt: skip
"""The kind of the first and of the other results."""


def uses_fabric(script: Script) -> bool:
    """Return whether a script uses the class Fabric."""
    return any(
        script.qualified_name(node) in FABRIC
        if isinstance(node, (cst.Name, cst.Attribute))
        else isinstance(node, cst.Annotation) and _IN_TEXT.fullmatch(to_code(node.annotation))
        for node in script.nodes
    )


class FabricUses:
    """The variables of a script that hold a Fabric, and the uses of its results."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self.script = conversion.script
        self.instances = self._find_instances()
        self._kinds = self._find_prepared()

    def is_fabric(self, node: cst.CSTNode) -> bool:
        """Return whether an expression names the class Fabric."""
        return self.script.qualified_name(node) in FABRIC

    def _find_instances(self) -> set[Variable]:
        """Return the variables, parameters and attributes that hold a Fabric."""
        script = self.script
        params = [
            (script.parameter(function, param.name.value), param.annotation)
            for function in script.functions
            for param in function.params.params
        ]
        found = {variable for variable, one in params if one is not None and self.names_fabric(one)}
        while True:
            passed: list[tuple[Variable, cst.BaseExpression]] = [
                (variable, value) for variable, entries in script.assigned.items() for _, value in entries
            ]
            passed += [
                (script.parameter(function, name), arg.value)
                for call, function in script.callees.items()
                for name, arg in script.bind(call, function).items()
            ]
            new = {variable for variable, value in passed if self._holds_fabric(value, found)}
            new |= {variable for call in script.calls if (variable := self._get_launched(call, found))}
            if new <= found:
                return found
            found |= new

    def names_fabric(self, annotation: cst.Annotation) -> bool:
        """Return whether an annotation names the class Fabric, also in `Optional` or as text."""
        return any(
            self.is_fabric(one) or (isinstance(one, cst.SimpleString) and _IN_TEXT.fullmatch(to_code(one)))
            for one in descendants(annotation)
        )

    def _holds_fabric(self, node: cst.BaseExpression, known: set[Variable]) -> bool:
        is_created = isinstance(node, cst.Call) and self.is_fabric(node.func)
        return is_created or self.script.variable(node) in known

    def _get_launched(self, call: cst.Call, known: set[Variable]) -> Variable | None:
        """Return the parameter to which `fabric.launch(function)` passes the Fabric."""
        if not isinstance(call.func, cst.Attribute) or self.script.variable(call.func.value) not in known:
            return None
        if call.func.attr.value != "launch" or not call.args:
            return None
        variable = self.script.variable(call.args[0].value)
        for function in self.script.functions:
            if (
                variable == Variable(self.script.scopes[function], function.name.value)
                and function.params.params
            ):
                return self.script.parameter(function, function.params.params[0].name.value)
        return None

    def _find_prepared(self) -> dict[Variable, str]:
        """Return the kinds of the variables to which `setup` assigns its results."""
        kinds: dict[Variable, str] = {}
        for node in self.script.nodes:
            func = (
                node.value.func if isinstance(node, cst.Assign) and isinstance(node.value, cst.Call) else None
            )
            if not isinstance(func, cst.Attribute) or self.script.variable(func.value) not in self.instances:
                continue
            assert isinstance(node, cst.Assign)
            first, other = _SETUP.get(func.attr.value, ("", ""))
            for index, name in enumerate(list_elements(node.targets[0].target)):
                if first and (variable := self.script.variable(name)):
                    kinds[variable] = other if index else first
        return kinds

    def kind_of(self, node: cst.CSTNode) -> str:
        """Return the kind of an expression's role: model, optimizer, loader and so on; empty without one."""
        variable = self.script.variable(node)
        return self.script.kind_of(node) or (self._kinds.get(variable, "") if variable else "")

    def read_state(self, state: cst.BaseExpression) -> list[tuple[str, str, str]] | None:
        """Return key, code and kind of the objects in a dictionary, or in a variable that is assigned one."""
        variable = self.script.variable(state)
        entries = self.script.assigned.get(variable, []) if variable else []
        literal = entries[0][1] if len(entries) == 1 else state
        if not isinstance(literal, cst.Dict):
            return None
        items = []
        for element in literal.elements:
            if not isinstance(element, cst.DictElement):
                return None
            key, kind = to_code(element.key), self.kind_of(element.value)
            if (
                not kind
                and isinstance(element.value, (cst.Name, cst.Attribute))
                and _STATE.search(f"{key} {to_code(element.value)}")
            ):
                return None
            code = to_code(element.value) if state is literal else f"{to_code(state)}[{key}]"
            items.append((key, code, kind))
        return items

    def is_number(self, node: cst.BaseExpression) -> bool:
        """Return whether a value may be a number of Python, which Fabric converts to a tensor."""
        if isinstance(node, cst.BinaryOperation):
            return self.is_number(node.left) and self.is_number(node.right)
        if isinstance(node, cst.Call):
            numbers = {"builtins.float", "builtins.int", "builtins.len"}
            return to_code(node.func).endswith(".item") or self.script.qualified_name(node.func) in numbers
        variable = self.script.variable(node)
        values = [value for _, value in self.script.assigned.get(variable, [])] if variable else []
        return isinstance(node, (cst.Integer, cst.Float)) or any(
            isinstance(value, (cst.Integer, cst.Float, cst.Call)) and self.is_number(value)
            for value in values
        )

    def gathers_samples(self, call: cst.Call, data: cst.BaseExpression) -> bool:
        """Return whether an evaluation loop gathers a value for each sample, so that padding can be removed."""
        loop = self.script.find_ancestor(call, cst.For)
        if loop is None or loop not in list_evaluations(self.conversion):
            return False
        samples = find_samples(self.conversion, loop)
        names = [self.script.variable(one) for one in list_elements(data)]
        return all(name is not None and samples.get(name) in {"batch", "output"} for name in names)

    def computes_with(self, assign: cst.CSTNode) -> bool:
        """Return whether assigned tensors are used in operators and methods only, and not by their rows."""
        script = self.script
        names = list_elements(assign.targets[0].target) if isinstance(assign, cst.Assign) else []
        variables = {script.variable(name) for name in names} - {None}
        uses = [
            script.parents[node]
            for node in script.nodes
            if script.variable(node) in variables and script.start(node) > script.end(assign)
        ]
        operators = (cst.Attribute, cst.BinaryOperation, cst.Comparison, cst.ComparisonTarget)
        return bool(variables) and all(isinstance(one, (*operators, cst.AssignTarget)) for one in uses)

    def note_counts(self) -> None:
        """Note the first statement of each evaluation loop that counts samples before their padding is removed."""
        for loop in list_evaluations(self.conversion):
            for statement in descendants(loop.body):
                parts = list(descendants(statement)) if isinstance(statement, cst.SimpleStatementLine) else []
                calls = [
                    one for one in parts if isinstance(one, cst.Call) and get_method(one) == "all_gather"
                ]
                if any(one.args and self.gathers_samples(one, one.args[0].value) for one in calls):
                    break
                if any(map(accumulates, parts)):
                    self.conversion.note(statement, _PADDED)
                    break
