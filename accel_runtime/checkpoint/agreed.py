"""What is equal on all ranks and what each has for itself, so that the first is written once and the second by everyone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_runtime.checkpoint.digest import digest
from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.manifest import checksum, own_name
from accel_runtime.checkpoint.together import Share, together
from accel_runtime.checkpoint.values import packed

__all__ = ["State", "agreed"]

_SMALL = 1 << 16
"""Bytes of a rank's own tensor that the first rank writes for it, so that there is not a file a rank for a few."""


@dataclass
class State:
    """A run's state, as one rank writes its part of it."""

    values: dict[str, Any] = field(default_factory=dict)
    """JSON of the items that are equal on all ranks."""
    own: dict[str, list[Any]] = field(default_factory=dict)
    """JSON of the others, one a rank."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those that this rank may write; DCP decides who does where several may."""


def agreed(items: Sequence[Item], share: Share, rank: int, world_size: int) -> State:
    """Take the state of all items.

    Args:
        items: What the run consists of; the same on all ranks.
        share: Exchanges objects between the ranks.
        rank: This rank.
        world_size: How many there are.

    Raises:
        CheckpointError: Something cannot be saved, on some rank; raised on all.
    """
    texts: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}

    def take() -> tuple[dict[str, str], dict[str, int | None]]:
        for item in items:
            texts[item.name], own = packed(item.tree(), item.name)
            tensors.update(own)
        if world_size == 1:
            return {}, {}
        prints = {name: None if _is_sharded(tensor) else digest(tensor) for name, tensor in tensors.items()}
        return {name: checksum(json.dumps(text).encode()) for name, text in texts.items()}, prints

    told = together(share, take)
    if world_size == 1:
        return State(texts, {}, tensors)
    return _divided(texts, tensors, told, share, rank)


def _divided(
    texts: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    told: Sequence[tuple[dict[str, str], dict[str, int | None]]],
    share: Share,
    rank: int,
) -> State:
    differ = {name for name in texts if len({prints.get(name) for prints, _ in told}) > 1}
    known = set().union(*(prints for _, prints in told))
    apart = {name for name in known if len({prints.get(name, "none") for _, prints in told}) > 1}
    state = State({name: text for name, text in texts.items() if name not in differ})
    small = {name: tensor for name, tensor in tensors.items() if name in apart and tensor.nbytes <= _SMALL}
    if differ or apart:
        mine = (
            {name: texts[name] for name in differ},
            {name: tensor.cpu() for name, tensor in small.items()},
        )
        everyone = share(mine)
        state.own = {name: [own[name] for own, _ in everyone] for name in sorted(differ)}
        if rank == 0:
            for number, (_, given) in enumerate(everyone):
                state.tensors.update({own_name(name, number): tensor for name, tensor in given.items()})
    for name, tensor in tensors.items():
        if name not in apart:
            state.tensors[name] = tensor
        elif name not in small:
            state.tensors[own_name(name, rank)] = tensor
    return state


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")
