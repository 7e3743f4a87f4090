"""Creation of the Accelerator, and preparation of models, optimizers, loaders and schedulers."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.findings import MissingModelError
from accel_cli.extensions.migrate.raw import ORDER, Conversion, strip_wrappers
from accel_cli.extensions.migrate.script import (
    SETTINGS,
    Script,
    Variable,
    descendants,
    get_method,
    list_elements,
    to_code,
)

__all__ = ["check_creations", "list_blocks", "place_accelerator", "prepare_objects"]

_LINE_LENGTH = 100


@dataclass
class PreparedGroup:
    """Objects that are created in the same function and loop, and prepared together."""

    variables: dict[Variable, str] = field(default_factory=dict)
    """The kind of each."""
    statements: list[cst.CSTNode] = field(default_factory=list)
    condition: cst.If | None = None
    """The condition under which they exist."""


# Statements and blocks


def list_blocks(script: Script, node: cst.CSTNode) -> list[tuple[cst.CSTNode, cst.CSTNode]]:
    """Return the blocks around a node within its function and loop, outermost first, each with the statement in it."""
    found: list[tuple[cst.CSTNode, cst.CSTNode]] = []
    child = node
    for parent in script.ancestors(node):
        if isinstance(parent, (cst.IndentedBlock, cst.Module)):
            found.append((parent, child))
            owner = script.parents.get(parent)
            if isinstance(owner, (cst.FunctionDef, cst.For, cst.While)):
                break
        child = parent
    return found[::-1]


def find_anchor(script: Script, statements: list[cst.CSTNode]) -> cst.CSTNode:
    """Return the last statement of the innermost block that contains all statements."""
    chains = [list_blocks(script, node) for node in statements]
    anchors: list[cst.CSTNode] = []
    for level in zip(*chains, strict=False):
        if len({block for block, _ in level}) > 1:
            break
        anchors = [statement for _, statement in level]
        if len({id(statement) for statement in anchors}) > 1:
            break
    last = max(anchors, key=script.start)
    if len(set(anchors)) > 1 and (isinstance(last, (cst.With, cst.Try)) or is_main_guard(last)):
        # its body runs after the other statements
        return find_anchor(script, [one for one in statements if last in script.ancestors(one)])
    return last


def is_main_guard(node: cst.CSTNode) -> bool:
    """Return whether a statement is `if __name__ == "__main__"`."""
    return isinstance(node, cst.If) and "__name__" in to_code(node.test)


# The Accelerator


def find_devices(conversion: Conversion) -> list[cst.CSTNode]:
    """Return the statements that choose a device, in the order of the text."""
    script = conversion.script
    found = []
    for variable, entries in script.assigned.items():
        role = script.roles.get(variable)
        if role is None or role.kind != "device":
            continue
        for node, value in entries:
            outer = script.find_ancestor(node, (cst.For, cst.While, cst.FunctionDef, cst.ClassDef))
            is_once = outer is None or isinstance(outer, cst.FunctionDef)
            if is_once and len(getattr(node, "targets", [1])) == 1 and _is_device_choice(script, value):
                found.append(node)
    return sorted(found, key=script.start)


def _is_device_choice(script: Script, value: cst.BaseExpression) -> bool:
    return (script.kind_of(value) == "device" and script.variable(value) is None) or isinstance(
        value, (cst.SimpleString, cst.FormattedString)
    )


def place_accelerator(conversion: Conversion) -> None:
    """Choose the statement at which the Accelerator is created."""
    script = conversion.script
    models = [
        node
        for variable, statements in conversion.creations.items()
        if script.roles[variable].kind == "model"
        for node in statements
    ]
    if not models:
        call = conversion.backwards[0]
        for one in script.calls:
            if get_method(one) == "share_memory":
                raise conversion.unsafe(
                    one,
                    "Processes that share a model train it without an average of their gradients. Call the function that trains once, create model and optimizer there, and start the script with accel launch --nproc-per-node N.",
                )
        raise MissingModelError(
            script.line(call),
            "No model of this file with an optimizer was found for this backward pass. Create both in this file, each in a variable of its own, and pass them to accelerator.prepare.",
        )
    first = min((node for nodes in conversion.creations.values() for node in nodes), key=script.start)
    owners = {script.function_of(node) for nodes in conversion.creations.values() for node in nodes}
    devices = find_devices(conversion)
    for node in devices:
        function = script.function_of(node)
        if function is None or function in owners:
            _create_at(conversion, node, [one for one in devices if script.function_of(one) is function])
            return
    home = script.function_of(min(models, key=script.start))
    candidates = [
        node for nodes in conversion.creations.values() for node in nodes if script.function_of(node) is home
    ]
    conversion.home = home
    first = min([*candidates, *_find_process_group(conversion)], key=script.start)
    blocks = list_blocks(script, first)
    statement = blocks[0][1]
    if is_main_guard(statement) and len(blocks) > 1:
        statement = blocks[1][1]
    outer = script.find_ancestor(statement, (cst.For, cst.While, cst.FunctionDef))
    while isinstance(outer, (cst.For, cst.While)):
        statement = outer
        outer = script.find_ancestor(statement, (cst.For, cst.While, cst.FunctionDef))
    _insert_accelerator(conversion, statement)


def _create_at(conversion: Conversion, node: cst.CSTNode, devices: list[cst.CSTNode]) -> None:
    script = conversion.script
    conversion.home = script.function_of(node)
    node = min([node, *_find_process_group(conversion)], key=script.start)
    blocks = list_blocks(script, node)
    statement = blocks[0][1]
    if is_main_guard(statement):
        statement = blocks[1][1]
    settings = _list_settings(conversion) if conversion.home is None else []
    for device in devices:
        value = device.value  # type: ignore[attr-defined]
        is_setting = any(one in settings for one in script.ancestors(device))
        if is_setting or _chooses_cpu(script, value):
            conversion.note(
                device,
                "This setting of the device has no effect. Use accel launch --cpu to train on the CPU.",
            )
        if is_setting:
            continue
        if _is_read_elsewhere(conversion, device):
            conversion.edits.replace(value, f"{conversion.accelerator(device)}.device")
        else:
            conversion.edits.remove(device)
    if statement in settings:
        body = script.module.body
        statement = body[min(body.index(settings[-1]) + 1, len(body) - 1)]
    _insert_accelerator(conversion, statement)


def _chooses_cpu(script: Script, value: cst.CSTNode) -> bool:
    """Return whether an option such as `args.no_cuda` chooses the CPU, also through variables; `args.device` is removed with its option."""
    values = [value, *(one for variable in script.variables(value) for one in script.find_values(variable))]
    is_numbered = any(isinstance(one, cst.FormattedString) for one in descendants(value))
    return (
        "cpu" in to_code(value)
        and not is_numbered
        and any(
            isinstance(one, cst.Attribute)
            and to_code(one.value).lower() in SETTINGS
            and not script.is_settings_device(one)
            for each in values
            for one in descendants(each)
        )
    )


def _is_read_elsewhere(conversion: Conversion, node: Any) -> bool:
    """Return whether another file reads a variable that is assigned."""
    targets = [target.target for target in node.targets] if isinstance(node, cst.Assign) else [node.target]
    return any(to_code(one).rpartition(".")[2] in conversion.read_elsewhere for one in targets)


def _list_settings(conversion: Conversion) -> list[cst.CSTNode]:
    """Return the statements up to the last one before the models that may change all variables of the module by `exec` or `globals`."""
    script = conversion.script
    body = script.module.body
    first = min(script.start(node) for nodes in conversion.creations.values() for node in nodes)
    last = max(
        (
            body.index(list_blocks(script, call)[0][1])
            for call in script.calls
            if script.function_of(call) is None
            and script.start(call) < first
            and script.is_call_of(call, "builtins.exec", "builtins.globals")
        ),
        default=-1,
    )
    return list(body[: last + 1])


def _find_process_group(conversion: Conversion) -> list[cst.CSTNode]:
    """Return the statements that connect the processes or read a rank in the function of the Accelerator."""
    script = conversion.script
    found = [
        script.parents[call]
        for call in script.calls
        if script.is_call_of(call, "torch.distributed.init_process_group")
        and isinstance(script.parents[call], cst.Expr)
    ]
    found += [
        script.find_ancestor(node, (cst.Assign, cst.Expr)) or node
        for node in script.nodes
        if isinstance(node, (cst.Call, cst.Subscript))
        and node not in script.callees
        and script.kind_of(node) in {"rank", "local_rank", "world_size"}
    ]
    return [node for node in found if script.function_of(node) is conversion.home]


def _find_outer_connection(conversion: Conversion) -> cst.CSTNode | None:
    """Return the statement that connects the processes if a function around that of the Accelerator runs it."""
    script = conversion.script
    calling = script.find_callers({conversion.home}) - {None, conversion.home}
    for call in script.calls:
        is_connecting = script.is_call_of(call, "torch.distributed.init_process_group")
        if is_connecting and script.function_of(call) in calling:
            return script.parents[call]
    return None


def _insert_accelerator(conversion: Conversion, statement: cst.CSTNode) -> None:
    if connection := _find_outer_connection(conversion):
        conversion.home = conversion.script.function_of(connection)
        statement = list_blocks(conversion.script, connection)[0][1]
    conversion.home_line = conversion.script.line(statement)
    conversion.statement = statement
    cls = conversion.script.class_of(conversion.home)
    if cls is not None and conversion.script.is_torch_class(cls):
        raise conversion.unsafe(
            statement,
            "The model creates its own optimizer. Create both in a function, and prepare them there.",
        )


# Objects that are prepared


def prepare_objects(conversion: Conversion) -> None:
    """Insert a call of `prepare` after the objects of each function and loop are created."""
    script = conversion.script
    groups: dict[Any, PreparedGroup] = {}
    for variable, statements in conversion.creations.items():
        kind = script.roles[variable].kind
        if variable in conversion.unprepared:
            continue
        loops = {script.find_ancestor(node, (cst.For, cst.While, cst.FunctionDef)) for node in statements}
        if len(loops) > 1:
            raise conversion.unsafe(
                statements[0],
                f"{variable.name} is created in several loops or functions. Give each of them a name of its own.",
            )
        loop = loops.pop()
        # Loaders that are created after a training are prepared on their own.
        is_late = script.start(statements[0]) > _find_training_start(conversion, statements[0], loop)
        condition = _find_condition(script, variable, statements)
        test = to_code(condition.test) if condition is not None else ""
        group = groups.setdefault((loop, is_late, test), PreparedGroup(condition=condition))
        if kind != "scheduler" or _steps_each_batch(conversion, variable):
            group.variables[variable] = kind
        group.statements += statements
    for (loop, is_late, _), group in groups.items():
        kinds = set(group.variables.values())
        if not kinds:
            continue
        others = groups.get((loop, is_late, ""))
        beside = set(others.variables.values()) if others is not None else set()
        if kinds & {"optimizer", "scheduler"} and "model" not in kinds | beside:
            _check_models(conversion, group)
        _insert_prepare(conversion, group, others)


def _find_condition(script: Script, variable: Variable, statements: list[cst.CSTNode]) -> cst.If | None:
    """Return the condition under which a variable is created and read; None for one that always exists."""
    for outer in script.ancestors(statements[0]):
        if isinstance(outer, (cst.For, cst.While, cst.FunctionDef)):
            return None
        if not isinstance(outer, cst.If) or is_main_guard(outer):
            continue
        inside = set(descendants(outer.body))
        reads = [node for node in script.list_reads(variable) if node not in inside]
        is_only = all(node in inside for node, _ in script.assigned[variable])
        if is_only and all(_is_under(script, node, to_code(outer.test)) for node in reads):
            return outer
    return None


def _is_under(script: Script, node: cst.CSTNode, test: str) -> bool:
    """Return whether a node runs under a condition, alone or with others."""
    inner = node
    for one in script.ancestors(node):
        if isinstance(one, cst.If) and inner is one.body and test in _split_condition(one.test):
            return True
        inner = one
    return False


def _split_condition(test: cst.BaseExpression) -> list[str]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [to_code(test), *_split_condition(test.left), *_split_condition(test.right)]
    return [to_code(test)]


def _check_models(conversion: Conversion, group: PreparedGroup) -> None:
    """Raise an error for an optimizer or scheduler whose models or optimizers are not prepared before it is created."""
    script = conversion.script
    for variable, kind in group.variables.items():
        if kind not in {"optimizer", "scheduler"}:
            continue
        part, source = {
            "optimizer": ("model", "the parameters of a model"),
            "scheduler": ("optimizer", "an optimizer"),
        }[kind]
        parts = script.find_parts(variable, part)
        if not parts or not conversion.is_prepared(frozenset(parts)):
            raise conversion.unsafe(
                group.statements[0],
                f"The {part} of this {kind} was not found, and both must be prepared. Create the {kind} from {source} of this script.",
            )


def check_creations(conversion: Conversion) -> None:
    """Raise an error for an optimizer or loader that is not assigned to a variable."""
    script = conversion.script
    for variable, role in script.roles.items():
        if role.kind == "mixed":
            nodes = [node for node, _ in script.assigned.get(variable, [])] or [script.module.body[0]]
            raise conversion.unsafe(
                nodes[0],
                f"{variable.name} has different meanings in different calls. Use one name for each object.",
            )
    for call in script.calls:
        kind = script.kind_of(call)
        if kind not in {"optimizer", "loader"} or call in script.callees or script.is_progress_bar(call):
            continue
        if isinstance(call.func, cst.Attribute) and script.role_of_variable(call.func.value) is not None:
            continue
        if not (
            _is_kept(conversion, call) or (kind == "loader" and _is_read_without_training(conversion, call))
        ):
            raise conversion.unsafe(
                call,
                f"The {kind} is not assigned to a variable of its own. Assign it, and pass it to accelerator.prepare.",
            )
    for variable in conversion.creations:
        for node, value in script.assigned[variable]:
            source = strip_wrappers(script, value)
            is_loader = script.roles[variable].kind == "loader" and isinstance(source, cst.Call)
            if is_loader and script.kind_of(source) != "loader" and variable in script.variables(source):
                raise conversion.unsafe(
                    node,
                    f"{variable.name} is replaced by what {to_code(source.func)} makes of it. Give this another name.",  # type: ignore[attr-defined]
                )


def _is_kept(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether an object that a call creates is assigned to a variable, or returned."""
    script = conversion.script
    outer = script.find_ancestor(call, (cst.Assign, cst.AnnAssign, cst.Return))
    if isinstance(outer, cst.Return):
        return isinstance(script.parents[call], (cst.Return, cst.Element))
    return outer is not None and (
        any(outer in nodes for nodes in conversion.creations.values())
        or _is_assigned_variable(script, outer, call)
    )


def _is_read_without_training(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a loader that is created where it is read gives one batch, or is that of a loop that does not train."""
    script = conversion.script
    reader: Any = script.parents[call]
    while isinstance(reader, (cst.Arg, cst.Call)):
        if script.is_call_of(reader, "builtins.next"):
            return True
        reader = script.parents[reader]
    return isinstance(reader, cst.For) and not any(
        isinstance(one, cst.Call) and _is_training(conversion, one) for one in descendants(reader.body)
    )


def _is_assigned_variable(script: Script, node: Any, call: cst.Call) -> bool:
    targets = [target.target for target in node.targets] if isinstance(node, cst.Assign) else [node.target]
    kind = script.kind_of(call)
    elements = [one for target in targets for one in list_elements(target)]
    return any((role := script.role_of_variable(one)) is not None and role.kind == kind for one in elements)


def _steps_each_batch(conversion: Conversion, scheduler: Variable) -> bool:
    """Return whether a scheduler advances after each batch, and not after each epoch."""
    script = conversion.script
    for call in script.calls:
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value != "step":
            continue
        role = script.role_of_variable(func.value)
        if role is None or role.kind != "scheduler" or scheduler not in role.origins:
            continue
        around = set(script.ancestors(call))
        if any(loop in around and node not in around for loop, node in conversion.cycles):
            conversion.finding(
                call,
                "This scheduler advances within an accumulation cycle too, and a prepared one advances with the optimizer. It is not prepared, and slower on several processes. "
                f"Write for _ in range({conversion.accelerator(call)}.num_processes): {to_code(call)}",
            )
            return False
        if any(
            isinstance(one, cst.For) and script.batch_target(one) is not None
            for one in script.ancestors(call)
        ):
            return not call.args
        function = script.function_of(call)
        if function is not None and any(role.kind == "batch" for role in _parameter_roles(script, function)):
            return not call.args
    return False


def _parameter_roles(script: Script, function: cst.FunctionDef) -> list[Any]:
    names = [param.name.value for param in function.params.params]
    return [role for name in names if (role := script.roles.get(script.parameter(function, name)))]


def _insert_prepare(conversion: Conversion, group: PreparedGroup, others: PreparedGroup | None) -> None:
    """Insert the call after the last creation; for objects that may not exist, after those that do, under their condition."""
    script = conversion.script
    anchor = find_anchor(script, group.statements)
    test = ""
    if group.condition is not None and others is not None and others.variables:
        after = find_anchor(script, others.statements)
        if script.start(after) > script.start(anchor):
            anchor, test = after, to_code(group.condition.test)
            if any(isinstance(one, (cst.Call, cst.NamedExpr)) for one in descendants(group.condition.test)):
                raise conversion.unsafe(
                    group.statements[0],
                    f"{next(iter(group.variables)).name} exists under a condition only. Create it after the other objects, or in every case.",
                )
    _check_uses(conversion, group, anchor)
    conversion.anchors |= dict.fromkeys(group.variables, anchor)
    ordered = sorted(
        group.variables,
        key=lambda one: (ORDER.index(group.variables[one]), script.start(conversion.creations[one][0])),
    )
    names = ", ".join(one.code for one in ordered)
    accelerator = conversion.accelerator(anchor)
    code = f"{names} = {accelerator}.prepare({names})"
    indent = script.start(anchor)[1]
    if len(code) + indent > _LINE_LENGTH:
        lines = textwrap.wrap(names, _LINE_LENGTH - indent - 4)
        arguments = "".join(f"    {line}\n" for line in lines)
        code = f"{names} = {accelerator}.prepare(\n{arguments})"
        if len(names) + indent + 30 > _LINE_LENGTH:
            code = f"(\n{arguments}) = {accelerator}.prepare(\n{arguments})"
    if test:
        code = f"if {test}:\n{textwrap.indent(code, '    ')}"
    conversion.edits.insert_after(anchor, code, *_list_aliases(conversion, group, anchor))


def _list_aliases(conversion: Conversion, group: PreparedGroup, anchor: cst.CSTNode) -> list[str]:
    """Return the assignments that give the prepared models their other names, by which the script calls them."""
    script = conversion.script
    found: dict[str, None] = {}
    called = {script.variable(node.func) for node in script.calls if script.is_model_call(node)}
    for alias, entries in script.assigned.items():
        for node, value in entries:
            source = script.variable(strip_wrappers(script, value))
            if (
                source is not None
                and alias in called - {source}
                and group.variables.get(source) == "model"
                and script.function_of(node) is script.function_of(anchor)
                and script.start(node) <= script.end(anchor)
            ):
                found[f"{alias.code} = {source.code}"] = None
    return list(found)


def _is_training(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a call is a backward pass, or one of a function that runs one."""
    return call in conversion.backwards or conversion.script.callees.get(call, False) in conversion.training


def _find_training_start(conversion: Conversion, node: cst.CSTNode, loop: Any) -> tuple[float, float]:
    """Return where the first training begins in the function and loop of a statement."""
    script = conversion.script
    return min(
        (
            script.start(call)
            for call in script.calls
            if _is_training(conversion, call)
            and script.function_of(call) is script.function_of(node)
            and (not isinstance(loop, (cst.For, cst.While)) or loop in script.ancestors(call))
        ),
        default=(math.inf, 0),
    )


def _check_uses(conversion: Conversion, group: PreparedGroup, anchor: cst.CSTNode) -> None:
    """Raise an error if an object is used for training before it can be prepared."""
    script = conversion.script
    first, last = min(map(script.start, group.statements)), script.end(anchor)
    for call in script.calls:
        if not first < script.start(call) <= last or script.function_of(call) is not script.function_of(
            anchor
        ):
            continue
        if _is_training(conversion, call):
            raise conversion.unsafe(
                call,
                "Training begins before the last model, optimizer or loader of this function is created. Create them first, and give those of another training names of their own.",
            )
        if (
            call in script.constructed
            and call not in _creating_calls(conversion)
            and _keeps(script, call, group)
        ):
            raise conversion.unsafe(
                call,
                "This object receives models or loaders before all of them are created. Create it after the last of them.",
            )


def _creating_calls(conversion: Conversion) -> set[cst.CSTNode]:
    return {
        one
        for nodes in conversion.creations.values()
        for node in nodes
        for one in descendants(node)
        if isinstance(one, cst.Call)
    }


def _keeps(script: Script, call: cst.Call, group: PreparedGroup) -> bool:
    """Return whether an object keeps one of the variables that are prepared later, and not a copy of it."""
    function = script.callees.get(call)
    passed = [arg for arg in call.args if script.variable(arg.value) in group.variables]
    if function is None or not passed:
        return bool(passed)
    bound = {script.parameter(function, name): arg for name, arg in script.bind(call, function).items()}
    parameters = {parameter for parameter, arg in bound.items() if arg in passed}
    reads = [node for node in descendants(function.body) if script.variable(node) in parameters]
    return len(parameters) < len(passed) or not all(_is_copied(script, node) for node in reads)


def _is_copied(script: Script, node: cst.CSTNode) -> bool:
    parent = script.parents[node]
    if isinstance(parent, cst.Arg):
        return script.is_call_of(script.parents[parent], "copy.deepcopy")
    return isinstance(parent, cst.Attribute)
