"""Places that are not converted, and that behave differently on several processes."""

from __future__ import annotations

import re

import libcst as cst

from accel_cli.migrate.fabric_uses import FABRIC
from accel_cli.migrate.raw import Conversion, Finding
from accel_cli.migrate.script import Script, Variable, descendants, to_code

__all__ = ["check_loaders", "find_places", "find_rest"]

_FORWARD = {
    "parameters", "named_parameters", "train", "eval", "state_dict", "load_state_dict", "to", "cuda", "cpu", "zero_grad", "modules",
    "named_modules", "children", "buffers", "requires_grad_", "apply", "half", "float", "register_forward_hook",
}  # fmt: skip
"""Methods of a model that do not compute outputs."""
_HARMLESS = {"len", "print", "isinstance", "enumerate", "hasattr", "type"}
_REPORTS = {"print", "append", "extend", "add_scalar", "log", "info", "write", "update", "set_description", "set_postfix"}  # fmt: skip
_WRITES = {
    "savefig",
    "save_pretrained",
    "write_text",
    "write_bytes",
    "to_csv",
    "copyfile",
    "savez",
    "savetxt",
}
_DEVICES = {"torch.set_default_tensor_type", "torch.set_default_device"}
_SAMPLES = re.compile(r"^len\([\w.]*(?:dataset|data|_set)\)$")
_REDUCE = "Report accelerator.reduce(loss.detach(), 'mean').item()."


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
            "The loader is read in a way that is not understood. The loader is not prepared, so every process evaluates all samples. Read it in a for loop by its own name.",
        )


def _is_alias(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a loader is an argument of a function of Python, or a part of a collection."""
    parent = script.parents.get(node)
    while isinstance(parent, cst.Arg) and isinstance(call := script.parents[parent], cst.Call):
        name = script.qualified_name(call.func)
        known = call in script.callees or call in script.constructed
        if known or name.removeprefix("builtins.") in _HARMLESS or script.is_progress_bar(call):
            return False
        if isinstance(script.parents.get(call), (cst.For, cst.CompFor)):
            return name == "builtins.zip"
        if name == "builtins.iter" and isinstance(outer := script.parents.get(call), cst.Arg):
            # Each process may read a first batch, which starts and leaves an epoch as the loader before did.
            return not script.is_call_of(script.parents[outer], "builtins.next")
        return name.startswith("builtins.")
    if isinstance(parent, (cst.Element, cst.DictElement)):
        outer = script.parents[script.parents[parent]]
        is_unpacked = isinstance(outer, cst.Assign) and all(
            isinstance(one.target, cst.Tuple) for one in outer.targets
        )
        return not (is_unpacked or isinstance(outer, (cst.Return, cst.AssignTarget)))
    return False


def find_places(conversion: Conversion) -> None:
    """Report devices, losses, files and schedulers that are not converted."""
    region = _find_region(conversion)
    losses = {
        variable for loss in conversion.losses.values() if (variable := conversion.script.variable(loss))
    }
    for node in conversion.script.nodes:
        if isinstance(node, cst.Call):
            _check_device(conversion, node)
            _check_file(conversion, node)
            if node in region:
                _check_training_call(conversion, node)
        elif isinstance(node, cst.Name) and conversion.script.variable(node) in losses:
            _check_loss(conversion, node)
        elif isinstance(node, cst.BinaryOperation):
            _check_number(conversion, node, losses)
        elif isinstance(node, cst.SimpleString) and to_code(node)[1:-1] == "CUDA_VISIBLE_DEVICES":
            conversion.finding(
                node,
                "The visible GPUs are chosen by the script. Remove this: accel launch assigns a GPU to each process.",
            )
    for loop in (node for node in conversion.script.nodes if isinstance(node, cst.For)):
        _check_host(conversion, loop)
    _note_order(conversion)


def _check_host(conversion: Conversion, loop: cst.For) -> None:
    """Report parts of a batch that the script kept on the CPU, and uses with outputs that it moves there."""
    script = conversion.script
    role, target = script.loader_of(loop.iter), script.batch_target(loop)
    if role is None or not conversion.is_prepared(role.origins) or not isinstance(target, cst.Tuple):
        return
    parts = {script.variable(one.value): to_code(one.value) for one in target.elements}
    inside = [node for node in descendants(loop.body) if isinstance(node, cst.Call)]
    moves = [call for call in inside if isinstance(call.func, cst.Attribute)]
    moved = {
        script.variable(one)
        for call in moves
        if to_code(call.func).endswith((".to", ".cuda", ".cpu"))
        for one in descendants(call.func)
        if isinstance(one, cst.Name)
    }
    returns = [call for call in moves if to_code(call.func).endswith((".cpu", ".numpy"))]
    if not returns or not parts.keys() & moved:
        return
    for variable, name in parts.items():
        reads = [
            one
            for one in descendants(loop.body)
            if isinstance(one, cst.Name) and script.variable(one) == variable
        ]
        if variable is not None and variable not in moved and reads:
            conversion.finding(
                reads[0],
                f"A prepared loader moves {name} to the device, and the script computes with it on the CPU. Write {name}.cpu() here.",
            )


def _find_region(conversion: Conversion) -> set[cst.CSTNode]:
    """Return the nodes of the innermost loops around the backward passes, and of the functions that run one."""
    script = conversion.script
    region: set[cst.CSTNode] = set()
    for call in conversion.backwards:
        region |= set(descendants(script.find_ancestor(call, (cst.For, cst.FunctionDef)) or script.module))
    return region


def _check_device(conversion: Conversion, call: cst.Call) -> None:
    """Report a move to a device that is not understood."""
    script = conversion.script
    if script.qualified_name(call.func) in _DEVICES:
        conversion.finding(
            call, "The default device is not converted. Remove it, and use accelerator.device."
        )
    moves = isinstance(call.func, cst.Attribute) and call.func.attr.value == "to"
    values = [arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == "device"]
    if moves and call.args and call.args[0].keyword is None:
        values.append(call.args[0].value)
    for value in values:
        code = to_code(value)
        kind = script.kind_of(value)
        is_number = isinstance(value, cst.Integer)
        is_item = isinstance(value, cst.Subscript) and not kind
        sources = [one for _, one in script.assigned.get(script.variable(value) or _NONE, [])]
        is_unknown = bool(sources) and not kind and all(isinstance(one, cst.Integer) for one in sources)
        if is_number or (is_item and "dtype" not in code) or is_unknown or _is_walrus(script, value):
            conversion.finding(value, f"The device {code} is not converted. Use accelerator.device.")


_NONE = Variable(None, "")


def _is_walrus(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a variable is assigned in an expression."""
    return isinstance(node, cst.Name) and any(
        isinstance(one, cst.NamedExpr) and to_code(one.target) == node.value for one in script.nodes
    )


def _check_file(conversion: Conversion, call: cst.Call) -> None:
    """Report a file that every process writes."""
    name = conversion.script.qualified_name(call.func)
    method = to_code(call.func).rpartition(".")[2]
    modes = {to_code(arg.value)[1:2] for arg in call.args[1:] if isinstance(arg.value, cst.SimpleString)}
    downloads = any(to_code(arg).replace(" ", "") == "download=True" for arg in call.args)
    if method == "open" and name != "builtins.open" and call.args:
        modes = {to_code(arg.value)[1:2] for arg in call.args[:1] if isinstance(arg.value, cst.SimpleString)}
    opens = method == "open" and bool(modes & {"w", "a", "x"})
    if (opens or method in _WRITES or downloads) and not conversion.is_guarded(call):
        advice = (
            "Use with accelerator.main_process_first():"
            if downloads
            else "Guard it with if accelerator.is_main_process:"
        )
        conversion.finding(call, f"Every process writes this file. {advice}.".replace(":.", ":"))


def _check_training_call(conversion: Conversion, call: cst.Call) -> None:
    """Report methods of the model that compute a loss, and schedulers that step at the end of an epoch."""
    script = conversion.script
    if not isinstance(call.func, cst.Attribute):
        return
    kind, method = script.kind_of(call.func.value), call.func.attr.value
    if kind == "model" and method not in _FORWARD and not isinstance(script.parents[call], cst.Expr):
        conversion.finding(
            call,
            f"The gradients are not averaged over the processes, since {method} is not the model's forward. Call the model.",
        )
    elif kind == "scheduler" and method == "step":
        condition = script.find_ancestor(call, (cst.If, cst.For, cst.FunctionDef))
        if (
            isinstance(condition, cst.If)
            and "len(" in to_code(condition.test)
            and "%" not in to_code(condition.test)
        ):
            conversion.finding(
                call,
                "A prepared scheduler steps once for each process. Step it after the loop over the batches.",
            )


def _check_loss(conversion: Conversion, node: cst.Name) -> None:
    """Report a loss that is printed, logged or added without being averaged over the processes."""
    script = conversion.script
    parent = script.parents.get(node)
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
            if method in _REPORTS:
                conversion.finding(node, f"This loss is that of one process. {_REDUCE}")
                return
        if isinstance(one, cst.AugAssign) and script.variable(one.target) != script.variable(node):
            conversion.finding(node, f"This loss is that of one process. {_REDUCE}")
            return
        if isinstance(one, (cst.BaseSuite, cst.Assign)):
            return


def _check_number(conversion: Conversion, node: cst.BinaryOperation, losses: set[Variable]) -> None:
    """Report numbers of samples that are those of the script before: the steps of an epoch, and constants."""
    script = conversion.script
    left, right = to_code(node.left), node.right
    if isinstance(node.operator, cst.FloorDivide) and "len(" in left:
        conversion.finding(
            node,
            "The number of batches is divided by the number of processes. Use len(loader) after accelerator.prepare.",
        )
    if (
        isinstance(node.operator, cst.Divide)
        and _SAMPLES.search(to_code(right))
        and (variable := script.variable(node.left))
        and _adds_means(conversion, variable, losses)
    ):
        conversion.finding(
            node,
            "A mean loss is added at each step, and several processes take fewer steps. Divide by len(loader) instead of the number of samples.",
        )
    is_loss = left.endswith(".item()") and any(
        script.variable(one) in losses for one in descendants(node.left)
    )
    is_constant = isinstance(right, (cst.Integer, cst.Name)) and script.kind_of(right) != "batch"
    is_batch_size = isinstance(right, cst.Integer) or any(
        isinstance(value, cst.Integer)
        for _, value in script.assigned.get(script.variable(right) or _NONE, [])
    )
    steps = {count for count, _ in conversion.divided.values()}
    if (
        isinstance(node.operator, cst.Multiply)
        and to_code(right) not in steps
        and is_loss
        and is_constant
        and is_batch_size
    ):
        conversion.finding(
            node,
            "This counts the samples of one process. Multiply by the number of samples of all processes.",
        )


def _adds_means(conversion: Conversion, variable: Variable, losses: set[Variable]) -> bool:
    """Return whether `loss.item()` of a mean loss is added to a variable, without a factor for the samples."""
    script = conversion.script
    for node in script.nodes:
        if isinstance(node, cst.AugAssign) and script.variable(node.target) == variable:
            value = node.value
            owner = (
                value.func.value
                if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute)
                else None
            )
            if owner is not None and to_code(value).endswith(".item()") and script.variable(owner) in losses:
                return not any("sum" in to_code(one) for _, one in script.assigned[script.variable(owner)])  # type: ignore[index]
    return False


def _note_order(conversion: Conversion) -> None:
    """Note files that are read after they are written, and splits without a seed."""
    script = conversion.script
    saves = [call for call in script.calls if script.is_call_of(call, "torch.save")]
    seeds = any("seed" in to_code(call.func) for call in script.calls)
    for call in script.calls:
        if script.is_call_of(call, "torch.load") and any(
            script.line(one) < script.line(call) and script.function_of(one) is script.function_of(call)
            for one in saves
        ):
            conversion.note(
                call,
                "The main process may still write this file. Call accelerator.wait_for_everyone() before.",
            )
        elif script.is_call_of(call, "torch.utils.data.random_split") and not seeds:
            conversion.note(
                call, "Each process draws another split. Call set_seed(seed) at the start of the script."
            )


_LEFT = {
    "torch.distributed.init_process_group": "Remove it: the first Accelerator connects the processes.",
    "torch.nn.parallel.DistributedDataParallel": "Remove it: accelerator.prepare(model) averages the gradients.",
    "torch.utils.data.DistributedSampler": "Remove it: accelerator.prepare(loader) shards the batches.",
    "torch.utils.data.distributed.DistributedSampler": "Remove it: accelerator.prepare(loader) shards the batches.",
    **dict.fromkeys(FABRIC, "Write Accelerator(), and its methods for those of Fabric."),
    "torch.multiprocessing.spawn": "Call the function once, and start the script with accel launch.",
}


def find_rest(script: Script) -> tuple[Finding, ...]:
    """Return the places of a raw script in one that imports accel already."""
    findings = []
    for call in script.calls:
        advice = _LEFT.get(script.qualified_name(call.func), "")
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward" and not call.args:
            advice = f"Write accelerator.backward({to_code(call.func.value)})."
        if advice:
            findings.append(
                Finding(
                    script.line(call),
                    f"This is not converted, since the script imports accel_runtime already. {advice}",
                )
            )
    return tuple(sorted(set(findings)))
