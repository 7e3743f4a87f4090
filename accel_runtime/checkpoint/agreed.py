"""What is equal on all ranks and what each has for itself, so that the first is written once and the second by everyone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_runtime.checkpoint.digest import digest
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.live import is_sharded
from accel_runtime.checkpoint.manifest import checksum, own_name
from accel_runtime.checkpoint.together import Share, together
from accel_runtime.checkpoint.values import packed

__all__ = ["State", "agreed"]

_SMALL = 1 << 16
"""Bytes of a rank's own tensor that the first rank writes for it, so that there is not a file a rank for a few."""


Hosted = Callable[[Any], Any]


def _same(state: Any) -> Any:
    return state


@dataclass
class State:
    """A run's state, as one rank writes its part of it."""

    values: dict[str, Any] = field(default_factory=dict)
    """JSON of the items that are equal on all ranks."""
    own: dict[str, list[Any]] = field(default_factory=dict)
    """JSON of the others, one a rank."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those that this rank may write; DCP decides who does where several may."""


@dataclass
class _Taken:
    """The state of one rank."""

    texts: dict[str, Any] = field(default_factory=dict)
    """JSON by item."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def prints(self) -> tuple[dict[str, str], dict[str, int | None]]:
        """What tells whether other ranks have the same: of texts, and of tensors; None for one that is sharded."""
        texts = {name: checksum(json.dumps(text).encode()) for name, text in self.texts.items()}
        return texts, {name: None if is_sharded(own) else digest(own) for name, own in self.tensors.items()}


def agreed(  # noqa: PLR0913 - the last says something of one rank of many
    items: Sequence[Item],
    share: Share,
    rank: int,
    world_size: int,
    hosted: Hosted = _same,
    *,
    handed_over: bool = False,
) -> State:
    """Take the state of all items.

    Args:
        items: What the run consists of; the same on all ranks.
        share: Exchanges objects between the ranks.
        rank: This rank.
        world_size: How many there are.
        hosted: Makes a state what files take, as `Backend.hosted`.
        handed_over: Whether the first rank writes all that this one has for itself, whatever its size.

    Raises:
        CheckpointError: Something cannot be saved, on some rank, or the ranks consist of other items; raised on all.
    """
    taken = _Taken()

    def take() -> tuple[dict[str, str], dict[str, int | None]]:
        for item in items:
            taken.texts[item.name], tensors = packed(hosted(item.tree()), item.name)
            taken.tensors.update(tensors)
        return taken.prints() if world_size > 1 else ({}, {})

    told = together(share, take)
    if world_size == 1:
        return State(taken.texts, {}, taken.tensors)
    texts, tensors = [text for text, _ in told], [tensor for _, tensor in told]
    _same_items(texts)
    small = None if handed_over else _SMALL
    return _divided(taken, _unequal(texts), _unequal(tensors), share, rank, small=small)


def _same_items(texts: Sequence[Mapping[str, str]]) -> None:
    everywhere = set.intersection(*map(set, texts))
    lone = {name: number for number, own in enumerate(texts) for name in own if name not in everywhere}
    if lone:
        listed = ", ".join(f"{name} on rank {number}" for name, number in lone.items())
        raise CheckpointError(
            f"not all ranks have the same to save: {listed}; prepare and register alike everywhere"
        )


def _unequal(told: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names for which not all ranks have the same."""
    names = set().union(*told)
    return {name for name in names if any(name not in own or own[name] != told[0].get(name) for own in told)}


def _divided(  # noqa: PLR0913 - the facts of one rank
    taken: _Taken, differ: set[str], apart: set[str], share: Share, rank: int, *, small: int | None
) -> State:
    """What of a rank's state it may write.

    Args:
        taken: The rank's state.
        differ: The items whose JSON is not the same everywhere.
        apart: The tensors that are not.
        share: Exchanges objects between the ranks.
        rank: This rank.
        small: Bytes of a tensor of its own that the first rank writes for it; None is any.
    """
    state = State({name: text for name, text in taken.texts.items() if name not in differ})
    own_ones = {name: own for name, own in taken.tensors.items() if name in apart}
    large = {name: own for name, own in own_ones.items() if small is not None and own.nbytes > small}
    if differ or apart:
        for_first = {name: own.cpu() for name, own in own_ones.items() if name not in large}
        everyone = share(({name: taken.texts[name] for name in differ}, for_first))
        state.own = {name: [texts[name] for texts, _ in everyone] for name in sorted(differ)}
        for number, (_, tensors) in enumerate(everyone if rank == 0 else ()):
            state.tensors |= {own_name(name, number): tensor for name, tensor in tensors.items()}
    state.tensors |= {name: own for name, own in taken.tensors.items() if name not in apart}
    state.tensors |= {own_name(name, rank): own for name, own in large.items()}
    return state
