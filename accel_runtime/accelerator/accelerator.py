"""The `Accelerator`: the facade over the parts of a run, with the documentation of its methods."""

from __future__ import annotations

import gc
import logging
import operator
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from accel_runtime.accelerator.checkpointing import Checkpointing, LoadHook, SaveHook
from accel_runtime.accelerator.description import Description, describe_run
from accel_runtime.accelerator.exports import Exports
from accel_runtime.accelerator.options import Arguments, RunOptions
from accel_runtime.accelerator.preparation import Preparation
from accel_runtime.accelerator.run import Run
from accel_runtime.accelerator.state import AcceleratorState, GradientState, ProcessMethods
from accel_runtime.accelerator.training_steps import PREEMPTION, TrainingSteps
from accel_runtime.backends import connect, find_accelerator, known_backend, register_accelerator, tensors
from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.single import DetachedBackend
from accel_runtime.checkpoint.project_checkpoints import Checkpoints, RunOrigin
from accel_runtime.checks.result_order import check_result_order
from accel_runtime.collectives.signatures import collective
from accel_runtime.data import metrics
from accel_runtime.data.loader import PreparedLoader, skip_first_batches
from accel_runtime.environment.settings import NODE_NAME, MixedPrecision, Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.export import objects
from accel_runtime.foundation.keywords import check_keywords_of_methods
from accel_runtime.foundation.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    changed_fields,
)
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.monitoring.profiling import ProfileKwargs, profiled
from accel_runtime.monitoring.rates import RateMeter
from accel_runtime.observe.call_sites import call_site
from accel_runtime.observe.heartbeat import Heartbeat, enable_progress, heartbeat
from accel_runtime.parallel.big_modeling import describe_dispatch
from accel_runtime.parallel.node_loading import NodeLoading
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.tracking import GeneralTracker, Trackers
from accel_runtime.training.accumulation import MicroBatch
from accel_runtime.training.compile import DynamoBackend, TorchDynamoPlugin
from accel_runtime.training.memory import release_memory
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.scheduler import PreparedScheduler

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel_runtime.parallel.plugins import FullyShardedDataParallelPlugin, ParallelismConfig

__all__ = ["Accelerator", "DetachedAccelerator"]

_LOG = logging.getLogger("accel_runtime.environment")
_OPTIONS_LOG = MultiProcessAdapter(logging.getLogger("accel_runtime.options"))

_T1 = TypeVar("_T1")
_T2 = TypeVar("_T2")
_T3 = TypeVar("_T3")
_T4 = TypeVar("_T4")
_T5 = TypeVar("_T5")
_Data = TypeVar("_Data")
_Model = TypeVar("_Model", bound=nn.Module)
_Model2 = TypeVar("_Model2", bound=nn.Module)
_Placement = Sequence[bool | None] | None


@check_keywords_of_methods
class Accelerator(ProcessMethods):
    """Run a training loop on any number of processes and devices.

    Args:
        device_placement: Move models in `prepare`, and batches in loaders, to the device.
        split_batches: Treat the batch size of a loader as the global one, and split it over the processes.
        mixed_precision: `no`, `bf16` or `fp16`; None takes the value of the launcher, else `no`.
        gradient_accumulation_steps: The number of micro-batches per optimizer step.
        cpu: Compute on the CPU, even if other devices are available.
        dataloader_config: How loaders are sharded.
        log_with: Trackers, by name, class or instance, one or a list; `all` means every installed tracker.
        project_dir: The directory of the project, or a URL such as `s3://bucket/run`.
        project_config: The same and more options, as an object.
        rng_types: Generators whose state each rank copies from rank 0 at every epoch: `torch`, `cuda`, `xpu`, `xla`.
            `generator` is accepted without an effect, because the order of loaders is always the same on all ranks.
        step_scheduler_with_optimizer: Step prepared schedulers with their optimizers; with False the script steps them.
        kwargs_handlers: At most one each of `AutocastKwargs`, `DistributedDataParallelKwargs`, `GradScalerKwargs`,
            `InitProcessGroupKwargs` and `ProfileKwargs`.
        gradient_accumulation_plugin: Options of accumulation; replaces `gradient_accumulation_steps`.
        global_batch_size: The samples of an optimizer step over all processes, in place of `gradient_accumulation_steps`. Loaders have
            the micro-batch of one process that fits into memory; each step has the samples that one process would have, in the
            same order and with the same weights, whatever the number of processes and the batch size.
        dynamo_backend: The backend of `torch.compile` to compile models with.
        dynamo_plugin: Options of compilation; replaces `dynamo_backend`.
        dispatch_batches: The same as this field of `dataloader_config`.
        parallelism_config: The sizes of the parallel dimensions; the profile sets those that are not given.
        fsdp_plugin: How models are sharded; the profile sets the options that are not given.
        deepspeed_plugin: Options of DeepSpeed, one object or several by name, of which the first is selected; the profile
            sets the options that are not given.
        deepspeed_plugins: The same as `deepspeed_plugin`.
        fp16: The same as `mixed_precision="fp16"` (True) or `"no"` (False).
        throughput: If given, `log` adds the samples and tokens per second of all ranks since its last call, and model FLOP/s and
            MFU with `measure_flops` in the profile, as `throughput/samples_per_s`, `throughput/tokens_per_s`, `throughput/flops_per_s` and
            `throughput/mfu`. Tokens are the elements of `input_ids` in batches of prepared loaders with True, of another tensor
            with its key, or the number that a function returns for a batch of this rank.

    Raises:
        ValueError: If options contradict each other, the device does not support an option, or an environment variable is
            invalid.
        RuntimeError: If the requested device is not available.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the signature scripts know
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: MixedPrecision | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        rng_types: Iterable[str] | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        global_batch_size: int | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        dispatch_batches: bool | None = None,
        parallelism_config: ParallelismConfig | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        deepspeed_plugin: Any = None,
        deepspeed_plugins: Any = None,
        fp16: bool | None = None,
        throughput: str | Callable[[Any], int] | Literal[True] | None = None,
    ) -> None:
        if throughput is not None:
            enable_progress()
        options = RunOptions(
            Arguments(
                mixed_precision=mixed_precision,
                fp16=fp16,
                cpu=cpu,
                device_placement=device_placement,
                gradient_accumulation_steps=gradient_accumulation_steps,
                gradient_accumulation_plugin=gradient_accumulation_plugin,
                global_batch_size=global_batch_size,
                dynamo_backend=dynamo_backend,
                dynamo_plugin=dynamo_plugin,
                dataloader_config=dataloader_config,
                split_batches=split_batches,
                dispatch_batches=dispatch_batches,
                rng_types=rng_types,
                step_scheduler_with_optimizer=step_scheduler_with_optimizer,
                kwargs_handlers=kwargs_handlers,
                parallelism_config=parallelism_config,
                fsdp_plugin=fsdp_plugin,
                engine_plugin=_choose_plugin(deepspeed_plugin, deepspeed_plugins),
                project_config=project_config,
                throughput=throughput,
            ),
            os.environ,
        )
        topology, group_options = Topology.from_env(os.environ), options.get_kwargs(InitProcessGroupKwargs)
        before = known_backend()
        self._use_backend(connect(options.settings, topology, group_options))
        self._run = run = Run.build(options, self._backend)
        options.project.place(project_dir)
        self._trackers = Trackers(log_with, options.project.logs, self._backend.topology)
        self._steps = TrainingSteps(run)
        if options.settings.measure_flops and not isinstance(heartbeat(), Heartbeat):
            _OPTIONS_LOG.warning(
                "measure_flops has no effect: accel launch counts the operations, and has not started this process."
            )
        progress = heartbeat() if options.logs_rates else None
        self._rates = None if progress is None else RateMeter(progress, self._backend.topology.world_size)
        self._checkpoints = Checkpointing(
            run,
            RunOrigin.from_env(os.environ),
            os.environ.get(NODE_NAME) or socket.gethostname(),
            self._steps.is_stopping,
        )
        self._loading = NodeLoading(run.backend, run.strategy, lambda: run.meta_models)
        self._preparation = Preparation(
            run, self._loading, self._checkpoints.reserve_staging, self._checkpoints.check_shared_directory
        )
        self._exports = Exports(run)
        options.complete(self.num_processes)
        self._state = AcceleratorState.of(run)
        self._compare_precision(before)
        self._number = register_accelerator(self, self._state)
        for sentence in options.accelerate.idle if self.is_main_process else ():
            _warn_once(sentence)

    def _compare_precision(self, before: Backend | None) -> None:
        """Report another number format than that of the `Accelerator` of the backend before, which Accelerate does not allow."""
        if self._find_other_precision(before):
            # It may be garbage, as after a training in a function.
            gc.collect()
        if other := self._find_other_precision(before):
            _OPTIONS_LOG.warning(
                "This Accelerator computes with mixed_precision %r, and the one before it with %r. If that is not meant, pass the "
                "same mixed_precision to both, or set it for the launch: accel launch --mixed-precision.",
                self.mixed_precision,
                other,
            )

    def _find_other_precision(self, before: Backend | None) -> str:
        """Return the number format of the newest living `Accelerator`; empty if it is the same, or of an earlier run."""
        other: Accelerator | None = find_accelerator()
        if other is None or other._run.backend is not before:  # noqa: SLF001 - of this class
            return ""
        return other.mixed_precision if other.mixed_precision != self.mixed_precision else ""

    # Preparation -------------------------------------------------------------------------

    # One line for each order of arguments that scripts have: docs/design/types.md.
    # fmt: off
    @overload
    def prepare(self, a: _Model, /, *, device_placement: _Placement = ...) -> _Model: ...
    @overload
    def prepare(self, a: Optimizer, /, *, device_placement: _Placement = ...) -> PreparedOptimizer: ...
    @overload
    def prepare(self, a: DataLoader[_Data], /, *, device_placement: _Placement = ...) -> PreparedLoader[_Data]: ...
    @overload
    def prepare(self, a: LRScheduler, /, *, device_placement: _Placement = ...) -> PreparedScheduler: ...
    @overload
    def prepare(self, a: _T1, /, *, device_placement: _Placement = ...) -> _T1: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer]: ...
    @overload
    def prepare(self, a: _T1, b: DataLoader[_Data], /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedLoader[_Data]]: ...
    @overload
    def prepare(self, a: _T1, b: _T2, /, *, device_placement: _Placement = ...) -> tuple[_T1, _T2]: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, c: DataLoader[_Data], /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer, PreparedLoader[_Data]]: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, c: _T3, /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer, _T3]: ...
    @overload
    def prepare(self, a: _T1, b: _T2, c: _T3, /, *, device_placement: _Placement = ...) -> tuple[_T1, _T2, _T3]: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, c: DataLoader[_Data], d: _T4, /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer, PreparedLoader[_Data], _T4]: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, c: LRScheduler, d: DataLoader[_Data], /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer, PreparedScheduler, PreparedLoader[_Data]]: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, c: _T3, d: _T4, /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer, _T3, _T4]: ...
    @overload
    def prepare(self, a: _Model, b: _Model2, c: Optimizer, d: Optimizer, /, *, device_placement: _Placement = ...) -> tuple[_Model, _Model2, PreparedOptimizer, PreparedOptimizer]: ...
    @overload
    def prepare(self, a: _T1, b: _T2, c: _T3, d: _T4, /, *, device_placement: _Placement = ...) -> tuple[_T1, _T2, _T3, _T4]: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, c: DataLoader[_Data], d: _T4, e: _T5, /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer, PreparedLoader[_Data], _T4, _T5]: ...
    @overload
    def prepare(self, a: _T1, b: Optimizer, c: _T3, d: _T4, e: _T5, /, *, device_placement: _Placement = ...) -> tuple[_T1, PreparedOptimizer, _T3, _T4, _T5]: ...
    @overload
    def prepare(self, a: _Model, b: _Model2, c: Optimizer, d: Optimizer, e: DataLoader[_Data], /, *, device_placement: _Placement = ...) -> tuple[_Model, _Model2, PreparedOptimizer, PreparedOptimizer, PreparedLoader[_Data]]: ...
    @overload
    def prepare(self, a: _Model, b: _Model2, c: Optimizer, d: DataLoader[_Data], e: _T5, /, *, device_placement: _Placement = ...) -> tuple[_Model, _Model2, PreparedOptimizer, PreparedLoader[_Data], _T5]: ...
    @overload
    def prepare(self, a: _T1, b: _T2, c: _T3, d: _T4, e: _T5, /, *, device_placement: _Placement = ...) -> tuple[_T1, _T2, _T3, _T4, _T5]: ...
    @overload
    def prepare(self, *objects: Any, device_placement: _Placement = ...) -> Any: ...
    # fmt: on
    @collective("objects", "device_placement")
    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the devices, precision and processes of the run.

        Args:
            *objects: In any order, also nested in lists, tuples and dicts. Other objects, and objects that are
                prepared already, are returned unchanged. A warning names others that are used like one of the four.
            device_placement: For every object, whether it is moved to the device; None means the option of the
                `Accelerator`.

        Returns:
            The prepared objects in the same order; for one object, the object itself.

        Raises:
            MismatchError: If the ranks prepare different objects: another dataset length, batch size, sampler, dtype, ...
            ValueError: If a loader cannot be sharded exactly, `len(device_placement) != len(objects)`, the loss scaler
                cannot train the parameters, or the results are assigned in another order.
        """
        if len(objects) > 1:
            check_result_order()
        prepared = self._preparation.prepare(objects, device_placement)
        self._steps.replay_new_models()
        return prepared

    def prepare_model(
        self, model: _Model, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> _Model:
        """Move a model to the device, wrap its forward pass in autocast, and average its gradients over the processes.

        Args:
            model: The model of the script.
            device_placement: Move the model; None means the option of the `Accelerator`.
            evaluation_mode: Do not average gradients, because the model is never trained.

        Raises:
            ValueError: If fp16 loss scaling is used with trainable float16 parameters, or a model on the meta device is
                not sharded.
        """
        prepared = self._preparation.prepare_model(model, device_placement, is_trained=not evaluation_mode)
        self._steps.replay_new_models()
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Wrap an optimizer so that it steps at the end of accumulation cycles and uses the loss scaler.

        Args:
            optimizer: The optimizer of the script.
            device_placement: Move existing state to the devices of the parameters; None means the option of the
                `Accelerator`.

        Raises:
            ValueError: If fp16 loss scaling is used with trainable float16 parameters.
        """
        return self._preparation.prepare_optimizer(optimizer, device_placement)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[_Data],
        device_placement: bool | None = None,
        *,
        data: Literal["global", "sharded"] = "global",
    ) -> PreparedLoader[_Data]:
        """Shard a loader: each process gets its slice of every global batch.

        Args:
            data_loader: The loader of the script.
            device_placement: Move batches to the device; None means the option of the `Accelerator`.
            data: `sharded` if the loader contains the data of its own process only, for example with a
                `DistributedSampler`; its batches are not sharded again.

        Raises:
            TypeError: If it is not a `DataLoader`.
            ValueError: If the loader cannot be sharded exactly, or `data` has another value.
        """
        return self._preparation.prepare_data_loader(data_loader, device_placement, data)

    def skip_first_batches(self, dataloader: DataLoader[_Data], num_batches: int = 0) -> DataLoader[_Data]:
        """Return a loader that skips the first batches of every epoch; see `accel_runtime.skip_first_batches`.

        Args:
            dataloader: A prepared loader; or an unprepared one over a map-style dataset.
            num_batches: The number of batches to skip.

        Raises:
            ValueError: If the number is negative, or the loader of an iterable dataset is not prepared.
        """
        return skip_first_batches(dataloader, num_batches)

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Wrap a scheduler so that it advances by the samples of all processes, at optimizer steps only."""
        return self._preparation.prepare_scheduler(scheduler)

    def describe(self) -> Description:
        """Return a description of the run: processes, precision, models, loaders, and the origin of each option.

        `print` shows text, `rich.print` a panel; `as_dict()` returns data.
        """
        return describe_run(self._run)

    # Training ----------------------------------------------------------------------------

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
        self._steps.backward(loss, weight, options)

    def forward_backward(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run the forward pass of a prepared model, and the backward pass of its loss as `backward` does.

        It is `loss = loss_fn(model(inputs), targets)` and `backward(loss, weight)`, unless the strategy of the run runs both
        passes itself: a pipeline splits the rows, and runs parts of them through its stages. All processes that share the
        parts of a model pass the same rows.

        Args:
            model: A model that `prepare` returned.
            inputs: Arguments of the model for one micro-batch, each `[n, ...]`: one, a tuple or list of positional ones, or
                a dict by name.
            targets: The second argument of `loss_fn`, for the same rows; a pipeline needs a tensor `[n, ...]`.
            loss_fn: Returns the mean loss over rows, a scalar `[]`, for outputs of the model and targets. A pipeline calls it
                for parts of the rows, and averages the results: rows must count equally.
            weight: The weight of the loss, as in `backward`.

        Returns:
            The loss, detached: `[]`. In a pipeline it is the mean over all rows on the last stage, and None on the others.

        Raises:
            StallError: As `backward`.
            ValueError: As `backward`; or the model is not prepared.
        """
        return self._steps.forward_backward(model, inputs, targets, loss_fn, weight)

    def check_replay(self, every: int = 100) -> None:
        """Run the passes of one in `every` micro-batches again, and warn about results that differ.

        Before that forward pass of each prepared model in training mode, its forward and backward pass run twice, from the same
        inputs, parameters, buffers and states of random number generators. The warning names the rank, the device, the host, and
        the first module whose output, or parameter whose gradient, differs; a third pass, and two with
        `torch.use_deterministic_algorithms`, tell a nondeterministic kernel from silent corruption where this is possible. The
        training stays the same to the bit. Call it after `prepare`; a later call replaces an earlier one.

        The gradients are those of a fixed function of the outputs, without loss and exchange. A model that is compiled is
        replayed without `torch.compile`.

        Args:
            every: The number of forward passes of which the first is checked; that adds two forward and two backward passes to it.

        Raises:
            ValueError: `every` is less than 1, no model is prepared, or the strategy of the run has no whole models on each rank.
        """
        self._steps.check_replay(every)

    def accumulate(self, *models: nn.Module) -> MicroBatch:
        """Return the context of one micro-batch; gradients synchronize and optimizers step at the end of a cycle.

        A micro-batch that fails before its backward pass is not counted. The micro-batches that follow complete a cycle that
        `break` leaves incomplete.

        Args:
            *models: The prepared models used inside; none means all.
        """
        return self._steps.accumulate(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Skip gradient averaging in the backward passes of `model` inside the context."""
        return self._steps.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients in the next backward pass inside the context, even if the forward pass ran in `no_sync`."""
        return self._steps.trigger_sync_in_backward(model)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Shard every sequence over the context- or sequence-parallel ranks inside the context; attention stays exact.

        Without these (`cp` and `sp` are 1), nothing changes. Run the forward and the backward pass inside; attention
        must be `torch.nn.functional.scaled_dot_product_attention`, as in torch's own layers.

        Args:
            buffers: Tensors with a sequence dimension: inputs, labels, positions. They are sharded in place.
            buffer_seq_dims: The sequence dimension of each buffer.
            no_restore_buffers: Buffers that stay sharded at the end.

        Raises:
            ValueError: If the arguments do not match, a sequence length is not divisible, or a kind of attention would see
                only a shard.
        """
        return self._steps.shard_sequences(buffers, buffer_seq_dims, no_restore_buffers)

    context_parallel = maybe_context_parallel

    def gather_sequence(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return full sequences from the shards of `maybe_context_parallel`, with gradients.

        Args:
            tensor: The result for a shard, of equal shape on all ranks that split the sequence.
            dim: The sequence dimension.

        Raises:
            ValueError: If the tensor has no such dimension.
        """
        return self._steps.gather_sequence(tensor, dim)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the run, for operations outside of prepared models.

        Args:
            autocast_handler: Options that replace those of the run.
        """
        return self._steps.autocast(autocast_handler)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; fp16 gradients of all optimizers are unscaled first.

        Gradients are clipped only at the end of an accumulation cycle; before, they are incomplete.

        Returns:
            The norm before clipping, without the fp16 scale, a scalar.
        """
        return self._run.gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp gradients to `[-clip_value, clip_value]`; fp16 gradients are unscaled first.

        Gradients are clipped only at the end of an accumulation cycle; before, they are incomplete.
        """
        self._run.gradients.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the fp16 loss scale at the end of an accumulation cycle.

        Args:
            optimizer: One or several prepared optimizers; None means all.

        Raises:
            ValueError: If an optimizer is not prepared.
        """
        self._run.gradients.unscale(optimizer)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
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
        return self._steps.join_uneven_inputs(joinables, even_batches)

    def set_trigger(self) -> None:
        """Set the trigger on this process, for example to stop all processes."""
        self._steps.set_trigger()

    @collective()
    def check_trigger(self) -> bool:
        """Return whether any process has set the trigger, and reset it on all processes.

        All processes must call it equally often.
        """
        return self._steps.check_trigger()

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
        return self._steps.preempted(signals)

    # Collectives -------------------------------------------------------------------------

    def gather(self, tensor: _T1) -> _T1:
        """Return the tensors of all processes, concatenated along the first dimension; see `tensors.gather`."""
        return tensors.gather(tensor, self._run.backend)

    def reduce(self, tensor: _T1, reduction: Reduction = "sum", scale: float = 1.0) -> _T1:
        """Return the tensors of all processes, combined element by element; see `tensors.reduce`."""
        return tensors.reduce(tensor, reduction, self._run.backend, scale)

    def pad_across_processes(
        self, tensor: _T1, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> _T1:
        """Pad tensors to the largest length of all processes; see `tensors.pad_across_processes`."""
        return tensors.pad_across_processes(tensor, self._run.backend, dim, pad_index, pad_first)

    @collective("input_data", "batch")
    def gather_for_metrics(
        self, input_data: _T1, use_gather_object: bool = False, *, batch: Any = None
    ) -> _T1:
        """Gather the results of the current step without padding: every sample once, in the order of the dataset.

        Args:
            input_data: Tensors with an integer number of rows per sample, also nested; or lists of objects, one per sample.
            use_gather_object: Send tensors as objects too: for lists of tensors of different shapes, one per sample.
            batch: The batch of the results, if several loaders are iterated together (`zip`).

        Raises:
            ValueError: If the rows of a tensor do not match the batch.
            MismatchError: If the data of the processes differ in structure, dtype or trailing shape.
        """
        steps = self._run.loops.find_steps(input_data, batch)
        samples: _T1 = metrics.gather_samples(
            input_data, steps, self._run.backend, as_objects=use_gather_object
        )
        return samples

    # Checkpoints -------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints with automatic names, to list, find and verify them."""
        return self._checkpoints.checkpoints

    @collective("output_dir", "safe_serialization", "async_save")
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool | None = None,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> str:
        """Save a checkpoint with the full training state; after a failure, no incomplete checkpoint exists.

        The checkpoint contains models, optimizers, schedulers, the loss scaler, loaders, registered objects, random number
        generators, and the gradients of an incomplete accumulation cycle. All processes must call it. If some do not call
        it and continue training, the first process that does call it saves without them; a warning lists the missing state.
        Sharded models cannot be saved without all processes.

        Args:
            output_dir: The directory of the checkpoint, or a URL such as `s3://bucket/run`; an existing checkpoint is replaced
                when the new one is complete. None with `automatic_checkpoint_naming`.
            safe_serialization: Must be True: a checkpoint contains safetensors and JSON files only.
            async_save: Return when the state is copied, and write in the background. The next optimizer step, the next
                save, `wait_for_checkpoint` or the end of the script raises the error of a failed write.
                None means the option of `ProjectConfiguration`.
            on_error: "warn" logs the error of a failed save, and training goes on; the previous checkpoint is kept.

        Returns:
            The directory of the checkpoint, or its URL; an empty string if the save failed and `on_error` is "warn".

        Raises:
            CheckpointError: If a process cannot write the checkpoint (the previous one is kept), an object cannot be
                saved, the last background write failed, or models are sharded and not all processes call it.
            StallError: If a process does not call it in time.
            ValueError: If there is no directory, `on_error` is unknown, or `safe_serialization=False`.
        """
        return self._checkpoints.save_state(
            output_dir, safe_serialization, async_save=async_save, on_error=on_error
        )

    @collective("input_dir", "load_kwargs")
    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
    ) -> Checkpoint:
        """Load a checkpoint of `save_state`, on any number of processes; prepare all objects before.

        All checksums are verified before any state changes. A loader restarts the epoch of the checkpoint in the same
        order, so that the script can skip the batches it has trained on, with `skip_first_batches` or by itself. After the
        last batch of an epoch, it starts the next epoch. `resume` continues after the last batch without skipping, and so
        does this method with `DataLoaderConfiguration(use_stateful_dataloader=True)`.

        Args:
            input_dir: The directory of a checkpoint, also one of Accelerate, or a URL; None means the newest complete checkpoint.
            load_kwargs: Must be empty; exists for scripts written for Accelerate.
            strict: Require that the checkpoint and the prepared objects match exactly. With False, a warning lists the
                state that is not loaded.

        Returns:
            The checkpoint; its `manifest` contains step, time and more.

        Raises:
            CheckpointError: If no checkpoint is found, or it is damaged or does not match; no state was changed.
            ValueError: If there is no directory and checkpoints have no automatic names, or `load_kwargs` are passed.
        """
        return self._checkpoints.load_state(input_dir, load_kwargs, strict=strict)

    @collective("input_dir")
    def resume(self, input_dir: str | os.PathLike[str] | None = None) -> Checkpoint | None:
        """Load a checkpoint and continue exactly after the last batch before it; prepare all objects before.

        Each loader continues after the last batch it yielded, so the script skips nothing: `for epoch in
        range(loader.epoch, epochs)`. If that was the last batch of an epoch, the loop over the loader ends
        immediately, and the code after the epoch runs.

        Args:
            input_dir: The directory of a checkpoint, or a URL. None means a checkpoint with an automatic name: with
                `accel launch --resume` the newest; otherwise the newest of this run, after a restart of its processes or
                a requeue by Slurm.

        Returns:
            The checkpoint; None if no directory is passed and there is nothing to resume.

        Raises:
            CheckpointError: As for `load_state`; or if checkpoints exist and none is complete.
            ValueError: If there is no directory, and checkpoints have no automatic names or the project has no directory.
            RuntimeError: Within a loop over a prepared loader, which would go on with its own batches.
        """
        return self._checkpoints.resume(input_dir)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete.

        Raises:
            CheckpointError: If it cannot be written.
        """
        self._checkpoints.wait_for_checkpoint()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in the checkpoints of `save_state`, in this order.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`; the state consists of numbers, text, tensors, lists
                and dicts.

        Raises:
            ValueError: If an object lacks one of the methods.
        """
        self._checkpoints.register_for_checkpointing(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every process before a state is saved.

        The hook may change the lists: models whose weights are removed are not saved. Files written into `output_dir`, a
        temporary directory, become part of the checkpoint.

        Returns:
            A handle; its `remove()` removes the hook.
        """
        return self._checkpoints.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every process before a state is loaded; models removed from the list are not.

        Returns:
            A handle; its `remove()` removes the hook.
        """
        return self._checkpoints.register_load_state_pre_hook(hook)

    # Export ------------------------------------------------------------------------------

    def unwrap_model(
        self, model: _Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> _Model:
        """Return the module of the script, with its original parameter names.

        `DataParallel` and `DistributedDataParallel` wrappers that the script added are removed, too.

        Args:
            model: A prepared model, or any module.
            keep_fp32_wrapper: If False, remove autocast from the forward pass.
            keep_torch_compile: If False, remove `torch.compile`.
        """
        return self._exports.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model is on several devices, or offloaded, by `device_map` or by hooks of Accelerate.

        `prepare` leaves such a model where it is on one process, and raises ValueError on several.
        """
        return bool(describe_dispatch(model))

    @collective("model")
    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, everywhere: bool = False
    ) -> dict[str, Any]:
        """Return the full state of a model.

        For a replicated model, the result is available on every process, with its dtypes and devices. For a sharded model,
        the main process gets full tensors on the CPU, gathered one by one, and the others an empty dict; all processes must
        call it.

        Args:
            model: A prepared model, or any module.
            unwrap: Use the parameter names of the script. With False, names begin with `module.` if the model is wrapped in
                `DistributedDataParallel`.
            everywhere: Return the full state of a sharded model on every process.
        """
        return self._exports.get_state_dict(model, unwrap, everywhere=everywhere)

    @collective("model")
    def gathered(self, model: _Model) -> AbstractContextManager[_Model]:
        """Gather the parameters of a sharded model on every process inside the context, for generation or export.

        Parameters are plain full tensors in the dtype of the computation. A forward pass needs no communication, so each
        process may call the model any number of times. At the end, also after an exception, every process has its shards
        again; changes of the full tensors are lost. Layers sharded by `tp` stay sharded, with a warning. A model that is not
        sharded does not change.

        Args:
            model: A prepared model.

        Returns:
            A context manager that yields the model. All processes must enter and exit it.

        Raises:
            RuntimeError: If an optimizer steps inside the context.
        """
        return self._exports.gathered(model)

    @collective("model", "save_directory", "safe_serialization")
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export the weights of a model as safetensors, in the layout of the Hugging Face Hub.

        The files are `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
        `model.safetensors.index.json`. They are verified against the model before they get their names. Tied weights are
        written once. A sharded model is gathered tensor by tensor: the writing process holds the tensors of one file in
        memory. The main process writes; with `ProjectConfiguration(save_on_each_node=True)` the first process of every
        node. All processes must call it, and return when the files are complete. If some continue training instead, the
        first process that calls it writes; for a sharded model, that is an error.

        Args:
            model: A prepared model, or any module.
            save_directory: The directory, created if missing, or a URL such as `s3://bucket/model`. Weights of an earlier
                export are replaced.
            max_shard_size: The maximum size of a file: `"500MB"`, `"10GB"`, `"2GiB"`, or a number of bytes. A larger
                tensor gets a separate file.
            safe_serialization: Must be True.

        Raises:
            ValueError: If the size is invalid, or `safe_serialization=False`.
            CheckpointError: On every process, if the files cannot be written or differ from the model, or the format does
                not support a tensor of the model.
        """
        self._exports.save_model(model, save_directory, max_shard_size, safe_serialization)

    def loading(self) -> AbstractContextManager[None]:
        """Load the models that the block creates once on each node; all processes run the block.

        The first process of each node runs it as it is. The others create parameters on the meta device, and `from_pretrained`
        and `torch.load` read no values there. `prepare` (or `prepare_model`) sends the values within the node, one tensor at a
        time, and the first process frees each tensor of a sharded model once it is sent. The values of the first process are
        those of all: of parameters, buffers, and weights that no file has. Before it is prepared, a model has values on the first
        process of each node only; elsewhere its forward pass raises an error.

        Code in the block must not compute with the values of weights. On one process the block runs as it is.

        Raises:
            RuntimeError: On every process, if the block fails on one; the message names the rank, its node, and the file.
            ValueError: The strategy of the run, such as DeepSpeed, loads models in its own way.
        """
        return self._loading.load()

    @collective("model", "directory")
    def load_model(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        """Load weights of `save_model`, or of another writer of the same layout, into a model.

        Every process reads; for a sharded model, only its own shards. Names, shapes and dtypes are checked on all processes
        before any weight changes; values are converted to the dtypes of the model. A model on the meta device is
        materialized, and its optimizers stay valid.

        Args:
            model: A prepared model, or any module.
            directory: The directory of `save_model`, a safetensors file, or the index of several; or the URL of one.

        Raises:
            CheckpointError: On every process, if no weights are found, or they are damaged or do not match the model.
        """
        self._exports.load_model(model, directory)

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object on the main process; a path is replaced atomically.

        With `ProjectConfiguration(save_on_each_node=True)` the first process of every node writes. The other processes
        do not wait.

        Args:
            obj: An object that `torch.save` supports; tensors by name with `safe_serialization`.
            f: A path, or an open binary file.
            safe_serialization: Write safetensors; `f` must then be a path. Tensors that share memory, such as tied
                weights, are written under each of their names.

        Raises:
            ValueError: On every process, if a tensor is sharded.
        """
        self._exports.save(obj, f, safe_serialization)

    def load(
        self, f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, *, weights_only: bool = True
    ) -> Any:
        """Read a file of `save`, in either format, on the calling process, without running code in it.

        Args:
            f: A path, or an open binary file.
            map_location: The device for tensors, or another value that `torch.load` accepts; None means the CPU.
            weights_only: Must be True.

        Raises:
            CheckpointError: If the file is missing or damaged, or contains objects that need code to be loaded; the
                message explains how to convert it.
            ValueError: If `weights_only=False`, which would run code in the file.
        """
        return objects.load(f, map_location, weights_only=weights_only)

    # Project, trackers and profiles ------------------------------------------------------

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Return the directory of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Path | None:
        """Return the directory of tracker files."""
        return self.project_configuration.logs

    @property
    def save_iteration(self) -> int:
        """Return the number of the next checkpoint with an automatic name."""
        return self.project_configuration.iteration

    @property
    def log_with(self) -> list[str]:
        """Return the names of the requested trackers."""
        return [choice.name for choice in self._trackers.chosen]

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Return the trackers that record on this process."""
        return self._trackers.active

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers; a tracker that fails to start causes a warning and records nothing.

        Args:
            project_name: The name of the project, run or experiment.
            config: The configuration of the run, which trackers store; values that look like secrets are masked.
            init_kwargs: Arguments by the name of the tracker, such as `{"wandb": {"tags": ["a"]}}`.

        Raises:
            RuntimeError: If the trackers are running already.
            ValueError: If there are arguments for a tracker that `log_with` does not contain, or that the script created.
        """
        self._trackers.begin(project_name, config, init_kwargs)
        if self._run.recorder is not None and isinstance(config, Mapping):
            self._run.recorder.write_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name; on processes that do not record, its methods do nothing.

        Args:
            name: The name in `log_with`.
            unwrap: Return the object that the tracker wraps, such as the run of wandb.

        Raises:
            ValueError: If `log_with` contains other trackers, but not this one.
        """
        return self._trackers.find(name, unwrap=unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values with every tracker; the first failure of a tracker causes a warning and no error.

        With `Accelerator(throughput=...)`, the throughput since the last call is added to the values.

        `accel launch` also records numbers and text of the main process in its run folder, with and without trackers.

        Args:
            values: Numbers or text by name; also tensors of one element, and other objects that a tracker supports.
            step: The step of the values.
            log_kwargs: Arguments by the name of the tracker.

        Raises:
            TypeError: If `values` is not a mapping, or `step` not an integer.
            ValueError: If there are arguments for a tracker that `log_with` does not contain.
        """
        if self._rates is not None and isinstance(values, Mapping):
            values = {**values, **self._rates.measure()}
        self._trackers.log(values, step, log_kwargs)
        if self._run.recorder is not None:
            self._run.recorder.record_metrics(values, step if step is None else operator.index(step))

    def end_training(self) -> None:
        """Finish the trackers, and destroy the process group if no other `Accelerator` uses it."""
        self._trackers.end()
        self._run.backend.close()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Return a context that profiles the operations inside.

        Args:
            profile_handler: Options that replace those of `kwargs_handlers`.
        """
        return profiled(profile_handler or self.profile_handler or ProfileKwargs(), self._run.backend)

    # Configuration -----------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """Return the settings of the launcher, with those of the arguments."""
        return self._run.options.settings

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Return the directories of the project."""
        return self._run.options.project

    @project_configuration.setter
    def project_configuration(self, _: ProjectConfiguration) -> None:
        raise RuntimeError(
            "Cannot set Accelerator.project_configuration: the directories of the project are in use. Pass "
            "Accelerator(project_config=...), or assign to its fields."
        )

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Return the configuration of loaders; assigned fields take effect for loaders prepared later."""
        return self._run.options.loaders

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        prepared = self._run.prepared
        self._run.options.set_loaders(config, are_prepared=bool(prepared.loaders or prepared.schedulers))

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """Return the DDP arguments for models prepared later; None means the defaults of torch."""
        return self._run.options.handlers.get(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        options = {} if handler is None else changed_fields(handler)
        self._run.strategy.check_options(options, self.mixed_precision)
        self._run.options.set_handler("ddp_handler", DistributedDataParallelKwargs, handler)
        if options and self.use_distributed and self._run.prepared.models:
            _OPTIONS_LOG.warning(
                "Accelerator.ddp_handler, assigned at %s, has no effect on %d model(s) that are prepared already. "
                "Assign it before prepare().",
                call_site(),
                len(self._run.prepared.models),
            )

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """Return the autocast arguments; None means the defaults of torch."""
        return self._run.options.handlers.get(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._run.options.set_handler("autocast_handler", AutocastKwargs, handler)
        self._run.precision.set_autocast(self._run.options.get_kwargs(AutocastKwargs))

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """Return the arguments of `profile()`; None means the defaults of torch."""
        return self._run.options.handlers.get(ProfileKwargs)

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._run.options.set_handler("profile_handler", ProfileKwargs, handler)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """Return the arguments of the loss scaler; None means the defaults of torch."""
        return self._run.options.handlers.get(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """Return the arguments of `init_process_group`; None means those of the profile."""
        return self._run.options.handlers.get(InitProcessGroupKwargs)

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Return the sizes of the parallel dimensions; None if only parameters are sharded or nothing is."""
        config: ParallelismConfig | None = self._state.parallelism_config
        return config

    # State -------------------------------------------------------------------------------

    @property
    @override
    def distributed_type(self) -> DistributedType:
        """Return the kind of distribution, with that of the models: `NO`, `MULTI_GPU`, `FSDP`, ..."""
        return self._state.distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Return whether models are sharded by torch's `fully_shard`."""
        return self.settings.parallel.shards

    is_composable_parallelism_enabled = is_fsdp2

    @property
    def torch_device_mesh(self) -> Any:
        """Return the device mesh of the dimensions larger than one; None if models are replicated."""
        return self._run.backend.mesh if self._run.strategy.mesh is not None else None

    @property
    def tensor_parallel_rank(self) -> int:
        """Return the tensor-parallel rank of this process, from 0."""
        return self._run.backend.grid.coordinate(self.process_index, "tensor")

    @property
    def context_parallel_rank(self) -> int:
        """Return the rank of this process among those that split a sequence by `cp` or `sp`, from 0."""
        return self._run.backend.grid.coordinate(self.process_index, "sequence")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Return the rank of this process among those that shard parameters, from 0."""
        return self._run.backend.grid.coordinate(self.process_index, "shard")

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Return the number format of the run: `no`, `bf16` or `fp16`."""
        return self.settings.mixed_precision

    @property
    def use_fp16(self) -> bool:
        """Return whether the number format is fp16."""
        return self.mixed_precision == "fp16"

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the loss scaler of fp16; None in other formats."""
        return self._run.precision.scaler

    @property
    def split_batches(self) -> bool:
        """Return whether the batch size of a loader is the global one."""
        return self._run.options.loaders.split_batches

    @property
    def even_batches(self) -> bool:
        """Return whether the last global batch is padded; an assignment takes effect for loaders prepared later."""
        return self._run.options.loaders.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._run.options.loaders.even_batches = even_batches

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches per optimizer step; with `global_batch_size`, those of the first prepared loader."""
        return self._run.count_micro_batches()

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._run.accumulation.set_steps(steps)

    @property
    def sync_gradients(self) -> bool:
        """Return whether the current backward pass completes an accumulation cycle."""
        return self._run.accumulation.synced

    @sync_gradients.setter
    def sync_gradients(self, synced: bool) -> None:
        self._run.accumulation.set_synced(synced)

    @property
    def step(self) -> int:
        """Return the number of micro-batches of `accumulate` since the last epoch end; an assignment sets the count."""
        return self._run.accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._run.accumulation.set_step(step)

    @property
    def should_save_model(self) -> bool:
        """Return whether this process writes models: the main process; with `save_on_each_node` the first of each node."""
        each = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each else self.is_main_process

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether the last step of any prepared optimizer was skipped because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._run.prepared.optimizers)

    @property
    def multi_device(self) -> bool:
        """Return whether there are several processes, each with its own GPU or other accelerator device."""
        return self.use_distributed and self.device.index is not None

    @property
    def native_amp(self) -> bool:
        """Return whether autocast is enabled."""
        return self.mixed_precision != "no"

    @property
    def deepspeed_plugin(self) -> Any:
        """Return the selected options of DeepSpeed; None without DeepSpeed."""
        return self._state.deepspeed_plugin

    @property
    def state(self) -> AcceleratorState:
        """Return the process topology, number format and plugins as one object."""
        return self._state

    @property
    def gradient_state(self) -> GradientState:
        """Return the state of gradient accumulation and of the current batch."""
        return GradientState.of(self._number, self._run.accumulation, self._run.loops)

    @property
    def dispatch_batches(self) -> bool | None:
        """Return whether the main process reads batches for all."""
        return self._run.options.loaders.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Return whether shuffled orders depend on a seed and the epoch number only."""
        return self._run.options.loaders.use_seedable_sampler

    @property
    def device_placement(self) -> bool:
        """Return whether `prepare` moves models, and loaders move batches, to the device."""
        return self._run.options.device_placement

    @property
    def rng_types(self) -> list[str]:
        """Return the generators whose state every rank copies from rank 0 at each epoch."""
        return list(self._run.options.rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Return whether prepared schedulers advance with their optimizers; otherwise the script steps them."""
        return self._run.options.step_with_optimizer

    @property
    def non_blocking(self) -> bool:
        """Return whether copies to the device overlap with computation."""
        return self._run.options.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Return whether `load_state` resumes loaders after their last batch; every prepared loader has a state."""
        return self._run.options.loaders.use_stateful_dataloader

    # Private names of Accelerate's class that published scripts read -----------------------

    @property
    def _models(self) -> list[nn.Module]:
        return self._run.prepared.models

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        return self._run.prepared.optimizers

    @property
    def _schedulers(self) -> list[PreparedScheduler]:
        return self._run.prepared.schedulers

    # Cleanup -----------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop all prepared objects and release memory, for example between two trainings.

        Args:
            *objects: Objects to drop; assign the result: `model, loader = accelerator.free_memory(model, loader)`.

        Returns:
            None for each object.
        """
        self._run.prepared.clear()
        self._run.gradients.clear()
        self._run.checks.clear()
        self._run.accumulation.reset()
        return release_memory(*objects)

    clear = free_memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return the same object, so that objects that refer to an accelerator can be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._number, self.settings, self._state)


class DetachedAccelerator(Accelerator):
    """Unpickled `Accelerator` in a process that is not a rank, with the properties of the rank that pickled it.

    Args:
        number: The number of the pickled `Accelerator` among those of its rank.
        settings: Its settings.
        state: Its state.
    """

    def __init__(self, number: int, settings: Settings, state: AcceleratorState) -> None:
        self._number, self._settings, self._state = number, settings, state
        self._backend = state._backend  # noqa: SLF001 - the other half of one object

    @property
    @override
    def settings(self) -> Settings:
        """Return the settings of the launcher, with those of the arguments."""
        return self._settings

    def __getattr__(self, name: str) -> Any:
        # Attributes that the constructor of Accelerator assigns.
        if name.startswith("_") and not name.startswith("__"):
            raise DetachedBackend.of(self._backend).build_error()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _unpickle(number: int, settings: Settings, state: AcceleratorState) -> Accelerator:
    """Return the `Accelerator` of this process with the number of the pickled one, else a detached one."""
    accelerator: Accelerator | None = find_accelerator(number)
    return DetachedAccelerator(number, settings, state) if accelerator is None else accelerator


@cache
def _warn_once(sentence: str) -> None:
    """Log a warning once per process."""
    _LOG.warning("%s", sentence)


def _choose_plugin(plugin: Any, plugins: Any) -> Any:
    if plugin is not None and plugins is not None:
        raise ValueError("Pass either deepspeed_plugin or deepspeed_plugins, not both.")
    return plugin if plugin is not None else plugins
