"""This rank's part of a tensor that lies whole somewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["box_of", "part_of"]


def box_of(like: Any) -> tuple[slice, ...]:
    """Where this rank's part of a divided tensor lies in the whole; one slice a dimension."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def part_of(whole: torch.Tensor, like: Any) -> DTensor:
    """A whole tensor, divided as another is; nothing is sent.

    Args:
        whole: All of it, equal on all ranks, of the shape of `like`.
        like: A DTensor that says how it is divided, and on which device the parts are.
    """
    local = whole[box_of(like)].to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )
