"""Buffers of a model that is divided: those that forward passes change are the first rank's, as with DDP."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from accel_runtime.parallel.boxes import local

__all__ = ["Changed"]


class Changed:
    """Gives every rank the first one's buffers, of those that were written since it did so last.

    The same forward pass writes the same buffers on all ranks: running means and the like. Tables that nothing writes,
    as those of rotary embeddings are, travel once.

    Args:
        broadcast: Gives a tensor the first rank's values, in place.
    """

    def __init__(self, broadcast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._broadcast = broadcast
        self._seen: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()

    @torch.no_grad()
    def share(self, buffers: Sequence[torch.Tensor]) -> None:
        """Share those that have changed; all ranks together."""
        for buffer in buffers:
            own = local(buffer)
            if not own.is_meta and self._seen.get(buffer) != own._version:  # noqa: SLF001 - torch names it nowhere else
                own.copy_(self._broadcast(own.clone(memory_format=torch.contiguous_format)))
                self._seen[buffer] = own._version  # noqa: SLF001
