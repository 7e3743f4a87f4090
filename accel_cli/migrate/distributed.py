"""Conversion of scripts with a process group of torch: ranks, `DistributedSampler` and `DistributedDataParallel`."""

from __future__ import annotations

from functools import partial
from typing import Any

import libcst as cst

from accel_cli.migrate.edits import drop_last_comma
from accel_cli.migrate.raw import Conversion
from accel_cli.migrate.script import (
    Script,
    Variable,
    descendants,
    get_method,
    get_positional,
    list_elements,
    to_code,
)

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
_METHODS = {
    "no_sync": "accelerator.no_sync(model)",
    "join": "accelerator.join_uneven_inputs([model])",
    "register_comm_hook": "DistributedDataParallelKwargs(comm_hook=...)",
}
_DDP_OPTIONS = {
    "broadcast_buffers": "True",
    "bucket_cap_mb": "",
    "find_unused_parameters": "False",
    "gradient_as_bucket_view": "False",
    "static_graph": "False",
}
"""Options of DDP with their defaults."""
_SYNC = ".require_backward_grad_sync"
"""The attribute of DDP that scripts set instead of `no_sync`."""
_ATTRIBUTES = {"rank": "process_index", "local_rank": "local_process_index", "world_size": "num_processes"}
_MAIN = {"rank": "is_main_process", "local_rank": "is_local_main_process"}
_REDUCTIONS = ("torch.distributed.all_reduce", "torch.distributed.reduce")
_OPERATIONS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"}


def convert_process_group(conversion: Conversion) -> None:
    """Remove the process group and the choice of a GPU, and convert barriers and the arguments of DDP."""
    script = conversion.script
    for call in script.calls:
        name = script.qualified_name(call.func)
        if name in REMOVED:
            statement = script.parents[call]
            if not isinstance(statement, cst.Expr):
                raise conversion.unsafe(call, f"The result of {name} is used. Remove the call.")
            conversion.edits.remove(statement)
        elif name == "torch.distributed.is_initialized":
            conversion.edits.replace(call, f"{conversion.accelerator(call)}.use_distributed")
        elif name == "torch.distributed.barrier":
            if any(arg.keyword is None or arg.keyword.value == "group" for arg in call.args):
                continue  # that of a group works as it is
            conversion.edits.replace(call, f"{conversion.accelerator(call)}.wait_for_everyone()")
        elif name in _DDP:
            _read_options(conversion, call)
        elif (
            isinstance(call.func, cst.Attribute)
            and call.func.attr.value in _METHODS
            and script.kind_of(call.func.value) == "model"
        ):
            _convert_method(conversion, call, call.func.value)
    _check_guards(conversion)


def _convert_method(conversion: Conversion, call: cst.Call, model: cst.BaseExpression) -> None:
    """Replace a method of DDP by that of the Accelerator, which also exists for a model on one process."""
    method = get_method(call)
    if method == "no_sync" and not call.args:
        code = f"{conversion.accelerator(call)}.no_sync({to_code(model)})"
    elif method == "join" and not call.args:
        code = f"{conversion.accelerator(call)}.join_uneven_inputs([{to_code(model)}])"
    else:
        conversion.finding(call, f"{method} is a method of DDP. Use {_METHODS[method]}.")
        return
    conversion.edits.replace(call, code)


def _read_options(conversion: Conversion, call: cst.Call) -> None:
    """Pass the options of DDP that are constants to the Accelerator, and report others."""
    options = []
    for arg in call.args[1:]:
        name, code = arg.keyword.value if arg.keyword is not None else "", to_code(arg.value)
        is_constant = code in {"True", "False"} or isinstance(arg.value, cst.Integer)
        if name in _DDP_OPTIONS and is_constant:
            options += [f"{name}={code}"] if code != _DDP_OPTIONS[name] else []
        elif name not in {"device_ids", "output_device"}:
            conversion.finding(
                arg,
                f"This argument of DistributedDataParallel is not converted. Pass DistributedDataParallelKwargs({name or '...'}=...) to the Accelerator.",
            )
    if options:
        conversion.imports.add("DistributedDataParallelKwargs")
        conversion.arguments["kwargs_handlers"] = f"[DistributedDataParallelKwargs({', '.join(options)})]"


def _check_guards(conversion: Conversion) -> None:
    """Report loaders that are read on some ranks only, and leave them whole: a prepared one is read by all processes."""
    script = conversion.script
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
                "A loader is read on some ranks only. It is not prepared, so these ranks evaluate all samples, and the others wait. Read it on all processes, and print on the main one.",
            )
        else:
            conversion.finding(
                guarded,
                "A loader is read on some ranks only, and all processes must read a prepared one. Read it on all processes, and print on the main one.",
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
    if script.function_of(node) is conversion.home and script.line(node) < conversion.home_line:
        raise conversion.unsafe(
            node, "The rank is used before the Accelerator is created. Choose the device earlier."
        )
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
    for variable, entries in script.assigned.items():
        role = script.roles.get(variable)
        if role is not None and role.kind == "sampler":
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
        ):
            conversion.edits.remove(script.parents[call])
        elif script.kind_of(call) == "loader" and call not in script.callees:
            _convert_loader(conversion, call, samplers)


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
        orders = {_read_order(conversion, value, shuffle) for value in values}
        code = orders.pop()
        if orders or code is None:
            raise conversion.unsafe(
                arg.value,
                "The sampler is not a DistributedSampler in every case, and the order of the samples depends on it. Remove it, and pass shuffle=True to the DataLoader if it shuffles.",
            )
        conversion.edits.change(call, partial(_replace_sampler, index=index, shuffle=code))
        conversion.dropped |= set(descendants(arg))


def _read_order(conversion: Conversion, sampler: Any, shuffle: cst.BaseExpression | None) -> str | None:
    """Return the code of the loader's argument `shuffle` that orders the samples like a sampler; None for another one."""
    script = conversion.script
    if script.is_call_of(sampler, *_SAMPLERS):
        names = {one.keyword.value: to_code(one.value) for one in sampler.args if one.keyword}
        if names.get("drop_last", "False") != "False":
            conversion.note(
                sampler,
                "The DistributedSampler drops samples that are not divisible by the number of processes, and a prepared loader does not. To drop an incomplete batch, pass drop_last=True to the DataLoader.",
            )
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
    """Replace `all_reduce`, or remove it where the samples of all processes are gathered already."""
    script = conversion.script
    for call in script.calls:
        if not script.is_call_of(call, *_REDUCTIONS):
            continue
        tensor, operation = _read_reduction(conversion, call)
        accelerator = conversion.accelerator(call)
        statement = script.parents[call]
        variable = script.variable(tensor)
        assert variable is not None
        is_divided = _is_divided(conversion, call, variable)
        if _is_of_all_processes(conversion, variable, set()) and (operation != "sum" or not is_divided):
            conversion.edits.remove(statement)
            continue
        code = f'{tensor.value} = {accelerator}.reduce({tensor.value}, "{operation}")'
        assign: Any = cst.parse_statement(code)
        conversion.edits.change(statement, partial(_use, node=assign.body[0]))


def _use(_: Any, node: cst.CSTNode) -> cst.CSTNode:
    return node


def _read_reduction(conversion: Conversion, call: cst.Call) -> tuple[cst.Name, str]:
    """Return the tensor and the operation of a reduction."""
    script = conversion.script
    tensor = get_positional(call, 0, "tensor")
    position = 1 if script.qualified_name(call.func).endswith(".all_reduce") else 2
    operation = get_positional(call, position, "op")
    name = "SUM" if operation is None else to_code(operation).rpartition(".")[2]
    names = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    variable = script.variable(tensor) if isinstance(tensor, cst.Name) else None
    changes_argument = variable is not None and _changes_argument(script, call, variable)
    text = to_code(tensor) if tensor is not None else "tensor"
    known = _OPERATIONS.get(name, "sum")
    if (
        not isinstance(tensor, cst.Name)
        or variable is None
        or changes_argument
        or name not in _OPERATIONS
        or names - {"tensor", "op", "dst", "async_op"}
        or any(
            arg.keyword and arg.keyword.value == "async_op" and to_code(arg.value) != "False"
            for arg in call.args
        )
        or not isinstance(script.parents[call], cst.Expr)
    ):
        raise conversion.unsafe(
            call,
            f'This reduction changes a tensor in place, which may be used elsewhere. Write {text} = accelerator.reduce({text}, "{known}").',
        )
    return tensor, _OPERATIONS[name]


def _changes_argument(script: Script, call: cst.Call, variable: Variable) -> bool:
    """Return whether a tensor is a parameter, and callers may read their argument after it is changed in place."""
    function = script.function_of(call)
    names = [param.name.value for param in function.params.params] if function is not None else []
    if function is None or not any(script.parameter(function, name) == variable for name in names):
        return False
    returned = script.returned_values(function)
    if not returned or any(script.variable(one) != variable for one in returned):
        return True
    for caller in script.calls_of(function):
        arg = script.bind(caller, function).get(variable.name)
        assign = script.parents[caller]
        target = assign.targets[0].target if isinstance(assign, cst.Assign) else None
        is_same = target is not None and arg is not None and to_code(target) == to_code(arg.value)
        if arg is None or not (is_same or isinstance(arg.value, cst.Call)):
            return True
    return False


def _is_divided(conversion: Conversion, call: cst.Call, variable: Variable) -> bool:
    """Return whether a variable is divided by the number of processes after a call."""
    script = conversion.script
    for node in script.nodes:
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            parts: tuple[cst.CSTNode, cst.CSTNode] = node.left, node.right
        elif isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign):
            parts = node.target, node.value
        else:
            continue
        reads = any(script.variable(one) == variable for one in descendants(parts[0]))
        sizes = any(script.kind_of(one) == "world_size" for one in descendants(parts[1]))
        if reads and sizes and script.start(node) > script.start(call):
            return True
    return False


def _is_of_all_processes(conversion: Conversion, variable: Variable, seen: set[Variable]) -> bool:
    """Return whether a variable is computed from metrics that loops count for the samples of all processes."""
    script = conversion.script
    seen.add(variable)
    for loop in conversion.gathered:
        for node in descendants(loop.body):
            if isinstance(node, cst.AugAssign) and script.variable(node.target) == variable:
                return True
            callee = script.callees.get(node) if isinstance(node, cst.Call) else None
            if callee is not None and script.class_of(callee) is variable.scope is not None:
                return True
    return any(
        (source := script.variable(one)) is not None
        and source not in seen
        and _is_of_all_processes(conversion, source, seen)
        for value in script.list_values(variable)
        for one in descendants(value)
        if isinstance(one, (cst.Name, cst.Attribute))
    )
