"""Changes of a script: expressions that are replaced, statements that are inserted and removed."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import libcst as cst
from typing_extensions import override

from accel_cli.extensions.migrate.script import descendants, list_children, to_code

__all__ = [
    "Edits",
    "add_import",
    "drop_last_comma",
    "drop_parameters",
    "drop_unused_imports",
    "is_docstring",
    "keep_arguments",
    "list_unbound_names",
    "set_fields",
    "set_function",
]

Change = Callable[[Any], Any]
"""A function of a node, whose children are changed already, that returns the node to use instead."""
Code = str | Callable[[], str]
"""A statement to insert, or a function that returns it after the nodes in it are changed."""


@dataclass
class Edits:
    """Changes of the nodes of a module, collected first and applied together."""

    changes: dict[cst.CSTNode, list[Change]] = field(default_factory=dict)
    removed: set[cst.CSTNode] = field(default_factory=set)
    before: dict[cst.CSTNode, list[Code]] = field(default_factory=dict)
    after: dict[cst.CSTNode, list[Code]] = field(default_factory=dict)

    def change(self, node: cst.CSTNode, change: Change) -> None:
        """Apply a function to a node, after those that were added before."""
        self.changes.setdefault(node, []).append(change)

    def replace(self, node: cst.CSTNode, code: str) -> None:
        """Replace an expression by code."""
        expression = cst.parse_expression(code)
        self.changes[node] = [lambda _: expression]

    def remove(self, statement: cst.CSTNode) -> None:
        """Remove a statement of one line."""
        self.removed.add(statement)

    def insert_before(self, statement: cst.CSTNode, *code: Code) -> None:
        """Insert statements before a statement."""
        self.before.setdefault(statement, []).extend(code)

    def insert_after(self, statement: cst.CSTNode, *code: Code) -> None:
        """Insert statements after a statement."""
        self.after.setdefault(statement, []).extend(code)

    def apply(self, module: cst.Module) -> cst.Module:
        """Return the changed module."""
        changed = module.visit(_Transformer(self, module))
        assert isinstance(changed, cst.Module)
        return changed


class _Transformer(cst.CSTTransformer):
    def __init__(self, edits: Edits, module: cst.Module) -> None:
        super().__init__()
        self._edits = edits
        self._config = module.config_for_parsing
        self._entered = _list_around(module, {*edits.changes, *edits.removed, *edits.before, *edits.after})
        """The nodes that contain a change; others stay as they are."""
        self._statements: set[cst.CSTNode] = set()
        self._blank: list[list[cst.EmptyLine]] = []
        """The blank lines before removed statements that the next statement gets, for each block that is entered."""

    @override
    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.IndentedBlock, cst.Module)):
            self._statements.update(node.body)
            self._blank.append([])
        return node in self._entered

    @override
    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if original_node in self._edits.removed:
            self._keep_blank_lines(original_node)
            return cst.RemoveFromParent()
        updated = updated_node
        for change in self._edits.changes.get(original_node, ()):
            updated = change(updated)
        if isinstance(original_node, cst.If):
            updated = _drop_empty_branches(original_node, updated)
        if isinstance(updated, (cst.IndentedBlock, cst.Module)):
            self._blank.pop()
            updated = updated.with_changes(body=_strip_start(original_node, updated.body))
        before = self._parse(self._edits.before.get(original_node, ()))
        after = self._parse(self._edits.after.get(original_node, ()))
        if _is_empty(updated) and not before and not after:
            self._keep_blank_lines(original_node)
        elif original_node in self._statements:
            updated = self._add_blank_lines(updated)
        if before or after:
            kept = [] if _is_empty(updated) else [updated]
            if not kept and isinstance(updated, cst.SimpleStatementLine):
                first, *rest = [*before, *after]
                before, after = [first.with_changes(leading_lines=updated.leading_lines), *rest], []
            return cst.FlattenSentinel([*before, *kept, *after])
        return updated

    def _keep_blank_lines(self, statement: cst.CSTNode) -> None:
        if statement in self._statements and not self._blank[-1]:
            lines = getattr(statement, "leading_lines", ())
            self._blank[-1] = [line for line in lines if line.comment is None]

    def _add_blank_lines(self, statement: Any) -> Any:
        blank, self._blank[-1] = self._blank[-1], []
        lines = statement.leading_lines
        return (
            statement
            if lines and not lines[0].comment
            else set_fields(statement, leading_lines=[*blank, *lines])
        )

    def _parse(self, code: Iterable[Code]) -> list[Any]:
        return [cst.parse_statement(one if isinstance(one, str) else one(), self._config) for one in code]


def _list_around(module: cst.Module, nodes: set[cst.CSTNode]) -> set[cst.CSTNode]:
    """Return nodes of a module, and those around them."""
    parents = {child: node for node in descendants(module) for child in list_children(node)}
    found: set[cst.CSTNode] = set()
    for node in nodes:
        one: cst.CSTNode | None = node
        while one is not None and one not in found:
            found.add(one)
            one = parents.get(one)
    return found


def _is_empty(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and not node.body


def _strip_start(original: cst.IndentedBlock | cst.Module, body: Sequence[Any]) -> Sequence[Any]:
    """Return statements without blank lines at the start if the original block begins without them."""
    lines = getattr(body[0], "leading_lines", ()) if body else ()
    before = getattr(original.body[0], "leading_lines", ()) if original.body else ()
    if not lines or lines[0].comment is not None or (before and before[0].comment is None):
        return body
    kept = lines[next((n for n, line in enumerate(lines) if line.comment), len(lines)) :]
    return [body[0].with_changes(leading_lines=kept), *body[1:]]


def _drop_empty_branches(original: cst.If, updated: cst.If) -> Any:
    """Return an `if` without the branches whose statements were all removed."""
    has_body = not (original.body.children and _is_block(updated.body) and not updated.body.body)
    otherwise: Any = updated.orelse
    if (isinstance(otherwise, cst.Else) and _is_block(otherwise.body) and not otherwise.body.body) or (
        otherwise is not None and _is_empty(otherwise)
    ):
        otherwise = None
    if has_body:
        return updated if otherwise is updated.orelse else updated.with_changes(orelse=None)
    if otherwise is None:
        return cst.SimpleStatementLine(body=[], leading_lines=updated.leading_lines)
    if not isinstance(otherwise, cst.Else):
        return updated
    test = cst.UnaryOperation(
        cst.Not(), updated.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    )
    return updated.with_changes(test=test, body=otherwise.body, orelse=None)


def _is_block(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.IndentedBlock)


def is_docstring(statement: cst.CSTNode) -> bool:
    """Return whether a statement that is the first of its block is a docstring."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and statement.body else None
    return isinstance(small, cst.Expr) and isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString))


def add_import(module: cst.Module, statements: Iterable[str]) -> cst.Module:
    """Return a module with imports after its last import at the top, without those that it has."""
    body = list(module.body)
    code = module.code.splitlines()
    new = [cst.parse_statement(one, module.config_for_parsing) for one in statements if one not in code]
    position = 0
    for number, statement in enumerate(body):
        small = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        if any(isinstance(one, (cst.Import, cst.ImportFrom)) for one in small):
            position = number + 1
        elif number == 0 and is_docstring(statement):
            position = 1
        elif not isinstance(statement, (cst.Try, cst.If)) and position:
            break
    return module.with_changes(body=[*body[:position], *new, *body[position:]])


def list_unbound_names(text: str) -> set[str]:
    """Return the names that a script reads and nowhere assigns, without those of Python."""
    module = symtable.symtable(text, "script", "exec")
    bound = {
        symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    read: set[str] = set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                bound.add(symbol.get_name())
            if symbol.is_referenced() and (symbol.is_global() or table is module):
                read.add(symbol.get_name())
    return read - bound - set(dir(builtins))


def _list_used_names(text: str) -> set[str]:
    """Return the names that a script reads, and those in its `__all__`."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names | texts if "__all__" in names else names


def drop_unused_imports(before: str, module: cst.Module, packages: tuple[str, ...] = ()) -> cst.Module:
    """Return a module without the imports that only the text before the changes used, and unused ones of packages."""
    used = _list_used_names(module.code)
    unused = _list_used_names(before) - used
    edits = Edits()
    bodies = [one.body.body for one in descendants(module) if isinstance(one, cst.FunctionDef)]
    for statement in [*module.body, *(one for body in bodies if len(body) > 1 for one in body)]:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, (cst.Import, cst.ImportFrom)) and not isinstance(
                small.names, cst.ImportStar
            ):
                source = to_code(small.module) if isinstance(small, cst.ImportFrom) and small.module else ""
                kept = [
                    alias
                    for alias in small.names
                    if (name := _get_bound_name(alias)) in used
                    or not (name in unused or (source or to_code(alias.name)).startswith(packages))
                ]
                if not kept:
                    edits.remove(small)
                elif len(kept) < len(small.names):
                    edits.change(small, partial(set_fields, names=drop_last_comma(kept)))
    return edits.apply(module)


def set_fields(node: Any, **fields: Any) -> Any:
    """Return a node with other fields."""
    return node.with_changes(**fields)


def drop_last_comma(items: Sequence[Any]) -> list[Any]:
    """Return arguments, parameters or names without the comma after the last one."""
    return [*items[:-1], *(one.with_changes(comma=cst.MaybeSentinel.DEFAULT) for one in items[-1:])]


def keep_arguments(call: Any, names: set[str], extra: str = "", *, keeps_names: bool = False) -> Any:
    """Return a call with its positional arguments and those of some names, and with more arguments at the end."""
    args = [arg for arg in call.args if arg.keyword is None or arg.keyword.value in names]
    if not keeps_names:
        args = [arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT) for arg in args]
    added: Any = cst.parse_expression(f"f({extra})")
    args += added.args
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    args = [arg if isinstance(arg.comma, cst.Comma) else arg.with_changes(comma=comma) for arg in args]
    return call.with_changes(args=drop_last_comma(args))


def drop_parameters(function: cst.FunctionDef, names: set[str]) -> cst.FunctionDef:
    """Return a function without some parameters."""
    params = function.params
    kept: Sequence[cst.Param] = [param for param in params.params if param.name.value not in names]
    if (
        params.star_arg is cst.MaybeSentinel.DEFAULT
        and not params.kwonly_params
        and params.star_kwarg is None
    ):
        kept = drop_last_comma(kept)
    return function.with_changes(params=params.with_changes(params=kept))


def set_function(code: str) -> Change:
    """Return a change of a call that replaces its function by code."""
    return partial(set_fields, func=cst.parse_expression(code))


def _get_bound_name(alias: cst.ImportAlias) -> str:
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return next(node.value for node in descendants(alias.name) if isinstance(node, cst.Name))
