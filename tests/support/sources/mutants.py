"""Operators that break a function on purpose; each finds the place to change by a name that the function mentions.

A target is `module:definition`, for example `accel_runtime.storage.manifest:Manifest.parse`. Definitions inside the target
belong to another target: `prefetch_batches.fetch`. The name that an operator takes is that of a variable, an attribute, a
called function or a key. In an expression that replaces another one, `it` is the replaced expression.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

Definition: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef"
Operator: TypeAlias = "Callable[[Definition], None]"

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class NotApplicableError(Exception):
    """A target is not found, or an operator does not match exactly one place of it."""


def find_file(target: str, root: Path) -> Path:
    """Return the file of a target's module below `root`."""
    module = root.joinpath(*target.partition(":")[0].split("."))
    for file in (module.with_suffix(".py"), module / "__init__.py"):
        if file.is_file():
            return file
    raise NotApplicableError(f"module '{target.partition(':')[0]}' not found")


def mutate(source: str, target: str, operator: Operator) -> str:
    """Return the source of a module with an operator applied to the definition that a target names."""
    tree = ast.parse(source)
    operator(_find_definition(tree, target.partition(":")[2]))
    mutated = ast.unparse(ast.fix_missing_locations(tree))
    if mutated == normalize(source):
        raise NotApplicableError("the operator changes nothing")
    compile(mutated, target, "exec")
    return mutated


def normalize(source: str) -> str:
    """Return a source in the layout of `mutate`, without comments."""
    return ast.unparse(ast.parse(source))


def return_value(expression: str, *, instead_of: str | None = None) -> Operator:
    """Return an expression from the start, or instead of the `return` that mentions a name."""

    def operate(definition: Definition) -> None:
        if instead_of is None:
            definition.body.insert(0, ast.Return(_parse(expression, definition)))
            return
        found = [
            node
            for node in _walk_own(definition)
            if isinstance(node, ast.Return) and _mentions(node, instead_of)
        ]
        node = _get_only(found, f"`return` that mentions '{instead_of}'")
        node.value = _parse(expression, definition, node.value)

    return operate


def force_condition(name: str, value: bool, *, also: str | None = None) -> Operator:
    """Always take one branch of the `if` or `while` whose condition mentions a name, or two, outside of a comprehension."""
    names = [each for each in (name, also) if each is not None]

    def operate(definition: Definition) -> None:
        found = [
            node
            for node in _walk_own(definition)
            if isinstance(node, (ast.If, ast.IfExp, ast.While))
            and all(_mentions(node.test, each, nested=False) for each in names)
        ]
        _get_only(found, f"condition that mentions {' and '.join(map(repr, names))}").test = ast.Constant(
            value
        )

    return operate


def skip_call(name: str) -> Operator:
    """Leave out the statement that calls a function."""

    def operate(definition: Definition) -> None:
        found = [
            node
            for node in _walk_own(definition)
            if isinstance(node, ast.Expr) and _get_called(node.value) == name
        ]
        _replace(definition, _get_only(found, f"statement that calls '{name}'"), ast.Pass())

    return operate


def replace_call(name: str, expression: str) -> Operator:
    """Replace the call of a function by an expression."""

    def operate(definition: Definition) -> None:
        call = _find_call(definition, name)
        _replace(definition, call, _parse(expression, definition, call))

    return operate


def replace_argument(name: str, argument: int | str, expression: str) -> Operator:
    """Replace an argument in the call of a function, by position or keyword."""

    def operate(definition: Definition) -> None:
        call = _find_call(definition, name)
        value = _get_argument(call, argument)
        _replace(call, value, _parse(expression, definition, value))

    return operate


def drop_argument(name: str, argument: int | str) -> Operator:
    """Leave out an argument in the call of a function, by position or keyword."""

    def operate(definition: Definition) -> None:
        call = _find_call(definition, name)
        value = _get_argument(call, argument)
        call.args = [each for each in call.args if each is not value]
        call.keywords = [each for each in call.keywords if each.value is not value]

    return operate


def replace_name(name: str, expression: str) -> Operator:
    """Replace the only read of a variable or an attribute by an expression."""

    def operate(definition: Definition) -> None:
        found = [
            node
            for node in _walk_own(definition)
            if _get_name(node) == name and isinstance(node.ctx, ast.Load)
        ]
        node = _get_only(found, f"read of '{name}'")
        _replace(definition, node, _parse(expression, definition, node))

    return operate


def set_value(name: str, expression: str) -> Operator:
    """Assign an expression to a variable or an attribute instead of its value."""

    def operate(definition: Definition) -> None:
        node = _find_assignment(definition, name)
        node.value = _parse(expression, definition, node.value)

    return operate


def skip_assignment(name: str) -> Operator:
    """Leave out the assignment to a variable or an attribute."""

    def operate(definition: Definition) -> None:
        _replace(definition, _find_assignment(definition, name), ast.Pass())

    return operate


def reverse_update(name: str) -> Operator:
    """Let the former entries of a dict win in its update `name |= others`."""

    def operate(definition: Definition) -> None:
        found = [
            node
            for node in _walk_own(definition)
            if isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.BitOr)
            and _get_name(node.target) == name
        ]
        node = _get_only(found, f"update of '{name}' with |=")
        former = copy.deepcopy(node.target)
        former.ctx = ast.Load()
        merged = ast.BinOp(node.value, ast.BitOr(), former)
        _replace(definition, node, ast.Assign([node.target], merged))

    return operate


def skip_loop(name: str) -> Operator:
    """Iterate over nothing in the `for` of a loop or a comprehension over a variable, an attribute or a call."""

    def operate(definition: Definition) -> None:
        found = [
            node
            for node in _walk_own(definition)
            if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension))
            and name in {_get_name(node.iter), _get_called(node.iter)}
        ]
        _get_only(found, f"loop over '{name}'").iter = ast.Tuple([], ast.Load())

    return operate


def drop_element(name: str) -> Operator:
    """Leave out a variable or an attribute that is an element of a list, a tuple or a set."""

    def operate(definition: Definition) -> None:
        found = [
            (node, element)
            for node in _walk_own(definition)
            if isinstance(node, (ast.List, ast.Tuple, ast.Set))
            for element in node.elts
            if _get_name(element) == name
        ]
        node, element = _get_only(found, f"list, tuple or set with the element '{name}'")
        node.elts.remove(element)

    return operate


def list_definitions(statements: Iterable[ast.AST]) -> Iterator[Definition]:
    """Yield the functions and classes of a body, also those inside `if`, `with` and `try`."""
    for node in statements:
        if isinstance(node, _DEFINITIONS):
            yield node
        elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from list_definitions(ast.iter_child_nodes(node))


def _find_definition(tree: ast.Module, name: str) -> Definition:
    nodes: list[ast.Module | Definition] = [tree]
    for part in name.split("."):
        nodes = [inner for node in nodes for inner in list_definitions(node.body) if inner.name == part]
    return _get_only(nodes, f"definition '{name}'")


def _walk_own(definition: Definition) -> Iterator[ast.AST]:
    """Yield the nodes of a definition, without those of functions and classes in it."""
    waiting: list[ast.AST] = list(definition.body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, _DEFINITIONS):
            yield node
            waiting += ast.iter_child_nodes(node)


def _get_only(found, what):
    if len(found) != 1:
        raise NotApplicableError(f"{what} found {len(found)} times" if found else f"no {what} found")
    return found[0]


def _get_name(node: ast.AST) -> str | None:
    """Return the name of a variable or an attribute."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _get_called(node: ast.AST) -> str | None:
    """Return the name of the function or method that an expression calls."""
    node = node.value if isinstance(node, ast.Await) else node
    return _get_name(node.func) if isinstance(node, ast.Call) else None


def _mentions(node: ast.AST, name: str, *, nested: bool = True) -> bool:
    """Return whether an expression contains a variable, an attribute or a key; `nested`: also in a comprehension."""
    if _get_name(node) == name or (isinstance(node, ast.Constant) and node.value == name):
        return True
    if isinstance(node, _COMPREHENSIONS) and not nested:
        return False
    return any(_mentions(inner, name, nested=nested) for inner in ast.iter_child_nodes(node))


def _find_call(definition: Definition, name: str) -> ast.Call:
    found = [
        node for node in _walk_own(definition) if isinstance(node, ast.Call) and _get_called(node) == name
    ]
    return _get_only(found, f"call of '{name}'")


def _get_argument(call: ast.Call, argument: int | str) -> ast.expr:
    if isinstance(argument, str):
        found = [each.value for each in call.keywords if each.arg == argument]
    else:
        found = call.args[argument : argument + 1]
    return _get_only(found, f"argument {argument!r} of '{_get_called(call)}'")


def _find_assignment(definition: Definition, name: str) -> ast.Assign | ast.AnnAssign | ast.AugAssign:
    found = []
    for node in _walk_own(definition):
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            targets = [node.target]
        else:
            targets = node.targets if isinstance(node, ast.Assign) else []
        found += [node for target in targets if _get_name(target) == name]
    return _get_only(found, f"assignment to '{name}'")


def _replace(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(root):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list):
                value[:] = [new if each is old else each for each in value]


def _parse(expression: str, definition: Definition, it: ast.AST | None = None) -> ast.expr:
    """Parse an expression, which must use names of the definition only: a renamed variable must not break the mutant."""
    parsed = ast.parse(expression, mode="eval")
    read = [node for node in ast.walk(parsed) if isinstance(node, ast.Name)]
    known = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    known |= {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    known |= {node.id for node in read if isinstance(node.ctx, ast.Store)} | vars(builtins).keys()
    for node in read:
        if node.id == "it" and it is not None:
            _replace(parsed, node, copy.deepcopy(it))
        elif node.id not in known:
            raise NotApplicableError(f"the function has no variable '{node.id}' for `{expression}`")
    return parsed.body
