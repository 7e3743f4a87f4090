"""The state of an optimizer, measured: it takes one step on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from accel_runtime.estimating.errors import EstimateError, raised

__all__ = ["NAMES", "optimizer_of", "state_bytes"]

_KNOWN: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
NAMES = tuple(_KNOWN)
"""Optimizers that need not be made by a factory."""


def optimizer_of(
    model: nn.Module, chosen: torch.optim.Optimizer | Callable[..., Any] | str
) -> torch.optim.Optimizer:
    """An optimizer over a model's parameters that are trained.

    Args:
        model: On the meta device.
        chosen: A name in `NAMES`, an optimizer, or what makes one of an iterable of parameters.

    Raises:
        EstimateError: There is none of this name, it could not be made, or it has parameters that are not the model's.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(chosen, str):
        if chosen not in _KNOWN:
            raise EstimateError(
                f"--optimizer is one of {', '.join(NAMES)}; it is {chosen!r}. Others come from the factory: return a dict with "
                "model and optimizer"
            )
        chosen = _KNOWN[chosen]
    if not trained:
        return torch.optim.SGD([torch.empty(0, device="meta")], lr=0.1)
    made = chosen if isinstance(chosen, torch.optim.Optimizer) else _made(chosen, trained)
    own = {id(p) for p in model.parameters()}
    strangers = [p for group in made.param_groups for p in group["params"] if id(p) not in own]
    if strangers:
        raise EstimateError(
            f"{type(made).__name__} has parameters that are not the model's, the first of shape {list(strangers[0].shape)}"
        )
    return made


def state_bytes(optimizer: torch.optim.Optimizer, local: Mapping[nn.Parameter, tuple[int, ...]]) -> int:
    """Bytes of the state after a step over the local parts of parameters.

    Args:
        optimizer: Over a model on the meta device.
        local: The shape of every parameter's part.

    Raises:
        EstimateError: It cannot take a step there.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    before = dict(optimizer.state)
    try:
        optimizer.state.clear()
        for group, whole in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [_part(p, local.get(p, tuple(p.shape))) for p in whole]
            for parameter, part in zip(whole, group["params"], strict=True):
                _begun(optimizer, part, parameter, before)
        optimizer.step()
        return sum(t.untyped_storage().nbytes() for t in _tensors(optimizer))
    except Exception as error:  # noqa: BLE001 - an optimizer is anybody's code
        raise EstimateError(
            f"the state of {type(optimizer).__name__} cannot be measured, since a step on the meta device failed: "
            f"{raised(error)}. --optimizer can name one with as much state"
        ) from None
    finally:
        for group, whole in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = whole
        optimizer.state.clear()
        optimizer.state.update(before)


def _made(make: Callable[..., Any], trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        made = make(trained)
    except Exception as error:  # noqa: BLE001 - as above
        raise EstimateError(
            f"the optimizer could not be made of the model's parameters: {raised(error)}"
        ) from None
    if not isinstance(made, torch.optim.Optimizer):
        raise EstimateError(
            f"the factory's optimizer returned {type(made).__name__}; it takes parameters and returns a torch.optim.Optimizer"
        )
    return made


def _part(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    part = nn.Parameter(
        torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
    )
    if parameter.requires_grad:
        part.grad = torch.empty_like(part)
    return part


def _begun(
    optimizer: torch.optim.Optimizer, part: nn.Parameter, whole: nn.Parameter, before: Mapping[Any, Any]
) -> None:
    """State that was there before the first step, as Adagrad's is, for the part."""
    if whole in before:
        optimizer.state[part] = {
            name: torch.empty_like(part, dtype=value.dtype)
            if isinstance(value, torch.Tensor) and value.shape == whole.shape
            else value
            for name, value in before[whole].items()
        }


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from (
        leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)
    )
