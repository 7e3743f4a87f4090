"""Output of a script: prints, logs, progress bars and reported losses, and the places that are not converted."""

from __future__ import annotations

from functools import partial
from typing import Any

import libcst as cst

from accel_cli.migrate.edits import drop_last_comma, set_fields, set_function
from accel_cli.migrate.fabric_uses import FABRIC
from accel_cli.migrate.findings import Finding
from accel_cli.migrate.preparation import list_blocks
from accel_cli.migrate.raw import Conversion
from accel_cli.migrate.saving import check_file
from accel_cli.migrate.script import NO_VARIABLE, Script, Variable, descendants, get_positional, to_code

__all__ = ["convert_output", "find_places", "find_rest", "reduce_losses"]

_REDUCE = 'Write accelerator.reduce(loss.detach(), "mean") on all processes.'
_RANDOM = {
    f"torch.{name}"
    for name in ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "normal")
}  # fmt: skip
_REPORTS = {"print", "append", "extend", "add_scalar", "log", "info", "write", "update", "set_description", "set_postfix"}  # fmt: skip
_LEFT = {
    "torch.distributed.init_process_group": "Remove it: the first Accelerator connects the processes.",
    "torch.nn.parallel.DistributedDataParallel": "Remove it: accelerator.prepare(model) averages the gradients.",
    "torch.utils.data.DistributedSampler": "Remove it: accelerator.prepare(loader) shards the batches.",
    "torch.utils.data.distributed.DistributedSampler": "Remove it: accelerator.prepare(loader) shards the batches.",
    **dict.fromkeys(FABRIC, "Write Accelerator(), and its methods for those of Fabric."),
    "torch.multiprocessing.spawn": "Call the function once, and start the script with accel launch.",
}


# Text


def convert_output(conversion: Conversion) -> None:
    """Print, show progress bars and log on the main process."""
    script = conversion.script
    for call in script.calls:
        name = script.qualified_name(call.func)
        if name == "builtins.print" and not conversion.is_guarded(call):
            cls = script.class_of(script.function_of(call))
            if (
                conversion.can_reach(call)
                and not (cls is not None and script.is_torch_class(cls))
                and script.find_ancestor(call, cst.Lambda) is None
            ):
                conversion.edits.change(call, set_function(f"{conversion.accelerator(call)}.print"))
            elif script.function_of(call) in script.callees.values():
                conversion.note(
                    call,
                    "Every process prints this, since the function has no Accelerator. Give it a parameter accelerator, and write accelerator.print.",
                )
        elif name.endswith("SummaryWriter") or name in {"wandb.init", "mlflow.start_run"}:
            if conversion.is_guarded(call):
                continue
            conversion.finding(
                call,
                "Every process writes this log. Use Accelerator(log_with=...), accelerator.init_trackers and accelerator.log.",
            )
        elif (value := get_positional(call, -1, "reduction")) and to_code(value)[1:-1] == "sum":
            _note_sum(conversion, call)
        elif name == "logging.getLogger" and len(call.args) == 1 and conversion.home is None:
            _convert_logger(conversion, call)
        elif name in _RANDOM and call not in conversion.draws and _is_in_training(conversion, call):
            conversion.note(
                call,
                "With the same seed, these random numbers are equal on every process. Call set_seed(seed, device_specific=True) after the model is created.",
            )
    _convert_progress_bars(conversion)


def _note_sum(conversion: Conversion, call: cst.Call) -> None:
    """Report a loss of the training that is a sum over the batch, and not a mean."""
    is_constructor = isinstance(
        conversion.script.parents[call], cst.Assign
    ) and conversion.script.qualified_name(call.func).startswith("torch.nn.")
    if _is_in_training(conversion, call) or (
        is_constructor and not conversion.script.qualified_name(call.func).startswith("torch.nn.functional")
    ):
        conversion.note(
            call,
            "Gradients are averaged over the processes, and this loss is a sum. See Losses that are sums on the page Tutorial: convert a script.",
        )


def _convert_logger(conversion: Conversion, call: cst.Call) -> None:
    conversion.imports.add("get_logger")
    conversion.edits.change(call, lambda node: node.with_changes(func=cst.Name("get_logger")))


def _is_in_training(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a node runs in a training loop, also in a function that it calls or in a module."""
    script = conversion.script
    around = (cst.For, cst.While, cst.FunctionDef)
    regions = {script.find_ancestor(call, around) for call in conversion.backwards}
    if _is_in_training_loop(conversion, node):
        return True
    pending, seen = [node], set()
    while pending:
        one = pending.pop()
        function = script.function_of(one)
        cls = script.class_of(function)
        if (region := script.find_ancestor(one, around)) is not None and region in regions:
            return True
        if function is None or function in seen:
            continue
        if cls is not None and script.is_derived(cls, "torch.nn.") and function.name.value != "__init__":
            return True
        pending += script.calls_of(function)
        seen.add(function)
    return False


def _is_in_training_loop(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether the innermost loop around a node contains a backward pass."""
    loop = conversion.script.find_ancestor(node, (cst.For, cst.While, cst.FunctionDef))
    return isinstance(loop, (cst.For, cst.While)) and bool(set(descendants(loop)) & set(conversion.backwards))


def _convert_progress_bars(conversion: Conversion) -> None:
    """Import tqdm from accel, whose bars only one process of a node shows."""
    script = conversion.script
    for node in script.nodes:
        if (
            isinstance(node, cst.ImportFrom)
            and node.module is not None
            and to_code(node.module) in {"tqdm", "tqdm.auto", "tqdm.notebook"}
            and not isinstance(node.names, cst.ImportStar)
        ):
            others = [alias for alias in node.names if to_code(alias.name) != "tqdm"]
            if len(others) == len(node.names) or any(alias.asname for alias in node.names):
                continue
            conversion.imports.add("tqdm")
            if others:
                conversion.edits.change(node, partial(set_fields, names=drop_last_comma(others)))
            else:
                conversion.edits.remove(node)
    bars = [
        node
        for node in script.nodes
        if isinstance(node, cst.Attribute)
        and script.qualified_name(node) in {"tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.notebook.tqdm"}
        and script.find_ancestor(node, (cst.Import, cst.ImportFrom)) is None
    ]
    roots = [
        node
        for node in script.nodes
        if isinstance(node, cst.Name)
        and script.qualified_name(node) == "tqdm"
        and script.find_ancestor(node, (cst.Import, cst.ImportFrom)) is None
    ]
    if bars and len(roots) == len(bars):
        conversion.imports.add("tqdm")
        for bar in bars:
            conversion.edits.change(bar, lambda _: cst.Name("tqdm"))
        for node in script.nodes:
            if isinstance(node, cst.Import) and [
                to_code(one.name).partition(".")[0] for one in node.names
            ] == ["tqdm"]:
                conversion.edits.remove(node)


# Losses


def reduce_losses(conversion: Conversion) -> None:
    """Report losses as means over the processes: `loss.item()` becomes `accelerator.reduce(loss.detach(), "mean").item()`."""
    script = conversion.script
    losses = {
        variable
        for loss in conversion.losses.values()
        if isinstance(loss, cst.Name) and (variable := script.variable(loss)) is not None
    }
    reported = losses | _find_terms(conversion, losses)
    for call in script.calls:
        owner = _get_reported(conversion, call)
        variable = script.variable(owner) if owner is not None else None
        if owner is None or variable not in reported or not _is_reported_loss(conversion, call, variable):
            continue
        if conversion.is_guarded(call):
            _restore_division(conversion, call, variable)
        elif _depends_on_batch(conversion, call, losses):
            continue  # the other processes may not take this branch
        else:
            _reduce_loss(conversion, call, to_code(owner), variable)


def _find_terms(conversion: Conversion, losses: set[Variable]) -> set[Variable]:
    """Return the terms of losses that are sums, and the variables that are sums of losses."""
    script = conversion.script
    found: set[Variable] = set()
    for node in script.nodes:
        if isinstance(node, cst.Assign) and isinstance(node.value, cst.BinaryOperation):
            terms = {variable for one in _list_terms(node.value) if (variable := script.variable(one))}
            target = script.variable(node.targets[0].target)
            if target in losses:
                found |= terms
            elif terms & losses and target is not None:
                found.add(target)
    return found


def _list_terms(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(node, cst.BinaryOperation) and isinstance(
        node.operator, (cst.Add, cst.Subtract, cst.Multiply, cst.Divide)
    ):
        return [*_list_terms(node.left), *_list_terms(node.right)]
    return [node]


def _get_reported(conversion: Conversion, call: cst.Call) -> cst.BaseExpression | None:
    """Return the tensor in `tensor.item()`, `float(tensor)` and `scheduler.step(tensor)`."""
    func = call.func
    if conversion.script.qualified_name(func) == "builtins.float" and len(call.args) == 1:
        owner: Any = call.args[0].value
    elif isinstance(func, cst.Attribute) and func.attr.value == "item" and not call.args:
        owner = func.value
    elif (
        isinstance(func, cst.Attribute)
        and func.attr.value == "step"
        and conversion.script.kind_of(func.value) == "scheduler"
    ):
        return call.args[0].value if len(call.args) == 1 else None
    else:
        return None
    while isinstance(owner, cst.Call) and isinstance(owner.func, cst.Attribute) and not owner.args:
        if owner.func.attr.value not in {"detach", "cpu"}:
            return None
        owner = owner.func.value
    return owner  # type: ignore[no-any-return]


def _is_reported_loss(conversion: Conversion, call: cst.Call, variable: Variable) -> bool:
    """Return whether the loss at a call is one of the backward pass, and not of an evaluation loop with the same name."""
    script = conversion.script
    loops = [one for one in script.ancestors(call) if isinstance(one, (cst.For, cst.While))]
    for loop in loops:
        nodes = set(descendants(loop))
        if any(one in nodes for one in conversion.backwards):
            return True
        if any(
            isinstance(one, cst.Assign)
            and any(script.variable(target.target) == variable for target in one.targets)
            for one in nodes
        ):
            return False
    return True


def _depends_on_batch(conversion: Conversion, node: cst.CSTNode, losses: set[Variable]) -> bool:
    """Return whether a node runs under a condition that reads a batch or a loss, which differ between processes."""
    return any(
        isinstance(one, (cst.If, cst.While, cst.IfExp)) and _reads_batch(conversion, one.test, losses)
        for one in conversion.script.ancestors(node)
    )


def _reads_batch(conversion: Conversion, test: cst.CSTNode, losses: set[Variable]) -> bool:
    script = conversion.script
    return any(
        isinstance(one, cst.Name) and (script.variable(one) in losses or script.kind_of(one) == "batch")
        for one in descendants(test)
    )


def _reduce_loss(conversion: Conversion, call: cst.Call, loss: str, variable: Variable) -> None:
    accelerator = conversion.accelerator(call)
    node, count = _find_division(conversion, call, variable)
    value = f"{loss}.detach() / {count}" if count else f"{loss}.detach()"
    conversion.reduced.add(node)
    quote = _choose_quote(conversion, node)
    reduced = f"{accelerator}.reduce({value}, {quote}mean{quote})"
    if isinstance(call.func, cst.Attribute) and call.func.attr.value == "step":
        conversion.edits.replace(call.args[0].value, reduced)
    else:
        conversion.edits.replace(node, f"{reduced}.item()")


def _restore_division(conversion: Conversion, call: cst.Call, variable: Variable) -> None:
    """Report the loss of one rank as before, though its division by the accumulation steps was removed."""
    node, count = _find_division(conversion, call, variable)
    if count:
        conversion.edits.replace(node, f"({to_code(call)} / {count})")
    elif node is not call:
        conversion.edits.replace(node, to_code(call))


def _find_division(conversion: Conversion, call: cst.Call, variable: Variable) -> tuple[Any, str]:
    """Return the expression that reports a loss, and the number by which it must be divided since its division was removed."""
    count, position = conversion.divided.get(variable, ("", (0, 0)))
    if not count or conversion.script.start(call) < position:
        return call, ""
    conversion.reported |= set(descendants(call))
    product: Any = conversion.script.parents[call]
    is_product = isinstance(product, cst.BinaryOperation) and isinstance(product.operator, cst.Multiply)
    return (product, "") if is_product and to_code(product.right) == count else (call, count)


def _choose_quote(conversion: Conversion, node: cst.CSTNode) -> str:
    """Return the quote that an f-string around a node does not use: before Python 3.12, they must differ."""
    string = conversion.script.find_ancestor(node, cst.FormattedString)
    return "'" if string is not None and '"' in string.start else '"'


# Places that are not converted


def find_places(conversion: Conversion) -> None:
    """Report losses and files that are not converted."""
    losses = {
        variable for loss in conversion.losses.values() if (variable := conversion.script.variable(loss))
    }
    for node in conversion.script.nodes:
        if isinstance(node, cst.Call):
            check_file(conversion, node)
        elif isinstance(node, cst.Name) and conversion.script.variable(node) in losses:
            _check_loss(conversion, node)
    _note_order(conversion)


def _check_loss(conversion: Conversion, node: cst.Name) -> None:
    """Report a loss that is printed, logged or added without being averaged over the processes."""
    script = conversion.script
    parent = script.parents.get(node)
    _check_division(conversion, node)
    if isinstance(parent, cst.AssignTarget) or conversion.is_guarded(node):
        return
    if isinstance(parent, cst.Attribute) and parent.attr.value in {
        "item",
        "backward",
        "sum",
        "mean",
        "squeeze",
    }:
        return
    for one in script.ancestors(node):
        if isinstance(one, cst.Call):
            method = to_code(one.func).rpartition(".")[2]
            if method in {"item", "float", "scale", "backward", "step"}:
                return
            if method in _REPORTS and node not in set(descendants(one.func)):
                conversion.finding(node, f"This loss is that of one process. {_REDUCE}")
                return
        if isinstance(one, cst.AugAssign) and script.variable(one.target) != script.variable(node):
            conversion.finding(node, f"This loss is that of one process. {_REDUCE}")
            return
        if isinstance(one, (cst.BaseSuite, cst.Assign)):
            return


def _check_division(conversion: Conversion, node: cst.Name) -> None:
    """Report other reads of a loss whose division by the accumulation steps was removed."""
    script = conversion.script
    count, position = conversion.divided.get(script.variable(node) or NO_VARIABLE, ("", (0, 0)))
    known = conversion.edits.removed | set(conversion.backwards)
    is_target = isinstance(script.parents.get(node), cst.AssignTarget)
    is_known = node in conversion.reported or is_target or any(one in known for one in script.ancestors(node))
    if count and script.start(node) > position and not is_known:
        conversion.finding(
            node, f"The loss is no longer divided by {count} here. Divide it where it is reported."
        )


def _note_order(conversion: Conversion) -> None:
    """Note files that are read after they are written, and splits without a seed."""
    script = conversion.script
    saves = [call for call in script.calls if script.is_call_of(call, "torch.save")]
    waits: set[Any] = set()
    seeds = any("seed" in to_code(call.func) for call in script.calls)
    for call in script.calls:
        if script.is_call_of(call, "torch.load") and any(
            script.line(one) < script.line(call) and script.function_of(one) is script.function_of(call)
            for one in saves
        ):
            statement = list_blocks(script, call)[-1][1]
            if conversion.is_guarded(call) or not conversion.can_reach(call):
                conversion.note(
                    call,
                    "The main process may still write this file. Call accelerator.wait_for_everyone() before.",
                )
            elif statement not in waits:
                waits.add(statement)
                outer = script.find_ancestor(statement, (cst.With, cst.FunctionDef))
                place = outer if isinstance(outer, cst.With) else statement
                conversion.edits.insert_before(place, f"{conversion.accelerator(call)}.wait_for_everyone()")
        elif script.is_call_of(call, "torch.utils.data.random_split") and not seeds:
            conversion.note(
                call, "Each process draws another split. Call set_seed(seed) at the start of the script."
            )


def find_rest(script: Script) -> tuple[Finding, ...]:
    """Return the places of a raw script in one that uses accel already."""
    findings = []
    for call in script.calls:
        advice = _LEFT.get(script.qualified_name(call.func) or to_code(call.func), "")
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward" and not call.args:
            advice = f"Write accelerator.backward({to_code(call.func.value)})."
        if advice:
            findings.append(
                Finding(
                    script.line(call),
                    f"This is not converted, since the script uses accel already. {advice}",
                )
            )
    return tuple(sorted(set(findings)))
