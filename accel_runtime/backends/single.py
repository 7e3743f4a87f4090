"""One process: every verb is an identity."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.base import Backend, Reduction

__all__ = ["Single"]


class Single(Backend):
    """The backend of a process that is alone."""

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    @override
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        return tensor.clone()

    @override
    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor

    @override
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    @override
    def all_gather_objects(self, item: Any) -> list[Any]:
        return [item]

    @override
    def broadcast_object(self, item: Any, source: int = 0) -> Any:
        return item

    @override
    def barrier(self) -> None:
        return None

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        return model

    @override
    def original(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()
