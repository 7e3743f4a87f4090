"""What ranks that compute one part of a batch together have gathered, counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel_runtime import tree
from accel_runtime.topology import DataPlace

__all__ = ["each_once"]


def each_once(everyone: Sequence[Any], place: DataPlace) -> list[Any]:
    """Every part's values, from the first of the ranks that have it.

    Args:
        everyone: What each rank gave.
        place: Which ranks have the same part.

    Raises:
        ValueError: Ranks that divide sequences gave different values, of which none is whole.
    """
    apart = place.copies // place.sequences
    for rank in range(0, len(everyone), apart):
        if not _same(everyone[rank], everyone[rank - rank % place.copies]):
            raise ValueError(
                f"gather_for_metrics got different values from ranks that divide each sequence among them (cp: "
                f"{place.sequences}), so that none has the whole. Join their places first, accelerator.gather_sequence(tensor, "
                'dim=1); or take the mean of a loss over all ranks, accelerator.reduce(loss, "mean")'
            )
    return list(everyone[:: place.copies])


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    pairs = list(zip(tree.leaves(one), tree.leaves(other), strict=False))
    return len(tree.leaves(one)) == len(tree.leaves(other)) and all(_alike(*pair) for pair in pairs)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # By their bytes: nan is nan.
        return (
            one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))
        )
    return type(one) is type(other) and bool(one == other)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
