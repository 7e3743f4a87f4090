"""Which part of a sharded tensor a rank has: a box, by where it begins and how long it is in every dimension."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Box", "box_of", "local", "part_of"]


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor on this rank: its own part of a sharded one, a plain one itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found.detach()


def box_of(tensor: torch.Tensor, name: str) -> Box:
    """What this rank has of a tensor, sharded or not.

    Args:
        tensor: Sharded in any way in which each rank has one box: by `fully_shard`, by tensor parallelism, by both.
        name: What it is called, for the message.

    Raises:
        ValueError: It is sharded in another way, or holds sums that are not complete.
    """
    if not hasattr(tensor, "device_mesh"):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    return _of_sharded(tensor, name)


def part_of(whole: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor that every rank has whole, divided as another one is; nothing is sent.

    Args:
        whole: It, with the same numbers on all ranks.
        like: A tensor of the same shape, sharded or not.
        name: What it is called, for the message.

    Raises:
        ValueError: As for `box_of`.
    """
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - it takes a second to load

    assert isinstance(like, DTensor)
    own = whole
    for dimension, (begin, length) in enumerate(zip(*_of_sharded(like, name), strict=True)):
        own = own.narrow(dimension, min(begin, whole.shape[dimension]), length)
    return DTensor.from_local(
        own.clone(memory_format=torch.contiguous_format).to(local(like).device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _of_sharded(tensor: torch.Tensor, name: str) -> Box:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    assert isinstance(tensor, DTensor)
    _refuse_unplaced(tensor, name)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(sizes) != tuple(local(tensor).shape):
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and is divided into parts of unequal size by both tensor parallelism "
            f"and fully_shard, so that it cannot be told which part is where ({tensor.placements}): choose a tp that "
            "divides it"
        )
    return Box(tuple(offsets), tuple(sizes))


def _refuse_unplaced(tensor: DTensor, name: str) -> None:
    """Refuse what is no box: sums to be made, and strides that no shard to the right undoes."""
    placements = tensor.placements
    for place, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{name} holds sums that are not complete yet ({placements})")
        factor = getattr(placement, "split_factor", None)
        right = [
            tensor.device_mesh.size(later)
            for later in range(place + 1, len(placements))
            if getattr(placements[later], "dim", None) == getattr(placement, "dim", None)
        ]
        if factor is not None and factor != math.prod(right):
            raise ValueError(f"{name} is divided so that a rank's rows are not neighbours ({placements})")
