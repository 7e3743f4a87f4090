"""Output of a script: prints, logs, progress bars and reported losses, and the places that are not converted."""

from __future__ import annotations

import bisect
from functools import partial
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.batches import draws_same_numbers
from accel_cli.extensions.migrate.edits import drop_last_comma, set_fields, set_function
from accel_cli.extensions.migrate.fabric_uses import FABRIC
from accel_cli.extensions.migrate.findings import Finding
from accel_cli.extensions.migrate.lengths import is_number_of_samples, list_divisors
from accel_cli.extensions.migrate.loop import LossReport, find_report, find_terms, list_losses
from accel_cli.extensions.migrate.preparation import list_blocks
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.saving import check_file
from accel_cli.extensions.migrate.script import (
    Script,
    Variable,
    descendants,
    get_method,
    get_positional,
    to_code,
)
from accel_cli.extensions.migrate.wrappers import runs_without_gradients

__all__ = ["convert_output", "find_places", "find_rest", "reduce_losses"]

_RANDOM = {
    f"torch.{name}"
    for name in ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "normal")
}  # fmt: skip
_LEFT = {
    "torch.distributed.init_process_group", "torch.nn.parallel.DistributedDataParallel", "torch.multiprocessing.spawn",
    "torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler", *FABRIC,
}  # fmt: skip


# Text


def convert_output(conversion: Conversion) -> None:
    """Print, show progress bars and log on the main process."""
    script = conversion.script
    printing: set[Any] = set()
    noise: list[cst.Call] = []
    for call in script.calls:
        name = script.qualified_name(call.func)
        if name == "builtins.print" and not conversion.is_guarded(call):
            _convert_print(conversion, call, printing)
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
            noise.append(call)
    if noise and draws_same_numbers(conversion):
        conversion.note(
            noise[0],
            "The seed of the script makes these random numbers equal on every process. Call set_seed(seed, device_specific=True) after the model is created.",
        )
    _convert_progress_bars(conversion)


def _convert_print(conversion: Conversion, call: cst.Call, seen: set[Any]) -> None:
    """Print on the main process; note the first print of each function that could get an Accelerator."""
    script = conversion.script
    function = script.function_of(call)
    cls = script.class_of(function)
    if (
        conversion.can_reach(call)
        and not (cls is not None and script.is_torch_class(cls))
        and script.find_ancestor(call, cst.Lambda) is None
    ):
        conversion.edits.change(call, set_function(f"{conversion.accelerator(call)}.print"))
    elif conversion.can_get(call) and function not in seen:
        seen.add(function)
        conversion.note(
            call,
            "Every process prints this, since the function has no Accelerator. Give it a parameter accelerator, and write accelerator.print.",
        )


def _note_sum(conversion: Conversion, call: cst.Call) -> None:
    """Report a loss of the training that is a sum over the batch, and not a mean."""
    is_constructor = isinstance(
        conversion.script.parents[call], cst.Assign
    ) and conversion.script.qualified_name(call.func).startswith("torch.nn.")
    if runs_without_gradients(conversion.script, call):
        return
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
    losses = list_losses(conversion)
    reported = losses | find_terms(conversion)
    for node in script.nodes:
        variable = script.variable(node)
        report = find_report(script, node) if variable in reported else None
        if variable is None or report is None or not _is_reported_loss(conversion, node, variable):
            continue
        if not report.is_number and (
            variable not in losses or not _is_of_backward(conversion, node, variable)
        ):
            continue
        if conversion.is_guarded(node):
            _restore_division(conversion, report, variable)
        elif not _depends_on_batch(conversion, node, losses):  # the other processes may not take this branch
            _reduce_loss(conversion, report, variable)
    _note_exchange(conversion)


def _is_of_backward(conversion: Conversion, node: cst.CSTNode, variable: Variable) -> bool:
    """Return whether a loss is still the one of a backward pass where it is read, and not a number of the same name."""
    script = conversion.script
    starts = sorted(script.start(assign) for assign, _ in script.assigned.get(variable, []))
    trained = {
        bisect.bisect(starts, script.start(call))
        for call, loss in conversion.losses.items()
        if script.variable(loss) == variable
    }
    return bisect.bisect(starts, script.start(node)) in trained


def _is_reported_loss(conversion: Conversion, node: cst.CSTNode, variable: Variable) -> bool:
    """Return whether the loss at a place is one of the backward pass, and not of an evaluation loop with the same name."""
    script = conversion.script
    loops = [one for one in script.ancestors(node) if isinstance(one, (cst.For, cst.While))]
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


def _reduce_loss(conversion: Conversion, report: LossReport, variable: Variable) -> None:
    node, count = _find_division(conversion, report, variable)
    value = f"{to_code(report.name)}.detach()" + (f" / {count}" if count else "")
    conversion.reduced.add(node)
    conversion.exchanges.append(node)
    quote = _choose_quote(conversion, node)
    reduction = f"{quote}{_choose_reduction(conversion, node)}{quote}"
    item = ".item()" if node is not report.name else ""
    conversion.edits.replace(node, f"{conversion.accelerator(node)}.reduce({value}, {reduction}){item}")


def _choose_reduction(conversion: Conversion, node: cst.CSTNode) -> str:
    """Return `sum` for a loss that is added up for all samples: the sum is divided by a number that is not counted in steps."""
    script = conversion.script
    statement = script.find_ancestor(node, (cst.AugAssign, cst.BaseSuite))
    variable = script.variable(statement.target) if isinstance(statement, cst.AugAssign) else None
    divisors = list_divisors(script, variable) if variable is not None else []
    if not divisors:
        return "mean"
    value = statement.value
    is_weighted = isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Multiply)
    if is_weighted and conversion.gathered & set(script.ancestors(node)):
        return "mean"  # times the number of samples of all processes
    counted = {script.variable(one.target) for one in script.nodes if isinstance(one, cst.AugAssign)} - {None}
    is_sum = is_weighted and not any(_counts_steps(script, one, counted) for one in divisors)
    return "sum" if is_sum or any(map(is_number_of_samples, divisors)) else "mean"


def _counts_steps(script: Script, node: cst.CSTNode, counted: set[Variable | None]) -> bool:
    """Return whether a number is counted in the steps of one process, or is that of the batches of a loader."""
    return any(
        script.variable(one) in counted or script.kind_of(one) == "loader" for one in descendants(node)
    )


def _note_exchange(conversion: Conversion) -> None:
    """Note the first place that makes the processes exchange values at each step."""
    script = conversion.script
    kinds = (cst.For, cst.While, cst.FunctionDef, cst.If)
    regions = {script.find_ancestor(call, kinds[:3]) for call in conversion.backwards}
    places = [one for one in conversion.exchanges if script.find_ancestor(one, kinds) in regions]
    if places:
        conversion.note(
            min(places, key=script.start),
            "All processes exchange values here at each step, which takes time. To save it, report every n-th step, or add up detached values and reduce the sum after the loop.",
        )


def _restore_division(conversion: Conversion, report: LossReport, variable: Variable) -> None:
    """Report the loss of one rank as before, though its division by the accumulation steps was removed."""
    node, count = _find_division(conversion, report, variable)
    if count:
        conversion.edits.replace(node, f"({to_code(report.node)} / {count})")
    elif node is not report.node:
        conversion.edits.replace(node, to_code(report.node))


def _find_division(conversion: Conversion, report: LossReport, variable: Variable) -> tuple[Any, str]:
    """Return the expression that reports a loss, and the number by which it must be divided since its division was removed."""
    count, position = conversion.divided.get(variable, ("", (0, 0)))
    if not count or conversion.script.start(report.node) < position:
        return report.node, ""
    product: Any = conversion.script.parents[report.node]
    is_product = isinstance(product, cst.BinaryOperation) and isinstance(product.operator, cst.Multiply)
    return (product, "") if is_product and to_code(product.right) == count else (report.node, count)


def _choose_quote(conversion: Conversion, node: cst.CSTNode) -> str:
    """Return the quote that an f-string around a node does not use: before Python 3.12, they must differ."""
    string = conversion.script.find_ancestor(node, cst.FormattedString)
    return "'" if string is not None and '"' in string.start else '"'


# Places that are not converted


def find_places(conversion: Conversion) -> None:
    """Report files that every process writes, and wait for those that are read after they are written."""
    for call in conversion.script.calls:
        check_file(conversion, call)
    _wait_for_files(conversion)


def _wait_for_files(conversion: Conversion) -> None:
    """Wait for the main process before a file is read that the script may have written."""
    script = conversion.script
    saves = [call for call in script.calls if script.is_call_of(call, "torch.save")]
    training = [
        call
        for call in script.calls
        if call in conversion.backwards or script.callees.get(call, False) in conversion.training
    ]
    waits: set[Any] = set()
    for call in script.calls:
        if (
            script.is_call_of(call, "torch.load")
            and not conversion.is_guarded(call)
            and conversion.can_reach(call)
            and any(
                script.line(one) < script.line(call) and script.function_of(one) is script.function_of(call)
                for one in (*saves, *(training if saves else ()))
            )
        ):
            statement = list_blocks(script, call)[-1][1]
            if statement not in waits:
                waits.add(statement)
                outer = script.find_ancestor(statement, (cst.With, cst.FunctionDef))
                place = outer if isinstance(outer, cst.With) else statement
                conversion.edits.insert_before(place, f"{conversion.accelerator(call)}.wait_for_everyone()")


def find_rest(script: Script) -> tuple[Finding, ...]:
    """Return the places of a raw script in one that uses accel already."""
    return tuple(
        Finding(
            script.line(call),
            "This is not converted, since the script uses accel already. Convert it as the tables on the page Migrate a script show.",
        )
        for call in script.calls
        if script.qualified_name(call.func) in _LEFT or (get_method(call) == "backward" and not call.args)
    )
