"""Conversion of scripts for Lightning Fabric: each call becomes one of the Accelerator, or is reported with what to write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from string import Template
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.edits import keep_arguments
from accel_cli.extensions.migrate.fabric_uses import FabricUses
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    descendants,
    get_method,
    get_positional,
    list_elements,
    to_code,
)

__all__ = ["convert_fabric"]

_LIGHTNING = ("lightning.", "lightning_fabric.", "lightning_utilities.")
_PROPERTIES = {"device": "device", "global_rank": "process_index", "is_global_zero": "is_main_process", "local_rank": "local_process_index", "world_size": "num_processes"}  # fmt: skip
_RENAMED = {"autocast": "autocast", "log_dict": "log", "print": "print", "setup_module": "prepare", "setup_optimizers": "prepare"}  # fmt: skip
"""Methods whose arguments stay."""
_CALLS: dict[str, tuple[str, ...]] = {
    "all_gather": ("data",),
    "all_reduce": ("data group reduce_op",),
    "barrier": ("name", "$fabric.wait_for_everyone()"),
    "broadcast": ("obj src", "broadcast_object_list([$obj], from_process=$src)[0]", "broadcast_object_list([$obj])[0]"),
    "clip_gradients": ("module optimizer clip_val max_norm norm_type error_if_nonfinite",),
    "init_module": ("empty_init",),
    "init_tensor": ("", "$fabric.device"),
    "load": ("path state strict weights_only",),
    "load_raw": ("path obj strict weights_only",),
    "log": ("name value step", "$fabric.log({$name: $value}, step=$step)", "$fabric.log({$name: $value})"),
    "no_backward_sync": ("module enabled",),
    "rank_zero_first": ("local",),
    "save": ("path state",),
    "seed_everything": ("seed workers verbose",),
    "to_device": ("obj", "send_to_device($obj, $fabric.device)"),
}  # fmt: skip
"""The parameters of methods, and the code for a call, unless it depends on the arguments: the first whose parameters are given."""
_ADVICE = {
    "all_gather": "Write accelerator.gather(tensor), which concatenates the tensors of the processes instead of stacking them",
    "call": "Call the functions of the callbacks in the script",
    "callbacks": "Call the functions of the callbacks in the script",
    "init_module": "Write with accelerator.device:, or with init_empty_weights(): for a model that is loaded later",
    "logger": "Use accelerator.get_tracker(name)",
    "loggers": 'Write Accelerator(log_with="tensorboard", project_dir=path) and accelerator.init_trackers(name)',
    "precision": "Write Accelerator(mixed_precision=...) with no, bf16 or fp16; for parameters in another dtype, model.to(dtype)",
    "rank_zero_only": "Remove it, and write if accelerator.is_main_process: before the calls",
    "save": "Write accelerator.save(state_dict, path) for weights, or accelerator.save_state(path)",
    "setup_dataloaders": 'Write accelerator.prepare(loader), or accelerator.prepare_data_loader(loader, data="sharded") if each process has its own samples',
    "strategy": "The profile selects how models are replicated or sharded: see the keys parallel.dp_shard and deepspeed.stage",
}
"""What to write for a call, member or argument that is not converted."""
_LAUNCH = {
    "accelerator": ({"auto", "gpu", "cuda", "mps"}, "The device", "--cpu"),
    "devices": ({"auto", "1", "-1"}, "The number of processes", "--nproc-per-node {}"),
    "num_nodes": ({"1"}, "The number of nodes", "--nnodes {}"),
}  # fmt: skip
"""Arguments of Fabric that belong to the launch: the values without a note, the subject, and the option of `accel launch`."""
_PRECISIONS = {"32": "", "32-true": "", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}  # fmt: skip
_REPLICATED = {"auto", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "dp", "fsdp"}
_UNUSED = "_find_unused_parameters_true"
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}
_TOTALS = {"sum", "mean", "max", "min", "any", "all", "std", "var", "numel", "item", "flatten"}
"""Methods whose result without arguments does not depend on the shape of a tensor."""
_STATEFUL = ("model", "optimizer", "scheduler")


def convert_fabric(conversion: Conversion) -> cst.Module:
    """Return the module after its conversion; findings of the conversion are places that are not converted."""
    converter = _Converter(conversion)
    converter.convert_classes()
    converter.convert_calls()
    converter.convert_names()
    converter.check_models()
    converter.uses.note_counts()
    return conversion.edits.apply(conversion.script.module)


class _Converter:
    """Conversion of one script."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self.script = conversion.script
        self.edits = conversion.edits
        self.uses = FabricUses(conversion)
        names = [
            name for name in self.script.nodes if isinstance(name, cst.Name) and name.value == "accelerator"
        ]
        self.renames = {self.script.variable(name) for name in names} - {None} <= self.uses.instances
        self.is_sharded = False
        self.builders: dict[str, Callable[[cst.Call, dict[str, cst.BaseExpression]], str]] = {
            "all_gather": self._build_all_gather, "all_reduce": self._build_all_reduce, "clip_gradients": self._build_clip_gradients,
            "init_module": self._build_init_module, "load": self._build_load, "load_raw": self._build_load_raw,
            "no_backward_sync": self._build_no_backward_sync, "rank_zero_first": self._build_rank_zero_first, "save": self._build_save,
            "seed_everything": self._build_seed_everything,
        }  # fmt: skip
        """The methods that return the code for a call that depends on its arguments; empty if it is not understood."""

    # The script

    def convert_classes(self) -> None:
        """Convert the creation of a Fabric, and annotations."""
        for node in self.script.nodes:
            if isinstance(node, cst.Annotation) and isinstance(node.annotation, cst.SimpleString):
                if self.uses.names_fabric(node):
                    self.edits.replace(node.annotation, '"Accelerator"')
                continue
            if not isinstance(node, (cst.Name, cst.Attribute)) or not self.uses.is_fabric(node):
                continue
            parent = self.script.parents[node]
            if self.script.find_ancestor(node, (cst.Import, cst.ImportFrom)) is not None:
                continue
            if isinstance(parent, cst.Call) and parent.func is node:
                self._convert_creation(parent)
                if isinstance(member := self.script.parents[parent], cst.Attribute):
                    self._convert_member(member)
            elif isinstance(self.script.parents.get(parent), cst.ClassDef):
                self._report(node, "A class derived from Fabric")
            else:
                self.edits.change(node, lambda _: cst.Name("Accelerator"))

    def convert_calls(self) -> None:
        """Convert the functions of Lightning."""
        for call in self.script.calls:
            if self._is_of_lightning(call.func, "seed_everything"):
                self._convert_call(call)
        for function in self.script.functions:
            for decorator in function.decorators:
                if self._is_of_lightning(decorator.decorator, "rank_zero_only"):
                    self._convert_decorator(function, decorator)

    def _is_of_lightning(self, node: cst.CSTNode, name: str) -> bool:
        qualified = self.script.qualified_name(node)
        return qualified.startswith(_LIGHTNING) and qualified.endswith(f".{name}")

    def convert_names(self) -> None:
        """Convert each place that names a Fabric, and rename the variable."""
        script = self.script
        for node in script.nodes:
            if (
                not isinstance(node, (cst.Name, cst.Attribute))
                or script.variable(node) not in self.uses.instances
            ):
                continue
            parent = script.parents.get(node)
            if (isinstance(parent, cst.Attribute) and parent.attr is node) or (
                isinstance(parent, cst.Arg) and parent.keyword is node
            ):
                continue
            if isinstance(parent, cst.Attribute):
                self._convert_member(parent)
            elif isinstance(parent, cst.Arg):
                self._check_argument(parent)
            if self.renames:
                self.edits.change(node, _rename)
        for call, function in script.callees.items():
            for name, arg in script.bind(call, function).items():
                if arg.keyword and self.renames and script.parameter(function, name) in self.uses.instances:
                    self.edits.change(arg, lambda one: one.with_changes(keyword=cst.Name("accelerator")))

    def _check_argument(self, arg: cst.Arg) -> None:
        call = self.script.parents[arg]
        name = self.script.qualified_name(call.func) if isinstance(call, cst.Call) else ""
        is_library = name.partition(".")[0] in {"", "torch", *sys.stdlib_module_names}
        if not is_library and call not in self.script.callees:
            self.conversion.note(
                arg, f"{name} gets an Accelerator instead of a Fabric. Convert its file too."
            )

    def _convert_member(self, attribute: cst.Attribute) -> None:
        name = attribute.attr.value
        call: Any = self.script.parents.get(attribute)
        is_called = isinstance(call, cst.Call) and call.func is attribute
        special = {
            "backward": self._convert_backward,
            "launch": self._convert_launch,
            "setup": self._convert_setup,
            "setup_dataloaders": self._convert_loaders,
        }
        if name in _PROPERTIES or (is_called and name in _RENAMED):
            self.edits.change(attribute, _set_attribute((_PROPERTIES | _RENAMED)[name]))
        elif is_called and name in special:
            special[name](call)
        elif is_called and name in _CALLS:
            self._convert_call(call)
        else:
            self._report(attribute, f"fabric.{name}", name)

    def _report(self, node: cst.CSTNode, what: str, name: str = "") -> None:
        """Report a place that is not converted."""
        advice = _ADVICE.get(name, "See the table on the page Migrate from Fabric")
        self.conversion.finding(node, f"{what} is not converted. {advice}.")

    def _convert_call(self, call: cst.Call) -> None:
        """Replace a call by the code for its name, with its arguments in place of `$parameter`."""
        name = to_code(call.func).rpartition(".")[2]
        parameters, *templates = _CALLS[name]
        given = _bind(call, parameters.split())
        if given is None:
            template = ""
        elif name in self.builders:
            template = self.builders[name](call, given)
        else:
            names = {"fabric", *given}
            template = next(
                (one for one in templates if names.issuperset(Template(one).get_identifiers())), ""
            )
        if not template:
            self._report(call, f"This call of {name}", name)
            return
        for function in ("broadcast_object_list", "nullcontext", "send_to_device", "set_seed"):
            if f"{function}(" in template:
                self.conversion.imports.add(function)
        self.edits.change(call, partial(_fill, template=Template(template), parameters=parameters.split()))

    def check_models(self) -> None:
        """Report methods that compute a loss, and remove `.module`."""
        for node in self.script.nodes:
            if not isinstance(node, cst.Attribute) or self.uses.kind_of(node.value) != "model":
                continue
            if node.attr.value == "training_step":
                self.conversion.finding(
                    node,
                    "The gradients are not averaged over the processes in training_step. Compute the loss in the model's forward, and call the model.",
                )
            elif node.attr.value == "mark_forward_method":
                self._report(node, "mark_forward_method")
            elif node.attr.value == "module":
                self.edits.change(node, lambda one: one.value)

    # The Accelerator

    def _convert_creation(self, call: cst.Call) -> None:
        arguments: dict[str, str] = {}
        for arg in call.args:
            self._convert_option(arg, arguments)
        code = ", ".join(f"{name}={value}" for name, value in arguments.items())
        expression = cst.parse_expression(f"Accelerator({code})")
        self.edits.change(call, lambda _: expression)

    def _convert_option(self, arg: cst.Arg, arguments: dict[str, str]) -> None:
        """Convert an argument of Fabric; those for the launch are removed with a note."""
        if arg.keyword is None:
            self._report(arg, "An argument without its name")
            return
        name = arg.keyword.value
        text = self._get_strategy(arg.value) or _get_text(arg.value)
        is_constant = isinstance(arg.value, (cst.SimpleString, cst.Integer)) or text != _get_text(arg.value)
        base = text.removesuffix(_UNUSED)
        if name == "accelerator" and text == "cpu":
            arguments["cpu"] = "True"
        elif name in _LAUNCH:
            self._note_launch(arg, name, text)
        elif name == "precision" and is_constant and text in _PRECISIONS:
            if _PRECISIONS[text]:
                arguments["mixed_precision"] = f'"{_PRECISIONS[text]}"'
        elif name == "strategy" and is_constant and base in _REPLICATED:
            self.is_sharded = base == "fsdp"
            if self.is_sharded:
                self.conversion.note(
                    arg,
                    "Sharding is an option of the launch: accel launch --set parallel.dp_shard=auto. The keys of fully_shard in the profile replace arguments of FSDPStrategy.",
                )
            if base != text:
                self.conversion.imports.add("DistributedDataParallelKwargs")
                arguments["kwargs_handlers"] = "[DistributedDataParallelKwargs(find_unused_parameters=True)]"
        elif text not in {"None", "[]"}:
            self._report(arg, f"The argument {name}", name)

    def _get_strategy(self, node: cst.BaseExpression) -> str:
        """Return the name of the strategy of which an expression creates the class; empty for another expression."""
        kind = to_code(node.func).rpartition(".")[2] if isinstance(node, cst.Call) else ""
        if not isinstance(node, cst.Call) or not self._is_of_lightning(node.func, kind):
            return ""
        arguments = {to_code(arg).replace(" ", "").rstrip(",") for arg in node.args}
        if kind == "DDPStrategy" and not arguments - {"find_unused_parameters=True"}:
            return "ddp" + (_UNUSED if arguments else "")
        return "fsdp" if kind == "FSDPStrategy" else ""

    def _note_launch(self, arg: cst.Arg, name: str, text: str) -> None:
        silent, subject, option = _LAUNCH[name]
        if isinstance(arg.value, cst.List):
            subject, option = "The choice of GPUs", f"--gpu-ids {to_code(arg.value)[1:-1].replace(' ', '')}"
        elif text in silent:
            return
        option = option.format(text if text.isdigit() else "N")
        self.conversion.note(arg, f"{subject} is an option of the launch: accel launch {option}.")

    def _convert_launch(self, call: cst.Call) -> None:
        statement = self.script.parents[call]
        if not call.args and isinstance(statement, cst.Expr):
            self.edits.remove(statement)
            return
        if not call.args or call.args[0].keyword is not None or call.args[0].star:
            self._report(call, "This call of launch")
            return
        self.edits.change(
            call,
            lambda one: one.with_changes(
                func=one.args[0].value, args=[one.args[0].with_changes(value=one.func.value), *one.args[1:]]
            ),
        )

    def _convert_decorator(self, function: cst.FunctionDef, decorator: cst.Decorator) -> None:
        """Replace `rank_zero_only` where the Accelerator exists when the function is defined."""
        script, outer = self.script, self.script.function_of(function)
        names = [
            variable.name
            for variable in self.uses.instances
            for node, _ in script.assigned.get(variable, [])
            if script.function_of(node) is outer and script.line(node) < script.line(function)
        ]
        names += [
            param.name.value
            for param in (outer.params.params if outer is not None else ())
            if outer is not None and script.parameter(outer, param.name.value) in self.uses.instances
        ]
        if not names:
            self._report(decorator, "rank_zero_only before the Accelerator is created", "rank_zero_only")
            return
        expression = cst.parse_expression(f"{'accelerator' if self.renames else names[0]}.on_main_process")
        self.edits.change(decorator.decorator, lambda _: expression)

    def _build_seed_everything(self, call: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        if "seed" not in given or not isinstance(self.script.parents[call], cst.Expr):
            return ""
        return "set_seed($seed)"

    # Preparation

    def _convert_setup(self, call: cst.Call) -> None:
        keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
        moves = to_code(keywords.get("move_to_device", cst.Name("True"))) == "True"
        if keywords.keys() - {"module", "move_to_device", "_reapply_compile"} or not moves:
            self._report(call, "This call of setup")
            return
        self.edits.change(call, partial(keep_arguments, names={"module"}))
        self.edits.change(call.func, _set_attribute("prepare"))

    def _convert_loaders(self, call: cst.Call) -> None:
        options = {arg.keyword.value: to_code(arg.value) for arg in call.args if arg.keyword is not None}
        if options.keys() - {"use_distributed_sampler", "move_to_device"} or {*options.values()} - {"True"}:
            self._report(call, "This call of setup_dataloaders", "setup_dataloaders")
            return
        self.edits.change(call, partial(keep_arguments, names=set()))
        self.edits.change(call.func, _set_attribute("prepare"))

    def _build_init_module(self, _: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        is_filled = to_code(given.get("empty_init", cst.Name("None"))) in {"None", "False"}
        return "$fabric.device" if is_filled else ""

    # Training

    def _convert_backward(self, call: cst.Call) -> None:
        if len([arg for arg in call.args if arg.keyword is None]) != 1 or any(arg.star for arg in call.args):
            self._report(call, "This call of backward")
            return
        names = {arg.keyword.value for arg in call.args if arg.keyword is not None} - {"model"}
        self.edits.change(call, partial(keep_arguments, names=names, keeps_names=True))

    def _build_no_backward_sync(self, _: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        if "module" not in given:
            return ""
        if to_code(given.get("enabled", cst.Name("True"))) == "True":
            return "$fabric.no_sync($module)"
        is_plain = not isinstance(given["enabled"], (cst.IfExp, cst.NamedExpr, cst.Lambda))
        return f"$fabric.no_sync($module) if {'$enabled' if is_plain else '($enabled)'} else nullcontext()"

    def _build_clip_gradients(self, call: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        module = given.get("module")
        if module is None or ("max_norm" in given) == ("clip_val" in given) or self._has_optimizers(module):
            return ""
        if "clip_val" in given:
            return "$fabric.clip_grad_value_($module.parameters(), $clip_val)"
        if to_code(given.get("error_if_nonfinite", cst.Name("True"))) != "False":
            self.conversion.note(
                call,
                "Fabric stops at gradients that are infinite or nan, and clip_grad_norm_ does not. To stop, check the norm that it returns.",
            )
        kind = ", norm_type=$norm_type" if "norm_type" in given else ""
        return f"$fabric.clip_grad_norm_($module.parameters(), $max_norm{kind})"

    def _has_optimizers(self, module: cst.BaseExpression) -> bool:
        """Return whether a model may have several optimizers, of which Fabric clips the gradients of one."""
        optimizers = set()
        for call in self.script.calls:
            given = _bind(call, _CALLS["clip_gradients"][0].split()) or {}
            if get_method(call) == "clip_gradients" and to_code(given.get("module", call)) == to_code(module):
                optimizers.add(to_code(given.get("optimizer", call)))
            elif get_method(call) == "setup" and len(call.args) > 2:  # noqa: PLR2004 - the model and one optimizer
                return True
        return len(optimizers) > 1

    # Collectives

    def _build_rank_zero_first(self, _: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        names = {"False": "main_process_first", "True": "local_main_process_first"}
        name = names.get(to_code(given.get("local", cst.Name("False"))))
        return f"$fabric.{name}()" if name else ""

    def _build_all_reduce(self, call: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        operation = _get_text(given.get("reduce_op", cst.Name("mean"))).rpartition(".")[2].lower()
        statement, data = self.script.parents[call], given.get("data")
        is_statement = isinstance(statement, cst.Expr)
        has_group = to_code(given.get("group", cst.Name("None"))) != "None"
        if (
            data is None
            or has_group
            or operation not in _REDUCTIONS
            or (is_statement and not isinstance(data, cst.Name))
        ):
            return ""
        if is_statement:
            name = cst.Name(to_code(data))
            self.edits.change(statement, lambda one: cst.Assign([cst.AssignTarget(name)], one.value))
        return f'$fabric.reduce({self._format_tensor(data)}, "{_REDUCTIONS[operation]}")'

    def _build_all_gather(self, call: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        data = given.get("data")
        if data is None:
            return ""
        parent = self.script.parents[call]
        method: Any = self.script.parents[parent]
        is_total = get_method(method) in _TOTALS and not method.args
        if self.uses.gathers_samples(call, data) and (is_total or self.uses.computes_with(parent)):
            return "$fabric.gather_for_metrics($data)"
        return f"$fabric.gather({self._format_tensor(data)})" if is_total else ""

    def _format_tensor(self, data: cst.BaseExpression) -> str:
        return "torch.as_tensor($data, device=$fabric.device)" if self.uses.is_number(data) else "$data"

    # Files and trackers

    def _build_save(self, call: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        state = self._format_state(given["state"]) if "state" in given else ""
        statement = self.script.find_ancestor(call, cst.SimpleStatementLine)
        path = given.get("path", call)
        is_statement = statement is not None and isinstance(self.script.parents[call], cst.Expr)
        if (
            not state
            or not is_statement
            or any(self.script.variable(one) in self.uses.instances for one in descendants(path))
        ):
            return ""
        if not isinstance(path, cst.SimpleString) or "/" in to_code(path):  # Fabric creates the folder.
            self.conversion.imports.add("Path")
            self.edits.insert_before(
                statement, f"Path({to_code(path)}).parent.mkdir(parents=True, exist_ok=True)"
            )
        if any(to_code(one.func).rpartition(".")[2].startswith("load") for one in self.script.calls):
            assert isinstance(call.func, cst.Attribute)
            owner = to_code(call.func.value)
            name = f"{owner.rpartition('.')[0]}.accelerator".lstrip(".") if self.renames else owner
            self.edits.insert_after(statement, f"{name}.wait_for_everyone()")
        return f"$fabric.save({state}, $path)"

    def _format_state(self, state: cst.BaseExpression) -> str:
        """Return the code of what is saved, with the state of models and optimizers; empty if it is not understood."""
        code = to_code(state).replace("$", "$$")
        if self.uses.kind_of(state) == "model":
            return f"$fabric.get_state_dict({code})"
        if isinstance(state, cst.Call):
            return code if to_code(state.func).endswith(".state_dict") else ""
        items = self.uses.read_state(state)
        if items is None:
            return ""
        states = {
            key: f"$fabric.get_state_dict({obj})" if kind == "model" else f"{obj}.state_dict()"
            for key, obj, kind in items
            if kind in _STATEFUL
        }
        if isinstance(state, cst.Dict):
            values = [f"{key}: {states.get(key, obj)}" for key, obj, _ in items]
        else:
            values = [f"**{code}", *(f"{key}: {value}" for key, value in states.items())]
        return f"{{{', '.join(values)}}}"

    def _build_load(self, call: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        safe = ", weights_only=$weights_only" if "weights_only" in given else ""
        loaded = f'torch.load($path, map_location="cpu"{safe})'
        if "path" not in given or self.is_sharded or "state" not in given:
            return loaded if "path" in given and not self.is_sharded else ""
        state, parent = given["state"], self.script.parents[call]
        items = self.uses.read_state(state)
        is_strict = to_code(given.get("strict", cst.Name("True"))) == "True"
        is_assigned = isinstance(parent, cst.Assign) and len(list_elements(parent.targets[0].target)) == 1
        statement = self.script.find_ancestor(call, cst.SimpleStatementLine)
        if (
            items is None
            or not is_strict
            or statement is None
            or not (is_assigned or isinstance(parent, cst.Expr))
        ):
            return ""
        used = {node.value for node in self.script.nodes if isinstance(node, cst.Name)}
        name = next(one for one in ("checkpoint", "loaded", "loaded_checkpoint") if one not in used)
        if isinstance(parent, cst.Assign):
            name = to_code(parent.targets[0].target)
        else:
            self.edits.change(parent, lambda one: cst.Assign([cst.AssignTarget(cst.Name(name))], one.value))
        for key, obj, kind in items:
            value = f"{name}.pop({key})"
            if kind in _STATEFUL:
                self.edits.insert_after(statement, f"{obj}.load_state_dict({value})")
            else:
                self.edits.insert_after(
                    statement, value if isinstance(state, cst.Dict) else f"{obj} = {value}"
                )
        return loaded

    def _build_load_raw(self, _: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        if not {"path", "obj"} <= given.keys() or self.is_sharded:
            return ""
        safe = ", weights_only=$weights_only" if "weights_only" in given else ""
        is_model = self.uses.kind_of(given["obj"]) == "model"
        strict = ", strict=$strict" if "strict" in given and is_model else ""
        return f'$obj.load_state_dict(torch.load($path, map_location="cpu"{safe}){strict})'


def _bind(call: cst.Call, parameters: list[str]) -> dict[str, cst.BaseExpression] | None:
    """Return the arguments of a call by parameter; None if they are not understood."""
    names = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    if names - set(parameters) or any(arg.star for arg in call.args) or len(call.args) > len(parameters):
        return None
    values = {name: get_positional(call, index, name) for index, name in enumerate(parameters)}
    return {name: value for name, value in values.items() if value is not None}


def _fill(call: cst.Call, template: Template, parameters: list[str]) -> cst.BaseExpression:
    """Return the code of a template with the arguments of a call."""
    codes = {name: to_code(value) for name, value in (_bind(call, parameters) or {}).items()}
    if isinstance(call.func, cst.Attribute):
        codes["fabric"] = to_code(call.func.value)
    return cst.parse_expression(template.substitute(codes))


def _rename(node: Any) -> Any:
    if isinstance(node, cst.Attribute):
        return node.with_changes(attr=cst.Name("accelerator"))
    return node.with_changes(value="accelerator")


def _set_attribute(name: str) -> Callable[[Any], Any]:
    """Return a change of an attribute that replaces its name."""
    return lambda node: node.with_changes(attr=cst.Name(name))


def _get_text(node: cst.CSTNode) -> str:
    """Return a string without its quotes, or the code of another expression."""
    return to_code(node)[1:-1] if isinstance(node, cst.SimpleString) else to_code(node)
