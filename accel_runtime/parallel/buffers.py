"""Buffers of a model that is divided are the first rank's, as with DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel_runtime.backends.averaging import Buffers, in_parts
from accel_runtime.parallel.boxes import local

__all__ = ["FirstRanks", "Untraced"]

_untraced: Any = torch.compiler.disable


class FirstRanks:
    """Gives every rank the first one's buffers: running means and the like, which forward passes change.

    Those that no state dict has are tables, as of rotary embeddings: nobody changes them, and they may be large. They were
    made equal when the model was prepared.

    Args:
        model: Its buffers.
        broadcast: Gives a tensor the first rank's values, in place.
    """

    def __init__(self, model: nn.Module, broadcast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._broadcast = broadcast
        # By name: a forward pass may put another tensor in a buffer's place.
        self._places = [
            (module, name)
            for module in model.modules()
            for name in module._buffers  # noqa: SLF001 - torch has no other way to ask which of them are saved
            if name not in module._non_persistent_buffers_set  # noqa: SLF001
        ]

    @torch.no_grad()
    def take_over(self) -> None:
        """Share them; all ranks together."""
        found = (getattr(module, name) for module, name in self._places)
        there = [local(buffer) for buffer in found if buffer is not None and not buffer.is_meta]
        for part in in_parts(there):
            flat = self._broadcast(torch.cat([buffer.reshape(-1) for buffer in part]))
            for buffer, values in zip(part, torch.split(flat, [some.numel() for some in part]), strict=True):
                buffer.copy_(values.view_as(buffer))


class Untraced(Buffers):
    """The hooks, where the compiler stops: it cannot follow what goes between processes."""

    before = _untraced(Buffers.before)
    after = _untraced(Buffers.after)
