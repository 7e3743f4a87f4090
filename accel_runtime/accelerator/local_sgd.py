"""Local SGD: processes train independently, and their weights are averaged every few steps."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from accel_runtime.backends.tensors import reduce
from accel_runtime.foundation.keywords import check_keywords_of

if TYPE_CHECKING:
    from accel_runtime.accelerator.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """Context in which gradients stay local, and weights are averaged every few steps.

    Trainable parameters are averaged in one collective. Buffers, such as the running statistics of a batch norm, and
    the states of optimizers stay local.

    Args:
        accelerator: The accelerator of the run.
        model: A prepared model.
        local_sgd_steps: The number of optimizer steps between two averages.
        enabled: If true, train locally; False trains as without the context.

    Raises:
        ValueError: `local_sgd_steps` is below 1, or the run has a `global_batch_size`.
    """

    @check_keywords_of
    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"Invalid local_sgd_steps={local_sgd_steps}: expected at least 1.")
        if enabled and (size := accelerator._run.accumulation.global_batch_size) is not None:  # noqa: SLF001 - a part of the Accelerator
            raise ValueError(
                f"LocalSGD cannot train with global_batch_size={size}: each process takes optimizer steps by itself, with the samples "
                "of one process. Use gradient_accumulation_steps, or train without LocalSGD."
            )
        self.enabled = enabled and accelerator.use_distributed
        """True if weights are averaged."""
        self.num_steps = 0
        """Number of steps in the context."""
        self._accelerator = accelerator
        self._model = model
        self._interval = local_sgd_steps
        self._no_sync = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._accelerator._run.checks.allow_different_weights()  # noqa: SLF001 - a part of the Accelerator
            self._no_sync.enter_context(self._accelerator.no_sync(self._model))
        return self

    def step(self) -> None:
        """Count an optimizer step, and average the weights if it is due."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._interval == 0:
            self._average()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._no_sync.close()
        # After an exception, the other ranks may not get here.
        if self.enabled and kind is None:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        weights = [p.detach() for p in self._model.parameters() if p.requires_grad]
        backend = self._accelerator._backend  # noqa: SLF001 - `Accelerator.reduce` compares lines of the script
        means = reduce(weights, "mean", backend, compare_lines=False)
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean)
