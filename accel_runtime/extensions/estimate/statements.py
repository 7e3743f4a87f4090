"""The statements of a script that one of its names depends on, so that the script itself is not run."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Statement", "select_statements"]

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_SETTINGS = ("sys.path", "os.environ")
"""Objects that imports depend on."""
_MODULE_SETTINGS = (*_SETTINGS, "torch.set_default_dtype")
"""Calls of imported modules that a model depends on; others are part of the training."""


@dataclass(frozen=True)
class Statement:
    """A statement of the top level of a script."""

    node: ast.stmt
    bound: frozenset[str] = frozenset()
    """Names that it assigns, defines or imports."""
    used: frozenset[str] = frozenset()
    """Names that it reads when it runs or when its functions are called."""
    changed: tuple[str, ...] = ()
    """Expressions that it changes, without subscripts: `options` for `options["width"] = 3`, `parser.add_argument` for a call."""

    @classmethod
    def parse(cls, node: ast.stmt) -> Statement:
        """Return the statement of a node, with its names."""
        table = symtable.symtable(ast.unparse(node), "<statement>", "exec")
        symbols = table.get_symbols()
        bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
        used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()} | set(_list_globals(table))
        return cls(node, frozenset(bound), frozenset(used), tuple(_list_changed(node)))

    @property
    def binds_unknown_names(self) -> bool:
        """Return True for `from module import *`."""
        return isinstance(self.node, ast.ImportFrom) and self.node.names[0].name == "*"

    def binds_variable(self, name: str) -> bool:
        """Return True if it assigns a name, and neither defines nor imports it."""
        return name in self.bound and not isinstance(self.node, (*_DEFINITIONS, *_IMPORTS))

    def binds_value(self, name: str) -> bool:
        """Return True if it gives a name a value, other than the None of a declaration."""
        value = self.node.value if isinstance(self.node, (ast.Assign, ast.AnnAssign)) else self.node
        is_empty = value is None or (isinstance(value, ast.Constant) and value.value is None)
        return name in self.bound and not is_empty


def select_statements(source: str, name: str, file: str = "<script>") -> list[Statement]:
    """Return the statements that a name of a script depends on, in their order.

    A variable has its first value: a model before it is prepared and trained. Loops are left out unless nothing else assigns
    the name.
    """
    statements = [Statement.parse(node) for node in ast.parse(source, file).body]
    selected = {
        index
        for index, each in enumerate(statements)
        if any(path.startswith(_SETTINGS) for path in each.changed)
        or each.binds_unknown_names
        or (isinstance(each.node, ast.ImportFrom) and each.node.module == "__future__")
    }
    needed = {name}.union(*(statements[index].used for index in selected))
    pending = list(needed)
    while pending:
        current = pending.pop()
        for index in _find_bindings(statements, current, is_target=current == name):
            if index not in selected:
                selected.add(index)
                new = statements[index].used - needed
                needed |= new
                pending += new
    return [statements[index] for index in sorted(selected)]


def _find_bindings(statements: Sequence[Statement], name: str, *, is_target: bool) -> list[int]:
    """Return the indices of the statements that give a name its value."""
    binding = [index for index, each in enumerate(statements) if name in each.bound]
    outside = [index for index in binding if not isinstance(statements[index].node, _LOOPS)]
    if is_target:
        values = [index for index in outside if statements[index].binds_value(name)]
        definitions = [index for index in values if isinstance(statements[index].node, _DEFINITIONS)]
        return (definitions or values or binding)[:1]
    is_module = any(isinstance(statements[index].node, _IMPORTS) for index in binding)
    changing = [
        index
        for index, each in enumerate(statements)
        for path in each.changed
        if path.partition(".")[0] == name and (not is_module or path.startswith(_MODULE_SETTINGS))
    ]
    return [*(outside or binding), *changing]


def _list_globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that functions and classes of a statement use."""
    for child in table.get_children():
        for symbol in child.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                yield symbol.get_name()
        yield from _list_globals(child)


def _list_changed(node: ast.stmt) -> Iterator[str]:
    """Yield the names whose objects a statement changes."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        targets = [node.value.func]
    elif isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    else:
        return
    for target in targets:
        names: list[str] = []
        root = target
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            names[:0] = [root.attr] if isinstance(root, ast.Attribute) else []
            root = root.value
        if isinstance(root, ast.Name) and root is not target:
            yield ".".join([root.id, *names])
