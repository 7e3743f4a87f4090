"""Roles of values in a training loop: models, optimizers, loaders, batches, devices and ranks."""

from __future__ import annotations

import functools
import re
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.structure import (
    NO_VARIABLE,
    Role,
    Structure,
    Variable,
    descendants,
    get_method,
    get_positional,
    list_children,
    list_elements,
    to_code,
)

__all__ = [
    "NO_VARIABLE",
    "SETTINGS",
    "WRAPPERS",
    "Role",
    "Script",
    "Variable",
    "descendants",
    "get_method",
    "get_positional",
    "is_device_name",
    "list_children",
    "list_elements",
    "to_code",
]

_ROUNDS = 12
"""Roles are passed through assignments and calls until nothing changes, at most this often."""
_SAME_MODEL = {"to", "cuda", "cpu", "train", "eval", "float", "double", "half", "bfloat16", "compile"}
_SAME_BATCH = _SAME_MODEL | {"view", "reshape", "unsqueeze", "squeeze", "flatten", "long", "contiguous", "items"}  # fmt: skip
WRAPPERS = {
    "torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel", "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "torch.compile",
}  # fmt: skip
"""Functions and classes of torch that return a model for a model."""
_KINDS = {
    "torch.utils.data.DataLoader": "loader",
    "torch.utils.data.dataloader.DataLoader": "loader",
    "torch.amp.GradScaler": "scaler",
    "torch.cuda.amp.GradScaler": "scaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "scaler",
    "torch.device": "device",
    "torch.cuda.current_device": "device",
    "torch.accelerator.current_accelerator": "device",
    "torch.utils.data.DistributedSampler": "sampler",
    "torch.utils.data.distributed.DistributedSampler": "sampler",
    "torch.distributed.get_rank": "rank",
    "torch.distributed.get_world_size": "world_size",
}
_DEVICE_TYPES = {"cpu", "cuda", "mps", "xpu", "npu", "hpu", "xla", "mtia"}
_NUMBERED = {"device", "device_id", "cuda_device", "gpu_device"}
"""Variables whose number is that of a GPU."""
_RANKS = {"RANK": "rank", "LOCAL_RANK": "local_rank", "WORLD_SIZE": "world_size"}
SETTINGS = {"args", "cfg", "conf", "config", "hparams", "opt", "options", "params", "hp", "flags"}
_ITERATORS = {
    "builtins.iter": {"loader": "iterator"},
    "itertools.cycle": {"loader": "iterator"},
    "builtins.next": {"iterator": "batch"},
}
"""The kind of a function's result for the kind of its first argument."""
_ITERATED = {
    "enumerate",
    "iter",
    "tqdm.tqdm",
    "tqdm.auto.tqdm",
    "tqdm.notebook.tqdm",
    "tqdm.std.tqdm",
    "itertools.islice",
    "itertools.cycle",
}


def is_device_name(node: cst.CSTNode) -> bool:
    """Return whether a node is a text such as `"cuda:0"`, also one with the number of a rank."""
    kind = re.split(r"[:\"']", to_code(node).lstrip("frb\"'"))[0]
    return isinstance(node, (cst.SimpleString, cst.FormattedString)) and kind in _DEVICE_TYPES


class Script(Structure):
    """A parsed script with the roles of its variables."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.trained: set[Variable] = set()
        self._classes: dict[Variable, cst.ClassDef] = {}
        """The classes of variables that are modules of the script."""
        self._foreign_optimizers: set[cst.Call] = set()
        """Calls that create optimizers of other packages."""
        self._resolving: set[cst.FunctionDef] = set()
        """Functions whose result is being resolved, which may call themselves."""
        self._find_roles()

    def is_model_call(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a call of a model's variable."""
        return (
            isinstance(node, cst.Call)
            and self.variable(node.func) is not None
            and self.kind_of(node.func) == "model"
        )

    # Roles

    def kind_of(self, node: cst.CSTNode) -> str:
        """Return the kind of an expression's role; empty without one."""
        role = self.role_of(node)
        return role.kind if isinstance(role, Role) else ""

    def _find_roles(self) -> None:
        self.assigned: dict[Variable, list[tuple[cst.CSTNode, cst.BaseExpression]]] = {}
        assigning = (cst.Assign, cst.AnnAssign, cst.For, cst.CompFor)
        assignments = [node for node in self.nodes if isinstance(node, assigning)]
        for function in self.functions:
            names = {param.name.value for param in (*function.params.params, *function.params.kwonly_params)}
            passed = any("device" in self.bind(call, function) for call in self.calls_of(function))
            if "device" in names and not passed:
                self._merge(self.parameter(function, "device"), Role("device"))
        for _ in range(_ROUNDS):
            before = dict(self.roles), set(self.trained)
            self._find_foreign_optimizers()
            self._find_definitions_of_instances()
            for node in assignments:
                self._read_assignment(node)
            for call, function in list(self.callees.items()):
                for name, arg in self.bind(call, function).items():
                    self._merge(self.parameter(function, name), self.role_of(arg.value))
                    self._find_class(self.parameter(function, name), arg.value)
            self._find_trained()
            if before == (self.roles, self.trained):
                break

    def _find_foreign_optimizers(self) -> None:
        """Add the calls of other packages whose results are stepped and zeroed, and get the parameters of a model."""
        stepped = self.list_owners("step")
        for variable in stepped & self.list_owners("zero_grad"):
            for _, value in self.assigned.get(variable, []):
                if (
                    isinstance(value, cst.Call)
                    and self.is_foreign_call(value)
                    and self._gets_parameters(value, set())
                ):
                    self._foreign_optimizers.add(value)

    def list_owners(self, method: str) -> set[Variable]:
        """Return the variables whose method is called, also of parameters, and those in `scaler.step(optimizer)`."""
        pending: list[cst.CSTNode] = []
        for call in self.calls:
            if get_method(call) == method:
                assert isinstance(call.func, cst.Attribute)
                pending += [call.func.value, *(arg.value for arg in call.args)]
        found: set[Variable] = set()
        while pending:
            variable = self.variable(pending.pop())
            if variable is not None and variable not in found:
                found.add(variable)
                pending += self.list_values(variable)
        return found

    def is_foreign_call(self, call: cst.Call) -> bool:
        """Return whether a call is that of a function or class of another file, and neither of Python nor of torch."""
        name = self.qualified_name(call.func)
        known = call in self.callees or call in self.constructed or name in _KINDS or self._library_kind(name)
        return bool(name) and not known and not name.startswith(("builtins.", "torch."))

    def _gets_parameters(self, node: cst.CSTNode, seen: set[Variable]) -> bool:
        """Return whether an expression reads the parameters of a model, also through variables."""
        for one in descendants(node):
            if get_method(one) in {"parameters", "named_parameters"}:
                return True
            variable = self.variable(one)
            if variable is not None and variable not in seen:
                seen.add(variable)
                if any(self._gets_parameters(value, seen) for _, value in self.assigned.get(variable, [])):
                    return True
        return False

    def _find_definitions_of_instances(self) -> None:
        for call in self.calls:
            if call not in self.callees:
                self._bind_callee(call)

    def _read_assignment(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                self._assign(target.target, node.value, node)
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, node)
        elif isinstance(node, (cst.For, cst.CompFor)):
            batch = self.batch_target(node)
            role = self.loader_of(node.iter) or self.role_of(node.iter)
            if batch is not None and isinstance(role, Role):
                self._assign_role(batch, Role("batch", role.origins))

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression, node: cst.CSTNode) -> None:
        if isinstance(target, (cst.Tuple, cst.List)) and isinstance(value, (cst.Tuple, cst.List)):
            if len(target.elements) == len(value.elements):
                for one, other in zip(target.elements, value.elements, strict=True):
                    self._assign(one.value, other.value, node)
            return
        for element in target.elements if isinstance(target, (cst.Tuple, cst.List)) else ():
            if isinstance(value, cst.Call) and (one_variable := self.variable(element.value)):
                self._record(one_variable, node, value)
        variable = self.variable(target)
        if variable is not None:
            self._record(variable, node, value)
            is_field = isinstance(self.find_ancestor(node, (cst.FunctionDef, cst.ClassDef)), cst.ClassDef)
            name = variable.name.lower()
            is_device = "device" in name if isinstance(value, cst.SimpleString) else name in _NUMBERED
            if isinstance(value, (cst.SimpleString, cst.Integer)) and is_device and not is_field:
                self._merge(variable, Role("device"))
        self._assign_role(target, self.role_of(value))

    def _record(self, variable: Variable, node: cst.CSTNode, value: cst.BaseExpression) -> None:
        self._find_class(variable, value)
        entries = self.assigned.setdefault(variable, [])
        if not any(known is node for known, _ in entries):
            entries.append((node, value))

    def _find_class(self, variable: Variable, value: cst.BaseExpression) -> None:
        """Keep the class of a variable whose value is a module of the script, also moved or wrapped."""
        while isinstance(value, cst.Call) and value not in self.constructed:
            if value.args and self.qualified_name(value.func) in WRAPPERS:
                value = value.args[0].value
            elif isinstance(value.func, cst.Attribute) and value.func.attr.value in _SAME_MODEL:
                value = value.func.value
            else:
                return
        definition = self.constructed.get(value) if isinstance(value, cst.Call) else None
        definition = definition or self._classes.get(self.variable(value) or NO_VARIABLE)
        if definition is not None and self.is_derived(definition, "torch.nn."):
            self._classes[variable] = definition

    def _makes_optimizer(self, call: cst.Call) -> bool:
        """Return whether a call is that of a module's method that returns an optimizer of its parameters."""
        if not isinstance(call.func, cst.Attribute):
            return False
        owner = self.variable(call.func.value)
        if owner is not None and owner not in self._classes and call not in self.callees:
            return call.func.attr.value == "configure_optimizers"
        definition = self._classes.get(owner or NO_VARIABLE)
        method = self._definitions.get(Variable(definition, call.func.attr.value)) if definition else None
        role = self._role_of_result(method) if isinstance(method, cst.FunctionDef) else None
        return isinstance(role, Role) and role.kind == "optimizer"

    def _assign_role(self, target: cst.BaseExpression, role: Role | tuple[Any, ...] | None) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            each = role if isinstance(role, tuple) else [role] * len(target.elements)
            if isinstance(role, tuple) and len(role) != len(target.elements):
                return
            if isinstance(role, Role) and role.kind != "batch":
                return
            for element, one in zip(target.elements, each, strict=True):
                self._assign_role(element.value, one)
        elif (variable := self.variable(target)) is not None:
            self._merge(variable, role)

    def _merge(self, variable: Variable, role: Role | tuple[Any, ...] | None) -> None:
        if not isinstance(role, Role):
            return
        role = role if role.origins else Role(role.kind, frozenset([variable]), role.definition)
        known = self.roles.get(variable)
        if known is None:
            self.roles[variable] = role
        elif known.kind == role.kind:
            self.roles[variable] = Role(role.kind, known.origins | role.origins, known.definition)
        elif "mixed" not in {known.kind, role.kind} and {known.kind, role.kind} & {
            "loader",
            "model",
            "optimizer",
        }:
            self.roles[variable] = Role("mixed", known.origins | role.origins)

    @functools.cached_property
    def _bindings(self) -> dict[Variable, list[Any]]:
        """The assignments and loops that give each variable a value."""
        found: dict[Variable, list[Any]] = {}
        for node in self.nodes:
            if isinstance(node, (cst.Assign, cst.For, cst.CompFor)):
                targets = (
                    [one.target for one in node.targets] if isinstance(node, cst.Assign) else [node.target]
                )
                for variable in {one for target in targets for one in self.variables(target)}:
                    found.setdefault(variable, []).append(node)
        return found

    def keeps_role(self, node: cst.CSTNode) -> bool:
        """Return whether the value of a variable here, by the order of the text, has the role of the variable."""
        around = set(self.ancestors(node))
        before = [
            one
            for one in self._bindings.get(self.variable(node) or NO_VARIABLE, [])
            if self.function_of(one) is self.function_of(node)
            and (
                one in around
                if isinstance(one, (cst.For, cst.CompFor))
                else one not in around and self.start(one) < self.start(node)
            )
        ]
        last = max(before, key=self.start, default=None)
        if not isinstance(last, cst.Assign):
            return True
        values = [self._strip_methods(one) for one in list_elements(last.value)]
        return all(self.role_of(one) is not None for one in values) and all(map(self.keeps_role, values))

    def role_of(self, node: cst.CSTNode) -> Role | tuple[Any, ...] | None:
        """Return the role of an expression's value; a tuple of roles for a tuple."""
        if isinstance(node, cst.Tuple):
            return tuple(self.role_of(element.value) for element in node.elements)
        readers: list[tuple[Any, Any]] = [
            (cst.Call, self._role_of_call),
            (cst.IfExp, self._role_of_choice),
            ((cst.Subscript, cst.BaseComp), self._role_of_item),
        ]
        for kind, read in readers:
            if isinstance(node, kind):
                return read(node)  # type: ignore[no-any-return]
        if (
            isinstance(node, cst.Attribute)
            and node.attr.value == "module"
            and self.kind_of(node.value) == "model"
        ):
            return self.role_of(node.value)
        if self.is_settings_device(node) or self.is_device_text(node):
            return Role("device")
        return self.role_of_variable(node)

    @staticmethod
    def _strip_methods(node: cst.BaseExpression) -> cst.BaseExpression:
        """Return `t` in `t.to(device)`."""
        while (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value in _SAME_BATCH
        ):
            node = node.func.value
        return node

    def _role_of_choice(self, node: cst.IfExp) -> Role | tuple[Any, ...] | None:
        if "is_available" in to_code(node.test) and is_device_name(node.body):
            return Role("device")
        return self.role_of(node.body) or self.role_of(node.orelse)

    def _role_of_item(self, node: cst.Subscript | cst.BaseComp) -> Role | None:
        """Return the role of a part of a batch, or of a dictionary or list of its parts."""
        if isinstance(node, cst.BaseSimpleComp) and self.variable(node.for_in.target) != self.variable(
            self._strip_methods(node.elt)
        ):
            return None
        if isinstance(node, cst.Subscript) and (kind := self._environment_kind(node)):
            return Role(kind)
        source = node.value if isinstance(node, cst.Subscript) else node.for_in.iter
        role = self.role_of(source)
        return role if isinstance(role, Role) and role.kind == "batch" else None

    def is_settings_device(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the device in the script's settings, such as `args.device`."""
        return (
            isinstance(node, cst.Attribute)
            and node.attr.value.lower() == "device"
            and to_code(node.value).split(".")[0].lower() in SETTINGS
        )

    def is_device_text(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the text of a device: `f"cuda:{rank}"`, or the `type` of a new device."""
        if isinstance(node, cst.Attribute):
            return (
                node.attr.value == "type"
                and isinstance(node.value, cst.Call)
                and self.kind_of(node.value) == "device"
            )
        is_joined = isinstance(node, cst.FormattedString) and to_code(node)[2:].startswith("{device")
        return is_joined or (isinstance(node, cst.FormattedString) and is_device_name(node))

    def _environment_kind(self, node: cst.Subscript | cst.Call) -> str:
        """Return the kind of an environment variable with a rank; empty for another value."""
        owner = node.value if isinstance(node, cst.Subscript) else node.func
        if not self.qualified_name(owner).startswith(("os.environ", "os.getenv")):
            return ""
        names = [to_code(one)[1:-1] for one in descendants(node) if isinstance(one, cst.SimpleString)]
        return _RANKS.get(names[0], "") if names else ""

    def _role_of_call(self, call: cst.Call) -> Role | tuple[Any, ...] | None:
        name = self.qualified_name(call.func)
        if call.args and (name in WRAPPERS or name == "builtins.int" or self.is_progress_bar(call)):
            return self.role_of(call.args[0].value)
        if name in _ITERATORS and len(call.args) >= 1:
            return self._role_of_iterator(call, name)
        kind = (
            "optimizer"
            if call in self._foreign_optimizers
            else _KINDS.get(name, "") or self._library_kind(name) or self._environment_kind(call)
        )
        if kind or self._makes_optimizer(call):
            return Role(kind or "optimizer")
        if call in self.constructed:
            return self._role_of_instance(self.constructed[call])
        if call in self.callees:
            return self._role_of_result(self.callees[call])
        return self._role_of_method(call)

    def _role_of_method(self, call: cst.Call) -> Role | tuple[Any, ...] | None:
        """Return the role of the object in `x.to(device)` and similar methods; None for others."""
        if get_method(call) == "setup_dataloaders":
            roles = [self.role_of(arg.value) for arg in call.args if arg.keyword is None]
            return roles[0] if len(roles) == 1 else tuple(roles)
        role = self.role_of(call.func.value) if isinstance(call.func, cst.Attribute) else None
        methods: set[str] = {"model": _SAME_MODEL, "batch": _SAME_BATCH}.get(getattr(role, "kind", ""), set())
        return role if get_method(call) in methods else None

    def _role_of_iterator(self, call: cst.Call, name: str) -> Role | None:
        """Return the role of `iter(loader)`, and of `next(...)` of one."""
        role = self.role_of(call.args[0].value)
        if not isinstance(role, Role):
            return None
        kind = _ITERATORS[name].get(role.kind)
        return Role(kind, role.origins) if kind else None

    @staticmethod
    def _library_kind(name: str) -> str:
        if name.startswith("torch.optim.lr_scheduler."):
            return "scheduler"
        if name.startswith("torch.optim."):
            return "" if name.startswith("torch.optim.swa_utils") else "optimizer"
        last = name.rpartition(".")[2]
        if name.startswith("transformers.") and last.startswith("get_") and "schedule" in last:
            return "scheduler"
        if name.startswith("torch_geometric.loader.") or (last.endswith("DataLoader") and "." in name):
            return "loader"
        return "optimizer" if name.startswith("transformers.") and last == "Adafactor" else ""

    def _role_of_instance(self, definition: cst.ClassDef) -> Role | None:
        if self.is_derived(definition, "torch.optim.lr_scheduler."):
            return Role("scheduler")
        if self.is_derived(definition, "torch.optim."):
            return Role("optimizer")
        if self.is_derived(definition, "torch.utils.data.DataLoader", "torch.utils.data.dataloader."):
            return Role("loader")
        return None if self.is_torch_class(definition) else Role("instance", frozenset(), definition)

    def _role_of_result(self, function: cst.FunctionDef) -> Role | tuple[Any, ...] | None:
        def without_origins(role: Any) -> Any:
            if isinstance(role, tuple):
                return tuple(map(without_origins, role))
            if role is None or role.kind in {"batch", "iterator"}:
                return role if role is not None and self._is_read_by_next(function) else None
            return Role(role.kind, frozenset(), role.definition)

        if function in self._resolving:
            return None
        self._resolving.add(function)
        for node in descendants(function.body):
            role = self.role_of(node.value) if isinstance(node, cst.Yield) and node.value else None
            if isinstance(role, Role) and role.kind == "batch" and self.function_of(node) is function:
                self._resolving.discard(function)
                return Role("iterator", role.origins)
        roles = (without_origins(self.role_of(value)) for value in self.returned_values(function))
        found = next((role for role in roles if role is not None), None)
        self._resolving.discard(function)
        return found

    def _is_read_by_next(self, function: cst.FunctionDef) -> bool:
        """Return whether a function reads its result from an iterator, and does not change a batch that it gets."""
        return any(self.is_call_of(node, "builtins.next") for node in descendants(function.body))

    # Loops over loaders

    def loader_of(self, node: cst.CSTNode) -> Role | None:
        """Return the role of the loader that an expression iterates over, also in `enumerate`, `tqdm` and `zip`."""
        while isinstance(node, cst.Call) and node.args and self._iterates(node):
            node = node.args[0].value
        if self.is_call_of(node, "builtins.zip"):
            roles = [self.loader_of(arg.value) for arg in node.args]  # type: ignore[attr-defined]
            origins = [role.origins for role in roles if role is not None]
            return Role("loader", frozenset().union(*origins)) if len(origins) == len(roles) else None
        role = self.role_of(node)
        return role if isinstance(role, Role) and role.kind in {"loader", "iterator"} else None

    def _iterates(self, call: cst.Call) -> bool:
        """Return whether a call yields the batches of its first argument; functions of other files do for a loader."""
        name = self.qualified_name(call.func)
        if name.removeprefix("builtins.") in _ITERATED or self.is_progress_bar(call):
            return True
        is_known = name.startswith("builtins.") or call in self.callees or call in self.constructed
        return (
            not is_known
            and self.kind_of(call.args[0].value) in {"loader", "iterator"}
            and not self.kind_of(call)
        )

    def is_progress_bar(self, call: cst.Call) -> bool:
        """Return whether a call is that of tqdm."""
        return self.qualified_name(call.func).rpartition(".")[2] == "tqdm"

    def batch_target(self, loop: cst.For | cst.CompFor) -> cst.BaseExpression | None:
        """Return the target of a loop that is assigned the batches of a loader; None for another loop."""
        if self.loader_of(loop.iter) is not None:
            node: Any = loop.iter
            target: Any = loop.target
            while isinstance(node, cst.Call):
                if self.qualified_name(node.func).removeprefix("builtins.") == "enumerate":
                    if not isinstance(target, cst.Tuple):
                        return None
                    target = target.elements[-1].value
                node = node.args[0].value if node.args and self._iterates(node) else None
            return target  # type: ignore[no-any-return]
        role = self.role_of(loop.iter)
        return loop.target if isinstance(role, Role) and role.kind == "batch" else None

    # Trained models

    def _find_trained(self) -> None:
        self._find_optimized()
        for call, function in self.callees.items():
            for name, arg in self.bind(call, function).items():
                if self.parameter(function, name) in self.trained:
                    variable = self.variable(arg.value)
                    if variable is not None:
                        self.trained.add(variable)
        for variable in tuple(self.trained):
            sources = [self._find_source(value) for _, value in self.assigned.get(variable, [])]
            names = {
                one
                for one in sources
                if one not in {None, variable} and one not in self._find_foreign(variable)
            }
            self.trained |= names
            definition = self.roles[variable].definition if variable in self.roles else None
            if definition is not None and any(self.variable(one.value) is None for one in definition.bases):
                self.trained_classes.add(definition)
                del self.roles[variable]
            is_passed = len(self.list_values(variable)) > len(sources)
            if (
                variable not in self.roles
                and sources
                and not names
                and not (is_passed and {*sources} == {variable})
            ):
                self.roles[variable] = Role("model", frozenset([variable]))

    def is_foreign(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is a parameter that no call in the script has an argument for."""
        variable = self.variable(node) if isinstance(node, cst.Name) else None
        function = self.function_of(node)
        names = [param.name.value for param in function.params.params] if function is not None else []
        return (
            variable is not None
            and variable not in self.assigned
            and variable.name in names
            and not self.calls_of(function)  # type: ignore[arg-type]
        )

    def _find_foreign(self, variable: Variable) -> set[Variable]:
        """Return the parameters without an argument that an attribute of an instance is assigned."""
        values = [self._strip_moves(value) for _, value in self.assigned.get(variable, [])]
        if not isinstance(variable.scope, cst.ClassDef):
            return set()
        return {one for value in values if value and self.is_foreign(value) and (one := self.variable(value))}

    def _find_source(self, value: cst.BaseExpression) -> Variable | None:
        """Return the variable whose model an expression is, also moved or wrapped."""
        source = self._strip_moves(value)
        return self.variable(source) if source is not None else None

    def _strip_moves(self, value: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return the model in `model.to(device)` and in wrappers; None for the result of another call."""
        while isinstance(value, cst.Call) and self.variable(value) is None:
            if value.args and self.qualified_name(value.func) in WRAPPERS:
                value = value.args[0].value
            elif isinstance(value.func, cst.Attribute) and value.func.attr.value in _SAME_MODEL:
                value = value.func.value
            else:
                return None
        return value

    @functools.cached_property
    def named_functions(self) -> dict[cst.CSTNode, cst.FunctionDef]:
        """The function of each of its names, which may be an argument, as of `torch.func.vmap`."""
        return {
            name: function
            for function, names in self.references.items()
            if isinstance(function, cst.FunctionDef)
            for name in names
        }

    @functools.cached_property
    def additions(self) -> dict[Variable, list[tuple[cst.CSTNode, cst.BaseExpression]]]:
        """The statements such as `total += loss` of each variable, with what they add."""
        found: dict[Variable, list[tuple[cst.CSTNode, cst.BaseExpression]]] = {}
        for node in self.nodes:
            if isinstance(node, cst.AugAssign) and (target := self.variable(node.target)) is not None:
                found.setdefault(target, []).append((node, node.value))
        return found

    @functools.cached_property
    def _called(self) -> set[str]:
        return {to_code(call.func) for call in self.calls}

    @functools.cached_property
    def _assigned_attributes(self) -> set[str]:
        return {to_code(one.target) for one in self.nodes if isinstance(one, cst.AssignTarget)}

    @functools.cached_property
    def _loops_over_gradients(self) -> list[cst.For]:
        return [
            loop
            for loop in self.nodes
            if isinstance(loop, cst.For)
            and any(
                isinstance(one, cst.Attribute) and one.attr.value == "grad" for one in descendants(loop.body)
            )
        ]

    def _find_optimized(self) -> None:
        """Add the models whose parameters optimizers get, or whose gradients the script reads in a loop."""
        for loop in self._loops_over_gradients:
            self._trace_parameters(loop.iter, set())
        for call in self.calls:
            if self._makes_optimizer(call) and (owner := self.variable(call.func.value)):  # type: ignore[attr-defined]
                self.trained.add(owner)
            elif self.kind_of(call) == "optimizer" and (call not in self.callees or call in self.constructed):
                for arg in call.args:
                    self._trace_parameters(arg.value, set())

    def _trace_parameters(self, node: cst.CSTNode, seen: set[Variable]) -> None:
        """Add the models whose parameters are in an expression."""
        for one in descendants(node):
            if (
                isinstance(one, cst.Call)
                and isinstance(one.func, cst.Attribute)
                and one.func.attr.value in {"parameters", "named_parameters"}
            ):
                owner: cst.BaseExpression = one.func.value
                if self.variable(owner) is None and self._is_object_of_its_own(owner):
                    continue
                while self.variable(owner) is None and isinstance(owner, cst.Attribute):
                    owner = owner.value
                variable = self.variable(owner)
                if variable is not None and to_code(owner) != "self":
                    self.trained.add(variable)
            elif isinstance(one, cst.Name) and (variable := self.variable(one)) and variable not in seen:
                seen.add(variable)
                for _, value in self.assigned.get(variable, []):
                    if self.kind_of(value) != "model":
                        self._trace_parameters(value, seen)

    def _is_object_of_its_own(self, node: cst.BaseExpression) -> bool:
        """Return whether an attribute is assigned and called, and its object is not, as `agent.model` of a namespace."""
        called, code = self._called, to_code(node)
        owner, _, name = code.rpartition(".")
        # A function may call it under another name of the object.
        is_called = any(one.endswith(f".{name}") and one != f"self.{name}" for one in called)
        return is_called and owner.partition(".")[0] not in called and code in self._assigned_attributes

    def list_values(self, variable: Variable) -> list[cst.BaseExpression]:
        """Return the expressions that are assigned to a variable, or passed to it as an argument."""
        values = [value for _, value in self.assigned.get(variable, [])]
        return values + [
            arg.value
            for call, function in self.callees.items()
            for name, arg in self.bind(call, function).items()
            if self.parameter(function, name) == variable
        ]

    def find_values(self, variable: Variable) -> list[cst.BaseExpression]:
        """Return the expressions whose values a variable may have, also through variables and arguments."""
        found: list[cst.BaseExpression] = []
        pending, seen = [variable], {variable}
        while pending:
            for value in self.list_values(pending.pop()):
                source = self.variable(value)
                if source is None:
                    found.append(value)
                elif source not in seen:
                    seen.add(source)
                    pending.append(source)
        return found

    def find_parts(self, variable: Variable, kind: str) -> set[Variable]:
        """Return the origins of the models of an optimizer, or of the optimizers of a scheduler."""
        found: set[Variable] = set()
        pending, seen = [value for _, value in self.assigned.get(variable, [])], {variable}
        while pending:
            for one in descendants(pending.pop()):
                role = self.role_of_variable(one)
                known = self.variable(one)
                if role is not None and role.kind == kind:
                    found |= role.origins
                elif known is not None and known not in seen:
                    seen.add(known)
                    pending += [value for _, value in self.assigned.get(known, [])]
        return found
