"""Objects in which models return tensors, and a model that returns them.

They are imported by ranks, since classes with private slots cannot be pickled by value.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

try:
    import attrs
except ImportError:
    attrs = None


@dataclass
class Plain:
    y: Any
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass(frozen=True, slots=True)
class Frozen:
    y: Any
    size: int = field(default=4, init=False)


if attrs is not None:

    @attrs.frozen
    class Defined:
        y: Any


class Pair(NamedTuple):
    y: Any
    other: int = 1


class Own:
    def __init__(self, y):
        self.y, self.function, self.dtype = y, torch.tanh, y.dtype


class Slots:
    __slots__ = ("__private", "y")

    def __init__(self, y):
        self.y, self.__private = y, y + 1

    @property
    def private(self):
        return self.__private


class Counter(dict):
    """A mapping that torch does not search."""

    y = property(lambda self: self["y"])


class Stateful:
    """An object that is more than data."""

    def __init__(self, y):
        self.y, self.module = y, nn.Identity()


MAKERS = {
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "namespace": lambda y: SimpleNamespace(y=y),
    "named tuple": Pair,
    "object": Own,
    "slots": Slots,
    "mapping": lambda y: Counter(y=y),
    "nested": lambda y: (
        Own(y) if y.dim() == 0 else SimpleNamespace(y=y, more={"all": deque([Plain((Own(y),))])})
    ),
}
if attrs is not None:
    MAKERS["attrs"] = Defined


class Net(nn.Module):
    """Layers whose outputs are in objects, and one that is not used."""

    def __init__(self, make, *, unused=True):
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.blocks = nn.ModuleList(Block(make) for _ in range(2))
        self.head = nn.Linear(4, 1)
        if unused:
            self.unused = nn.Linear(1, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).y
        return self.make(self.head(x))


class Block(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.make(torch.tanh(self.linear(x)))
