"""Digests by which the ranks of a save find what differs between their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_runtime.checkpoint.save_plan import Part, ShardSet
from accel_runtime.storage.errors import CheckpointError

__all__ = ["Details", "ItemDigest", "StateDigest", "check_same_items", "find_rank_specific"]


@dataclass(frozen=True)
class ItemDigest:
    """Digests of an item of the state, equal on two ranks if the item is."""

    values: str
    """Of its JSON."""
    layout: str
    """Of the names, dtypes, shapes and placements of its tensors."""
    tensors: str
    """Of the layout and the bytes of its tensors, except those of shards."""


@dataclass(frozen=True)
class StateDigest:
    """The state of a rank, as far as the others need it for the plan."""

    items: Mapping[str, ItemDigest]
    """Items by name; empty on one process, which compares nothing."""
    shards: tuple[ShardSet, ...]
    """Shards by kind."""
    weights: str | None
    """Digest of the weights that `ReplicaCheck` compares; None if it does not."""


@dataclass(frozen=True)
class Details:
    """Tensors of the items that differ between ranks, sent in a further exchange if there are any."""

    sees_draft: bool
    """Whether this node sees the draft, so that this rank can write into it."""
    hashes: tuple[int | None, ...]
    """Hash of each tensor, in the order of the names; None for shards."""
    parts: tuple[Part, ...]
    """The tensors, if not all ranks have the same ones; else empty."""
    weights: str
    """Hashes of all weights, if their digests differ; else empty."""


def check_same_items(digests: Sequence[StateDigest]) -> None:
    """Raise `CheckpointError` if not all ranks have the same items."""
    common = set.intersection(*(set(digest.items) for digest in digests))
    if missing := [
        f"{name} on rank {rank}"
        for rank, digest in enumerate(digests)
        for name in digest.items
        if name not in common
    ]:
        raise CheckpointError(
            f"Not all ranks have the same state to save: {', '.join(missing)}. Prepare and register the same objects on every "
            "rank."
        )


def find_rank_specific(own: Sequence[Part], details: Sequence[Details]) -> dict[int, list[Part]]:
    """Return the tensors of each rank that differ between ranks, or that some ranks do not have."""
    ranks = [
        {part.name: (part, value) for part, value in zip(each.parts or own, each.hashes, strict=True)}
        for each in details
    ]
    first = ranks[0]
    differing = {
        name
        for name in set().union(*ranks)
        if any(name not in tensors or tensors[name][1] != first[name][1] for tensors in ranks)
    }
    for rank, tensors in enumerate(ranks):
        if sharded := [name for name in sorted(differing & tensors.keys()) if tensors[name][1] is None]:
            raise CheckpointError(
                f"Cannot save {sharded[0]}: it is sharded on rank {rank}, and not on all ranks. Use the same objects on every "
                "rank."
            )
    return {
        rank: [part for name, (part, _) in tensors.items() if name in differing]
        for rank, tensors in enumerate(ranks)
    }
