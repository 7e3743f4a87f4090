"""Scripts that start their processes with `mp.spawn`, which a launcher starts instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.distributed import REMOVED
from accel_cli.extensions.migrate.edits import Edits, add_import, drop_parameters, drop_unused_imports
from accel_cli.extensions.migrate.findings import Finding, UnsafeError
from accel_cli.extensions.migrate.marks import match_lines
from accel_cli.extensions.migrate.script import Script, Variable, get_positional, to_code

__all__ = ["map_lines", "replace_spawn"]

_SPAWN = "torch.multiprocessing.spawn"
_CONNECTS = {"torch.distributed.init_process_group", "torch.distributed.destroy_process_group"}
_STARTS = re.compile(r"\b(spawn|(init|destroy)_process_group)\(")
_SETS_UP = {*REMOVED, "torch.distributed.barrier"}
_ADDRESS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
_IN_GROUP = {
    "RANK": "torch.distributed.get_rank()",
    "WORLD_SIZE": "torch.distributed.get_world_size()",
}
_START_ADVICE = (
    "Call the function once without the rank, and start the script with accel launch --nproc-per-node N."
)


def replace_spawn(text: str) -> str:
    """Return a script that torchrun could start: without `mp.spawn`, and without functions that only set up the process group.

    Raises:
        UnsafeError: A call of `mp.spawn` is not understood.
    """
    if not _STARTS.search(text):
        return text
    script = Script(text)
    edits = Edits()
    for function in script.functions:
        _replace_setup(script, edits, function)
    for node in script.nodes:
        if _sets_address(script, node):
            edits.remove(node)
    spawned = [call for call in script.calls if script.is_call_of(call, _SPAWN)]
    group = _find_group(script)
    for call in spawned:
        _replace_call(script, edits, call, group)
    module = drop_unused_imports(text, edits.apply(script.module))
    imported = {to_code(alias) for one in script.nodes if isinstance(one, cst.Import) for alias in one.names}
    needs = [name for name in ("torch", "os") if f"{name}." in module.code and name not in imported]
    return add_import(module, [f"import {name}" for name in needs] if spawned else []).code


def map_lines(findings: tuple[Finding, ...], text: str, changed: str) -> tuple[Finding, ...]:
    """Return findings in a changed text with the lines of the text before."""
    lines = match_lines(changed, text)
    return tuple(Finding(lines.get(finding.line, finding.line), finding.text) for finding in findings)


def _sets_address(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a statement sets a variable of the environment that a launcher sets."""
    if isinstance(node, cst.Assign) and isinstance(node.targets[0].target, cst.Subscript):
        owner: Any = node.targets[0].target
        return (
            script.qualified_name(owner.value) == "os.environ" and to_code(owner.slice[0])[1:-1] in _ADDRESS
        )
    if isinstance(node, cst.Expr) and script.is_call_of(node.value, "os.environ.setdefault"):
        call: Any = node.value
        return to_code(call.args[0].value)[1:-1] in _ADDRESS
    return False


def _replace_setup(script: Script, edits: Edits, function: cst.FunctionDef) -> None:
    """Remove a function that only sets up or destroys the process group, and do this in place of its calls."""
    lines = function.body.body
    if not all(isinstance(line, cst.SimpleStatementLine) for line in lines):
        return
    statements: list[Any] = [one for line in lines for one in line.body]  # type: ignore[union-attr]
    calls = []
    for index, one in enumerate(statements):
        value = one.value if isinstance(one, cst.Expr) else None
        if isinstance(value, cst.Call) and script.qualified_name(value.func) in _SETS_UP:
            calls.append(value)
        elif not (_sets_address(script, one) or (index == 0 and isinstance(value, cst.SimpleString))):
            return
    connecting = [call for call in calls if script.qualified_name(call.func) in _CONNECTS]
    used = script.calls_of(function)
    is_statement = all(isinstance(script.parents[call], cst.Expr) for call in used)
    if (
        not connecting
        or not used
        or not is_statement
        or len(script.references.get(function, [])) != len(used)
    ):
        return
    edits.remove(function)
    code = f"{to_code(connecting[0].func)}()"
    for call in used:
        edits.replace(call, code)


@dataclass(frozen=True)
class _Group:
    """The variables and attributes that `init_process_group` gets, also through parameters; None without such an argument."""

    ranks: set[Variable | str] | None
    sizes: set[Variable | str] | None

    def name_rank(self, variable: Variable | None) -> str:
        """Return the variable of the launcher for the number that `mp.spawn` passes: the rank, or that on the node."""
        return "RANK" if variable in (self.ranks or ()) else "LOCAL_RANK"

    def name_size(self, variable: Variable | None) -> str:
        """Return the variable of the launcher for `nprocs`: the world size, or the number of processes of the node."""
        return "WORLD_SIZE" if self.sizes is None or variable in self.sizes else "LOCAL_WORLD_SIZE"


def _find_group(script: Script) -> _Group:
    return _Group(_list_sources(script, "rank"), _list_sources(script, "world_size"))


def _list_sources(script: Script, name: str) -> set[Variable | str] | None:
    """Return the variables and attributes whose value is an argument of `init_process_group`; None without it."""
    found: set[Variable | str] = set()
    pending: list[Any] = [
        arg.value
        for call in script.calls
        if script.is_call_of(call, "torch.distributed.init_process_group")
        for arg in call.args
        if arg.keyword is not None and arg.keyword.value == name
    ]
    if not pending:
        return None
    while pending:
        value = pending.pop()
        key = script.variable(value) or (to_code(value) if isinstance(value, cst.Attribute) else None)
        if key is not None and key not in found:
            found.add(key)
            pending += script.list_values(key) if isinstance(key, Variable) else []
    return found


def _set_ranks(script: Script, edits: Edits, worker: cst.FunctionDef, group: _Group) -> None:
    """Replace the ranks that a worker computes from the number of its node, which a launcher does not pass."""
    for node in script.nodes:
        if isinstance(node, cst.Assign) and script.function_of(node) is worker:
            target = node.targets[0].target
            is_rank = (script.variable(target) or to_code(target)) in (group.ranks or ())
            if is_rank and isinstance(node.value, (cst.BinaryOperation, cst.IfExp)):
                edits.replace(node.value, "torch.distributed.get_rank()")


def _replace_call(script: Script, edits: Edits, call: cst.Call, group: _Group) -> None:
    """Replace `mp.spawn(worker, args=(...), nprocs=n)` by a call of the worker, whose rank and sizes are those of the launcher."""
    target, count = get_positional(call, 0, "fn"), get_positional(call, 2, "nprocs")
    arguments: Any = get_positional(call, 1, "args")
    if isinstance(arguments, cst.Name) and (source := script.variable(arguments)) is not None:
        [arguments] = script.list_values(source) if len(script.list_values(source)) == 1 else [arguments]
    variable = script.variable(target) if target is not None else None
    worker = next(
        (one for one in script.functions if variable == Variable(script.scopes[one], one.name.value)), None
    )
    joins = get_positional(call, 3, "join")
    elements = list(arguments.elements) if isinstance(arguments, cst.Tuple) else []
    if (
        target is None
        or not isinstance(script.parents[call], cst.Expr)
        or (worker is None and script.qualified_name(target).startswith("builtins."))
        or (worker is not None and len(elements) > len(worker.params.params) - 1)
        or (arguments is not None and not isinstance(arguments, cst.Tuple))
        or any(isinstance(one, cst.StarredElement) for one in elements)
        or (joins is not None and to_code(joins) != "True")
    ):
        raise UnsafeError(script.line(call), f"This use of mp.spawn is not understood. {_START_ADVICE}")
    values = [to_code(one.value) for one in elements]
    names = [param.name.value for param in worker.params.params] if worker is not None else []
    parameters = [script.parameter(worker, name) for name in names] if worker is not None else []
    size = to_code(count) if count is not None else ""
    if worker is not None:
        _set_ranks(script, edits, worker, group)
    if worker is None or len(script.references.get(worker, [])) != 1:
        known: list[Variable | None] = [*parameters] or [None] * (len(values) + 1)
        values = [
            _read(group.name_size(one)) if value == size else value
            for one, value in zip(known[1:], values, strict=False)
        ]
        edits.replace(call, f"{to_code(target)}({', '.join([_read(group.name_rank(known[0])), *values])})")
        return
    sizes = {
        name: index
        for index, (name, value) in enumerate(zip(names[1:], values, strict=False))
        if value == size
    }
    kept = [value for index, value in enumerate(values) if index not in sizes.values()]
    edits.replace(call, f"{to_code(target)}({', '.join(kept)})")
    rank = "RANK" if group.ranks is None else group.name_rank(parameters[0])
    code = [f"{names[0]} = {_IN_GROUP.get(rank) or _read(rank)}"]
    kinds = {name: group.name_size(parameters[index + 1]) for name, index in sizes.items()}
    code += [f"{name} = {_IN_GROUP.get(kind) or _read(kind)}" for name, kind in kinds.items()]
    edits.change(worker, partial(drop_parameters, names={names[0], *sizes}))
    position = 1 if worker.get_docstring() is not None else 0
    edits.insert_before(worker.body.body[min(position, len(worker.body.body) - 1)], *code)
    _remove_count(script, edits, call, count)


def _read(name: str) -> str:
    """Return the code for a variable of the launcher, where there may be no process group yet."""
    return f'int(os.environ.get("{name}", {int(name.endswith("SIZE"))}))'


def _remove_count(script: Script, edits: Edits, call: cst.Call, count: cst.BaseExpression | None) -> None:
    """Remove the variable for the number of processes if only the call reads it."""
    variable = script.variable(count) if isinstance(count, cst.Name) else None
    entries = script.assigned.get(variable, []) if variable else []
    reads = [
        node
        for node in script.nodes
        if isinstance(node, cst.Name)
        and script.variable(node) == variable
        and not isinstance(script.parents.get(node), cst.AssignTarget)
    ]
    if len(entries) == 1 and all(call in script.ancestors(node) for node in reads):
        edits.remove(entries[0][0])
