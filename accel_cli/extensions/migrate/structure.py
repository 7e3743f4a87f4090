"""Structure of a Python script: positions, scopes and variables, functions and classes with their calls."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import metadata

__all__ = [
    "NO_VARIABLE",
    "Role",
    "Structure",
    "Variable",
    "descendants",
    "get_method",
    "get_positional",
    "list_children",
    "list_elements",
    "to_code",
]

_LAYOUT = re.compile(
    r"whitespace|lines|^(lpar|rpar|lbrace|rbrace|lbracket|rbracket|comma|colon|first_colon|second_colon|semicolon|equal|dot"
    r"|header|footer|posonly_ind|separator)$"
)
"""Fields of nodes for spaces, comments and punctuation."""
_FIRST: dict[type[cst.CSTNode], tuple[str, ...]] = {
    cst.Arg: ("keyword",),
    cst.ClassDef: ("decorators",),
    cst.FunctionDef: ("decorators", "name", "params", "returns"),
    cst.IfExp: ("body", "test"),
    cst.Parameters: ("posonly_params",),
    cst.ExceptHandler: ("type", "name"),
}
"""The fields that come first in the text, where their order in the class is another one."""
_EMPTY = cst.Module(body=[])
_MODULE_BASES = ("torch.nn.", "torch.optim.Optimizer", "torch.utils.data.")


@dataclass(frozen=True)
class Variable:
    """A variable of a scope, or an attribute of `self` of a class."""

    scope: Any
    name: str

    @property
    def code(self) -> str:
        """The expression for the variable in its scope."""
        return f"self.{self.name}" if isinstance(self.scope, cst.ClassDef) else self.name


NO_VARIABLE = Variable(None, "")
"""A key for an expression that is not a variable."""


@dataclass(frozen=True)
class Role:
    """A value's part in training: model, optimizer, loader, batch, device, rank and so on."""

    kind: str
    origins: frozenset[Variable] = frozenset()
    """The variables to which the value was assigned when it was made."""
    definition: cst.ClassDef | None = None
    """The class of the script, for an instance of one."""


def descendants(node: cst.CSTNode) -> Iterator[Any]:
    """Yield a node and all nodes below it, in the order of the text."""
    pending = [node]
    while pending:
        one = pending.pop()
        yield one
        pending += reversed(list_children(one))


def list_children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the expressions and statements directly below a node, without spaces, commas and parentheses.

    `CSTNode.children` makes a copy of the node and of all below it in each call.
    """
    found: list[cst.CSTNode] = []
    node_kind: Any = type(node)
    for name in _list_fields(node_kind):
        value = getattr(node, name)
        kind: Any = type(value)
        if kind is tuple or kind is list:
            found += value
        elif _is_node(kind):
            found.append(value)
    return found


@functools.cache
def _is_node(kind: type) -> bool:
    """Return whether values of a type are nodes; `isinstance` is slow for the abstract classes of libcst."""
    return issubclass(kind, cst.CSTNode)


@functools.cache
def _list_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields of a type of nodes that hold expressions and statements, in the order of the text."""
    names = [field.name for field in dataclasses.fields(kind) if not _LAYOUT.search(field.name)]
    first = next((order for base, order in _FIRST.items() if issubclass(kind, base)), ())
    return tuple(sorted(names, key=lambda name: first.index(name) if name in first else len(first)))


def to_code(node: cst.CSTNode) -> str:
    """Return the text of a node."""
    if isinstance(node, cst.Name) and not node.lpar:
        return node.value
    return _EMPTY.code_for_node(node).strip()


def list_elements(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the elements of a tuple or list, or the expression itself."""
    return [one.value for one in node.elements] if isinstance(node, (cst.Tuple, cst.List)) else [node]


def get_method(node: cst.CSTNode) -> str:
    """Return the name of the method that a node calls; empty for another node."""
    return node.func.attr.value if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) else ""


def get_positional(call: cst.Call, number: int, name: str) -> cst.BaseExpression | None:
    """Return an argument of a call by its position or name; None without it."""
    for index, arg in enumerate(call.args):
        if (arg.keyword is not None and arg.keyword.value == name) or (
            arg.keyword is None and not arg.star and index == number
        ):
            return arg.value
    return None


class Structure:
    """A parsed script with its functions, classes and calls."""

    def __init__(self, text: str) -> None:
        # no copy: a module that was just parsed has each node once
        wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        found = wrapper.resolve_many([metadata.PositionProvider, metadata.ScopeProvider])
        self.module = wrapper.module
        self.scopes: Any = found[metadata.ScopeProvider]
        self._names: dict[cst.CSTNode, str] = {}
        self._named: dict[cst.CSTNode, Variable | None] = {}
        self._positions: Any = found[metadata.PositionProvider]
        self.nodes = list(descendants(self.module))
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {
            child: node for node in self.nodes for child in list_children(node)
        }
        self.calls = [node for node in self.nodes if isinstance(node, cst.Call)]
        self.functions = [node for node in self.nodes if isinstance(node, cst.FunctionDef)]
        self.roles: dict[Variable, Role] = {}
        """The parts of values in training, which `Script` finds."""
        self.trained_classes: set[cst.ClassDef] = set()
        """Classes with a base of another file whose instances give an optimizer their parameters."""
        self._find_calls()

    # Positions and scopes

    def line(self, node: cst.CSTNode) -> int:
        """Return the line of a node, counted from 1."""
        return int(self._positions[node].start.line)

    def start(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return line and column of a node's first character."""
        position = self._positions[node].start
        return position.line, position.column

    def end(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return line and column after a node's last character."""
        position = self._positions[node].end
        return position.line, position.column

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, from the inside."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def find_ancestor(self, node: cst.CSTNode, kinds: Any) -> Any:
        """Return the innermost node of some types around a node; None without one."""
        return next((one for one in self.ancestors(node) if isinstance(one, kinds)), None)

    def contexts(self, node: cst.CSTNode) -> list[cst.BaseExpression]:
        """Return the contexts in which a node runs: those of `with`, and decorators."""
        found: list[cst.BaseExpression] = []
        for one in self.ancestors(node):
            if isinstance(one, cst.With):
                found += [item.item for item in one.items]
            elif isinstance(one, cst.FunctionDef):
                found += [decorator.decorator for decorator in one.decorators]
        return found

    def is_optional(self, node: cst.CSTNode) -> bool:
        """Return whether an import is in a `try` that catches its failure."""
        outer = self.find_ancestor(node, (cst.Try, cst.FunctionDef))
        return (
            isinstance(outer, cst.Try)
            and outer.body in self.ancestors(node)
            and any(
                one.type is None or to_code(one.type) in {"ImportError", "ModuleNotFoundError", "Exception"}
                for one in outer.handlers
            )
        )

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function around a node."""
        return self.find_ancestor(node, cst.FunctionDef)  # type: ignore[no-any-return]

    def class_of(self, function: cst.FunctionDef | None) -> cst.ClassDef | None:
        """Return the class of a method; None for another function."""
        if function is None:
            return None
        outer = self.find_ancestor(function, (cst.FunctionDef, cst.ClassDef))
        return outer if isinstance(outer, cst.ClassDef) else None

    def qualified_name(self, node: cst.CSTNode) -> str:
        """Return the dotted name to which an expression is resolved by imports; empty without one."""
        if node not in self._names:
            scope = self.scopes.get(node)
            names = scope.get_qualified_names_for(node) if scope is not None else ()
            self._names[node] = min((one.name for one in names), default="")
        return self._names[node]

    def is_call_of(self, node: cst.CSTNode, *names: str) -> bool:
        """Return whether a node is a call of a function of one of these dotted names."""
        return isinstance(node, cst.Call) and self.qualified_name(node.func) in names

    def variable(self, node: cst.CSTNode) -> Variable | None:
        """Return the variable that a name or an attribute of an instance refers to."""
        kind = type(node)
        if kind is cst.Name:
            if node not in self._named:
                self._named[node] = self._find_variable(node)  # type: ignore[arg-type]
            return self._named[node]
        if kind is cst.Attribute:
            assert isinstance(node, cst.Attribute)
            if isinstance(node.value, cst.Name) and node.value.value == "self":
                cls = self.class_of(self.function_of(node))
                return None if cls is None else Variable(cls, node.attr.value)
            if isinstance(node.value, cst.Call) and node.value in self.constructed:
                return Variable(self.constructed[node.value], node.attr.value)
            role = self.role_of_variable(node.value)
            if role is not None and role.definition is not None:
                return Variable(role.definition, node.attr.value)
        return None

    def list_reads(self, variable: Variable) -> list[cst.CSTNode]:
        """Return the places where a variable is read."""
        return [
            node
            for node in self.nodes
            if isinstance(node, (cst.Name, cst.Attribute))
            and not isinstance(self.parents.get(node), (cst.AssignTarget, cst.Param))
            and self.variable(node) == variable
        ]

    def _find_variable(self, node: cst.Name) -> Variable | None:
        scope = self.scopes.get(node)
        if scope is None or node.value not in scope:
            return None
        assigned = [one for one in scope[node.value] if isinstance(one, metadata.Assignment)]
        return Variable(assigned[0].scope, node.value) if assigned else None

    def variables(self, node: cst.CSTNode) -> set[Variable]:
        """Return the variables in an expression."""
        return {variable for one in descendants(node) if (variable := self.variable(one))}

    def parameter(self, function: cst.FunctionDef, name: str) -> Variable:
        """Return the variable of a parameter."""
        return Variable(self.scopes[function.body], name)

    # Functions and their calls

    def _find_calls(self) -> None:
        self.callees: dict[cst.Call, cst.FunctionDef] = {}
        self._calls: dict[cst.FunctionDef, list[cst.Call]] = {}
        self.constructed: dict[cst.Call, cst.ClassDef] = {}
        self.references: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        self._definitions: dict[Variable, cst.CSTNode] = {}
        for node in self.nodes:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                scope: Any = self.class_of(node) if isinstance(node, cst.FunctionDef) else None
                self._definitions[Variable(scope or self.scopes[node], node.name.value)] = node
        for node in self.nodes:
            if isinstance(node, (cst.Name, cst.Attribute)) and (variable := self.variable(node)):
                definition = self._definitions.get(variable)
                if definition is not None and getattr(definition, "name", None) is not node:
                    self.references.setdefault(definition, []).append(node)
        for call in self.calls:
            self._bind_callee(call)

    def _bind_callee(self, call: cst.Call) -> None:
        variable = self.variable(call.func)
        definition = self._definitions.get(variable) if variable else None
        if isinstance(definition, cst.ClassDef):
            self.constructed[call] = definition
            definition = self._definitions.get(Variable(definition, "__init__"))
        if isinstance(definition, cst.FunctionDef):
            self.callees[call] = definition
            self._calls.setdefault(definition, []).append(call)

    def calls_of(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return the calls of a function; those of its class for `__init__`."""
        return self._calls.get(function, [])

    def find_callers(
        self,
        functions: Iterable[cst.FunctionDef | None],
        leaves: AbstractSet[cst.FunctionDef | None] = frozenset(),
    ) -> set[cst.FunctionDef | None]:
        """Return functions and those that call them, also through others; None: the module. Callers of `leaves` are not followed."""
        found = set(functions)
        pending = list(found)
        while pending:
            function = pending.pop()
            if function is None or function in leaves:
                continue
            callers = {self.function_of(call) for call in self.calls_of(function)} - found
            found |= callers
            pending += callers
        return found

    def bind(self, call: cst.Call, function: cst.FunctionDef) -> dict[str, cst.Arg]:
        """Return the arguments of a call of a function by the names of its parameters."""
        params = [param.name.value for param in (*function.params.posonly_params, *function.params.params)]
        is_method = self.class_of(function) is not None
        positional = iter(params[1:] if is_method else params)
        bound = {}
        for arg in call.args:
            if arg.star:
                break
            name = arg.keyword.value if arg.keyword else next(positional, None)
            if name is not None:
                bound[name] = arg
        return bound

    def is_derived(self, definition: cst.ClassDef, *prefixes: str) -> bool:
        """Return whether a class of the script is derived from a class whose dotted name begins so."""
        for base in definition.bases:
            variable = self.variable(base.value)
            parent = self._definitions.get(variable) if variable else None
            if isinstance(parent, cst.ClassDef) and parent is not definition:
                if self.is_derived(parent, *prefixes):
                    return True
            elif self.qualified_name(base.value).startswith(prefixes):
                return True
        return False

    def is_torch_class(self, definition: cst.ClassDef) -> bool:
        """Return whether a class is derived from one of torch: a module, an optimizer, a dataset."""
        return definition in self.trained_classes or self.is_derived(definition, *_MODULE_BASES)

    def role_of_variable(self, node: cst.CSTNode) -> Role | None:
        """Return the role of the variable that an expression names."""
        variable = self.variable(node)
        return self.roles.get(variable) if variable else None

    def returned_values(self, function: cst.FunctionDef) -> list[cst.BaseExpression]:
        """Return the expressions that a function returns."""
        return [
            node.value
            for node in descendants(function.body)
            if isinstance(node, cst.Return) and node.value is not None and self.function_of(node) is function
        ]
