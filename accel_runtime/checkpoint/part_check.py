"""Find what a node's part of a checkpoint does not have of the state that a rank reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import ReadItem

from accel_runtime.checkpoint.state_items import StateItem
from accel_runtime.foundation.torch_internals import local_tensor
from accel_runtime.storage.errors import PartError, format_names
from accel_runtime.storage.manifest import Checkpoint

__all__ = ["find_missing_rank", "find_unread", "raise_part_error"]

_SHOWN = 10
"""Number of ranks listed in a message."""


def find_missing_rank(
    checkpoint: Checkpoint, items: Sequence[StateItem], rank: int, *, moved: bool
) -> str | None:
    """Return a sentence if a part does not have the states of ranks that a rank needs; None if it has, or is no part.

    `moved` is whether other ranks have saved it, so that states that differ between ranks are merged, or taken from rank 0.
    """
    manifest = checkpoint.manifest
    for item in items if manifest.is_part else ():
        if not manifest.is_rank_specific(item.name):
            continue
        needed = {0 if moved else rank}
        if moved and item.merge_needs_all_ranks:
            needed = set(range(manifest.world_size))
        if missing := sorted(needed - set(manifest.ranks)):
            listed = format_names([str(each) for each in missing], limit=_SHOWN)
            return f"{checkpoint.key} does not have the state of {item.name} of rank {listed}"
    return None


def find_unread(
    checkpoint: Checkpoint, targets: Mapping[str, torch.Tensor], reads: Iterable[ReadItem], rank: int
) -> str | None:
    """Return a sentence if the planned reads do not fill a tensor of a rank; None if they do."""
    filled: Counter[str] = Counter()
    for item in reads:
        filled[item.storage_index.fqn] += math.prod(item.lengths)
    for name, target in targets.items():
        if filled[name] < local_tensor(target).numel():
            return f"{checkpoint.key} does not have the shard of {name} of rank {rank}"
    return None


def raise_part_error(reasons: Sequence[str | None]) -> None:
    """Raise `PartError` if a rank cannot use its part, given the reasons of all ranks."""
    if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]:
        raise PartError("; ".join(failed[:_SHOWN]))
