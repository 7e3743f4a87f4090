"""The half of the facade that a script meets in its loop: from a loss to gradients fit for a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_runtime.accumulation import Accumulation, MicroBatch
from accel_runtime.averaging_check import AveragingCheck
from accel_runtime.backends import Backend
from accel_runtime.data.loops import Loops
from accel_runtime.gradients import Gradients
from accel_runtime.heartbeat import Progress
from accel_runtime.options import AutocastKwargs
from accel_runtime.parallel.context import divided, gathered
from accel_runtime.precision import Precision

__all__ = ["InTheLoop"]


class InTheLoop:
    """What `Accelerator` does to losses and gradients."""

    _accumulation: Accumulation
    _averaging_check: AveragingCheck
    _backend: Backend
    _loops: Loops
    _gradients: Gradients
    _models: list[nn.Module]
    _precision: Precision
    _progress: Progress | None

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **options: Any
    ) -> None:
        """`loss.backward(**options)`: divided by the accumulation steps, scaled in fp16.

        Args:
            loss: The mean over this micro-batch, a scalar.
            weight: Over how many items (samples, tokens) the loss is the mean, a number or a scalar tensor.
                The gradient of a window is then the mean over all items of all its micro-batches on all
                processes, and the loss is not divided by the steps. With weight 0 the loss may be nan: it adds
                zeros. Give every loss of a window a weight, or none.
            **options: Arguments of `torch.Tensor.backward`.

        Raises:
            StallError: Another rank does not come to the averaging of gradients; the message tells where all are.
            ValueError: A negative or infinite weight (seen for numbers and tensors on the CPU; a tensor on the
                device is not waited for), or losses with and without weights in one window.
        """
        factor = self._factor()
        self._averaging_check.begin_backward()
        if self._progress is not None:
            self._progress.backward()
        try:
            if weight is None and self._gradients.plain(factor):
                loss.backward(**options)  # type: ignore[no-untyped-call]
            else:
                self._gradients.backward(loss, weight, factor, options)
        except RuntimeError as error:
            if (told := self._backend.explain(error, "backward()")) is not error:
                raise told from error
            raise
        self._averaging_check.end_backward()

    def _factor(self) -> float:
        """What this process's mean loss counts for at this step."""
        share = self._loops.computed
        return 1.0 if share is None else share.factor

    def accumulate(self, *models: nn.Module) -> MicroBatch:
        """One micro-batch: gradients synchronise, and optimizers step, where a window is complete.

        A micro-batch that fails before its backward pass is not counted. A window that `break` leaves open is
        completed by the micro-batches that follow.

        Args:
            *models: The prepared models at work; none means all.
        """
        share = self._loops.current
        last = share is not None and share.last
        return MicroBatch(
            self._accumulation, last=last, no_sync=self._backend.no_sync, models=models or self._models
        )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, backward passes of `model` keep their gradients to this process."""
        self._accumulation.held += 1
        try:
            with self._backend.no_sync(model):
                yield
        finally:
            self._accumulation.held -= 1

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the next backward pass averages gradients, though the forward pass ran in `no_sync`."""
        self._averaging_check.expect_average(model)
        return self._backend.sync_in_backward(model)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Inside, this process has its part of every sequence, and attention is exact over the whole of it.

        Where sequences are not divided (`cp` is 1), nothing changes. Forward and backward pass belong inside; attention
        has to be `torch.nn.functional.scaled_dot_product_attention`, as in torch's own layers.

        Args:
            buffers: Tensors with a dimension for the sequence: inputs, labels, positions. They are cut in place.
            buffer_seq_dims: For each, which dimension that is.
            no_restore_buffers: Those of them that stay cut at the end.

        Raises:
            ValueError: The arguments do not fit each other, a sequence cannot be divided equally, or a kind of attention
                that would see a part only.
        """
        return divided(self._sequence_group, buffers, buffer_seq_dims, no_restore_buffers)

    context_parallel = maybe_context_parallel

    def gather_sequence(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole sequences out of the parts that `maybe_context_parallel` divided them into, with their gradients.

        Args:
            tensor: What was computed from a part, of equal shape on all processes that divide the sequence.
            dim: The dimension of the sequence.

        Raises:
            ValueError: There is no such dimension.
        """
        return gathered(tensor, dim, self._sequence_group)

    @property
    def _sequence_group(self) -> dist.ProcessGroup | None:
        """The processes that divide sequences; None where none are divided."""
        mesh = self._backend.mesh
        return None if mesh is None or mesh.cp is None else mesh.cp.get_group()

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The context in which operations outside a prepared model run in the chosen format.

        Args:
            autocast_handler: Options in place of those of the run.
        """
        return self._precision.autocast(None if autocast_handler is None else autocast_handler.to_kwargs())

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; fp16 gradients are unscaled first.

        Inside a window that is not complete nothing is clipped: the gradients are not whole yet.

        Returns:
            The norm before, without the fp16 scale, a scalar.
        """
        return self._gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp gradients to `[-clip_value, clip_value]`; fp16 gradients are unscaled first.

        Inside a window that is not complete nothing is clipped: the gradients are not whole yet.
        """
        self._gradients.clip_value(parameters, clip_value)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide the fp16 scale out of gradients, where the window is complete.

        Args:
            optimizer: Whose gradients, one or several; None is every prepared optimizer.

        Raises:
            ValueError: An optimizer that is not prepared.
        """
        self._gradients.unscale(optimizer)
