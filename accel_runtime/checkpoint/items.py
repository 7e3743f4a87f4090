"""What a run's state is made of: one class for each kind of thing that is saved, how it is taken and how it comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.checkpoint.manifest import Stored
from accel_runtime.data.loader import PreparedLoader
from accel_runtime.optimizer import PreparedOptimizer

__all__ = ["Item", "Loader", "Model", "Optimizer", "Stateful"]

_SHOWN = 3
"""So many names of a kind stand in a message."""


class Item(ABC):
    """A part of a run's state.

    Args:
        name: What it is called in a checkpoint.
    """

    moved = False
    """Whether what is restored was saved by another number of processes."""
    every_rank = False
    """Whether `merged` wants the states of all ranks, equal or not; else that of the first will do where they differ."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def about(self) -> str:
        """The class that stands behind it."""
        return ""

    @abstractmethod
    def tree(self) -> Any:
        """Its state, as `values.packed` takes it; tensors in it may be the live ones."""

    def wrong(self, text: Any, tensors: Mapping[str, Stored]) -> list[str]:  # noqa: ARG002 - what others look at
        """Why a saved state does not fit, before anything is read; a sentence each.

        Args:
            text: The JSON of the saved tree.
            tensors: The item's tensors by name.
        """
        return []

    def targets(self, text: Any, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Tensors to read into, for those that are not to be new ones on the CPU."""
        return {}

    @abstractmethod
    def restore(self, tree: Any) -> None:
        """Take over a saved state."""

    def merged(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:  # noqa: ARG002
        """What this rank takes over where the ranks had different states, and there are as many no more.

        Args:
            trees: The state of every rank that saved, or of the first: see `every_rank`.
            rank: This rank.
            world_size: How many there are now.
        """
        return trees[0]


class Stateful(Item):
    """Anything with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, thing: Any) -> None:
        super().__init__(name)
        self._thing = thing

    @property
    @override
    def about(self) -> str:
        thing = getattr(self._thing, "scheduler", self._thing)
        return type(thing).__qualname__

    @override
    def tree(self) -> Any:
        return self._thing.state_dict()

    @override
    def targets(self, text: Any, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        if not isinstance(self._thing, nn.Module):
            return {}
        return _fitting(_named(text, self._thing.state_dict()), tensors)

    @override
    def restore(self, tree: Any) -> None:
        self._thing.load_state_dict(tree)


class Loader(Item):
    """A prepared loader, whose random numbers go on from those that are restored with it.

    One that the script has let go, when it saved or when it loads, has no state.
    """

    def __init__(self, name: str, loader: PreparedLoader | None) -> None:
        super().__init__(name)
        self._loader = loader

    @override
    def tree(self) -> Any:
        return None if self._loader is None else self._loader.state_dict()

    @override
    def restore(self, tree: Any) -> None:
        if self._loader is not None and tree is not None:
            self._loader.load_state_dict(tree, random_restored=not self.moved)


class Model(Item):
    """A model's parameters and buffers; they are read into the live ones.

    Args:
        name: As for every item.
        model: The script's own module.
        state: Its state, where hooks of the script have had a say in it.
        strict: False takes what fits, and leaves the rest as it is.
    """

    def __init__(
        self, name: str, model: nn.Module, state: dict[str, Any] | None = None, *, strict: bool = True
    ) -> None:
        super().__init__(name)
        self._model, self._strict = model, strict
        self._state = model.state_dict() if state is None else state

    @property
    @override
    def about(self) -> str:
        return type(self._model).__qualname__

    @override
    def tree(self) -> Any:
        return dict(self._state)

    @override
    def wrong(self, text: Any, tensors: Mapping[str, Stored]) -> list[str]:
        missing = [name for name in self._state if name not in text]
        beyond = [name for name in text if name not in self._state]
        wrong = []
        if missing:
            wrong.append(f"{self.name}: the checkpoint has no {_some(missing)}")
        if beyond:
            wrong.append(f"{self.name}: the model here has no {_some(beyond)}")
        live = _named(text, self._state)
        for name, tensor in live.items():
            if name in tensors and (said := _unlike(tensors[name], tensor)):
                wrong.append(f"{name} is {said}")
        return wrong

    @override
    def targets(self, text: Any, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        return _fitting(_named(text, self._state), tensors)

    @override
    def restore(self, tree: Any) -> None:
        known = {name: value for name, value in tree.items() if name in self._state}
        for name, value in known.items():
            _write(value, self._state[name])
        if self._needs_its_own():
            self._model.load_state_dict(known, strict=self._strict)

    def _needs_its_own(self) -> bool:
        """Whether the module has to take its state over by itself: it is not all in its parameters and buffers."""
        live = {
            t.data_ptr() for t in (*self._model.parameters(), *self._model.buffers()) if not _is_sharded(t)
        }
        plain = (t for t in self._state.values() if _is_tensor(t) and not _is_sharded(t) and t.numel())
        extra = any(not _is_tensor(value) for value in self._state.values())
        return extra or any(tensor.data_ptr() not in live for tensor in plain)


class Optimizer(Item):
    """An optimizer's groups and state, by the names of parameters; and the parameters that are in no prepared model.

    Args:
        name: As for every item.
        prepared: The prepared optimizer.
        names: What its parameters are called.
    """

    def __init__(self, name: str, prepared: PreparedOptimizer, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__(name)
        self._optimizer = prepared.optimizer
        self._names = names

    @property
    @override
    def about(self) -> str:
        return type(self._optimizer).__qualname__

    @override
    def tree(self) -> Any:
        state = self._optimizer.state_dict()
        called = dict(zip(_flat(state["param_groups"]), self._called(), strict=True))
        groups = [group | {"params": [called[i] for i in group["params"]]} for group in state["param_groups"]]
        extra = {key: value for key, value in state.items() if key not in {"state", "param_groups"}}
        own = {called[key]: value for key, value in state["state"].items() if key in called}
        other = {key: value for key, value in state["state"].items() if key not in called}
        return {"groups": groups, "state": own, "other": other, "extra": extra} | self._parameters()

    @override
    def wrong(self, text: Any, tensors: Mapping[str, Stored]) -> list[str]:
        if text.get("format") == "torch":
            return self._unlike_groups(text["state_dict"]["param_groups"])
        if "groups" not in text:
            return []
        saved, here = _flat(text["groups"]), self._called()
        missing = [name for name in here if name not in set(saved)]
        beyond = [name for name in saved if name not in set(here)]
        wrong = []
        if missing:
            wrong.append(f"{self.name}: the checkpoint has no state for {_some(missing)}")
        if beyond:
            wrong.append(f"{self.name}: the optimizer here does not have {_some(beyond)}")
        wrong += [] if wrong else self._regrouped(text["groups"])
        for name, tensor in _named(text.get("parameters", {}), self._loose()).items():
            if name in tensors and (said := _unlike(tensors[name], tensor)):
                wrong.append(f"{name} is {said}")
        return wrong

    @override
    def targets(self, text: Any, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        found = _fitting(_named(text.get("parameters", {}), self._loose()), tensors)
        for name, parameter in zip(self._called(), _flat(self._optimizer.param_groups), strict=True):
            for key, value in text.get("state", {}).get(name, {}).items():
                told = tensors.get(_name(value))
                if told is not None:
                    live = self._optimizer.state.get(parameter, {}).get(key)
                    found[_name(value)] = _room(told, live, parameter)
        return found

    @override
    def restore(self, tree: Any) -> None:
        if tree.get("format") == "torch":
            self._optimizer.load_state_dict(tree["state_dict"])
            return
        called = dict(zip(self._called(), range(len(self._called())), strict=True))
        groups = self._groups(tree["groups"], called)
        state = {called[name]: dict(own) for name, own in tree["state"].items() if name in called}
        self._optimizer.load_state_dict(
            {"state": state | tree["other"], "param_groups": groups} | tree["extra"]
        )
        self._keep_dtypes(tree["state"])
        for name, parameter in self._loose().items():
            _write(tree.get("parameters", {}).get(name), parameter)

    def _regrouped(self, saved: Sequence[Mapping[str, Any]]) -> list[str]:
        here = self._optimizer.param_groups
        if len(saved) != len(here):
            return [
                f"{self.name}: the checkpoint has {len(saved)} groups of parameters, the optimizer here {len(here)}"
            ]
        differ = [
            str(index)
            for index, (group, live) in enumerate(zip(saved, here, strict=True))
            if set(group["params"]) != {self._names[parameter] for parameter in live["params"]}
        ]
        if not differ:
            return []
        return [f"{self.name}: group {', '.join(differ)} has other parameters in the checkpoint than here"]

    def _groups(self, saved: Sequence[Mapping[str, Any]], called: Mapping[str, int]) -> list[dict[str, Any]]:
        """The groups as torch takes them, which goes by the place of a parameter: with those here, as they are here."""
        here = self._optimizer.param_groups
        same = len(saved) == len(here)
        groups = []
        for index, live in enumerate(here):
            own = {key: value for key, value in live.items() if key == "param_names" or not same}
            places = [called[self._names[parameter]] for parameter in live["params"]]
            groups.append((dict(saved[index]) if same else {}) | own | {"params": places})
        return groups

    def _keep_dtypes(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """In torch, loading casts a state to its parameter's dtype; what was float32 beside a bfloat16 parameter stays so."""
        for name, parameter in zip(self._called(), _flat(self._optimizer.param_groups), strict=True):
            for key, value in saved.get(name, {}).items():
                live = self._optimizer.state.get(parameter, {}).get(key)
                if _is_tensor(live) and _is_tensor(value) and live.dtype != value.dtype:
                    self._optimizer.state[parameter][key] = value.to(live.device)

    def _unlike_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """What torch would say of a state whose parameters have no names."""
        saved = [len(group["params"]) for group in groups]
        here = [len(group["params"]) for group in self._optimizer.param_groups]
        if saved == here:
            return []
        return [
            f"{self.name}: the checkpoint has groups of {saved} parameters, the optimizer here groups of {here}"
        ]

    def _parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        loose = self._loose()
        return {"parameters": loose} if loose else {}

    def _loose(self) -> dict[str, torch.Tensor]:
        """The parameters that are in no prepared model: nobody else saves them."""
        begin = f"{self.name}."
        names = {self._names[p]: p for p in _flat(self._optimizer.param_groups)}
        return {name: p for name, p in names.items() if name.startswith(begin)}

    def _called(self) -> list[str]:
        return [self._names[parameter] for parameter in _flat(self._optimizer.param_groups)]


def _flat(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [parameter for group in groups for parameter in group["params"]]


def _named(text: Any, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Live tensors by the names of the saved ones in their places."""
    found: dict[str, torch.Tensor] = {}
    for key, value in text.items():
        if _name(value) and _is_tensor(state.get(key)):
            found.setdefault(_name(value), state[key])
    return found


def _name(text: Any) -> str:
    """The name of the tensor that a piece of JSON stands for, or nothing."""
    return str(text["name"]) if isinstance(text, dict) and text.get("$") == "tensor" else ""


def _fitting(live: Mapping[str, torch.Tensor], tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in live.items()
        if name in tensors and tuple(tensor.shape) == tensors[name].shape
    }


def _room(told: Stored, live: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Where a part of an optimizer's state is read into: where it is now, else beside its parameter."""
    dtype = getattr(torch, told.dtype)
    if isinstance(live, torch.Tensor) and tuple(live.shape) == told.shape and live.dtype == dtype:
        return live.detach()
    if told.shape and tuple(parameter.shape) == told.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype, requires_grad=False)
    return torch.empty(told.shape, dtype=dtype)


def _unlike(told: Stored, live: torch.Tensor) -> str:
    """How a saved tensor differs in form from the one that is there."""
    if told.shape != tuple(live.shape):
        return f"{list(told.shape)} in the checkpoint and {list(live.shape)} here"
    dtype = str(live.dtype).removeprefix("torch.")
    same = dtype == told.dtype
    return (
        "" if same else f"{told.dtype} in the checkpoint and {dtype} here, to which strict=False converts it"
    )


def _write(value: Any, live: Any) -> None:
    """Copy into a live tensor what was read elsewhere, where it fits."""
    if not _is_tensor(live) or not _is_tensor(value) or live.shape != value.shape:
        return
    if not _same_memory(live, value):
        live.detach().copy_(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
