"""What parameters are called in a checkpoint: the names their models give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from accel_runtime.compilation import plain

__all__ = ["numbered", "parameter_names"]


def parameter_names(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    original: Callable[[nn.Module], nn.Module],
) -> dict[nn.Parameter, str]:
    """Every parameter of models and optimizers, by identity, with one name, however often it is found.

    Args:
        models: The prepared models. Those of the first are `model.layer.weight`, of the second `model_1.layer.weight`.
        optimizers: The prepared optimizers. A parameter that is in no model is `optimizer.0.3`: the first
            optimizer's first group, fourth parameter.
        original: Takes off a model what the run put around it, so that names do not depend on the world size.
    """
    names: dict[nn.Parameter, str] = {}
    for index, model in enumerate(models):
        for name, parameter in plain(original(model)).named_parameters():
            names.setdefault(parameter, f"{numbered('model', index)}.{name}")
    for index, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                names.setdefault(parameter, f"{numbered('optimizer', index)}.{at}.{place}")
    return names


def numbered(name: str, index: int) -> str:
    """The name of the first, the second, ... of a kind: `model`, `model_1`, ..."""
    return f"{name}_{index}" if index else name
