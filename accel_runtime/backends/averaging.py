"""Gradients averaged at the end of a backward pass, on devices whose operations are recorded and run later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["Averaging"]


class Averaging:
    """What makes a model average its gradients over the replicas, where it stands for DDP.

    All gradients go together, once the last is there: the compiler of the device overlaps and joins the collectives of
    one graph by itself, so nothing is gained by buckets.

    Args:
        model: Its trainable parameters are those averaged.
        average: Makes gradients their mean over the replicas, in place.
    """

    def __init__(self, model: nn.Module, average: Callable[[Sequence[torch.Tensor]], None]) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._average = average
        self._held = 0
        self._due = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, gradients stay those of this replica."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside, gradients are averaged whatever `held` is around it."""
        held, self._held = self._held, 0
        try:
            yield
        finally:
            self._held = held

    @property
    def averages(self) -> bool:
        """Whether the backward passes that end now average."""
        return not self._held

    def _arrived(self, _: torch.Tensor) -> None:
        if self._held or self._due:
            return
        self._due = True
        # What DDP and FSDP do it with; nothing public is called at the end of a backward pass (torch 2.13).
        torch.autograd.Variable._execution_engine.queue_callback(self._complete)  # noqa: SLF001

    @torch.no_grad()
    def _complete(self) -> None:
        self._due = False
        self._average([parameter.grad for parameter in self._parameters if parameter.grad is not None])
