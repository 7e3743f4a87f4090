"""Steps of an optimizer by parameter, though ZeRO has flat tensors of whole groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Fragment", "FragmentStates"]


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter whose master weights and optimizer state this rank has, in a flat tensor of a group."""

    parameter: nn.Parameter
    group: int
    """Number of the group."""
    flat: torch.Tensor
    """The master weights of a group of parameters on this rank, `[n]`; the key of their state."""
    start: int
    """Offset in `flat`."""
    offset: int
    """Offset in the flattened parameter."""
    length: int

    def select(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the fragment of a tensor with the shape of `flat`: `[length]`."""
        return flat.narrow(0, self.start, self.length)


class FragmentStates:
    """The states of an optimizer by parameter.

    deepspeed steps one flat tensor a group. A parameter without a gradient would get a step of a zero gradient, with weight decay
    and momentum, and all parameters would have one step count. So each step is that of the fragments, as views of the flat
    tensors, which have the gradients and the states.

    Args:
        optimizer: The optimizer that deepspeed steps.
        fragments: The fragments of this rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, fragments: Sequence[Fragment]) -> None:
        self._optimizer = optimizer
        self._by_flat: dict[torch.Tensor, list[Fragment]] = defaultdict(list)
        for fragment in fragments:
            self._by_flat[fragment.flat].append(fragment)
        self._scalars: dict[nn.Parameter, dict[str, Any]] = {}
        """States that are not one number for each element, such as step counts; a key for each parameter with a state."""
        self._reached: Collection[nn.Parameter] = ()
        self._groups: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        self._views: list[tuple[Fragment, torch.Tensor]] = []
        optimizer.register_step_pre_hook(lambda *_: self._divide())
        optimizer.register_step_post_hook(lambda *_: self._join())

    def set_reached(self, parameters: Collection[nn.Parameter]) -> None:
        """Set the parameters that have gradients in the next step."""
        self._reached = parameters

    def _divide(self) -> None:
        """Let the optimizer step the fragments that have gradients."""
        for group in self._optimizer.param_groups:
            flats = group["params"]
            views = [
                (fragment, self._build_view(fragment))
                for flat in flats
                for fragment in self._by_flat.get(flat, ())
                if fragment.parameter in self._reached
            ]
            self._groups.append((group, flats))
            self._views += views
            group["params"] = [view for _, view in views]

    def _build_view(self, fragment: Fragment) -> torch.Tensor:
        view = fragment.select(fragment.flat.detach())
        assert fragment.flat.grad is not None
        view.grad = fragment.select(fragment.flat.grad)
        if fragment.parameter in self._scalars:
            self._optimizer.state[view] = self.get(fragment)
        return view

    def _join(self) -> None:
        """Give the optimizer the flat tensors back."""
        for group, flats in self._groups:
            group["params"] = flats
        for fragment, view in self._views:
            self.set(fragment, self._optimizer.state.pop(view, {}))
        self._groups, self._views = [], []

    def get(self, fragment: Fragment) -> dict[str, Any]:
        """Return the state of a fragment, whose tensors are views; empty without one."""
        if fragment.parameter not in self._scalars:
            return {}
        flat: dict[str, Any] = self._optimizer.state.get(fragment.flat, {})
        return self._scalars[fragment.parameter] | {
            key: fragment.select(value) for key, value in flat.items()
        }

    def set(self, fragment: Fragment, state: dict[str, Any]) -> None:
        """Set the state of a fragment: tensors of its shape are copied, and others kept."""
        scalars = {}
        flat: dict[str, Any] = self._optimizer.state[fragment.flat]
        for key, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape == (fragment.length,)):
                scalars[key] = value
                continue
            if key not in flat:
                flat[key] = torch.zeros_like(fragment.flat.detach(), dtype=value.dtype)
            target = fragment.select(flat[key])
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
        self._scalars[fragment.parameter] = scalars

    def clear(self) -> None:
        """Remove the states of all parameters."""
        self._scalars.clear()
        for flat in self._by_flat:
            self._optimizer.state.pop(flat, None)
