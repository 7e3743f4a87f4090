"""Parameters that a division of the model has put others in place of, so that optimizers made before it find theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

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

    def bring(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer train the parameters that took the places of its own, with the state it has of them."""
        for group in optimizer.param_groups:
            mine: list[torch.Tensor] = group["params"]
            for old in [some for some in mine if some in self._now]:
                if old in optimizer.state:
                    optimizer.state[self._now[old]] = _divided(optimizer.state.pop(old), old, self._now[old])
            # In place: some optimizers keep the list itself.
            mine[:] = [self._now.get(some, some) for some in mine]
            if group.get("foreach", False) is None and _mixed(mine) and not group.get("fused"):
                # torch's joined loops take tensors of one kind only; the result is the same without.
                group["foreach"] = False


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All names, those of tied parameters too."""
    return dict(model.named_parameters(remove_duplicate=False))


def _mixed(parameters: Iterable[torch.Tensor]) -> bool:
    return len({getattr(some, "device_mesh", None) for some in parameters}) > 1


def _divided(state: Mapping[str, Any], old: torch.Tensor, new: torch.Tensor) -> dict[str, Any]:
    if not hasattr(new, "device_mesh"):
        return dict(state)
    from accel_runtime.parallel.parts import part_of  # noqa: PLC0415 - loading it costs time that most runs need not spend

    return {
        key: part_of(value, new) if isinstance(value, torch.Tensor) and value.shape == old.shape else value
        for key, value in state.items()
    }
