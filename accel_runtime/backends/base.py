"""The verbs through which one process speaks to the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from accel_runtime.topology import Topology

__all__ = ["Backend", "Reduction"]

Reduction = Literal["sum", "mean", "max", "min"]


class Backend(ABC):
    """How processes talk. One process is a backend too, so nobody else needs to ask how many there are."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        """Where this process stands."""
        self.device = device
        """The hardware this process computes on."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, stacked: `[...]` becomes `[world_size, ...]`; shapes must be equal."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """A new tensor, combined over the ranks element by element."""

    @abstractmethod
    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to add `tensor` up over the ranks, in place; what is returned waits for the sum and gives it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of rank `source`, written into `tensor` on every rank."""

    @abstractmethod
    def all_gather_objects(self, item: Any) -> list[Any]:
        """Every rank's picklable object, in rank order."""

    @abstractmethod
    def broadcast_object(self, item: Any, source: int = 0) -> Any:
        """The picklable object of rank `source`."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """The model, made to average its gradients over the ranks."""

    @abstractmethod
    def original(self, model: nn.Module) -> nn.Module:
        """The module that `replicate` was given."""

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward passes of a replicated model keep their gradients to themselves."""

    @abstractmethod
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the next backward pass averages gradients, though its forward pass ran in `no_sync`."""
