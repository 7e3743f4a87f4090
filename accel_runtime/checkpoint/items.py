"""What a run's state is made of: how a part of it is taken, and how it comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.checkpoint.live import fitting, named
from accel_runtime.checkpoint.manifest import Stored
from accel_runtime.data.loader import NextBatch, PreparedLoader

__all__ = ["Item", "Loader", "Stateful"]


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
        return fitting(named(text, self._thing.state_dict()), tensors)

    @override
    def restore(self, tree: Any) -> None:
        self._thing.load_state_dict(tree)


class Loader(Item):
    """A prepared loader, whose random numbers go on from those that are restored with it.

    One that the script has let go, when it saved or when it loads, has no state.
    """

    def __init__(self, name: str, loader: PreparedLoader | None, position: NextBatch = "next_batch") -> None:
        super().__init__(name)
        self._loader, self._position = loader, position
        self.every_rank = loader is not None and loader.own_data

    @override
    def tree(self) -> Any:
        return None if self._loader is None else self._loader.state_dict()

    @override
    def merged(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:
        return trees[0] if self._loader is None else self._loader.state_of(trees)

    @override
    def restore(self, tree: Any) -> None:
        if self._loader is not None and tree is not None:
            self._loader.load_state_dict(tree, random_restored=not self.moved, position=self._position)
