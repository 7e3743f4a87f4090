"""Backward passes, accumulation, uneven inputs, the trigger and preemption signals of a run."""

from __future__ import annotations

import logging
import signal
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from accel_runtime.accelerator.run import Run
from accel_runtime.checks.replay import ReplayCheck
from accel_runtime.collectives.handshake import Handshake, build_writer, call_at_site
from accel_runtime.data.epoch_ends import EpochEnds
from accel_runtime.data.global_batches import GlobalBatches
from accel_runtime.environment.layouts import name_dimension
from accel_runtime.foundation.module_names import uncompiled_module
from accel_runtime.foundation.options import AutocastKwargs
from accel_runtime.observe.call_sites import call_site
from accel_runtime.observe.heartbeat import Heartbeat, heartbeat
from accel_runtime.parallel.strategy import ScaleLoss, TrainingPass
from accel_runtime.training.accumulation import MicroBatch

__all__ = ["PREEMPTION", "Preemption", "TrainingSteps"]

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they end a job."""
_MASK = struct.Struct("=Q")
_LOG = logging.getLogger("accel_runtime.training.gradients")
_NEEDS_RANKS = (
    "a pass of this run needs other ranks, since models are sharded or split or have SyncBatchNorm, or it compiles a program. Check the "
    "model in a run with whole models on each rank."
)


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

    @property
    def is_agreed(self) -> bool:
        """Return whether a call of `check` has returned True; the same on all ranks."""
        return self._agreed != 0

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


class TrainingSteps:
    """The steps of a training loop; see the methods of `Accelerator` with these names.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._accumulation, self._strategy, self._checks = run.accumulation, run.strategy, run.checks
        self._global_batches = (
            None
            if run.accumulation.global_batch_size is None
            else GlobalBatches(run.loops, run.accumulation, run.backend.topology.rank)
        )
        self._is_distributed = run.backend.topology.world_size > 1
        self._splits_later = run.backend.grid.size("sequence") > 1
        """True if sequences are to be split, and were not yet."""
        self._find_loss_scale = run.loops.find_loss_scale if self._is_distributed else None
        """Returns the weight of this rank's mean loss; None if it is always 1."""
        if self._global_batches is not None:
            self._find_loss_scale = self._global_batches.begin_backward
        self._compiles_programs = run.backend.runtime.static_shapes
        """True if the weight of a loss must be data, as a constant would become part of a program."""
        self._scales_losses = run.precision.scaler is not None
        self._combines_gradients = run.strategy.combines_gradients
        self._progress = heartbeat()
        self._preemption = Preemption(run.backend.handshake)
        self._triggered = False
        self._epoch_ends = EpochEnds(run.loops, run.accumulation, self._report_tail)
        self._reported_tail = False
        self._replays: list[ReplayCheck] = []
        every = run.options.settings.check_replay
        self._replay_every = 0 if every == "never" else every
        """The number of the settings; 0 if passes are not replayed, or the script has chosen them itself."""

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None, options: dict[str, Any]
    ) -> None:
        """Run the backward pass of a loss."""
        accumulation, checks, loss_scale = self._accumulation, self._checks, 1.0
        if self._progress is not None:
            self._progress.backwards += 1
        if self._find_loss_scale is not None:
            loss_scale = self._find_loss_scale()
        if weight is None and self._run.loops.has_weights:
            weight = self._run.loops.find_weight()
        if checks.is_active:
            checks.begin_backward()
            if self._splits_later:
                self._report_full_sequences()
        try:
            if (
                weight is None
                and not options
                and (loss_scale == 1.0 or (loss_scale and not self._compiles_programs))
                and not self._scales_losses
                and accumulation.begin_plain_backward()
            ):
                steps, scaled = (
                    accumulation.plugin.num_steps,
                    loss if loss_scale == 1.0 else loss * loss_scale,
                )
                self._strategy.backward(scaled if steps == 1 else scaled / steps, options)
            else:
                self._run.gradients.backward(loss, weight, loss_scale, options)
        except RuntimeError as error:
            if (explained := self._strategy.explain_error(error, "backward()")) is not error:
                raise explained from error
            raise
        if accumulation.num_backward >= checks.next_pass:
            checks.end_backward(loss, weight)

    def forward_backward(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        weight: float | torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run the forward pass of a prepared model, and the backward pass of its loss; return the loss."""
        original = uncompiled_module(model)
        if not any(original is uncompiled_module(prepared) for prepared in self._run.prepared.models):
            raise ValueError(
                f"forward_backward() failed: the {type(model).__name__} is not prepared. Pass the model that prepare() returned."
            )

        def run_backward(
            dtype: torch.dtype, run: Callable[[ScaleLoss], torch.Tensor | None]
        ) -> torch.Tensor | None:
            loss: torch.Tensor | None = None
            # No forward pass of the prepared model has recorded them yet.
            by_name = isinstance(inputs, Mapping)
            self._run.loops.model_inputs(model, () if by_name else (inputs,), inputs if by_name else {})
            loss_scale = 1.0 if self._find_loss_scale is None else self._find_loss_scale()
            items = (
                self._run.loops.find_weight() if weight is None and self._run.loops.has_weights else weight
            )
            if self._progress is not None:
                self._progress.backwards += 1
            if self._checks.is_active:
                self._checks.begin_backward()

            def run_once(scale: ScaleLoss) -> None:
                nonlocal loss
                loss = run(scale)

            try:
                self._run.gradients.run_backward(dtype, items, loss_scale, run_once)
            except RuntimeError as error:
                if (explained := self._strategy.explain_error(error, "forward_backward()")) is not error:
                    raise explained from error
                raise
            if self._accumulation.num_backward >= self._checks.next_pass:
                self._checks.end_backward(loss, items)
            return loss

        training_pass = TrainingPass(
            model, inputs, targets, loss_fn, lambda loss: self.backward(loss, weight, {}), run_backward
        )
        return self._strategy.forward_backward(training_pass)

    def check_replay(self, every: int) -> None:
        """Replay the passes of one in `every` micro-batches of the models that are prepared."""
        if every < 1:
            raise ValueError(
                f"Invalid every={every} of check_replay(): expected a number of passes. Pass 1 or more."
            )
        models = self._run.prepared.models
        if not models:
            raise ValueError("check_replay() failed: no model is prepared. Call it after prepare().")
        if not self._can_replay():
            raise ValueError(f"check_replay() failed: {_NEEDS_RANKS}")
        for check in self._replays:
            check.remove()
        self._replays, self._replay_every = [], 0
        for model in models:
            self._replay(model, every)

    def replay_new_models(self) -> None:
        """Replay passes of models that were prepared since the last call, if the settings of the run have it."""
        if not self._replay_every:
            return
        models = self._run.prepared.models
        if models and isinstance(self._progress, Heartbeat):
            self._progress.confirm_replays()
        if models and not self._can_replay():
            self._replay_every = 0
            if self._run.backend.topology.rank == 0:
                _LOG.warning("check_replay has no effect: %s", _NEEDS_RANKS)
            return
        for model in models:
            if all(check.prepared is not model for check in self._replays):
                self._replay(model, self._replay_every)

    def _can_replay(self) -> bool:
        """Return whether a rank can repeat a pass without the others."""
        strategy, backend, models = self._run.strategy, self._run.backend, self._run.prepared.models
        exchanges = backend.topology.world_size > 1 and any(
            isinstance(part, nn.SyncBatchNorm) for model in models for part in model.modules()
        )
        return not (strategy.shards_models or backend.runtime.static_shapes or exchanges)

    def _replay(self, model: nn.Module, every: int) -> None:
        run = self._run
        self._replays.append(ReplayCheck(model, run.strategy.unwrap_model(model), run.backend, every))

    def accumulate(self, models: tuple[nn.Module, ...]) -> MicroBatch:
        """Return the context of one micro-batch."""
        run = self._run
        accumulation = run.accumulation
        models = models or tuple(run.prepared.models)
        if accumulation.record_models(models) and run.backend.topology.rank == 0:
            _LOG.warning(
                "accumulate() at %s has other models than the micro-batch before it in the same accumulation cycle: the calls "
                "for all models are counted together, so some models are never trained, or are trained on partial gradients. Call it once "
                "for each micro-batch, with all models: accumulate(first, second).",
                call_site(),
            )
        plugin = accumulation.plugin
        if self._global_batches is not None:
            is_last = self._global_batches.is_end()
        elif plugin.num_steps == 1:
            step = run.loops.current_step
            is_last = step is not None and step.is_last
        else:
            is_last = plugin.sync_with_dataloader and self._epoch_ends.is_end()
        combined = models if self._combines_gradients else ()
        return MicroBatch(accumulation, is_last=is_last, no_sync=run.strategy.no_sync, models=combined)

    def _report_tail(self) -> None:
        """Warn once about a cycle that continues in another loop."""
        if self._reported_tail or self._run.backend.topology.rank:
            return
        self._reported_tail = True
        counts = self._run.accumulation
        _LOG.warning(
            "accumulate() at %s continues an accumulation cycle of %d micro-batches of which the loop before it trained on %d "
            "only: it was left early, or its last batch was not used. Their gradients are part of the next optimizer "
            "step. Leave a loop after a multiple of %d micro-batches.",
            call_site(),
            counts.steps,
            counts.count,
            counts.steps,
        )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Skip gradient averaging inside the context."""
        self._run.accumulation.suspend_sync()
        try:
            with self._run.strategy.no_sync(model):
                yield
        finally:
            self._run.accumulation.resume_sync()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients in the next backward pass inside the context."""
        self._run.checks.expect_averaging(model)
        return self._run.strategy.sync_in_backward(model)

    def shard_sequences(
        self,
        buffers: list[torch.Tensor] | None,
        buffer_seq_dims: list[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """Shard sequences over the ranks that split them inside the context."""
        from accel_runtime.parallel.context_parallel import shard_sequences  # noqa: PLC0415 - its imports are slow

        self._splits_later = False
        form: Any = name_dimension(self._run.backend.grid, "sequence")
        return shard_sequences(self._sequence_group, buffers, buffer_seq_dims, no_restore_buffers, form)

    def _report_full_sequences(self) -> None:
        """Report a layout that splits sequences in a script that does not."""
        self._splits_later = False
        grid = self._run.backend.grid
        _LOG.warning(
            "Sequences are not split: %s is %d, and backward() at %s is not in maybe_context_parallel, so that each of these ranks "
            "computes full sequences. Train inside of accelerator.maybe_context_parallel(buffers=..., buffer_seq_dims=...).",
            name_dimension(grid, "sequence"),
            grid.size("sequence"),
            call_site(),
        )

    def gather_sequence(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return full sequences from shards."""
        from accel_runtime.parallel.context_parallel import gather_sequence  # noqa: PLC0415 - as above

        return gather_sequence(tensor, dim, self._sequence_group)

    @property
    def _sequence_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that split sequences, or None without one."""
        backend = self._run.backend
        return backend.get_group("sequence") if backend.grid.size("sequence") > 1 else None

    def autocast(self, autocast_handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        """Return the autocast context of the run."""
        if self._run.checks.is_active:
            self._run.checks.record_autocast()
        return self._run.precision.autocast(
            None if autocast_handler is None else autocast_handler.to_kwargs()
        )

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
        """Allow processes to have different numbers of batches inside the context."""
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self._run.prepared.loaders:
                    stack.enter_context(loader.override_even_batches(even_batches=even_batches))
            joined = [item for item in joinables if not _is_frozen_module(item)]
            if joined and self._is_distributed and not even_batches:
                stack.enter_context(self._run.strategy.join(joined))
                self._run.checks.allow_different_weights()
            yield
        if (progress := heartbeat()) is not None:
            progress.restart_counts()

    def set_trigger(self) -> None:
        """Set the trigger on this process."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether any process has set the trigger, and reset it on all processes; collective."""
        triggered, self._triggered = self._triggered, False
        handshake = self._run.backend.handshake
        call = call_at_site("check_trigger", anywhere=True)
        result = handshake.exchange(call, 1, build_writer(bytes([triggered])))
        return any(result.view(rank)[0] for rank in range(handshake.size))

    def preempted(self, signals: Iterable[signal.Signals | int]) -> bool:
        """Return whether any process has received one of these signals; collective."""
        return self._preemption.check(signals)

    def is_stopping(self) -> bool:
        """Return whether `preempted` has returned True; the same on all processes."""
        return self._preemption.is_agreed


def _is_frozen_module(item: Any) -> bool:
    """Return whether an object is a module without trainable parameters, which no DDP wraps."""
    if isinstance(item, Joinable) or not isinstance(item, nn.Module):
        return False
    return not any(parameter.requires_grad for parameter in item.parameters())
