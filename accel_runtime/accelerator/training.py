"""Backward passes, gradients, uneven inputs, the trigger and preemption signals of an `Accelerator`."""

from __future__ import annotations

import logging
import signal
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from accel_runtime.accelerator.properties import AcceleratorProperties
from accel_runtime.collectives.calls import collective
from accel_runtime.collectives.handshake import Handshake, build_writer, call_at_site
from accel_runtime.foundation.heartbeat import call_site, heartbeat
from accel_runtime.foundation.options import AutocastKwargs
from accel_runtime.training.accumulation import MicroBatch

__all__ = ["Preemption", "TrainingMethods"]

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they end a job."""
_MASK = struct.Struct("=Q")
_LOG = logging.getLogger("accel_runtime.training.gradients")


class Preemption:
    """Preemption signals received by any rank.

    No handler is installed before the first call of `check`. From then on a handler records the requested signals, and calls
    the handler that the script had or installs later.

    Args:
        handshake: Combines the signals of all ranks.
    """

    def __init__(self, handshake: Handshake) -> None:
        self._handshake = handshake
        self._received = 0
        self._agreed = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], None]] = {}

    def check(self, signals: Iterable[int]) -> bool:
        """Return whether any rank has received one of these signals; True stays True.

        Raises:
            ValueError: If a signal cannot be handled, or the first call is not made in the main thread.
            MismatchError: If the ranks call it at different lines, or for different signals.
        """
        requested = sorted({signal.Signals(number) for number in signals})
        for number in requested:
            self._install_handler(number)
        mask = sum(_bit(number) for number in requested)
        if not self._agreed & mask:
            self._agreed |= self._exchange(", ".join(number.name for number in requested))
        return bool(self._agreed & mask)

    def _exchange(self, names: str) -> int:
        """Return the mask of the signals received by any rank."""
        if self._handshake.size == 1:
            return self._received
        result = self._handshake.exchange(
            call_at_site(f"preempted for {names}"),
            _MASK.size,
            lambda buffer: _MASK.pack_into(buffer, 0, self._received),
        )
        received = 0
        for rank in range(self._handshake.size):
            received |= _MASK.unpack(result.view(rank))[0]
        return received

    def _install_handler(self, number: signal.Signals) -> None:
        """Install a handler that records the signal, unless it is the current one."""
        current = signal.getsignal(number)
        if number in self._handlers and current is self._handlers[number]:
            return
        # Python's own handler would raise KeyboardInterrupt before the state is saved.
        chained = current if callable(current) and current is not signal.default_int_handler else None

        def record(received: int, frame: FrameType | None) -> None:
            self._received |= _bit(received)
            if chained:
                chained(received, frame)

        try:
            signal.signal(number, record)
        except ValueError:
            # Replicas of torch_xla also run outside the main thread; their launcher permits handlers there.
            raise ValueError(
                "preempted() cannot install signal handlers: this is not the main thread. Make the first call in the main "
                "thread."
            ) from None
        except OSError:
            raise ValueError(
                f"preempted() cannot handle {number.name}: the operating system reserves it. Choose another signal."
            ) from None
        self._handlers[number] = record


def _bit(number: int) -> int:
    # Signals are numbered from 1 to 64.
    return 1 << (number - 1)


class TrainingMethods(AcceleratorProperties):
    """Methods of `Accelerator` for losses, gradients, uneven inputs, the trigger and preemption."""

    _preemption: Preemption
    _triggered = False

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **options: Any
    ) -> None:
        """Run `loss.backward(**options)`, with the loss divided by the accumulation steps and scaled in fp16.

        Args:
            loss: The mean over this micro-batch, a scalar.
            weight: The number of items (samples, tokens) over which the loss is the mean, a number or a scalar tensor.
                The gradient of an accumulation cycle is then the mean over all items of all its micro-batches on all
                processes, and the loss is not divided by the steps. With weight 0 the loss may be nan: it adds
                zeros. Either all losses of a cycle have a weight, or none.
            **options: Arguments of `torch.Tensor.backward`.

        Raises:
            StallError: If another rank does not reach the averaging of gradients; the message lists the position of each
                rank.
            ValueError: If a weight is negative or infinite (checked for numbers and CPU tensors only, to avoid waiting for
                the device), or only some losses of a cycle have weights.
        """
        is_distributed, progress, averages, loss_scale = self._is_distributed, self._progress, False, 1.0
        if is_distributed:
            if (step := self._loops.model_step) is not None:
                loss_scale = step.loss_scale
            self._averaging_check.begin_backward()
            if progress is not None:
                averages = self._accumulation.averages_gradients
                progress.backward(averages)
        try:
            if weight is None and not options and self._gradients.begin_plain_backward(loss_scale):
                self._strategy.backward(loss, options)
            else:
                self._gradients.backward(loss, weight, loss_scale, options)
        except RuntimeError as error:
            if (explained := self._strategy.explain_error(error, "backward()")) is not error:
                raise explained from error
            raise
        if is_distributed:
            if progress is not None and averages:
                progress.restart_own_time()
            self._averaging_check.end_backward()
            self._replica_check.count_backward()

    def accumulate(self, *models: nn.Module) -> MicroBatch:
        """Return the context of one micro-batch; gradients synchronize and optimizers step at the end of a cycle.

        A micro-batch that fails before its backward pass is not counted. The micro-batches that follow complete a cycle that
        `break` leaves incomplete.

        Args:
            *models: The prepared models used inside; none means all.
        """
        step = self._loops.current_step
        is_last = step is not None and step.is_last
        models = models or tuple(self._models)
        if self._accumulation.record_models(models) and self._backend.topology.rank == 0:
            _LOG.warning(
                "accumulate() at %s has other models than the micro-batch before it in the same accumulation cycle: the calls "
                "for all models are counted together, so some models are never trained, or are trained on partial gradients. Call it once "
                "for each micro-batch, with all models: accumulate(first, second).",
                call_site(),
            )
        return MicroBatch(self._accumulation, is_last=is_last, no_sync=self._strategy.no_sync, models=models)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Skip gradient averaging in the backward passes of `model` inside the context."""
        self._accumulation.no_sync_depth += 1
        try:
            with self._strategy.no_sync(model):
                yield
        finally:
            self._accumulation.no_sync_depth -= 1

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients in the next backward pass inside the context, even if the forward pass ran in `no_sync`."""
        self._averaging_check.expect_averaging(model)
        return self._strategy.sync_in_backward(model)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Shard every sequence over the context-parallel ranks inside the context; attention stays exact.

        Without context parallelism (`cp` is 1), nothing changes. Run the forward and the backward pass inside; attention
        must be `torch.nn.functional.scaled_dot_product_attention`, as in torch's own layers.

        Args:
            buffers: Tensors with a sequence dimension: inputs, labels, positions. They are sharded in place.
            buffer_seq_dims: The sequence dimension of each buffer.
            no_restore_buffers: Buffers that stay sharded at the end.

        Raises:
            ValueError: If the arguments do not match, a sequence length is not divisible, or a kind of attention would see
                only a shard.
        """
        from accel_runtime.parallel.context_parallel import shard_sequences  # noqa: PLC0415 - its imports are slow

        return shard_sequences(self._sequence_group, buffers, buffer_seq_dims, no_restore_buffers)

    context_parallel = maybe_context_parallel

    def gather_sequence(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return full sequences from the shards of `maybe_context_parallel`, with gradients.

        Args:
            tensor: The result for a shard, of equal shape on all context-parallel ranks.
            dim: The sequence dimension.

        Raises:
            ValueError: If the tensor has no such dimension.
        """
        from accel_runtime.parallel.context_parallel import gather_sequence  # noqa: PLC0415 - as above

        return gather_sequence(tensor, dim, self._sequence_group)

    @property
    def _sequence_group(self) -> dist.ProcessGroup | None:
        """Return the context-parallel process group, or None without one."""
        mesh = self._strategy.mesh
        return None if mesh is None or mesh.cp is None else mesh.cp.get_group()

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the run, for operations outside of prepared models.

        Args:
            autocast_handler: Options that replace those of the run.
        """
        self._bypass_check.record_autocast()
        return self._precision.autocast(None if autocast_handler is None else autocast_handler.to_kwargs())

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; fp16 gradients are unscaled first.

        Gradients are clipped only at the end of an accumulation cycle; before, they are incomplete.

        Returns:
            The norm before clipping, without the fp16 scale, a scalar.
        """
        return self._gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp gradients to `[-clip_value, clip_value]`; fp16 gradients are unscaled first.

        Gradients are clipped only at the end of an accumulation cycle; before, they are incomplete.
        """
        self._gradients.clip_value(parameters, clip_value)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by the fp16 loss scale at the end of an accumulation cycle.

        Args:
            optimizer: One or several prepared optimizers; None means all.

        Raises:
            ValueError: If an optimizer is not prepared.
        """
        self._gradients.unscale(optimizer)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Allow processes to have different numbers of batches inside the context; gradient averaging does not wait.

        DDP supports this on every device, the CPU too. All processes must still make all other collective calls of the
        loop. Sharded models and replicas of torch_xla cannot be joined: the call warns once, and only `even_batches` has an
        effect.

        Args:
            joinables: Prepared models.
            even_batches: If prepared loaders over indexed datasets pad their last global batch inside the context;
                None changes nothing. With True there is nothing to join.

        Raises:
            TypeError: If torch cannot join an object of `joinables`.
            ValueError: If a prepared loader cannot leave its last global batch without padding.
        """
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in list(self._loaders.values()):
                    stack.enter_context(loader.override_even_batches(even_batches=even_batches))
            joined = [item for item in joinables if not _is_frozen_module(item)]
            if joined and self.use_distributed and not even_batches:
                stack.enter_context(self._strategy.join(joined))
                self._replica_check.disable()
            yield
        if (progress := heartbeat()) is not None:
            progress.restart_counts()

    def set_trigger(self) -> None:
        """Set the trigger on this process, for example to stop all processes."""
        self._triggered = True

    @collective()
    def check_trigger(self) -> bool:
        """Return whether any process has set the trigger, and reset it on all processes.

        All processes must call it equally often.
        """
        triggered, self._triggered = self._triggered, False
        handshake = self._backend.handshake
        call = call_at_site("check_trigger", anywhere=True)
        result = handshake.exchange(call, 1, build_writer(bytes([triggered])))
        return any(result.view(rank)[0] for rank in range(handshake.size))

    @collective("signals")
    def preempted(self, signals: Iterable[signal.Signals | int] = PREEMPTION) -> bool:
        """Return whether any process has received a preemption signal; the result is the same on all processes.

        All processes must call it equally often: `if accelerator.preempted(): ...; break`. A call costs one small exchange
        on several processes, nothing on one. True stays True, so that outer loops see it too. The first call installs the
        signal handlers; before, signals act as they do without accel.

        Args:
            signals: The signals; by default those that schedulers send before they end a job.

        Raises:
            ValueError: If a signal cannot be handled, or the first call is not made in the main thread.
            MismatchError: If the processes call it at different lines, or with different signals.
        """
        return self._preemption.check(signals)


def _is_frozen_module(item: Any) -> bool:
    """Return whether an object is a module without trainable parameters, which no DDP wraps."""
    if isinstance(item, Joinable) or not isinstance(item, nn.Module):
        return False
    return not any(parameter.requires_grad for parameter in item.parameters())
