"""Items of a training state: how each is captured and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.quantized_tensors import PackedWeights
from accel_runtime.data.loader import PreparedLoader
from accel_runtime.data.state import LoaderState, NextBatch
from accel_runtime.foundation import module_names
from accel_runtime.foundation.module_names import unwrap_module
from accel_runtime.foundation.torch_internals import storage_id
from accel_runtime.parallel.big_modeling import MetaModels, list_meta_tensors
from accel_runtime.parallel.dtensor import shard_like
from accel_runtime.storage.errors import CheckpointError, format_names
from accel_runtime.storage.manifest import TensorEntry
from accel_runtime.storage.schema import FieldError, read_value, write_record

__all__ = [
    "LoaderItem",
    "ModelItem",
    "OptimizerItem",
    "RecordItem",
    "StateItem",
    "StatefulItem",
    "is_sharded",
    "tensor_name_of",
]

_Record = TypeVar("_Record")


class StateItem(ABC):
    """A part of the training state, with its name in checkpoints."""

    moved = False
    """True if another number of processes saved the state that is restored."""
    is_optional = True
    """True if a checkpoint of another program may be without it."""
    is_partial = False
    """True if each rank has a part of the state, and a checkpoint has all parts as one: ranks hold different parameters."""
    merge_needs_all_ranks = False
    """True if `merge_ranks` needs the states of all ranks; else the first is used if they differ."""
    schema: ClassVar[Any] = Any
    """Type of the state, for `read_value`; `Any` if an object of the script defines it."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def class_name(self) -> str:
        """Class name of the object."""
        return ""

    def has_other_class(self, saved: str) -> bool:  # noqa: ARG002 - what others compare
        """Return whether an object of a class with this name, empty if unknown, was saved, whose state this one cannot continue."""
        return False

    @abstractmethod
    def tree(self) -> Any:
        """Return the state for `serialize`; its tensors may be the live ones."""

    def find_mismatches(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> list[str]:  # noqa: ARG002 - what others look at
        """Return a sentence for each reason that a serialized state does not fit, before tensors are read."""
        return []

    def targets(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return live tensors to read into, by saved name; other tensors are read into new ones on the CPU."""
        return {}

    @abstractmethod
    def restore(self, tree: Any) -> None:
        """Restore a state."""

    def reset(self) -> None:  # noqa: B027 - what others do
        """Return to a state that fits any other items, if a checkpoint of another program does not have this one."""

    def check_part(self, encoded: Any) -> None:  # noqa: B027 - what others check
        """Raise `CheckpointError` if the serialized state of this rank, which differs from those of others, cannot be joined."""

    def join_parts(self, parts: Sequence[Any]) -> Any:
        """Return the serialized state of all ranks, given that of each, if this `is_partial`."""
        return parts[0]

    def select_part(self, encoded: Any) -> Any:
        """Return what this rank holds of a serialized state."""
        return encoded

    def merge_ranks(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:  # noqa: ARG002
        """Return the state of this rank after a change of ranks, from those of all saved ranks (see `merge_needs_all_ranks`)."""
        return trees[0]


class StatefulItem(StateItem):
    """Any object with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, thing: Any) -> None:
        super().__init__(name)
        self._object = thing

    @property
    @override
    def class_name(self) -> str:
        thing = getattr(self._object, "scheduler", self._object)
        return type(unwrap_module(thing) if isinstance(thing, nn.Module) else thing).__qualname__

    @override
    def has_other_class(self, saved: str) -> bool:
        return _are_different(saved, self.class_name, torch.optim.lr_scheduler)

    @override
    def tree(self) -> Any:
        is_module = isinstance(self._object, nn.Module)
        return module_names.state_dict(self._object) if is_module else self._object.state_dict()

    @override
    def targets(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        if not isinstance(self._object, nn.Module):
            return {}
        return select_matching(match_tensors(encoded, module_names.state_dict(self._object)), tensors)

    @override
    def restore(self, tree: Any) -> None:
        if isinstance(self._object, nn.Module):
            module_names.load_state_dict(self._object, tree)
        else:
            self._object.load_state_dict(tree)


class RecordItem(StateItem, Generic[_Record]):
    """An item whose state is a record of ours: its class, `schema`, declares and checks every field."""

    @abstractmethod
    def capture(self) -> _Record:
        """Return the state; its tensors may be the live ones."""

    @abstractmethod
    def apply(self, record: _Record) -> None:
        """Restore a state."""

    def merge_records(self, records: Sequence[_Record], rank: int, world_size: int) -> _Record:  # noqa: ARG002
        """Return the state of this rank after a change of ranks, from those of all saved ranks."""
        return records[0]

    @override
    def tree(self) -> Any:
        return write_record(self.capture())

    @override
    def restore(self, tree: Any) -> None:
        self.apply(self._read(tree))

    @override
    def merge_ranks(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:
        return write_record(self.merge_records([self._read(tree) for tree in trees], rank, world_size))

    def _read(self, tree: Any) -> _Record:
        try:
            record: _Record = read_value(self.schema, tree)
        except FieldError as error:
            raise CheckpointError(f"The state of {self.name} is damaged: {error}") from error
        return record


@dataclass(frozen=True)
class LoaderItemState:
    """State of a loader, if the script has not deleted it."""

    loader: LoaderState | None = None


class LoaderItem(RecordItem[LoaderItemState]):
    """A prepared loader; one that the script has deleted has no state."""

    schema = LoaderItemState

    def __init__(
        self, name: str, loader: PreparedLoader[Any] | None, position: NextBatch = "next_batch"
    ) -> None:
        super().__init__(name)
        self._loader, self._resume_at = loader, position
        self.merge_needs_all_ranks = loader is not None and loader.is_presharded

    @override
    def capture(self) -> LoaderItemState:
        return LoaderItemState(None if self._loader is None else self._loader.capture_state())

    @override
    def merge_records(
        self, records: Sequence[LoaderItemState], rank: int, world_size: int
    ) -> LoaderItemState:
        states = [record.loader for record in records if record.loader is not None]
        if self._loader is None or len(states) < len(records):
            return records[0]
        return LoaderItemState(self._loader.select_state(states))

    @override
    def apply(self, record: LoaderItemState) -> None:
        if self._loader is not None and record.loader is not None:
            self._loader.restore_state(
                record.loader, random_restored=not self.moved, position=self._resume_at
            )


class ModelItem(StateItem):
    """Parameters and buffers of a model, read into the live ones.

    `state` replaces the model's own if hooks have changed it; without `strict`, what fits is restored; `memory`
    materializes a model on the meta device; `elsewhere` are names that other ranks hold, None if all ranks hold all.
    """

    schema = Mapping[str, Any]
    is_optional = False

    def __init__(  # noqa: PLR0913 - the last three are named
        self,
        name: str,
        model: nn.Module,
        state: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        memory: MetaModels | None = None,
        elsewhere: frozenset[str] | None = None,
    ) -> None:
        super().__init__(name)
        self.is_partial, self._elsewhere = elsewhere is not None, elsewhere or frozenset()
        self._model, self._strict, self._memory = model, strict, memory
        self._state = module_names.state_dict(model) if state is None else state
        self._packed, self._unfit = PackedWeights(model, self._state), frozenset[str]()

    @property
    @override
    def class_name(self) -> str:
        # `fully_shard` derives a class from that of the script.
        kind = type(unwrap_module(self._model))
        return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)].__qualname__

    @override
    def tree(self) -> Any:
        return dict(self._state)

    @override
    def join_parts(self, parts: Sequence[Any]) -> Any:
        return _join_dicts(parts, self.name)

    @override
    def select_part(self, encoded: Any) -> Any:
        return {name: value for name, value in encoded.items() if name not in self._elsewhere}

    @override
    def find_mismatches(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> list[str]:
        missing = [name for name in self._state if name not in encoded]
        unexpected = [name for name in encoded if name not in self._state]
        reasons = []
        if missing:
            reasons.append(f"{self.name}: missing in the checkpoint: {format_names(missing)}")
        if unexpected:
            reasons.append(f"{self.name}: not in the model here: {format_names(unexpected)}")
        entries = self._find_packed(encoded, tensors)
        live = match_tensors(
            {name: value for name, value in encoded.items() if name not in entries}, self._state
        )
        for name, tensor in live.items():
            if name in tensors and (mismatch := describe_mismatch(tensors[name], tensor)):
                reasons.append(f"{name} is {mismatch}")
        return reasons + self._packed.list_mismatches(entries)

    def _find_packed(
        self, encoded: Any, tensors: Mapping[str, TensorEntry]
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shapes and dtypes of the saved entries that make up packed weights."""
        entries = {
            name: tensors.get(tensor_name_of(value))
            for name, value in encoded.items()
            if self._packed.find_weight(name)
        }
        return {name: (entry.shape, entry.dtype) for name, entry in entries.items() if entry is not None}

    @override
    def targets(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        if self._memory is not None and list_meta_tensors(self._model):
            self._memory.materialize(self._model)
            self._state = module_names.state_dict(self._model)
        self._unfit = self._packed.list_unfit(self._find_packed(encoded, tensors))
        in_place = {
            name: value
            for name, value in encoded.items()
            if name not in self._unfit and self._packed.is_read_in_place(name)
        }
        return select_matching(match_tensors(in_place, self._state), tensors)

    @override
    def restore(self, tree: Any) -> None:
        values = {
            name: value for name, value in tree.items() if name in self._state and name not in self._unfit
        }
        self._packed.restore(values)
        values = {name: value for name, value in values.items() if name not in self._packed.scales}
        for name, value in values.items():
            copy_into(value, self._state[name])
        if self._needs_load_state_dict():
            module_names.load_state_dict(self._model, values, strict=self._strict)

    def _needs_load_state_dict(self) -> bool:
        """Return whether `load_state_dict` is needed: parameters and buffers do not contain the whole state."""
        storages = {
            storage_key(t) for t in (*self._model.parameters(), *self._model.buffers()) if not is_sharded(t)
        }
        tensors = (
            tensor
            for name, tensor in self._state.items()
            if isinstance(tensor, torch.Tensor)
            and not is_sharded(tensor)
            and tensor.numel()
            and name not in self._packed.scales
        )
        extra = any(not isinstance(value, torch.Tensor) for value in self._state.values())
        return extra or any(storage_key(tensor) not in storages for tensor in tensors)


_BY_PARAMETER = ("params", "param_names")
"""Keys of a group of parameters with a value for each parameter; the first has the keys of the others."""


@dataclass(frozen=True)
class _Group:
    params: list[str]


@dataclass(frozen=True)
class _OptimizerState:
    groups: list[_Group]
    state: Mapping[str, Mapping[str, Any]]
    other: Mapping[str, Any]
    extra: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)


class OptimizerItem(StateItem):
    """Groups and state of an optimizer by parameter name, with the parameters that no prepared model contains.

    `elsewhere` are the names of parameters that other ranks hold, None if all ranks hold all.
    """

    schema = _OptimizerState
    is_optional = False

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        elsewhere: frozenset[str] | None = None,
    ) -> None:
        super().__init__(name)
        self.is_partial, self._elsewhere = elsewhere is not None, elsewhere or frozenset()
        self._optimizer = optimizer
        self._names = names

    @property
    @override
    def class_name(self) -> str:
        return type(self._optimizer).__qualname__

    @override
    def has_other_class(self, saved: str) -> bool:
        return _are_different(saved, self.class_name, torch.optim)

    @override
    def tree(self) -> Any:
        state = self._optimizer.state_dict()
        keys = dict.fromkeys(_list_parameters(state["param_groups"]))
        name_of = dict(zip(keys, self._parameters, strict=True))
        groups = [
            group | {"params": [name_of[i] for i in group["params"]]} for group in state["param_groups"]
        ]
        extra = {key: value for key, value in state.items() if key not in {"state", "param_groups"}}
        state_by_name = {name_of[key]: value for key, value in state["state"].items() if key in name_of}
        other_state = {key: value for key, value in state["state"].items() if key not in name_of}
        return {
            "groups": groups,
            "state": state_by_name,
            "other": other_state,
            "extra": extra,
            **({"parameters": unowned} if (unowned := self._unowned_parameters()) else {}),
        }

    @override
    def check_part(self, encoded: Any) -> None:
        # The names of these are their positions in the groups of a rank.
        if unowned := [*encoded.get("parameters", {})]:
            raise CheckpointError(
                f"Cannot save {self.name}: {format_names(unowned)} {'is' if len(unowned) == 1 else 'are'} in no prepared model, "
                "and the ranks hold different parameters, so that no common name exists. Prepare a module that contains "
                f"{'it' if len(unowned) == 1 else 'them'}."
            )

    @override
    def join_parts(self, parts: Sequence[Any]) -> Any:
        for part in parts:
            self.check_part(part)
        sizes = [len(part["groups"]) for part in parts]
        if len(set(sizes)) > 1:
            raise CheckpointError(
                f"Cannot save {self.name}: the ranks have different numbers of parameter groups "
                f"({', '.join(map(str, sizes))}). Use as many groups on every rank, with an empty list where a rank has no "
                "parameters of a group."
            )
        of_ranks = zip(*(part["groups"] for part in parts), strict=True)
        groups = [self._join_groups(index, group) for index, group in enumerate(of_ranks)]
        return {
            key: groups if key == "groups" else _join_dicts([part.get(key, {}) for part in parts], self.name)
            for key in dict.fromkeys(key for part in parts for key in part)
        }

    def _join_groups(self, index: int, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a group with the parameters of all ranks, given that of each rank."""
        # Lists with a value for each parameter differ with the parameters; everything else must be equal.
        empty: list[dict[str, Any]] = [{key: [] for key in _BY_PARAMETER if key in group} for group in groups]
        options = [{**group, **lists} for group, lists in zip(groups, empty, strict=True)]
        if any(each != options[0] for each in options):
            raise CheckpointError(
                f"Cannot save {self.name}: group {index} has different options on the ranks. Use the same on every rank."
            )
        values: dict[str, tuple[Any, ...]] = {}
        for group in groups:
            for each in zip(*(group[key] for key in empty[0]), strict=True):
                values.setdefault(each[0], each)
        return options[0] | {
            key: [each[number] for each in values.values()] for number, key in enumerate(empty[0])
        }

    @override
    def select_part(self, encoded: Any) -> Any:
        if "groups" not in encoded:
            return encoded
        # An optimizer keeps the `param_names` that it was built with; one without them must not get those of other ranks.
        groups = [
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [name for name in group["params"] if name not in self._elsewhere]}
            for group in encoded["groups"]
        ]
        state = {name: value for name, value in encoded["state"].items() if name not in self._elsewhere}
        return {**encoded, "groups": groups, "state": state}

    @override
    def find_mismatches(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> list[str]:
        if encoded.get("format") == "torch":
            # Torch's format has no parameter names.
            sizes = [len(group["params"]) for group in encoded["state_dict"]["param_groups"]]
            live = [len(group["params"]) for group in self._optimizer.param_groups]
            text = f"{self.name}: the checkpoint has groups of {sizes} parameters, the optimizer here groups of {live}"
            return [] if sizes == live else [text]
        if "groups" not in encoded:
            return []
        if other := self._find_other_options(_list_options(encoded["groups"])):
            return [other]
        saved, names = _list_parameters(encoded["groups"]), list(self._parameters)
        missing = [name for name in names if name not in set(saved)]
        unexpected = [name for name in saved if name not in set(names)]
        reasons = []
        if missing:
            reasons.append(f"{self.name}: the checkpoint does not have {format_names(missing)}")
        if unexpected:
            reasons.append(f"{self.name}: the optimizer here does not have {format_names(unexpected)}")
        reasons += [] if reasons else self._find_moved_parameters(encoded["groups"])
        for name, tensor in match_tensors(encoded.get("parameters", {}), self._unowned_parameters()).items():
            if name in tensors and (mismatch := describe_mismatch(tensors[name], tensor)):
                reasons.append(f"{name} is {mismatch}")
        return reasons

    @override
    def targets(self, encoded: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        targets = select_matching(
            match_tensors(encoded.get("parameters", {}), self._unowned_parameters()), tensors
        )
        for name, parameter in self._parameters.items():
            for key, value in encoded.get("state", {}).get(name, {}).items():
                entry = tensors.get(tensor_name_of(value))
                if entry is not None:
                    live = self._optimizer.state.get(parameter, {}).get(key)
                    targets[tensor_name_of(value)] = _choose_target(entry, live, parameter)
        return targets

    @override
    def restore(self, tree: Any) -> None:
        if tree.get("format") == "torch":
            self._optimizer.load_state_dict(tree["state_dict"])
            return
        if self._find_other_options(_list_options(tree["groups"])):
            return
        index_of = {name: index for index, name in enumerate(self._parameters)}
        groups = self._build_groups(tree["groups"], index_of)
        state = {
            index_of[name]: dict(parameter_state)
            for name, parameter_state in tree["state"].items()
            if name in index_of
        }
        self._optimizer.load_state_dict(
            {"state": state | tree["other"], "param_groups": groups} | tree["extra"]
        )
        self._keep_dtypes(tree["state"])
        for name, parameter in self._unowned_parameters().items():
            copy_into(tree.get("parameters", {}).get(name), parameter)

    def _find_other_options(self, options: set[str]) -> str:
        """Return a sentence if the options are those of another class; a version of torch may have added some, or removed some."""
        missing = [key for key in self._optimizer.defaults if key not in options]
        unexpected = sorted(options - _list_options(self._optimizer.param_groups) - {"param_names"})
        if not options - {*_BY_PARAMETER} or not missing or not unexpected:
            return ""
        return (
            f"{self.name}: the checkpoint has the options {format_names(unexpected)}, and the {self.class_name} here "
            f"{format_names(missing)}"
        )

    def _find_moved_parameters(self, saved: Sequence[Mapping[str, Any]]) -> list[str]:
        groups = self._optimizer.param_groups
        if len(saved) != len(groups):
            return [
                f"{self.name}: the checkpoint has {len(saved)} groups of parameters, the optimizer here {len(groups)}"
            ]
        differ = [
            str(index)
            for index, (group, live) in enumerate(zip(saved, groups, strict=True))
            if set(group["params"]) != {self._names[parameter] for parameter in live["params"]}
        ]
        if not differ:
            return []
        return [f"{self.name}: group {', '.join(differ)} has other parameters in the checkpoint than here"]

    def _build_groups(
        self, saved: Sequence[Mapping[str, Any]], index_of: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """Return the saved groups with parameter indices; the live groups if their number differs."""
        live_groups = self._optimizer.param_groups
        same = len(saved) == len(live_groups)
        groups = []
        for index, live in enumerate(live_groups):
            kept = {key: value for key, value in live.items() if key == "param_names" or not same}
            indices = [index_of[self._names[parameter]] for parameter in live["params"]]
            groups.append((dict(saved[index]) if same else {}) | kept | {"params": indices})
        return groups

    def _keep_dtypes(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Undo the cast of torch: state keeps its saved dtype beside parameters of a lower precision."""
        for name, parameter in self._parameters.items():
            for key, value in saved.get(name, {}).items():
                live = self._optimizer.state.get(parameter, {}).get(key)
                if (
                    isinstance(live, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and live.dtype != value.dtype
                ):
                    self._optimizer.state[parameter][key] = value.to(live.device)

    def _unowned_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that no prepared model contains, and that are saved here."""
        return {name: p for name, p in self._parameters.items() if name.startswith(f"{self.name}.")}

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, in the order of the groups."""
        return {self._names[p]: p for p in _list_parameters(self._optimizer.param_groups)}


def _are_different(saved: str, live: str, module: ModuleType) -> bool:
    """Return whether two names are those of different classes of torch; classes of scripts may be renamed, or derived from them."""
    return saved != live and all(isinstance(getattr(module, name, None), type) for name in (saved, live))


def _join_dicts(parts: Sequence[Any], item: str) -> Any:
    """Return the values of all ranks by name; those of a name differ only in which tensor of equal values they refer to."""
    joined: Any = {}
    for part in parts:
        for name, value in part.items():
            known = joined.setdefault(name, value)
            if known != value and not (tensor_name_of(known) and tensor_name_of(value)):
                raise CheckpointError(
                    f"Cannot save {item}: {name} differs between the ranks that hold it. Use the same value on every rank."
                )
    return joined


def _list_options(groups: Iterable[Iterable[str]]) -> set[str]:
    return {key for group in groups for key in group}


def _list_parameters(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [parameter for group in groups for parameter in group["params"]]


def _choose_target(entry: TensorEntry, live: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor to read optimizer state into: the live one if it fits, else one on the parameter's device."""
    dtype = getattr(torch, entry.dtype)
    if not has_host_memory(parameter):
        return torch.empty(entry.shape, dtype=dtype)
    if isinstance(live, torch.Tensor) and tuple(live.shape) == entry.shape and live.dtype == dtype:
        return live.detach()
    if entry.shape and tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=dtype)


def match_tensors(encoded: Any, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return live tensors by the names of the saved ones at the same keys."""
    matches: dict[str, torch.Tensor] = {}
    for key, value in encoded.items():
        if tensor_name_of(value) and isinstance(state.get(key), torch.Tensor):
            matches.setdefault(tensor_name_of(value), state[key])
    return matches


def tensor_name_of(encoded: Any) -> str:
    """Return the name of the tensor that JSON represents, or an empty string."""
    return str(encoded["name"]) if isinstance(encoded, dict) and encoded.get("$") == "tensor" else ""


def select_matching(
    live: Mapping[str, torch.Tensor], tensors: Mapping[str, TensorEntry]
) -> dict[str, torch.Tensor]:
    """Return the live tensors that saved ones can be read into, by name."""
    return {
        name: tensor.detach()
        for name, tensor in live.items()
        if name in tensors and tuple(tensor.shape) == tensors[name].shape and has_host_memory(tensor)
    }


def has_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether threads can fill a tensor; on a lazy device it only represents a computation."""
    return is_sharded(tensor) or not tensor.numel() or tensor.data_ptr() != 0


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that start at the same memory."""
    return tensor.data_ptr() or storage_id(tensor)  # without an address, the storage itself


def describe_mismatch(entry: TensorEntry, live: torch.Tensor) -> str:
    """Describe how shape or dtype of a saved and a live tensor differ; empty if they are equal."""
    if entry.shape != tuple(live.shape):
        return f"{list(entry.shape)} in the checkpoint and {list(live.shape)} here"
    dtype = str(live.dtype).removeprefix("torch.")
    if dtype == entry.dtype:
        return ""
    return f"{entry.dtype} in the checkpoint and {dtype} here (strict=False converts it)"


def copy_into(value: Any, live: Any) -> None:
    """Copy a tensor into a live one of the same shape."""
    if not isinstance(live, torch.Tensor) or not isinstance(value, torch.Tensor) or live.shape != value.shape:
        return
    if is_sharded(live) and not is_sharded(value):
        value = shard_like(value, live, "the tensor")
    first, second = getattr(live, "_local_tensor", live), getattr(value, "_local_tensor", value)
    if storage_key(first) != storage_key(second) or first.stride() != second.stride():
        live.detach().copy_(value)


def is_sharded(tensor: Any) -> bool:
    """Return whether this rank has only a shard of a tensor."""
    return hasattr(tensor, "device_mesh")
