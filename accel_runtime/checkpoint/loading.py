"""Reading a checkpoint: everything is checked before anything changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from accel_runtime.checkpoint import folder
from accel_runtime.checkpoint.agreed import own_name
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.manifest import Stored
from accel_runtime.checkpoint.storage import Reader, damage, own_share
from accel_runtime.checkpoint.together import Share, same, together
from accel_runtime.checkpoint.values import unpacked

__all__ = ["Loading"]

_T = TypeVar("_T")
_LOG = logging.getLogger("accel_runtime.checkpoint")
_SHOWN = 10
"""So many reasons stand in a message."""


class Loading:
    """One load.

    Args:
        share: Exchanges objects between the ranks.
        rank: This rank.
        world_size: How many there are.
        strict: False leaves out what does not fit, and says so.
    """

    def __init__(self, share: Share, rank: int, world_size: int, *, strict: bool) -> None:
        self._share, self._rank, self._world_size, self._strict = share, rank, world_size, strict

    def open(self, choose: Callable[[], Path], given: str | None) -> Found:
        """The checkpoint that the first rank chooses, seen by all.

        Args:
            choose: Gives its directory.
            given: What the script said; the same on all ranks.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        told = self._all(lambda: (given, choose() if self._rank == 0 else Path()))
        (_, path), said = told[0], [one for one, _ in told]

        def find() -> Found:
            same("load_state", said)
            return folder.find(path)

        return self._own(find)

    def run_hooks(self, call: Callable[[], None]) -> None:
        """Call what the script wants to do first.

        Raises:
            CheckpointError: It failed on some rank.
        """
        self._own(call)

    def load(self, found: Found, items: Sequence[Item]) -> list[str]:
        """Restore items.

        Args:
            found: The checkpoint.
            items: What the run consists of.

        Returns:
            What was left out, a sentence each; only where not strict.

        Raises:
            CheckpointError: Something does not fit or is damaged; nothing was changed.
        """
        left_out = self._own(lambda: self._fit(found, items))
        wanted = [item for item in items if item.name in found.manifest.items]
        self._verify(found, wanted)
        trees = self._own(lambda: self._read(found, wanted))

        def restore() -> None:
            for item in wanted:
                item.restore(trees[item.name])

        self._own(restore)
        if self._rank == 0:
            self._tell(found, left_out)
        return left_out

    def _fit(self, found: Found, items: Sequence[Item]) -> list[str]:
        """What does not fit."""
        manifest, names = found.manifest, {item.name for item in items}
        wrong = [
            f"{_called(name, manifest.about.get(name))}: it is in the checkpoint, and nothing of the kind here"
            for name in manifest.items
            if name not in names
        ]
        for item in items:
            if item.name not in manifest.items:
                wrong.append(f"{_called(item.name, item.about)}: it is here, and not in the checkpoint")
                continue
            wrong += item.wrong(self._text(found, item), self._tensors(found, item, self._rank))
        if wrong and self._strict:
            more = [f"... and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            told = "\n".join(f"  {sentence}" for sentence in [*wrong[:_SHOWN], *more])
            raise CheckpointError(
                f"{found.path} does not fit this run, and nothing was loaded; strict=False leaves out:\n{told}"
            )
        return wrong

    def _verify(self, found: Found, items: Sequence[Item]) -> None:
        names = [item.name for item in items]
        chunks = own_share(found, names, self._rank, self._world_size)
        wrong = [sentence for some in self._all(lambda: damage(found, chunks)) for sentence in some]
        if wrong:
            raise CheckpointError("\n".join([*wrong[:_SHOWN], _offer(found)]))

    def _read(self, found: Found, items: Sequence[Item]) -> dict[str, Any]:
        """The state trees of items: with tensors read into the live ones where an item says so."""
        trees: dict[str, Any] = {}
        merged = [item for item in items if self._divided(found, item)]
        plain = [item for item in items if item not in merged]
        targets: dict[str, torch.Tensor] = {}
        names: dict[str, dict[str, str]] = {}
        for item in plain:
            text, told = self._text(found, item), self._tensors(found, item, self._rank)
            names[item.name] = self._names(found, item, self._rank)
            rooms = item.targets(text, told)
            targets |= {
                names[item.name][name]: rooms[name] if name in rooms else _empty(stored)
                for name, stored in told.items()
            }
        _fetch(found, targets)
        for item in plain:
            known = {name: targets[there] for name, there in names[item.name].items()}
            trees[item.name] = unpacked(self._text(found, item), known)
        for item in merged:
            ranks = range(found.manifest.world_size if item.every_rank else 1)
            every = [self._tree_of(found, item, rank) for rank in ranks]
            trees[item.name] = item.merged(every, self._rank, self._world_size)
        return trees

    def _tree_of(self, found: Found, item: Item, rank: int) -> Any:
        """What a rank of those that saved had."""
        told, names = self._tensors(found, item, rank), self._names(found, item, rank)
        targets = {names[name]: _empty(stored) for name, stored in told.items()}
        _fetch(found, targets)
        return unpacked(self._text(found, item, rank), {name: targets[names[name]] for name in told})

    def _divided(self, found: Found, item: Item) -> bool:
        """Whether the ranks that saved may have had different states, and there are as many no more."""
        if found.manifest.world_size == self._world_size:
            return False
        return (
            item.every_rank
            or item.name in found.manifest.own
            or any("#" in name for name in found.manifest.tensors_of(item.name))
        )

    def _text(self, found: Found, item: Item, rank: int | None = None) -> Any:
        own = found.manifest.own.get(item.name)
        if own is None:
            return found.manifest.values[item.name]
        rank = self._rank if rank is None else rank
        return own[rank] if rank < len(own) else own[0]

    def _tensors(self, found: Found, item: Item, rank: int) -> dict[str, Stored]:
        names = self._names(found, item, rank)
        return {name: found.manifest.tensors[there] for name, there in names.items()}

    @staticmethod
    def _names(found: Found, item: Item, rank: int) -> dict[str, str]:
        """The tensors of an item as a rank had them: their names in the tree, and in the manifest."""
        rank = rank if rank < found.manifest.world_size else 0
        names = {}
        for there in found.manifest.tensors_of(item.name):
            name, _, owner = there.rpartition("#") if "#" in there else (there, "", "")
            if not owner or there == own_name(name, rank):
                names[name] = there
        return names

    def _tell(self, found: Found, left_out: Sequence[str]) -> None:
        if left_out:
            _LOG.warning("%s was loaded as far as it fits: %s", found.path, "; ".join(left_out))
        if unknown := folder.strangers(found):
            names = ", ".join(str(path.relative_to(found.path)) for path in unknown[:_SHOWN])
            _LOG.warning("%s: not part of the checkpoint, and not read: %s", found.path, names)

    def _all(self, act: Callable[[], _T]) -> list[_T]:
        return together(self._share, act)

    def _own(self, act: Callable[[], _T]) -> _T:
        """This rank's result of what all do."""
        results: list[_T] = []
        self._all(lambda: results.append(act()))
        return results[0]


def _fetch(found: Found, targets: Mapping[str, torch.Tensor]) -> None:
    """Read tensors."""
    reader, planner = (
        Reader(found),
        DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner)


def _empty(stored: Stored) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))


def _called(name: str, about: str | None) -> str:
    return f"{name} ({about})" if about else name


def _offer(found: Found) -> str:
    """What to do about a damaged checkpoint."""
    number = found.number
    whole, _ = folder.numbered(found.path.parent) if number is not None else ([], [])
    before = [one for one in whole if one.number is not None and number is not None and one.number < number]
    if not before:
        return "Nothing was loaded."
    return f"Nothing was loaded. The checkpoint before it is {before[-1].path}, of step {before[-1].manifest.step}."
