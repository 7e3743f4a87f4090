"""Conversion of a raw training loop: where the Accelerator is created, what is prepared, and who receives it."""

from __future__ import annotations

import math
import re
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.edits import Edits, is_docstring
from accel_cli.extensions.migrate.findings import Finding, UnsafeError
from accel_cli.extensions.migrate.script import (
    WRAPPERS,
    Role,
    Script,
    Variable,
    descendants,
    list_children,
    to_code,
)

__all__ = [
    "ORDER",
    "Conversion",
    "strip_wrappers",
    "thread_accelerator",
]

ORDER = ("model", "optimizer", "loader", "scheduler")
_IS_SET = re.compile(r"(-1|None|>= 0)$")
"""The end of a comparison that has one result on all ranks."""
_MOVES = {"to", "cuda", "cpu", "train", "eval", "float", "double", "half", "bfloat16", "compile"}


class Conversion:
    """State of the conversion of one script."""

    def __init__(self, script: Script, read_elsewhere: AbstractSet[str] = frozenset()) -> None:
        self.script = script
        self.read_elsewhere = read_elsewhere
        """Names that other files read: they stay, and other files call the functions without the Accelerator."""
        self.edits = Edits()
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []
        self.arguments: dict[str, str] = {}
        self.imports: set[str] = set()
        self.needs: list[cst.CSTNode] = []
        self.unprepared: set[Variable] = set()
        self.anchors: dict[Variable, cst.CSTNode] = {}
        """The statement after which each object is prepared."""
        self.losses: dict[cst.Call, cst.BaseExpression] = {}
        """The loss of each backward pass."""
        self.draws: set[cst.Call] = set()
        """Calls that draw such batches."""
        self.reduced: set[cst.CSTNode] = set()
        """Values that are reduced over the processes."""
        self.exchanges: list[cst.CSTNode] = []
        """Places at which the converted script makes the processes exchange values."""
        self.saved: set[cst.CSTNode] = set()
        """Calls of `open` that are replaced by the path of the file."""
        self.cycles: list[tuple[cst.For, cst.If]] = []
        """Loops that accumulate gradients, with the condition of the optimizer step."""
        self.keeps_scalers = False
        """Whether the scalers of the script stay, since their autocast does."""
        self.gathered: set[cst.For] = set()
        """Loops whose metrics are computed from gathered samples."""
        self.complete: set[cst.Call] = set()
        """Reductions of the script that sum only what gathered loops count for all processes."""
        self.divided: dict[Variable, tuple[str, tuple[int, int]]] = {}
        """Losses whose division by the accumulation steps was removed, with the position of the division."""
        self.dropped: set[cst.CSTNode] = set()
        """Arguments of removed parameters, with the nodes below them."""
        self.stripped: set[cst.CSTNode] = set()
        """Calls of `.to(device)` that are replaced by their object."""
        self.statement: cst.CSTNode = script.module
        """The statement before which the Accelerator is created."""
        self.home: cst.FunctionDef | None = None
        self.home_line = 0
        self._guarded: dict[cst.CSTNode, bool] = {}
        self._exits: dict[cst.CSTNode, tuple[float, float]] = {}
        self.backwards = [call for call in script.calls if _is_backward(script, call)]
        self.training = script.find_callers(map(script.function_of, self.backwards))
        """Functions that run a backward pass, themselves or in functions that they call."""
        self.collective: set[cst.FunctionDef | None] = set()
        """Functions in which the script exchanges values between the processes itself."""
        self.creations = self._find_creations()

    def finding(self, node: cst.CSTNode, text: str) -> None:
        """Record a place that is not converted."""
        self.findings.append(Finding(self.script.line(node), text))

    def note(self, node: cst.CSTNode, text: str) -> None:
        """Record a place that is converted and behaves differently on several processes."""
        self.notes.append(Finding(self.script.line(node), text))

    def unsafe(self, node: cst.CSTNode, text: str) -> UnsafeError:
        """Return the error for a place because of which the script is left unchanged."""
        return UnsafeError(self.script.line(node), text)

    def unreachable(self, node: cst.CSTNode) -> UnsafeError:
        """Return the error for a place that needs the Accelerator and cannot get it."""
        text = 'The Accelerator is needed here, and is created later or in another function. Write device = torch.device("cuda") below the imports, and it is created there.'
        return self.unsafe(node, text)

    def find_training_loaders(self) -> set[Variable]:
        """Return the loaders of the loops that run a backward pass, themselves or in functions that they call."""
        calls = {
            *self.backwards,
            *(call for call, callee in self.script.callees.items() if callee in self.training),
        }
        found: set[Variable] = set()
        for call in calls:
            loops = [one for one in self.script.ancestors(call) if isinstance(one, cst.For)]
            origins = {
                origin
                for one in loops
                if (role := self.script.loader_of(one.iter))
                for origin in role.origins
            }
            found |= origins or (self.find_batches(call) if call in self.backwards else set())
        return found

    def find_batches(self, call: cst.Call) -> set[Variable]:
        """Return the loaders whose batches are assigned in the innermost loop or function around a call, or passed to it."""
        script = self.script
        function = script.function_of(call)
        region = script.find_ancestor(call, (cst.For, cst.While, cst.FunctionDef)) or script.module
        roles: list[Any] = [
            script.role_of(one) for one in descendants(region) if script.is_call_of(one, "builtins.next")
        ]
        if isinstance(region, cst.For) and (loader := script.loader_of(region.iter)):
            # a variable of the loop may be that of loops over other loaders too
            roles.append(Role("batch", loader.origins))
        else:
            # a variable of a batch that is read here may be that of loops over other loaders too
            variables = {
                variable
                for node in descendants(region)
                if isinstance(node, cst.Assign) and script.function_of(node) is function and not any(roles)
                for target in node.targets
                for variable in script.variables(target.target)
            }
            names = [param.name.value for param in function.params.params] if function is not None else []
            variables |= {script.parameter(function, name) for name in names}  # type: ignore[arg-type]
            roles += [script.roles.get(one) for one in variables]
        return {
            origin for role in roles if role is not None and role.kind == "batch" for origin in role.origins
        }

    def is_guarded(self, node: cst.CSTNode) -> bool:
        """Return whether a statement runs on some ranks only, also through a guarded call of its function."""
        if node not in self._guarded:
            self._guarded[node] = self._is_guarded(node, set())
        return self._guarded[node]

    def _is_guarded(self, node: cst.CSTNode, seen: set[cst.CSTNode]) -> bool:
        if self.is_guarded_here(node):
            return True
        function = self.script.function_of(node)
        if function is None or function in seen:
            return False
        seen.add(function)
        return any(self._is_guarded(call, seen) for call in self.script.calls_of(function))

    def is_guarded_here(self, node: cst.CSTNode) -> bool:
        """Return whether a condition in its function restricts a statement to some ranks."""
        inner = node
        for one in self.script.ancestors(node):
            if isinstance(one, (cst.If, cst.IfExp, cst.While)) and self._reads_rank(one.test, set()):
                return True
            if isinstance(one, cst.BooleanOperation) and self._reads_rank(one.left, set()):
                return True
            if isinstance(one, (cst.IndentedBlock, cst.Module)) and self.script.start(
                inner
            ) > self._find_exit(one):
                return True
            inner = one
        return False

    def _find_exit(self, block: cst.IndentedBlock | cst.Module) -> tuple[float, float]:
        """Return where the first condition begins at which some ranks leave a block; infinity without one."""
        if block not in self._exits:
            leaving = (one for one in block.body if isinstance(one, cst.If) and self._leaves(one))
            self._exits[block] = next(map(self.script.start, leaving), (math.inf, 0))
        return self._exits[block]

    def _leaves(self, node: cst.If) -> bool:
        """Return whether some ranks leave a block at a condition."""
        return self._reads_rank(node.test, set()) and any(
            isinstance(one, (cst.Return, cst.Continue, cst.Break, cst.Raise))
            or (isinstance(one, cst.Call) and to_code(one.func) in {"exit", "quit", "sys.exit"})
            for one in descendants(node)
        )

    def reads_rank(self, node: cst.CSTNode) -> bool:
        """Return whether the value of an expression differs between ranks."""
        return self._reads_rank(node, set())

    def _reads_rank(self, node: cst.CSTNode, seen: set[Variable]) -> bool:
        """Return whether an expression depends on the rank, also through variables and functions."""
        pending = [node]
        while pending:
            one = pending.pop()
            if self.script.kind_of(one) in {"rank", "local_rank"}:
                return True
            if not (isinstance(one, cst.Comparison) and _IS_SET.search(to_code(one))):
                pending += list_children(one)
            variable = self.script.variable(one)
            # a model or loader of a rank is no condition on it
            if variable is not None and variable not in seen and variable not in self.script.roles:
                seen.add(variable)
                if any(self._reads_rank(value, seen) for value in self.script.list_values(variable)):
                    return True
            callee = self.script.callees.get(one) if isinstance(one, cst.Call) else None
            if callee is not None and Variable(callee, "") not in seen:
                seen.add(Variable(callee, ""))
                if any(self._reads_rank(value, seen) for value in self.script.returned_values(callee)):
                    return True
        return False

    # Objects

    def _find_creations(self) -> dict[Variable, list[cst.CSTNode]]:
        """Return the statements that create each model, optimizer, loader and scheduler."""
        found: dict[Variable, list[cst.CSTNode]] = {}
        for variable, entries in self.script.assigned.items():
            role = self.script.roles.get(variable)
            if role is None or role.kind not in ORDER:
                continue
            sources = [(node, strip_wrappers(self.script, value)) for node, value in entries]
            new = [node for node, source in sources if self._is_new(source)]
            wrapped = [node for node, source in sources if self.script.variable(source) == variable]
            if new and not self._is_returned(variable, new[0]):
                found[variable] = [*new, *wrapped]
        return found

    def _is_new(self, source: cst.BaseExpression) -> bool:
        """Return whether an expression creates an object, and does not choose between existing ones."""
        if isinstance(source, cst.IfExp):
            branches = (strip_wrappers(self.script, one) for one in (source.body, source.orelse))
            return any(self._is_new(one) for one in branches)
        if self.script.is_call_of(source, "torch.load"):
            return False
        return isinstance(source, cst.Call) or self.script.is_foreign(source)

    def _is_returned(self, variable: Variable, node: cst.CSTNode) -> bool:
        function = self.script.function_of(node)
        if function is None or function in self.training or isinstance(variable.scope, cst.ClassDef):
            return False
        return any(
            self.script.variable(one) == variable
            for value in self.script.returned_values(function)
            for one in descendants(value)
            if isinstance(one, cst.Name)
        )

    def is_prepared(self, origins: frozenset[Variable]) -> bool:
        """Return whether all objects to which a role goes back are prepared."""
        return bool(origins) and all(one in self.creations and one not in self.unprepared for one in origins)

    def is_after_prepare(self, node: cst.CSTNode, role: Any) -> bool:
        """Return whether an object is prepared where it is read."""
        script = self.script
        for origin in role.origins:
            anchor = self.anchors.get(origin)
            if anchor is None or script.function_of(anchor) is not script.function_of(node):
                continue
            if script.start(node) <= script.end(anchor):
                return False
        return True

    def accelerator(self, node: cst.CSTNode) -> str:
        """Return the expression for the Accelerator at a node; its function gets it as a parameter if necessary."""
        functions = [one for one in self.script.ancestors(node) if isinstance(one, cst.FunctionDef)]
        home_class = self.script.class_of(self.home)
        if home_class is not None and any(self.script.class_of(one) is home_class for one in functions):
            return "self.accelerator"
        is_known = home_class is None and (self.home is None or self.home in functions)
        if is_known and self.can_reach(node):
            return "accelerator"
        if is_known or not functions or home_class is not None:
            raise self.unreachable(node)
        outermost = functions[-1]
        definition = self.script.class_of(outermost) or outermost
        if definition not in self.needs:
            self.needs.append(definition)
        return "self.accelerator" if isinstance(definition, cst.ClassDef) else "accelerator"

    def create_accelerator(self) -> None:
        """Insert the statement that creates the Accelerator, with the arguments found."""
        cls = self.script.class_of(self.home)
        name = "accelerator" if cls is None else "self.accelerator"
        arguments = ", ".join(f"{key}={value}" for key, value in sorted(self.arguments.items()))
        self.edits.before.setdefault(self.statement, []).insert(0, f"{name} = Accelerator({arguments})")

    def can_get(self, node: cst.CSTNode) -> bool:
        """Return whether the Accelerator exists at a node, or all calls of its function or class can pass it."""
        return self._can_get(node, set())

    def _can_get(self, node: cst.CSTNode, seen: set[cst.CSTNode]) -> bool:
        if self.can_reach(node):
            return True
        functions = [one for one in self.script.ancestors(node) if isinstance(one, cst.FunctionDef)]
        if self.home is None or not functions:
            return False
        function = functions[-1]
        definition = self.script.class_of(function) or function
        is_module = isinstance(definition, cst.ClassDef) and self.script.is_torch_class(definition)
        if is_module or definition.name.value in self.read_elsewhere:
            return False
        calls = [
            call
            for call in (*self.script.callees, *self.script.constructed)
            if definition in {self.script.callees.get(call), self.script.constructed.get(call)}
        ]
        uses = [
            one
            for one in self.script.references.get(definition, [])
            if not isinstance(self.script.parents.get(one), (cst.Annotation, cst.Attribute))
        ]
        if not calls or len(uses) != len(calls):
            return False
        if definition in seen:
            return True
        seen.add(definition)
        return all(self._can_get(call, seen) for call in calls)

    def can_reach(self, node: cst.CSTNode) -> bool:
        """Return whether the Accelerator exists at a node without a new parameter."""
        functions = [one for one in self.script.ancestors(node) if isinstance(one, cst.FunctionDef)]
        if self.home is None:
            if not functions:
                return self.script.line(node) >= self.home_line
            return not self._runs_early(functions[-1], set())
        if self.home in functions:
            return self.script.line(node) >= self.home_line or self.script.function_of(node) is not self.home
        definitions = {self.script.class_of(one) or one for one in functions}
        if self.home.name.value == "__init__" and self.script.class_of(self.home) in definitions:
            return True
        return any(one in self.needs for one in definitions)

    def _runs_early(self, function: cst.FunctionDef, seen: set[cst.FunctionDef]) -> bool:
        """Return whether a function is called before the Accelerator of the module is created."""
        if function in seen:
            return False
        seen.add(function)
        for call in self.script.calls_of(function):
            around = [one for one in self.script.ancestors(call) if isinstance(one, cst.FunctionDef)]
            if self._runs_early(around[-1], seen) if around else self.script.line(call) < self.home_line:
                return True
        return False


def _is_backward(script: Script, call: cst.Call) -> bool:
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "backward":
        return False
    return not script.qualified_name(call.func).startswith("torch.autograd.")


def strip_wrappers(script: Script, node: cst.BaseExpression) -> cst.BaseExpression:
    """Return a model's expression without `.to(device)`, `torch.compile` and `DataParallel`."""
    while isinstance(node, cst.Call):
        if node.args and (script.qualified_name(node.func) in WRAPPERS or script.is_progress_bar(node)):
            node = node.args[0].value
        elif (
            isinstance(node.func, cst.Attribute)
            and node.func.attr.value in _MOVES
            and node not in script.callees
            and (
                isinstance(node.func.value, cst.Call)
                or script.qualified_name(node.func).partition(".")[0] != "torch"
            )
        ):
            node = node.func.value
        else:
            break
    return node


# Parameters


def thread_accelerator(conversion: Conversion) -> None:
    """Pass the Accelerator to the functions and classes that need it."""
    script = conversion.script
    done = 0
    while done < len(conversion.needs):
        definition: Any = conversion.needs[done]
        done += 1
        if isinstance(definition, cst.ClassDef):
            functions = [
                one
                for one in script.functions
                if script.class_of(one) is definition and one.name.value == "__init__"
            ]
            if not functions or script.is_torch_class(definition):
                raise conversion.unreachable(definition)
            function = functions[0]
            code = cst.parse_statement("self.accelerator = accelerator", script.module.config_for_parsing)
            conversion.edits.change(function.body, partial(_insert_first, code=code))
        else:
            function = definition
        _add_parameter(conversion, definition, function)


def _insert_first(body: Any, code: Any) -> Any:
    count = 1 if body.body and is_docstring(body.body[0]) else 0
    return body.with_changes(body=[*body.body[:count], code, *body.body[count:]])


def _add_parameter(conversion: Conversion, definition: Any, function: cst.FunctionDef) -> None:
    script = conversion.script
    calls: dict[Any, cst.Call] = {call.func: call for call in (*script.callees, *script.constructed)}
    references = script.references.get(definition, [])
    if not references or definition.name.value in conversion.read_elsewhere:
        raise conversion.unreachable(definition)
    for reference in references:
        call = calls.get(reference)
        if call is None and isinstance(script.parents.get(reference), (cst.Annotation, cst.Attribute)):
            continue
        if call is None:
            raise conversion.unreachable(reference)
        value = cst.parse_expression(conversion.accelerator(call))
        conversion.edits.change(call, partial(_prepend_argument, value=value))
    index = 1 if isinstance(definition, cst.ClassDef) else 0
    conversion.edits.change(function, partial(_insert_parameter, index=index))


def _prepend_argument(call: cst.Call, value: cst.BaseExpression) -> cst.Call:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")) if call.args else cst.MaybeSentinel.DEFAULT
    return call.with_changes(args=[cst.Arg(value, comma=comma), *call.args])


def _insert_parameter(function: cst.FunctionDef, index: int) -> cst.FunctionDef:
    params = list(function.params.params)
    params.insert(index, cst.Param(cst.Name("accelerator")))
    return function.with_changes(params=function.params.with_changes(params=params))
