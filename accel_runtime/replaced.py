"""Parameters that a division of the model has put others in place of, so that optimizers made before it find theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from accel_runtime.parallel.boxes import part_of

__all__ = ["Replaced", "named_parameters"]


class Replaced:
    """From a parameter as the script made it to the one that is trained in its place."""

    def __init__(self) -> None:
        # Weak: a parameter that no optimizer has is not to be kept, for all of it is in memory.
        self._now: MutableMapping[torch.Tensor, nn.Parameter] = WeakTensorKeyDictionary()

    def note(self, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Remember what became of a model's parameters.

        Args:
            before: The parameters by name, before the model was divided.
            model: The same model, divided.
        """
        now = named_parameters(model)
        for name, old in before.items():
            if now[name] is not old:
                self._now[old] = now[name]

    def check(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
        """Refuse an optimizer with parameters that no model has, before it steps.

        Raises:
            ValueError: There are such parameters.
        """
        known = {parameter for model in models for parameter in model.parameters()}
        loose = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p not in known
        ]
        if loose:
            raise ValueError(
                f"{type(optimizer).__name__} has {len(loose)} parameter(s) that are in no prepared model, the first of shape "
                f"{list(loose[0].shape)}: nothing would combine their gradients over the processes. Give their model to "
                "prepare(); where it was prepared before the optimizer was made, make the optimizer of model.parameters()"
            )

    def bring(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer train the parameters that took the places of its own, with the state it has of them."""
        for group in optimizer.param_groups:
            mine: list[torch.Tensor] = group["params"]
            for old in [some for some in mine if some in self._now]:
                if old in optimizer.state:
                    optimizer.state[self._now[old]] = _divided(optimizer.state.pop(old), old, self._now[old])
            # In place: some optimizers keep the list itself.
            mine[:] = [self._now.get(some, some) for some in mine]
            if _mixed(mine):
                _one_by_one(group)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All names, those of tied parameters too."""
    return dict(model.named_parameters(remove_duplicate=False))


def _mixed(parameters: Iterable[torch.Tensor]) -> bool:
    return len({hasattr(some, "device_mesh") for some in parameters}) > 1


def _one_by_one(group: dict[str, Any]) -> None:
    """Have parameters stepped by themselves, for torch's joined loops take none that are divided beside whole ones."""
    for name in ("fused", "foreach"):
        if group.get(name):
            raise ValueError(
                f"the optimizer has {name}=True, and a group with parameters that are divided among processes beside others "
                f"that are whole, which torch cannot step together: leave {name} out, or give each kind a group of its own"
            )
    if "foreach" in group:
        group["foreach"] = False


def _divided(state: Mapping[str, Any], old: torch.Tensor, new: torch.Tensor) -> dict[str, Any]:
    return {
        key: part_of(value, new, key)
        if isinstance(value, torch.Tensor) and value.shape == old.shape
        else value
        for key, value in state.items()
    }
