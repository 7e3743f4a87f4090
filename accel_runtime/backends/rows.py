"""Batches cut by rows over the devices of a mesh: which of their tensors, and which of what a model makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Rows"]


class Rows:
    """Cuts tensors along their first dimension, an equal part a device; what cannot be cut so is whole on each.

    It stands for an `input_sharding` of torch_xla, which by itself knows tensors of one rank only.

    Args:
        parts: How many devices there are.
        sharding: torch_xla's sharding of tensors of so many dimensions that are cut along the first.
        mark: Cuts a tensor that is on the devices already; one that has a sharding keeps it.
    """

    minibatch = False
    """Whether each host has its own rows only, as torch_xla asks: no, there is one."""

    def __init__(
        self, parts: int, sharding: Callable[[int], Any], mark: Callable[[torch.Tensor], None]
    ) -> None:
        self.parts = parts
        self._sharding, self._mark = sharding, mark

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        """Itself: a copy of a model that has it as a hook computes on the same devices."""
        return self

    def cut(self, tensor: torch.Tensor) -> bool:
        """Whether every device can have as many rows of the tensor."""
        return tensor.dim() > 0 and len(tensor) > 0 and len(tensor) % self.parts == 0

    def xla_spec(self, tensor: torch.Tensor) -> Any:
        """How torch_xla sends the tensor; None is whole, to every device."""
        return self._sharding(tensor.dim()).xla_spec(tensor) if self.cut(tensor) else None

    def passed(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook: what has a row for every row of the input is cut as the input is."""
        rows = {len(tensor) for tensor in _tensors((args, kwargs)) if self.cut(tensor)}
        for tensor in _tensors(output):
            if tensor.dim() > 0 and len(tensor) in rows:
                self._mark(tensor)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in anything a model takes or gives, fields of dataclasses among them."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name, None))
