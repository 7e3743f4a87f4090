"""Statements of a training loop: backward passes, clipping, mixed precision, saving and output."""

from __future__ import annotations

from functools import partial
from typing import Any

import libcst as cst

from accel_cli.migrate.edits import drop_last_comma, set_fields, set_function
from accel_cli.migrate.raw import Conversion, strip_wrappers
from accel_cli.migrate.script import WRAPPERS, Variable, descendants, get_positional, to_code

__all__ = [
    "convert_backward",
    "convert_clipping",
    "convert_output",
    "convert_precision",
    "convert_saving",
    "convert_wrappers",
    "reduce_losses",
]

_AUTOCAST = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.cpu.amp.autocast",
    "torch.amp.autocast_mode.autocast",
    "torch.cuda.amp.autocast_mode.autocast",
)
_CLIPPING = {
    "torch.nn.utils.clip_grad_norm_": "clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_": "clip_grad_value_",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "clip_grad_norm_",
}
_REDUCE = 'Write accelerator.reduce(loss.detach(), "mean") on all processes.'
_SAVED = 2
"""torch.save takes the object and the path."""
_RANDOM = ("torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.bernoulli", "torch.normal")


# Gradients


def convert_backward(conversion: Conversion) -> None:
    """Replace `loss.backward()` by `accelerator.backward(loss)`."""
    script = conversion.script
    _check_closures(conversion)
    for call in conversion.backwards:
        assert isinstance(call.func, cst.Attribute)
        if any(arg.keyword is None or arg.star or arg.keyword.value == "gradient" for arg in call.args):
            raise conversion.unsafe(
                call, "backward() has a gradient as its argument. Pass a scalar loss to accelerator.backward."
            )
        loss: Any = call.func.value
        scaled = _get_scaled(conversion, loss)
        accelerator = cst.parse_expression(f"{conversion.accelerator(call)}.backward")
        if (
            scaled is None
            and isinstance(loss, (cst.Call, cst.Attribute))
            and script.kind_of(loss) == "scaler"
        ):
            raise conversion.unsafe(
                call, "The scaled loss is not understood. Pass the loss to accelerator.backward."
            )
        conversion.edits.change(
            call,
            partial(_build_backward, function=accelerator, is_scaled=scaled is not None),
        )
        conversion.losses[call] = loss if scaled is None else scaled


def _check_closures(conversion: Conversion) -> None:
    """Raise an error for an optimizer that runs the backward pass itself."""
    for call in conversion.script.calls:
        is_step = isinstance(call.func, cst.Attribute) and call.func.attr.value == "step" and bool(call.args)
        if (
            is_step
            and isinstance(call.func, cst.Attribute)
            and conversion.script.kind_of(call.func.value) == "optimizer"
        ):
            raise conversion.unsafe(
                call, "The optimizer gets a closure. Run the backward pass before the step."
            )


def _build_backward(node: cst.Call, function: cst.BaseExpression, *, is_scaled: bool) -> cst.Call:
    assert isinstance(node.func, cst.Attribute)
    loss: Any = node.func.value
    if is_scaled:
        loss = loss.args[0].value
    if loss.lpar and isinstance(loss, (cst.BinaryOperation, cst.IfExp)):
        loss = loss.with_changes(lpar=loss.lpar[1:], rpar=loss.rpar[1:])
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")) if node.args else cst.MaybeSentinel.DEFAULT
    return node.with_changes(func=function, args=[cst.Arg(loss, comma=comma), *node.args])


def _get_scaled(conversion: Conversion, loss: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the loss in `scaler.scale(loss)`."""
    if (
        isinstance(loss, cst.Call)
        and isinstance(loss.func, cst.Attribute)
        and loss.func.attr.value == "scale"
    ):
        role = conversion.script.role_of_variable(loss.func.value)
        if role is not None and role.kind == "scaler" and len(loss.args) == 1:
            return loss.args[0].value
    return None


def convert_clipping(conversion: Conversion) -> None:
    """Replace torch's functions that clip gradients by methods of the Accelerator."""
    script = conversion.script
    for call in script.calls:
        name = _CLIPPING.get(script.qualified_name(call.func))
        if name is None:
            continue
        extra = [
            arg.keyword.value
            for arg in call.args
            if arg.keyword and arg.keyword.value not in {"parameters", "max_norm", "norm_type", "clip_value"}
        ]
        if extra or any(arg.star for arg in call.args):
            raise conversion.unsafe(
                call, f"accelerator.{name} has no argument {', '.join(extra) or '*'}. Remove it."
            )
        conversion.edits.change(call, set_function(f"{conversion.accelerator(call)}.{name}"))


def _call_on_value(node: cst.Attribute, function: str) -> cst.Call:
    return cst.Call(cst.parse_expression(function), [cst.Arg(node.value)])


def convert_wrappers(conversion: Conversion) -> None:
    """Remove `DataParallel`, and replace `model.module` by `unwrap_model`."""
    script = conversion.script
    for node in script.nodes:
        if (
            isinstance(node, cst.Call)
            and script.qualified_name(node.func) in WRAPPERS - {"torch.compile"}
            and "DataParallel" in script.qualified_name(node.func)
        ):
            assign = script.parents[node]
            is_plain = "SyncBatchNorm" not in to_code(node)
            if (
                is_plain
                and isinstance(assign, cst.Assign)
                and to_code(assign.targets[0].target) == to_code(strip_wrappers(script, node))
            ):
                conversion.edits.remove(assign)
            else:
                conversion.edits.change(node, lambda one: one.args[0].value)
        elif (
            isinstance(node, cst.Attribute)
            and node.attr.value == "module"
            and script.kind_of(node.value) == "model"
        ):
            function = f"{conversion.accelerator(node)}.unwrap_model"
            conversion.edits.change(
                node,
                partial(_call_on_value, function=function),
            )


# Mixed precision


def convert_precision(conversion: Conversion) -> None:
    """Replace autocast and GradScaler by `mixed_precision`."""
    script = conversion.script
    formats = set()
    is_training = _trains_in_autocast(conversion)
    for call in script.calls:
        if is_training and script.is_call_of(call, *_AUTOCAST):
            formats.add(_read_autocast(conversion, call))
            accelerator = conversion.accelerator(call)
            conversion.edits.replace(call, f"{accelerator}.autocast()")
    if len(formats) > 1:
        call = next(call for call in script.calls if script.is_call_of(call, *_AUTOCAST))
        raise conversion.unsafe(
            call, f"autocast is used with {' and '.join(sorted(formats))}. Use one format."
        )
    if formats:
        conversion.arguments["mixed_precision"] = f'"{formats.pop()}"'
    _remove_scalers(conversion)


def _trains_in_autocast(conversion: Conversion) -> bool:
    """Return whether the trained models are called in autocast; raise an error if some are, and others not."""
    script = conversion.script
    contexts = [call for call in script.calls if script.is_call_of(call, *_AUTOCAST)]
    if not contexts:
        return False
    inside: set[cst.CSTNode] = set()
    for call in conversion.backwards:
        region = script.find_ancestor(call, (cst.For, cst.While, cst.FunctionDef)) or script.module
        inside |= set(descendants(region))
    pending = [function for call, function in script.callees.items() if call in inside]
    while pending:
        function = pending.pop()
        if function.body not in inside:
            inside |= set(descendants(function))
            pending += [
                callee for call, callee in script.callees.items() if call in set(descendants(function))
            ]
    calls = [
        node
        for node in inside
        if isinstance(node, cst.Call) and script.variable(node.func) and script.kind_of(node.func) == "model"
    ]
    covered = [call for call in calls if _is_in_autocast(conversion, call)]
    uses_scaler = any(role.kind == "scaler" for role in script.roles.values())
    if not uses_scaler and not inside & set(contexts):
        return False
    if not calls or len(covered) < len(calls):
        missing = next((call for call in calls if call not in covered), contexts[0])
        raise conversion.unsafe(
            missing,
            "Only some calls of the trained models are in autocast, and Accelerator(mixed_precision=...) converts all. Use accelerator.autocast() for all of them.",
        )
    return True


def _is_in_autocast(conversion: Conversion, call: cst.Call) -> bool:
    script = conversion.script
    for one in script.ancestors(call):
        if isinstance(one, cst.With):
            contexts: list[cst.BaseExpression] = [item.item for item in one.items]
        elif isinstance(one, cst.FunctionDef):
            contexts = [decorator.decorator for decorator in one.decorators]
        else:
            continue
        if any(script.is_call_of(context, *_AUTOCAST) for context in contexts):
            return True
    return False


def _read_autocast(conversion: Conversion, call: cst.Call) -> str:
    script = conversion.script
    name = script.qualified_name(call.func)
    enabled = get_positional(call, 9, "enabled")
    dtype = get_positional(call, 1, "dtype")
    device = get_positional(call, 0, "device_type") if "cuda" not in name and "cpu" not in name else None
    if (enabled is not None and to_code(enabled) != "True") or (
        device is None and "cuda" not in name and "cpu" not in name
    ):
        raise conversion.unsafe(
            call,
            "autocast is enabled by a variable. Use accelerator.autocast() and Accelerator(mixed_precision=...).",
        )
    if dtype is not None:
        known = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}.get(
            script.qualified_name(dtype)
        )
        if known is None:
            raise conversion.unsafe(
                call,
                "The dtype of autocast is not a constant. Use accelerator.autocast() and Accelerator(mixed_precision=...).",
            )
        return known
    is_cpu = "cpu" in name or (device is not None and to_code(device)[1:-1] == "cpu")
    return "bf16" if is_cpu else "fp16"


def _remove_scalers(conversion: Conversion) -> None:
    script = conversion.script
    for variable, entries in script.assigned.items():
        role = script.roles.get(variable)
        if role is not None and role.kind == "scaler":
            for node, value in entries:
                if script.kind_of(value) == "scaler":
                    conversion.edits.remove(node)
    for node in script.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)) or isinstance(
            script.parents.get(node), (cst.AssignTarget, cst.Param)
        ):
            continue
        role = script.role_of_variable(node)
        if role is not None and role.kind == "scaler":
            _convert_scaler_use(conversion, node)


def _convert_scaler_use(conversion: Conversion, node: cst.CSTNode) -> None:
    script = conversion.script
    attribute = script.parents.get(node)
    call = script.parents.get(attribute) if isinstance(attribute, cst.Attribute) else None
    method = attribute.attr.value if isinstance(attribute, cst.Attribute) else ""
    statement = script.parents.get(call) if call is not None else None
    if (
        isinstance(call, cst.Call)
        and method == "scale"
        and call in {one.func.value for one in conversion.backwards if isinstance(one.func, cst.Attribute)}
    ):
        return
    if isinstance(call, cst.Call) and isinstance(statement, cst.Expr):
        if method in {"update", "unscale_"}:
            conversion.edits.remove(statement)
            return
        if method == "step" and len(call.args) == 1:
            conversion.edits.change(
                call,
                lambda one: cst.Call(cst.Attribute(one.args[0].value, cst.Name("step"))),
            )
            return
    raise conversion.unsafe(
        node,
        "The GradScaler is used in a way that is not converted. Remove it: Accelerator(mixed_precision=...) scales the loss.",
    )


# Saving and output


def convert_saving(conversion: Conversion) -> None:
    """Replace `torch.save` by `accelerator.save` in the code that has an Accelerator."""
    script = conversion.script
    for call in script.calls:
        if not script.is_call_of(call, "torch.save") or not call.args:
            continue
        kinds = {script.kind_of(one) for one in descendants(call.args[0].value)}
        if not conversion.can_reach(call) and not kinds & {"model", "optimizer"}:
            if script.function_of(call) is not None:
                conversion.finding(
                    call, "Every process writes this file. Use accelerator.save(object, path)."
                )
            continue
        if (
            conversion.is_guarded(call)
            or len(call.args) != _SAVED
            or any(arg.keyword or arg.star for arg in call.args)
        ):
            if not conversion.is_guarded(call):
                conversion.finding(
                    call, "Every process writes this file. Use accelerator.save(object, path)."
                )
            continue
        accelerator = conversion.accelerator(call)
        conversion.edits.change(call, set_function(f"{accelerator}.save"))
        for one in descendants(call.args[0].value):
            if (
                isinstance(one, cst.Call)
                and isinstance(one.func, cst.Attribute)
                and one.func.attr.value == "state_dict"
                and not one.args
            ):
                _convert_state_dict(conversion, one, accelerator)
        if script.kind_of(call.args[0].value) == "model":
            conversion.edits.replace(
                call.args[0].value, f"{accelerator}.unwrap_model({to_code(call.args[0].value)})"
            )


def _convert_state_dict(conversion: Conversion, call: cst.Call, accelerator: str) -> None:
    assert isinstance(call.func, cst.Attribute)
    owner = call.func.value
    if isinstance(owner, cst.Attribute) and owner.attr.value == "module":
        owner = owner.value
    if conversion.script.kind_of(owner) == "model":
        conversion.edits.replace(call, f"{accelerator}.get_state_dict({to_code(owner)})")


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
            conversion.finding(
                call,
                "Every process writes this log. Use Accelerator(log_with=...), accelerator.init_trackers and accelerator.log.",
            )
        elif any(
            to_code(arg).replace(" ", "") in {'reduction="sum"', "reduction='sum'"} for arg in call.args
        ):
            _note_sum(conversion, call)
        elif name == "logging.getLogger" and len(call.args) == 1 and conversion.home is None:
            _convert_logger(conversion, call)
        elif (
            name.startswith(("torch.rand", "torch.normal", "torch.bernoulli"))
            and name in _RANDOM
            and _is_in_training(conversion, call)
        ):
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


def reduce_losses(conversion: Conversion) -> None:
    """Report losses as means over the processes: `loss.item()` becomes `accelerator.reduce(loss.detach(), "mean").item()`."""
    script = conversion.script
    losses = {
        variable
        for loss in conversion.losses.values()
        if isinstance(loss, cst.Name) and (variable := script.variable(loss)) is not None
    }
    for call in script.calls:
        owner = _get_reported(conversion, call)
        variable = script.variable(owner) if owner is not None else None
        if owner is None or variable not in losses or conversion.is_guarded(call):
            continue
        if not _is_reported_loss(conversion, call, variable):
            continue
        if _depends_on_batch(conversion, call, losses):
            conversion.finding(
                call,
                f"This loss is that of one process, under a condition that may differ between processes. {_REDUCE}",
            )
        else:
            _reduce_loss(conversion, call, to_code(owner), variable)
    _find_conditions(conversion, losses)


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


def _find_conditions(conversion: Conversion, losses: set[Variable]) -> None:
    """Report conditions in training loops after which processes may take different numbers of steps."""
    for node in conversion.script.nodes:
        if (
            isinstance(node, cst.If)
            and _reads_batch(conversion, node.test, losses)
            and _is_in_training(conversion, node)
        ):
            conversion.finding(
                node,
                f"This condition reads values of one process, and all processes must take the same steps. {_REDUCE}",
            )


def _reduce_loss(conversion: Conversion, call: cst.Call, loss: str, variable: Variable) -> None:
    accelerator = conversion.accelerator(call)
    count, position = conversion.divided.get(variable, ("", (0, 0)))
    product = conversion.script.parents[call]
    value, node = f"{loss}.detach()", call
    if count and conversion.script.start(call) > position:
        if (
            isinstance(product, cst.BinaryOperation)
            and isinstance(product.operator, cst.Multiply)
            and to_code(product.right) == count
        ):
            node = product  # type: ignore[assignment]
        else:
            value = f"{loss}.detach() / {count}"
    quote = _choose_quote(conversion, node)
    reduced = f"{accelerator}.reduce({value}, {quote}mean{quote})"
    if isinstance(call.func, cst.Attribute) and call.func.attr.value == "step":
        conversion.edits.replace(call.args[0].value, reduced)
    else:
        conversion.edits.replace(node, f"{reduced}.item()")


def _choose_quote(conversion: Conversion, node: cst.CSTNode) -> str:
    """Return the quote that an f-string around a node does not use: before Python 3.12, they must differ."""
    string = conversion.script.find_ancestor(node, cst.FormattedString)
    return "'" if string is not None and '"' in string.start else '"'


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
