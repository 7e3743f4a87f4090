"""Conversion of scripts with a process group of torch: ranks, `DistributedSampler` and `DistributedDataParallel`."""

from __future__ import annotations

from functools import partial
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.edits import drop_last_comma
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    Script,
    descendants,
    get_method,
    get_positional,
    list_elements,
    to_code,
)
from accel_cli.extensions.migrate.totals import REDUCTIONS, read_reduction

__all__ = [
    "REMOVED",
    "convert_process_group",
    "convert_ranks",
    "convert_reductions",
    "convert_samplers",
]

_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_SAMPLERS = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
REMOVED = (
    "torch.distributed.init_process_group",
    "torch.distributed.destroy_process_group",
    "torch.cuda.set_device",
    "torch.accelerator.set_device_index",
    "torch.accelerator.set_device_idx",
)
_METHODS = {"no_sync": "no_sync({})", "join": "join_uneven_inputs([{}])"}
"""Methods of DDP, and those of the Accelerator that also work for a model on one process."""
_DDP_OPTIONS = {
    "broadcast_buffers": "True",
    "bucket_cap_mb": "",
    "dim": "0",
    "find_unused_parameters": "False",
    "gradient_as_bucket_view": "False",
    "static_graph": "False",
}
"""Options of DDP with their defaults."""
_SYNC = ".require_backward_grad_sync"
"""The attribute of DDP that scripts set instead of `no_sync`."""
_ATTRIBUTES = {"rank": "process_index", "local_rank": "local_process_index", "world_size": "num_processes"}
_MAIN = {"rank": "is_main_process", "local_rank": "is_local_main_process"}
_COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "gather",
        "gather_object",
        "all_to_all",
    )
)


def convert_process_group(conversion: Conversion) -> None:
    """Remove the process group and the choice of a GPU, and convert barriers and the arguments of DDP."""
    script = conversion.script
    conversion.collective = _find_collective(script)
    for call in script.calls:
        name = script.qualified_name(call.func)
        if name in REMOVED:
            statement = script.parents[call]
            if isinstance(statement, cst.Expr):
                conversion.edits.remove(statement)
            else:
                conversion.edits.replace(call, "None")
        elif name == "torch.distributed.is_initialized":
            conversion.edits.replace(call, f"{conversion.accelerator(call)}.use_distributed")
        elif name == "torch.distributed.barrier":
            if any(arg.keyword is None or arg.keyword.value == "group" for arg in call.args):
                continue  # that of a group works as it is
            conversion.edits.replace(call, f"{conversion.accelerator(call)}.wait_for_everyone()")
        elif name in _DDP:
            _read_options(conversion, call)
        elif isinstance(call.func, cst.Attribute) and script.kind_of(call.func.value) == "model":
            _convert_method(conversion, call, call.func.value)
    _check_guards(conversion)


def _find_collective(script: Script) -> set[cst.FunctionDef | None]:
    """Return the functions in which the script exchanges values itself, also in functions that they call and that read no loader."""
    if any(
        script.is_call_of(call, *REDUCTIONS) and read_reduction(script, call) is None for call in script.calls
    ):
        return {None, *script.functions}
    reading = {
        script.function_of(node)
        for node in script.nodes
        if isinstance(node, cst.For) and script.loader_of(node.iter)
    }
    found = {script.function_of(call) for call in script.calls if script.is_call_of(call, *_COLLECTIVES)}
    return script.find_callers(found, leaves=reading)


def _convert_method(conversion: Conversion, call: cst.Call, model: cst.BaseExpression) -> None:
    """Replace a method of DDP, and report its hook."""
    method = get_method(call)
    if method == "register_comm_hook":
        conversion.finding(
            call,
            "A model has this method only after accelerator.prepare, and on several processes. Use DistributedDataParallelKwargs(comm_hook=...).",
        )
    elif method in _METHODS:
        code = _METHODS[method].format(to_code(model))
        conversion.edits.replace(call, f"{conversion.accelerator(call)}.{code}")


def _read_options(conversion: Conversion, call: cst.Call) -> None:
    """Pass the options of DDP that are constants to the Accelerator, and report others."""
    options = []
    for arg in call.args[1:]:
        name, code = arg.keyword.value if arg.keyword is not None else "", to_code(arg.value)
        is_constant = code in {"True", "False"} or isinstance(arg.value, cst.Integer)
        if name in _DDP_OPTIONS and is_constant:
            options += [f"{name}={code}"] if code != _DDP_OPTIONS[name] else []
        elif name not in {"", "device_ids", "output_device"} and code != "None":
            conversion.finding(
                arg,
                f"The argument {name} of DistributedDataParallel is dropped. Options of DDP are arguments of DistributedDataParallelKwargs, in Accelerator(kwargs_handlers=[...]).",
            )
    if options:
        conversion.imports.add("DistributedDataParallelKwargs")
        conversion.arguments["kwargs_handlers"] = f"[DistributedDataParallelKwargs({', '.join(options)})]"


def _check_guards(conversion: Conversion) -> None:
    """Report loaders that are read on some ranks only, and leave them whole: a prepared one is read by all processes."""
    script = conversion.script
    conversion.unprepared |= {
        variable
        for variable, nodes in conversion.creations.items()
        if script.roles[variable].kind == "loader" and all(map(conversion.is_guarded_here, nodes))
    }
    loops = [node for node in script.nodes if isinstance(node, cst.For) and script.loader_of(node.iter)]
    for loop in loops:
        guarded = _find_guarded(conversion, loop, set())
        role = script.loader_of(loop.iter)
        if guarded is None or role is None:
            continue
        if not role.origins & conversion.find_training_loaders():
            conversion.unprepared |= role.origins
        conversion.finding(
            guarded,
            "A loader is read on some ranks only. Read it on all processes, and print on the main one.",
        )


def _find_guarded(
    conversion: Conversion, node: cst.CSTNode, seen: set[cst.FunctionDef]
) -> cst.CSTNode | None:
    """Return the loop, or the call of its function, that runs on some ranks only."""
    script = conversion.script
    if conversion.is_guarded_here(node):
        return node
    function = script.function_of(node)
    if function is None or function in seen:
        return None
    seen.add(function)
    return next(
        (found for call in script.calls_of(function) if (found := _find_guarded(conversion, call, seen))),
        None,
    )


# Ranks


def convert_ranks(conversion: Conversion) -> None:
    """Replace ranks and the world size by properties of the Accelerator."""
    script = conversion.script
    removed = set()
    for variable, entries in script.assigned.items():
        role = script.roles.get(variable)
        for node, value in entries:
            is_rank = role is not None and role.kind in _ATTRIBUTES and script.variable(value) is None
            if is_rank and _assigns_ranks(conversion, node) and not _precedes_home(conversion, node):
                conversion.edits.remove(node)
                removed.add(variable)
    for node in script.nodes:
        if isinstance(node, (cst.Name, cst.Attribute)):
            known = script.variable(node)
            if known in removed and not isinstance(script.parents.get(node), (cst.AssignTarget, cst.Param)):
                _replace_rank(conversion, node, script.roles[known].kind)
        elif isinstance(node, (cst.Call, cst.Subscript)) and node not in script.callees:
            kind = script.kind_of(node)
            if kind in _ATTRIBUTES and not _is_in_rank(conversion, node):
                _replace_rank(conversion, node, kind)


def _is_in_rank(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether an expression is the argument of `int` around a rank, which is replaced as a whole."""
    outer = conversion.script.parents[node]
    inner = conversion.script.parents.get(outer)
    return (
        isinstance(outer, cst.Arg)
        and isinstance(inner, cst.Call)
        and conversion.script.kind_of(inner) in _ATTRIBUTES
    )


def _assigns_ranks(conversion: Conversion, node: Any) -> bool:
    """Return whether all values of an assignment are ranks or the world size."""
    return all(conversion.script.kind_of(value) in _ATTRIBUTES for value in list_elements(node.value))


def _is_removed(conversion: Conversion, node: cst.CSTNode) -> bool:
    return any(one in conversion.edits.removed for one in conversion.script.ancestors(node))


def _replace_rank(conversion: Conversion, node: cst.CSTNode, kind: str) -> None:
    script = conversion.script
    if _is_removed(conversion, node) or _starts_worker(conversion, node):
        return
    if "environ" in to_code(node) and _precedes_home(conversion, node):
        return
    accelerator = conversion.accelerator(node)
    parent = script.parents.get(node)
    if (
        kind in _MAIN
        and isinstance(parent, cst.Comparison)
        and parent.left is node
        and len(parent.comparisons) == 1
    ):
        target = parent.comparisons[0]
        if to_code(target.comparator) == "0" and isinstance(target.operator, (cst.Equal, cst.NotEqual)):
            negation = "not " if isinstance(target.operator, cst.NotEqual) else ""
            conversion.edits.replace(parent, f"{negation}{accelerator}.{_MAIN[kind]}")
            return
        if to_code(target.comparator) == "-1" and isinstance(target.operator, (cst.Equal, cst.NotEqual)):
            negation = "" if isinstance(target.operator, cst.NotEqual) else "not "
            conversion.edits.replace(parent, f"{negation}{accelerator}.use_distributed")
            return
    conversion.edits.replace(node, f"{accelerator}.{_ATTRIBUTES[kind]}")


def _precedes_home(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a variable of the launcher is read in a function that calls the one that creates the Accelerator."""
    script = conversion.script
    function = script.function_of(node)
    if conversion.home is None or "environ" not in to_code(node) or function is conversion.home:
        return False
    return function in script.find_callers({conversion.home})


def _starts_worker(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a variable of the launcher is an argument of the function that creates the Accelerator."""
    script = conversion.script
    calls = script.calls_of(conversion.home) if conversion.home is not None else []
    return any(call in script.ancestors(node) for call in calls)


# Samplers


def convert_samplers(conversion: Conversion) -> None:
    """Replace `sampler=DistributedSampler(...)` of a loader by `shuffle=True`, and remove `set_epoch`."""
    script = conversion.script
    samplers = {}
    passed = {
        script.variable(arg.value)
        for call in script.calls
        for arg in call.args
        if arg.keyword is not None and arg.keyword.value == "sampler"
    }
    for variable, entries in script.assigned.items():
        role = script.roles.get(variable)
        if role is not None and role.kind == "sampler" and variable in passed:
            samplers[variable] = [one for _, value in entries for one in _list_branches(value)]
            for node, _ in entries:
                conversion.edits.remove(node)
    for node in script.nodes:
        if isinstance(node, cst.Assign) and to_code(node.targets[0].target).endswith(_SYNC):
            conversion.edits.remove(node)
    for call in script.calls:
        if (
            isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "set_epoch"
            and isinstance(script.parents[call], cst.Expr)
            and (script.variable(call.func.value) in samplers or _is_of_loader(script, call.func.value))
        ):
            conversion.edits.remove(script.parents[call])
        elif script.kind_of(call) == "loader" and call not in script.callees:
            _convert_loader(conversion, call, samplers)


def _is_of_loader(script: Script, node: cst.BaseExpression) -> bool:
    """Return whether an expression is `loader.sampler`, or the sampler of its batch sampler."""
    while isinstance(node, cst.Attribute) and node.attr.value in {"sampler", "batch_sampler"}:
        node = node.value
        if script.kind_of(node) == "loader":
            return True
    return False


def _list_branches(value: cst.BaseExpression) -> list[cst.BaseExpression]:
    return [value.body, value.orelse] if isinstance(value, cst.IfExp) else [value]


def _convert_loader(conversion: Conversion, call: cst.Call, samplers: dict[Any, Any]) -> None:
    script = conversion.script
    shuffle = get_positional(call, 2, "shuffle")
    for index, arg in enumerate(call.args):
        if arg.keyword is None or arg.keyword.value != "sampler":
            continue
        values = samplers.get(script.variable(arg.value), _list_branches(arg.value))
        if not any(script.is_call_of(value, *_SAMPLERS) for value in values):
            return
        orders = {_read_order(script, value, shuffle) for value in values}
        code = orders.pop()
        if orders or code is None:
            raise conversion.unsafe(
                arg.value,
                "The sampler is not a DistributedSampler in every case, and the order of the samples depends on it. Remove it, and pass shuffle=True to the DataLoader if it shuffles.",
            )
        conversion.edits.change(call, partial(_replace_sampler, index=index, shuffle=code))
        conversion.dropped |= set(descendants(arg))


def _read_order(script: Script, sampler: Any, shuffle: cst.BaseExpression | None) -> str | None:
    """Return the code of the loader's argument `shuffle` that orders the samples like a sampler; None for another one."""
    if script.is_call_of(sampler, *_SAMPLERS):
        names = {one.keyword.value: to_code(one.value) for one in sampler.args if one.keyword}
        return names.get("shuffle", "True")
    if to_code(sampler) == "None":
        code = "False" if shuffle is None else to_code(shuffle)
        return (
            code if code in {"True", "False"} else "True" if code.strip("()").endswith(" is None") else None
        )
    return {"RandomSampler": "True", "SequentialSampler": "False"}.get(
        script.qualified_name(sampler.func).rpartition(".")[2]
        if isinstance(sampler, cst.Call) and len(sampler.args) == 1
        else ""
    )


def _replace_sampler(call: cst.Call, index: int, shuffle: str) -> cst.Call:
    args = list(call.args)
    if shuffle == "False":
        del args[index]
    else:
        args[index] = args[index].with_changes(
            keyword=cst.Name("shuffle"), value=cst.parse_expression(shuffle)
        )
    kept = [
        arg
        for number, arg in enumerate(args)
        if not (arg.keyword and arg.keyword.value == "shuffle") or (shuffle != "False" and number == index)
    ]
    return call.with_changes(args=drop_last_comma(kept))


# Reductions


def convert_reductions(conversion: Conversion) -> None:
    """Replace `all_reduce`, or remove it where its sums are those of gathered loops."""
    script = conversion.script
    for call in script.calls:
        if not script.is_call_of(call, *REDUCTIONS) or (read := read_reduction(script, call)) is None:
            continue
        variable, operation = read
        statement = script.parents[call]
        if call in conversion.complete:
            conversion.edits.remove(statement)
            continue
        code = f'{variable.name} = {conversion.accelerator(call)}.reduce({variable.name}, "{operation}")'
        assign: Any = cst.parse_statement(code)
        conversion.edits.change(statement, partial(_use, node=assign.body[0]))


def _use(_: Any, node: cst.CSTNode) -> cst.CSTNode:
    return node
