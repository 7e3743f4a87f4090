"""The item `optimizer`: groups and states, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.live import fitting, has_memory, is_tensor, name_of, named, some, unlike, write
from accel_runtime.checkpoint.manifest import Stored
from accel_runtime.optimizer import PreparedOptimizer

__all__ = ["Optimizer"]


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
            wrong.append(f"{self.name}: the checkpoint has no state for {some(missing)}")
        if beyond:
            wrong.append(f"{self.name}: the optimizer here does not have {some(beyond)}")
        wrong += [] if wrong else self._regrouped(text["groups"])
        for name, tensor in named(text.get("parameters", {}), self._loose()).items():
            if name in tensors and (said := unlike(tensors[name], tensor)):
                wrong.append(f"{name} is {said}")
        return wrong

    @override
    def targets(self, text: Any, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        found = fitting(named(text.get("parameters", {}), self._loose()), tensors)
        for name, parameter in zip(self._called(), _flat(self._optimizer.param_groups), strict=True):
            for key, value in text.get("state", {}).get(name, {}).items():
                told = tensors.get(name_of(value))
                if told is not None:
                    live = self._optimizer.state.get(parameter, {}).get(key)
                    found[name_of(value)] = _room(told, live, parameter)
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
            write(tree.get("parameters", {}).get(name), parameter)

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
                if is_tensor(live) and is_tensor(value) and live.dtype != value.dtype:
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


def _room(told: Stored, live: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Where a part of an optimizer's state is read into: where it is now, else beside its parameter."""
    dtype = getattr(torch, told.dtype)
    if not has_memory(parameter):
        return torch.empty(told.shape, dtype=dtype)
    if isinstance(live, torch.Tensor) and tuple(live.shape) == told.shape and live.dtype == dtype:
        return live.detach()
    if told.shape and tuple(parameter.shape) == told.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype, requires_grad=False)
    return torch.empty(told.shape, dtype=dtype)
