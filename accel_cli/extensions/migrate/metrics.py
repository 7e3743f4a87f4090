"""Metrics of evaluation loops: the samples of all processes are gathered before they are counted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.lengths import is_number_of_samples, list_divisors
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    Role,
    Script,
    Variable,
    descendants,
    get_method,
    get_positional,
    list_elements,
    to_code,
)
from accel_cli.extensions.migrate.totals import Totals, exchanges_values

__all__ = [
    "accumulates",
    "check_loaders",
    "convert_evaluation",
    "find_other_uses",
    "is_gatherable",
    "list_evaluations",
]

_TENSOR_METHODS = {
    "argmax", "max", "topk", "softmax", "log_softmax", "sigmoid", "size", "data", "detach", "cpu", "numpy", "float",
    "shape", "view", "squeeze", "reshape", "sum", "mean", "item", "round", "long", "eq", "numel", "tolist", "view_as", "flatten",
}  # fmt: skip
"""Attributes of a tensor in an evaluation loop; an output with others is an object with fields."""
_HARMLESS = {"len", "print", "isinstance", "enumerate", "hasattr", "type"}
_MEAN = re.compile(r"^(?!.*(\*|sum)).*(\.item\(\)|float\(.*\))$", re.DOTALL)
"""Code of a value that may be the mean of a batch."""


# Loaders


def check_loaders(conversion: Conversion) -> None:
    """Leave loaders unprepared that are read under another name; raise an error if they train."""
    script = conversion.script
    training = conversion.find_training_loaders()
    for node in script.nodes:
        role = script.role_of_variable(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
        if role is None or role.kind != "loader" or not conversion.is_prepared(role.origins):
            continue
        if not _is_alias(script, node):
            continue
        if role.origins & training:
            raise conversion.unsafe(
                node,
                "The loader that trains is read in a way that is not understood. Read it in a for loop by its own name.",
            )
        conversion.unprepared |= role.origins
        conversion.finding(
            node,
            "This loader is not prepared, since it is not only read in for loops by its own name, so every process reads all of its samples. Read it by its own name, and pass it to accelerator.prepare.",
        )


def _is_alias(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a loader is an argument of a function of Python, or a part of a collection."""
    parent = script.parents.get(node)
    while isinstance(parent, cst.Arg) and isinstance(call := script.parents[parent], cst.Call):
        name = script.qualified_name(call.func)
        known = call in script.callees or call in script.constructed
        if known or name.removeprefix("builtins.") in _HARMLESS or script.is_progress_bar(call):
            return False
        if isinstance(script.parents.get(call), (cst.For, cst.CompFor)) or (
            name == "builtins.zip" and script.loader_of(call) is not None
        ):
            return False
        return name.startswith("builtins.") and not _is_known_read(script, call, name)
    if isinstance(parent, (cst.Element, cst.DictElement)):
        outer = script.parents[script.parents[parent]]
        is_unpacked = isinstance(outer, cst.Assign) and all(
            isinstance(one.target, cst.Tuple) for one in outer.targets
        )
        return not (is_unpacked or isinstance(outer, (cst.Return, cst.AssignTarget)))
    return False


def _is_known_read(script: Script, call: cst.Call, name: str) -> bool:
    """Return whether a loader is read by `next(iter(loader))`, an iterator in a variable, or `len(list(loader))`.

    Each process may read a first batch, which starts and leaves an epoch as the loader before did.
    """
    outer = script.parents.get(call)
    if isinstance(outer, cst.Assign):
        return name == "builtins.iter" and script.kind_of(outer.targets[0].target) == "iterator"
    reader = {"builtins.iter": "builtins.next", "builtins.list": "builtins.len"}.get(name)
    return (
        reader is not None and isinstance(outer, cst.Arg) and script.is_call_of(script.parents[outer], reader)
    )


def find_other_uses(conversion: Conversion) -> None:
    """Leave loaders whole that comprehensions and functions of other files compute with; report those that train."""
    script = conversion.script
    for node in script.nodes:
        if isinstance(node, cst.BaseComp) and any(map(script.is_model_call, descendants(node))):
            loader = script.loader_of(node.for_in.iter)
            if loader is not None and conversion.is_prepared(loader.origins):
                _leave_whole(conversion, node, loader.origins)
        elif isinstance(node, cst.Call) and script.is_foreign_call(node):
            roles = [role for arg in node.args if isinstance(role := script.role_of(arg.value), Role)]
            loaders = frozenset(one for role in roles if role.kind == "loader" for one in role.origins)
            kinds = {role.kind for role in roles}
            if loaders and "model" in kinds and "optimizer" not in kinds:
                _leave_whole(conversion, node, loaders)
        elif (
            script.is_call_of(node, "torch.optim.swa_utils.update_bn")
            and node.args
            and (loader := script.loader_of(node.args[0].value)) is not None
            and conversion.is_prepared(loader.origins)
        ):
            conversion.finding(
                node,
                "This computes the statistics of BatchNorm from the samples of one process. Pass a DataLoader that is not prepared, such as another one of the same dataset, and device=accelerator.device.",
            )


# Evaluation


def convert_evaluation(conversion: Conversion) -> None:
    """Gather what the metrics of an evaluation loop are computed from; a loader whose loop is not understood stays whole."""
    script = conversion.script
    for loop in list_evaluations(conversion):
        role = script.loader_of(loop.iter)
        assert role is not None
        if not conversion.is_prepared(role.origins):
            continue
        totals = Totals(conversion, loop)
        is_collective = script.function_of(loop) in conversion.collective
        if totals.exchanges and (
            is_collective or not totals.can_be_gathered or not _gather(conversion, loop)
        ):
            # neither gathered nor left whole: both would count each sample once for each process
            totals.report(loop)
        elif totals.exchanges:
            conversion.complete.update(totals.exchanges)
        elif (
            not is_collective
            and any(map(accumulates, descendants(loop.body)))
            and not _gather(conversion, loop)
        ):
            _leave_whole(conversion, loop, role.origins)


def list_evaluations(conversion: Conversion) -> list[cst.For]:
    """Return the loops over loaders without a backward pass."""
    script = conversion.script
    found = []
    for node in script.nodes:
        if (
            isinstance(node, cst.For)
            and script.batch_target(node) is not None
            and script.loader_of(node.iter)
        ):
            inside = set(descendants(node))
            trains = any(call in inside for call in conversion.backwards) or any(
                call in inside and callee in conversion.training for call, callee in script.callees.items()
            )
            if not trains:
                found.append(node)
    return found


def _gather(conversion: Conversion, loop: cst.For) -> bool:
    """Insert a gather after the model's call in an evaluation loop; return False if the loop is not understood."""
    script = conversion.script
    calls = [node for node in descendants(loop.body) if script.is_model_call(node)]
    if (
        len(calls) != 1
        or not is_gatherable(script, loop)
        or _divides_means(script, loop)
        or any(map(_moves_rows, descendants(loop.body)))
    ):
        return False
    call = calls[0]
    blocks = [
        one
        for one in (call, *script.ancestors(call))
        if isinstance(script.parents.get(one), cst.IndentedBlock)
    ]
    statement: Any = blocks[0]
    outer = blocks[: [script.parents[one] for one in blocks].index(loop.body) + 1]
    if any(not isinstance(one, (cst.With, cst.SimpleStatementLine)) for one in outer) or not isinstance(
        statement, cst.SimpleStatementLine
    ):
        return False
    return _insert_gather(conversion, loop, call, statement, outer)


def is_gatherable(script: Script, loop: cst.For) -> bool:
    """Return whether a loop reads one loader, through no function of another file, whose batches have one shape."""
    node: Any = loop.iter
    while isinstance(node, cst.Call) and node.args:
        if script.qualified_name(node.func) != "builtins.enumerate" and not script.is_progress_bar(node):
            return False
        node = node.args[0].value
    role = script.loader_of(loop.iter)
    values = [value for one in (role.origins if role else ()) for _, value in script.assigned.get(one, [])]
    return not any(
        isinstance(one, cst.Arg)
        and one.keyword is not None
        and one.keyword.value == "collate_fn"
        and to_code(one.value) != "None"
        for value in values
        for one in descendants(value)
    )


def _divides_means(script: Script, loop: cst.For) -> bool:
    """Return whether means of batches are added in a loop, and divided by the number of samples: gathered batches are fewer."""
    sums = {
        variable
        for node in descendants(loop.body)
        if isinstance(node, cst.AugAssign)
        and _MEAN.search(to_code(node.value))
        and (variable := script.variable(node.target))
    }
    return any(is_number_of_samples(one) for variable in sums for one in list_divisors(script, variable))


def _leave_whole(conversion: Conversion, node: cst.CSTNode, origins: frozenset[Variable]) -> None:
    """Let every process evaluate all samples of loaders; report those that train, which are prepared."""
    if origins & conversion.find_training_loaders():
        conversion.finding(
            node,
            "This evaluates the samples of one process, since the loader that trains is prepared. Gather the outputs and targets with accelerator.gather_for_metrics before counting.",
        )
        return
    if any(
        exchanges_values(conversion.script, call)
        for call in conversion.script.nodes
        if call not in conversion.complete
    ):
        # its sum over the processes would count each sample once for each process
        conversion.finding(
            node,
            "This evaluates the samples of one process, and the script exchanges values between processes. If it sums them, padding of the last batch is counted: gather the outputs and targets with accelerator.gather_for_metrics before counting, and remove the exchange.",
        )
        return
    conversion.unprepared |= origins
    conversion.note(
        node,
        "Every process evaluates all samples here, since this loader is not prepared. To divide them, prepare it, and gather the outputs and targets with accelerator.gather_for_metrics before counting.",
    )


def accumulates(node: cst.CSTNode) -> bool:
    """Return whether a statement adds to a metric, or fills a part of one."""
    if isinstance(node, cst.Assign):
        targets = [one.target for one in node.targets]
        names = {to_code(one) for one in targets}
        parts: tuple[cst.CSTNode, ...] = (node.value,) if isinstance(node.value, cst.BinaryOperation) else ()
        parts = tuple(node.value.args) if isinstance(node.value, cst.Call) else parts
        is_added = any(
            isinstance(one, cst.Name) and one.value in names for part in parts for one in descendants(part)
        )
        return is_added or any(isinstance(one, cst.Subscript) for one in targets)
    return isinstance(node, cst.AugAssign) or (get_method(node) in {"append", "extend", "update"})


def _insert_gather(
    conversion: Conversion, loop: cst.For, call: cst.Call, statement: Any, outer: list[Any]
) -> bool:
    """Gather the outputs and the parts of the batch that are read later; return False if this is not possible."""
    script = conversion.script
    assign = statement.body[0]
    later = _list_later(script, outer)
    earlier = set(descendants(loop.body)) - {*later, *descendants(statement)}
    if any(map(accumulates, earlier)) or _returns_loss(conversion, assign, later):
        return False
    is_assigned = (
        isinstance(assign, cst.Assign)
        and assign.value is call
        and isinstance(assign.targets[0].target, cst.Name)
    )
    if is_assigned:
        outputs = assign.targets[0].target.value
    else:
        used = {node.value for node in script.nodes if isinstance(node, cst.Name)}
        outputs = next(name for name in ("outputs", "predictions", "model_outputs") if name not in used)
        later = [*descendants(statement), *later]
    inside = set(descendants(call))
    names = [node for node in later if isinstance(node, cst.Name) and node not in inside]
    if (
        any(map(_has_fixed_shape, later))
        or any(_reduces_rows(node, call, outputs) for node in later)
        or not _can_gather_names(script, loop, names, outputs, set(later))
    ):
        return False
    conversion.gathered.add(loop)
    assigned = {node.value for node in names if isinstance(script.parents[node], cst.AssignTarget)}
    parts = dict.fromkeys(
        node.value for node in names if script.kind_of(node) == "batch" and node.value not in assigned
    )
    gathered = ", ".join([outputs, *parts])
    value = f"({gathered})" if parts else gathered
    code = f"{gathered} = {conversion.accelerator(loop)}.gather_for_metrics({value})"
    if is_assigned:
        conversion.edits.insert_after(statement, code)
    else:
        _hoist(conversion, call, statement, outputs)
        conversion.edits.insert_before(statement, code)
    return True


def _has_fixed_shape(node: cst.CSTNode) -> bool:
    """Return whether a batch is given a number of rows, which is another one for gathered batches."""
    if get_method(node) not in {"view", "reshape", "expand"} or not node.args:  # type: ignore[attr-defined]
        return False
    rows = node.args[0].value  # type: ignore[attr-defined]
    code = to_code(list_elements(rows)[0])
    return "batch_size" in code or (code.isdigit() and code != "1")


def _moves_rows(node: cst.CSTNode) -> bool:
    """Return whether a tensor is transposed, so that its first dimension may not be that of the samples."""
    if isinstance(node, cst.Call) and node.args:
        dims = [to_code(arg.value) for arg in node.args]
        method = get_method(node)
        return (method == "permute" and dims[0] != "0") or (method == "transpose" and "0" in dims)
    return isinstance(node, cst.Attribute) and node.attr.value in {"t", "T"}


def _reduces_rows(node: cst.CSTNode, call: cst.Call, outputs: str) -> bool:
    """Return whether the first dimension of an output is reduced, which then is not that of the samples."""
    if get_method(node) not in {"mean", "sum"}:
        return False
    owner, arg = node.func.value, get_positional(node, 0, "dim")  # type: ignore[attr-defined,arg-type]
    is_output = owner is call or (isinstance(owner, cst.Name) and owner.value == outputs)
    return is_output and arg is not None and to_code(arg) == "0"


def _can_gather_names(
    script: Script, loop: cst.For, names: list[cst.Name], outputs: str, later: set[cst.CSTNode]
) -> bool:
    """Return whether the values that are read after the model's call are tensors with a row for each sample."""
    derived = _find_derived(script, loop, [node for node in descendants(loop.body) if node not in later])
    for node in names:
        parent = script.parents[node]
        if node.value != outputs:
            if _is_computed(script, loop, node, derived):
                return False
        elif isinstance(parent, cst.AssignTarget) or (
            isinstance(parent, cst.Attribute) and parent.attr.value not in _TENSOR_METHODS
        ):
            return False
    return True


def _returns_loss(conversion: Conversion, assign: cst.CSTNode, later: list[cst.CSTNode]) -> bool:
    """Return whether the model returns a scalar: by a name of the trained loss, or a value with one item."""
    losses = {to_code(loss) for loss in conversion.losses.values()}
    scalars = {
        to_code(node.value) for node in later if isinstance(node, cst.Attribute) and node.attr.value == "item"
    }
    targets = [one.target for one in assign.targets] if isinstance(assign, cst.Assign) else []
    names = {to_code(name) for target in targets for name in list_elements(target)}
    return (
        isinstance(assign, cst.Assign)
        and conversion.script.is_model_call(assign.value)
        and bool(names & (losses | scalars))
    )


def _find_derived(script: Script, loop: cst.For, nodes: Iterable[cst.CSTNode]) -> set[Variable]:
    """Return the variables that are computed from the batch in these nodes."""
    known = script.variables(script.batch_target(loop) or loop.target)
    found: set[Variable] = set()
    for node in nodes:
        if isinstance(node, (cst.Assign, cst.NamedExpr)) and any(
            script.variable(one) in known for one in descendants(node.value)
        ):
            targets = [one.target for one in node.targets] if isinstance(node, cst.Assign) else [node.target]
            names = set().union(*map(script.variables, targets))
            known |= names
            found |= names
    return found


def _is_computed(script: Script, loop: cst.For, node: cst.Name, derived: set[Variable]) -> bool:
    """Return whether a name that is read has a value computed from the batch, and is not a part of it."""
    if isinstance(script.parents[node], cst.AssignTarget):
        return False
    if script.kind_of(node) == "batch":
        return not _is_of_batch(script, loop, node)
    return script.variable(node) in derived


def _is_of_batch(script: Any, loop: cst.For, node: cst.Name) -> bool:
    """Return whether a name is a batch or a part of one, and not a number computed from it."""
    variable = script.variable(node)
    target = script.batch_target(loop)
    if any(isinstance(one, cst.Name) and script.variable(one) == variable for one in descendants(target)):
        return True
    entries = [
        value for assign, value in script.assigned.get(variable, []) if assign in set(descendants(loop))
    ]
    unpacked = any(
        isinstance(one, cst.Assign)
        and isinstance(one.targets[0].target, cst.Tuple)
        and script.kind_of(one.value) == "batch"
        and any(script.variable(element.value) == variable for element in one.targets[0].target.elements)
        for one in descendants(loop.body)
    )
    return unpacked or (bool(entries) and all(script.kind_of(value) == "batch" for value in entries))


def _hoist(conversion: Conversion, call: cst.Call, statement: Any, outputs: str) -> None:
    """Assign the value of a call to a variable before its statement."""
    changed: list[cst.CSTNode] = []

    def take(node: cst.CSTNode) -> cst.Name:
        changed.append(node)
        return cst.Name(outputs)

    conversion.edits.change(call, take)
    conversion.edits.insert_before(statement, lambda: f"{outputs} = {to_code(changed[0])}")


def _list_later(script: Any, outer: list[Any]) -> list[cst.CSTNode]:
    """Return the nodes that run after each of these nested statements, in its block."""
    found: list[cst.CSTNode] = []
    for one in outer:
        block = script.parents[one]
        position = list(block.body).index(one)
        for later in block.body[position + 1 :]:
            found += descendants(later)
    return found
