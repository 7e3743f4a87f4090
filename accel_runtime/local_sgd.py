"""Local SGD: every process trains for itself, and now and then their weights are averaged."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import Self

from accel_runtime.collectives import reduce

if TYPE_CHECKING:
    from accel_runtime.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """A block in which gradients stay with each process, and weights are averaged every few steps.

    Trainable parameters are averaged in one collective. Buffers, such as the running statistics of
    a batch norm, and the states of optimizers stay each process's own.

    Args:
        accelerator: Which processes.
        model: A prepared model.
        local_sgd_steps: Optimizer steps between two averages.
        enabled: False trains as without it.

    Raises:
        ValueError: `local_sgd_steps` is below 1.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps must be at least 1; it is {local_sgd_steps}")
        self.enabled = enabled and accelerator.use_distributed
        """Whether there is anything to average."""
        self.num_steps = 0
        """Steps taken in the block."""
        self._accelerator = accelerator
        self._model = model
        self._every = local_sgd_steps
        self._local = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._local.enter_context(self._accelerator.no_sync(self._model))
        return self

    def step(self) -> None:
        """Count an optimizer step; the weights are averaged where it is due."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            self._average()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._local.close()
        # After an exception nobody knows whether the others come here too.
        if self.enabled and kind is None:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        weights = [p.detach() for p in self._model.parameters() if p.requires_grad]
        backend = self._accelerator._backend  # noqa: SLF001 - `Accelerator.reduce` compares lines of the script
        means = reduce(weights, "mean", backend, compare_lines=False)
        for own, mean in zip(weights, means, strict=True):
            own.copy_(mean)
