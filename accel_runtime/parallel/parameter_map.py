"""The sharded parameters that replace those of the script, in optimizers too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.parallel.dtensor import shard_like

__all__ = ["ParameterMap"]


class ParameterMap:
    """Map from the parameters that the script created to the sharded parameters that are trained."""

    def __init__(self) -> None:
        # Weak references: the map must not keep full parameters in memory that no optimizer uses.
        self._sharded: MutableMapping[torch.Tensor, nn.Parameter] = WeakTensorKeyDictionary()

    def add(self, originals: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Add the parameters of a sharded model, given the original parameters by name."""
        sharded = dict(model.named_parameters(remove_duplicate=False))
        for name, original in originals.items():
            if sharded[name] is not original:
                self._sharded[original] = sharded[name]

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter that replaced a parameter of the script, or the parameter itself."""
        return self._sharded.get(parameter, parameter)

    def check(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
        """Raise ValueError if an optimizer has parameters of no prepared model."""
        prepared = {parameter for model in models for parameter in model.parameters()}
        missing = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p not in prepared
        ]
        if missing:
            raise ValueError(
                f"{type(optimizer).__name__} cannot step: {len(missing)} of its parameters, the first of shape "
                f"{list(missing[0].shape)}, are in no prepared model, so their gradients are not averaged over the processes. "
                "Pass the model to prepare(); if it was prepared before, create the optimizer from model.parameters()."
            )

    def replace_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of an optimizer by the sharded ones, and shard its state."""
        for group in optimizer.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            for original in parameters:
                if original in self._sharded and original in optimizer.state:
                    sharded = self._sharded[original]
                    optimizer.state[sharded] = {
                        key: shard_like(value, sharded, key)
                        if isinstance(value, torch.Tensor) and value.shape == original.shape
                        else value
                        for key, value in optimizer.state.pop(original).items()
                    }
            # In place: some optimizers keep the list itself.
            parameters[:] = [self.find_current(parameter) for parameter in parameters]
            if has_dtensor(parameters):
                _refuse_optimizer(optimizer, group)
            if len({hasattr(parameter, "device_mesh") for parameter in parameters}) <= 1:
                continue
            # Step parameters one by one: torch's foreach loops refuse a mix of sharded and replicated parameters.
            for name in ("fused", "foreach"):
                if group.get(name):
                    raise ValueError(
                        f"Cannot prepare the optimizer with {name}=True: a parameter group contains both sharded and replicated "
                        f"parameters, which torch cannot step together. Remove {name}, or use one group for each kind."
                    )
            if "foreach" in group:
                group["foreach"] = False


_UNSHARDABLE = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
)
"""Optimizers that torch 2.13 cannot step with sharded parameters."""


def _refuse_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raise ValueError if torch cannot step a group of sharded parameters."""
    name = type(optimizer).__name__
    # Those of transformers and other libraries have the name too.
    if isinstance(optimizer, _UNSHARDABLE) or name == torch.optim.Adafactor.__name__:
        raise ValueError(
            f"{name} cannot train a sharded model: torch has no step for sharded parameters. Use another optimizer, such as AdamW, "
            "or train without sharding (remove dp_shard)."
        )
    if group.get("fused") and isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        raise ValueError(
            f"{name}(fused=True) cannot train a sharded model: torch has no fused step for sharded parameters. Remove fused."
        )
