"""Many tensors in one collective: packed into a buffer, sent, and taken apart again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from accel_runtime.backends.base import Backend, Reduction

__all__ = ["gather_all", "reduce_all"]


def gather_all(tensors: Sequence[torch.Tensor], backend: Backend) -> list[torch.Tensor]:
    """Every rank's tensors, each stacked: `[...]` becomes `[world_size, ...]`; one collective a device.

    Args:
        tensors: Of the same shapes, dtypes and devices on all ranks, in the same order.
        backend: Carries them.
    """

    def gathered(group: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        everyone = backend.all_gather(torch.cat([_bytes(tensor) for tensor in group]))
        columns = torch.split(everyone, [tensor.nbytes for tensor in group], dim=1)
        return [_typed(column, tensor) for column, tensor in zip(columns, group, strict=True)]

    return _grouped(tensors, lambda tensor: tensor.device, gathered, backend.all_gather)


def reduce_all(tensors: Sequence[torch.Tensor], reduction: Reduction, backend: Backend) -> list[torch.Tensor]:
    """Every tensor combined over the ranks element by element; one collective a device and dtype.

    Args:
        tensors: Of the same shapes, dtypes and devices on all ranks, in the same order.
        reduction: How to combine.
        backend: Carries them.
    """

    def reduced(group: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        total = backend.all_reduce(torch.cat([tensor.reshape(-1) for tensor in group]), reduction)
        parts = torch.split(total, [tensor.numel() for tensor in group])
        return [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)]

    return _grouped(
        tensors,
        lambda tensor: (tensor.device, tensor.dtype),
        reduced,
        lambda t: backend.all_reduce(t, reduction),
    )


def _grouped(
    tensors: Sequence[torch.Tensor],
    key: Callable[[torch.Tensor], Hashable],
    together: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    alone: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Treat tensors of the same key together, in the order of their first; the results in the order given."""
    groups: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(key(tensor), []).append(index)
    results: dict[int, torch.Tensor] = {}
    for indices in groups.values():
        group = [tensors[index] for index in indices]
        # One tensor is a buffer already.
        done = together(group) if len(group) > 1 else [alone(group[0])]
        results |= zip(indices, done, strict=True)
    return [results[index] for index in range(len(tensors))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _typed(column: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[world_size, bytes]` as `[world_size, *like.shape]` of its dtype."""
    # A copy of its own, in one row, since a number cannot begin at any byte.
    row = column.clone(memory_format=torch.contiguous_format).flatten()
    return row.view(like.dtype).view(len(column), *like.shape)
