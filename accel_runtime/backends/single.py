"""One process: every verb is an identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.exchange.agreement import Wire
from accel_runtime.kinds import DistributedType
from accel_runtime.topology import Topology

__all__ = ["Single"]


class _Nobody(Wire):
    """Reaches all others: none."""

    @override
    def swap(self, slot: memoryview, where: Callable[[], str]) -> bytearray:
        return bytearray(slot)

    @override
    def transfer(
        self,
        outgoing: Mapping[int, torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        where: Callable[[], str],
    ) -> None:
        return None


class Single(Backend):
    """The backend of a process that is alone."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        super().__init__(topology, device, _Nobody())
        self._words: dict[str, str] = {}
        self._turns: Counter[str] = Counter()

    @override
    def apart(self) -> Callable[[Any], list[Any]]:
        return lambda item: [item]

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

    @property
    @override
    def kind(self) -> DistributedType:
        return DistributedType.NO

    @property
    @override
    def name(self) -> str | None:
        return None

    @override
    def post(self, key: str, text: str) -> None:
        self._words[key] = text

    @override
    def posted(self, key: str) -> str | None:
        return self._words.get(key)

    @override
    def turn(self, key: str) -> int:
        self._turns[key] += 1
        return self._turns[key]

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
    def leave(self) -> None:
        return None

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()
