"""The states in a checkpoint: what a rank that saved had of every item, and what a rank that loads takes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.manifest import Stored, own_name
from accel_runtime.checkpoint.reader import Reader, dtype_of
from accel_runtime.checkpoint.values import unpacked
from accel_runtime.checkpoint.window import copies_of

__all__ = ["States"]


class States:
    """The states in a checkpoint, as one rank takes them over.

    Args:
        found: The checkpoint.
        rank: The rank that loads.
        world_size: How many there are.
        copies: How many of them have the same part of every batch.
    """

    def __init__(self, found: Found, rank: int, world_size: int, copies: int = 1) -> None:
        self._found, self._manifest = found, found.manifest
        self._rank, self._world_size = rank, world_size
        before = copies_of(self._text("window", 0)) if "window" in self._manifest.items else copies
        self.moved = self._manifest.world_size != world_size or before != copies
        """Whether another number of ranks saved them, or ranks that shared batches in another way."""

    def wrong(self, item: Item) -> list[str]:
        """Why an item's state does not fit; a sentence each.

        Raises:
            CheckpointError: It is no state of such an item.
        """
        try:
            return item.wrong(self._text(item.name, self._rank), self._tensors(item.name, self._rank))
        except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{self._found.path}: the state of {item.name} is not one of its kind: {error}"
            ) from error

    def check(self, items: Sequence[Item]) -> None:
        """See whether all states can be put together, with tensors that are empty.

        Raises:
            CheckpointError: One cannot.
        """
        for name, told in self._manifest.tensors.items():
            dtype_of(name, told)
        for item in items:
            for rank in self._ranks(item) if self._divided(item) else [self._rank]:
                nothing = dict.fromkeys(self._names(item.name, rank), torch.empty(0))
                try:
                    unpacked(self._text(item.name, rank), nothing)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{self._found.path}: the state of {item.name} is damaged: {error}"
                    ) from error

    def read(self, items: Sequence[Item]) -> dict[str, Any]:
        """The states by item, with tensors read into the live ones where an item says so."""
        # What differed from rank to rank, and of which that of the first will do, is read into place too.
        ranks = {
            item.name: 0 if self._divided(item) else self._rank
            for item in items
            if not (self.moved and item.every_rank)
        }
        targets: dict[str, torch.Tensor] = {}
        for item in (item for item in items if item.name in ranks):
            rank = ranks[item.name]
            told, names = self._tensors(item.name, rank), self._names(item.name, rank)
            rooms = item.targets(self._text(item.name, rank), told)
            for name, stored in told.items():
                targets[names[name]] = rooms[name] if name in rooms else _empty(stored)
        self._fetch(targets)
        trees = {name: self._put_together(name, rank, targets) for name, rank in ranks.items()}
        for item in items:
            if item.name not in trees:
                trees[item.name] = item.merged(self._of_all(item.name), self._rank, self._world_size)
        return trees

    def _of_all(self, item: str) -> list[Any]:
        """What each rank of those that saved had; a tensor that they had in common is one."""
        found: dict[str, torch.Tensor] = {}
        for rank in range(self._manifest.world_size):
            names = self._names(item, rank)
            new = {names[name]: stored for name, stored in self._tensors(item, rank).items()}
            targets = {name: _empty(stored) for name, stored in new.items() if name not in found}
            self._fetch(targets)
            found |= targets
        return [self._put_together(item, rank, found) for rank in range(self._manifest.world_size)]

    def _put_together(self, item: str, rank: int, tensors: Mapping[str, torch.Tensor]) -> Any:
        known = {name: tensors[there] for name, there in self._names(item, rank).items()}
        return unpacked(self._text(item, rank), known)

    def _fetch(self, targets: dict[str, torch.Tensor]) -> None:
        reader, metadata = Reader(self._found), self._metadata
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner)

    @cached_property
    def _metadata(self) -> Metadata:
        return Reader(self._found).read_metadata()

    def _ranks(self, item: Item) -> range:
        return range(self._manifest.world_size if item.every_rank else 1)

    def _divided(self, item: Item) -> bool:
        """Whether the ranks that saved may have had different states, and there are as many no more."""
        differ = item.name in self._manifest.own or any(
            "#" in name for name in self._manifest.tensors_of(item.name)
        )
        return self.moved and (item.every_rank or differ)

    def _text(self, item: str, rank: int) -> Any:
        own = self._manifest.own.get(item)
        if own is None:
            return self._manifest.values[item]
        return own[rank] if rank < len(own) else own[0]

    def _tensors(self, item: str, rank: int) -> dict[str, Stored]:
        return {name: self._manifest.tensors[there] for name, there in self._names(item, rank).items()}

    def _names(self, item: str, rank: int) -> dict[str, str]:
        """The tensors of an item as a rank had them: their names in the tree, and in the manifest."""
        rank = rank if rank < self._manifest.world_size else 0
        names = {}
        for there in self._manifest.tensors_of(item):
            name, _, owner = there.rpartition("#") if "#" in there else (there, "", "")
            if not owner or there == own_name(name, rank):
                names[name] = there
        return names


def _empty(stored: Stored) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
