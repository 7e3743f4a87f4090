"""The `Accelerator`: its constructor, and its collectives, trackers and profiles."""

from __future__ import annotations

import logging
import operator
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet, WeakValueDictionary

from accel_runtime.accelerator.description import origins
from accel_runtime.accelerator.exporting import ExportMethods
from accel_runtime.accelerator.prepare import PrepareMethods
from accel_runtime.accelerator.properties import HANDLER_TYPES
from accel_runtime.accelerator.state import AcceleratorState
from accel_runtime.accelerator.training import Preemption, TrainingMethods
from accel_runtime.backends import connect, current_loops, find_accelerator, register_accelerator, tensors
from accel_runtime.backends.base import Reduction
from accel_runtime.backends.rng import parse_rng_types
from accel_runtime.backends.single import DetachedBackend
from accel_runtime.checkpoint.manager import ResumePolicy, RunOrigin
from accel_runtime.collectives.calls import collective
from accel_runtime.data import metrics
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.loader import check_model_parallel_ranks
from accel_runtime.data.prepare import check_loader_configuration
from accel_runtime.environment.settings import (
    NODE_NAME,
    Compile,
    MixedPrecision,
    Settings,
    accelerate_variables,
)
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.heartbeat import heartbeat
from accel_runtime.foundation.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    find_handlers,
)
from accel_runtime.foundation.precision import FORMATS
from accel_runtime.monitoring.profiling import ProfileKwargs, profiled
from accel_runtime.monitoring.recording import rank_recorder
from accel_runtime.monitoring.tracking import GeneralTracker, Trackers
from accel_runtime.parallel import choose_strategy
from accel_runtime.training.accumulation import Accumulation, AveragingCheck
from accel_runtime.training.bypass_check import BypassCheck
from accel_runtime.training.forward import DynamoBackend, Precision, TorchDynamoPlugin
from accel_runtime.training.gradients import Gradients
from accel_runtime.training.memory import release_memory
from accel_runtime.training.replica_check import ReplicaCheck

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel_runtime.environment.accelerate import Equivalent
    from accel_runtime.environment.settings import CompileMode
    from accel_runtime.parallel.plugins import FullyShardedDataParallelPlugin, ParallelismConfig

__all__ = ["Accelerator", "DetachedAccelerator"]

_LOG = logging.getLogger("accel_runtime.environment")


class Accelerator(PrepareMethods, TrainingMethods, ExportMethods):
    """Run a training loop on any number of processes and devices.

    Args:
        device_placement: Move models in `prepare`, and batches in loaders, to the device.
        split_batches: Treat the batch size of a loader as the global one, and split it over the processes.
        mixed_precision: `no`, `bf16` or `fp16`; None takes the value of the launcher, else `no`.
        gradient_accumulation_steps: The number of micro-batches per optimizer step.
        cpu: Compute on the CPU, even if other devices are available.
        dataloader_config: How loaders are sharded.
        log_with: Trackers, by name, class or instance, one or a list; `all` means every installed tracker.
        project_dir: The directory of the project.
        project_config: The same and more options, as an object.
        rng_types: Generators whose state each rank copies from rank 0 at every epoch: `torch`, `cuda`, `xpu`, `xla`.
            `generator` is accepted without an effect, because the order of loaders is always the same on all ranks.
        step_scheduler_with_optimizer: Step prepared schedulers with their optimizers; with False the script steps them.
        kwargs_handlers: At most one of each type in `accel_runtime.foundation.options`.
        gradient_accumulation_plugin: Options of accumulation; replaces `gradient_accumulation_steps`.
        dynamo_backend: The backend of `torch.compile` to compile models with.
        dynamo_plugin: Options of compilation; replaces `dynamo_backend`.
        dispatch_batches: The same as this field of `dataloader_config`.
        parallelism_config: The sizes of the parallel dimensions; the profile sets those that are not given.
        fsdp_plugin: How models are sharded; the profile sets the options that are not given.
        fp16: The same as `mixed_precision="fp16"` (True) or `"no"` (False).

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
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        dispatch_batches: bool | None = None,
        parallelism_config: ParallelismConfig | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        fp16: bool | None = None,
    ) -> None:
        launched, others = Settings.from_env(os.environ), accelerate_variables(os.environ)
        precision_argument = _parse_precision(mixed_precision, fp16=fp16)
        precision = precision_argument or launched.mixed_precision
        settings = replace(launched, mixed_precision=precision, device="cpu" if cpu else launched.device)
        self._initial_settings = self.settings = settings
        if parallelism_config is not None or fsdp_plugin is not None:
            from accel_runtime.parallel.plugins import merge_settings  # noqa: PLC0415 - slow to import

            self.settings = merge_settings(settings, parallelism_config, fsdp_plugin)
        self._handlers = find_handlers(kwargs_handlers, HANDLER_TYPES)
        options = {kind: handler.to_kwargs() for kind, handler in self._handlers.items()}
        group_options = options.get(InitProcessGroupKwargs, {})
        self._use_backend(connect(self.settings, Topology.from_env(os.environ), group_options))
        self._progress = heartbeat()
        self._recorder = rank_recorder(self._backend.topology.rank)
        self._strategy = choose_strategy(self._backend, self.settings)
        check_model_parallel_ranks(self._backend)
        self._strategy.check_options(self._ddp_options, precision)
        self._preemption = Preemption(self._backend.handshake)
        self.project_configuration = project_config or ProjectConfiguration()
        self.project_configuration.place(project_dir)
        self._trackers = Trackers(log_with, self.project_configuration.logs, self._backend.topology)
        autocast_options, scaler_options = (
            options.get(kind, {}) for kind in (AutocastKwargs, GradScalerKwargs)
        )
        self._precision = Precision(
            precision,
            self._backend.device,
            autocast_options,
            scaler_options,
            self._strategy.unscale_gradients,
        )
        self._accumulation = _build_accumulation(
            gradient_accumulation_steps, gradient_accumulation_plugin, others.arguments, settings
        )
        dynamo = _choose_one(("dynamo_backend", dynamo_backend, None), ("dynamo_plugin", dynamo_plugin, None))
        self._dynamo = _build_dynamo_plugin(dynamo, settings.compile)
        self.settings = replace(
            self.settings,
            gradient_accumulation_steps=self._accumulation.steps,
            compile=_read_dynamo_plugin(self._dynamo),
        )
        self._models, self._optimizers, self._schedulers = [], [], []
        self._loaders, self._loaders_prepared = WeakValueDictionary(), 0
        self.dataloader_config = _merge_loader_config(dataloader_config, split_batches, dispatch_batches)
        check_loader_configuration(self.dataloader_config)
        self._device_placement, self._rng_types = device_placement, parse_rng_types(rng_types)
        self._step_with_optimizer = step_scheduler_with_optimizer
        self._loops = ActiveLoops(
            self._backend.data_rank.rank, has_padding=self._backend.pads_batches, peers=current_loops()
        )
        self._checked: WeakSet[Any] = WeakSet()
        self._is_distributed = self._backend.topology.world_size > 1
        self._averaging_check = AveragingCheck(self._strategy, self._accumulation, self._models)
        self._replica_check = ReplicaCheck(
            self._strategy, self._averaging_check.named_parameters, self._optimizers
        )
        self._bypass_check = BypassCheck(
            self._accumulation, self._precision, self._models, self._optimizers, self._schedulers
        )
        self._gradients = Gradients(
            self._accumulation,
            self._precision,
            self._strategy,
            self._models,
            self._optimizers,
        )
        self._init_checkpointing(
            ResumePolicy(self.settings.resume, RunOrigin.from_env(os.environ)),
            os.environ.get(NODE_NAME) or socket.gethostname(),
        )
        self._find_origins = partial(origins, launched=launched, others=others, environ=dict(os.environ))
        self._is_argument = {
            "mixed_precision": precision_argument is not None,
            "device": cpu,
            "parallel": parallelism_config is not None,
            "fully_shard": fsdp_plugin is not None,
            "gradient": gradient_accumulation_plugin is not None
            or (gradient_accumulation_steps != 1 and not others.arguments),
            "compile": dynamo is not None,
        }
        self._init_sharding(parallelism_config, fsdp_plugin)
        self._freeze_configurations()
        plugins = {
            "dynamo_plugin": self._dynamo,
            "fsdp_plugin": self._fsdp_plugin,
            "parallelism_config": self._parallelism_config,
        }
        self._state = AcceleratorState.of(self, self._strategy.distributed_type, precision, plugins)
        self._number = register_accelerator(self, self._state)
        for sentence in others.idle if self._backend.topology.rank == 0 else ():
            _warn_once(sentence)

    # Collectives -----------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes, concatenated along the first dimension; see `tensors.gather`."""
        return tensors.gather(tensor, self._backend)

    @collective("input_data", "batch")
    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, batch: Any = None
    ) -> Any:
        """Gather the results of the current step without padding: every sample once, in the order of the dataset.

        Args:
            input_data: Tensors with an integer number of rows per sample, also nested; or lists of objects, one per sample.
            use_gather_object: Send tensors as objects too: for lists of tensors of different shapes, one per sample.
            batch: The batch of the results, if several loaders are iterated together (`zip`).

        Raises:
            ValueError: If the rows of a tensor do not match the batch.
            MismatchError: If the data of the processes differ in structure, dtype or trailing shape.
        """
        steps = self._loops.find_steps(input_data, batch)
        return metrics.gather_samples(input_data, steps, self._backend, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Return the tensors of all processes, combined element by element; see `tensors.reduce`."""
        return tensors.reduce(tensor, reduction, self._backend, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors to the largest length of all processes; see `tensors.pad_across_processes`."""
        return tensors.pad_across_processes(tensor, self._backend, dim, pad_index, pad_first)

    # Project, trackers and profiles -----------------------------------------------------

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

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values with every tracker; the first failure of a tracker causes a warning and no error.

        `accel launch` also records numbers and text of the main process in its run folder, with and without trackers.

        Args:
            values: Numbers or text by name; also tensors of one element, and other objects that a tracker supports.
            step: The step of the values.
            log_kwargs: Arguments by the name of the tracker.

        Raises:
            TypeError: If `values` is not a mapping, or `step` not an integer.
            ValueError: If there are arguments for a tracker that `log_with` does not contain.
        """
        self._trackers.log(values, step, log_kwargs)
        if self._recorder is not None:
            self._recorder.record_metrics(values, step if step is None else operator.index(step))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name; on processes that do not record, its methods do nothing.

        Args:
            name: The name in `log_with`.
            unwrap: Return the object that the tracker wraps, such as the run of wandb.

        Raises:
            ValueError: If `log_with` contains other trackers, but not this one.
        """
        return self._trackers.find(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Finish the trackers, and destroy the process group if no other `Accelerator` uses it."""
        self._trackers.end()
        self._backend.close()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Return a context that profiles the operations inside.

        Args:
            profile_handler: Options that replace those of `kwargs_handlers`.
        """
        return profiled(profile_handler or self.profile_handler or ProfileKwargs(), self._backend)

    # Cleanup ---------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop all prepared objects and release memory, for example between two trainings.

        Args:
            *objects: Objects to drop; assign the result: `model, loader = accelerator.free_memory(model, loader)`.

        Returns:
            None for each object.
        """
        self._models.clear()
        self._averaging_check.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._loaders.clear()
        self._loaders_prepared = 0
        self._accumulation.reset()
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
        self._number, self.settings, self._state = number, settings, state
        self._backend = state._backend  # noqa: SLF001 - the other half of one object
        self._parallelism_config = state.parallelism_config

    def __getattr__(self, name: str) -> Any:
        # Attributes that the constructor of Accelerator assigns.
        if name == "project_configuration" or (name.startswith("_") and not name.startswith("__")):
            raise DetachedBackend.of(self._backend).build_error()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _unpickle(number: int, settings: Settings, state: AcceleratorState) -> Accelerator:
    """Return the `Accelerator` of this process with the number of the pickled one, else a detached one."""
    accelerator: Accelerator | None = find_accelerator(number)
    return DetachedAccelerator(number, settings, state) if accelerator is None else accelerator


def _build_accumulation(
    steps: int,
    plugin: GradientAccumulationPlugin | None,
    others: Mapping[str, Equivalent],
    settings: Settings,
) -> Accumulation:
    """Return the accumulation of the variable of Accelerate, else of the arguments, else of the profile."""
    options = _choose_one(
        ("gradient_accumulation_steps", steps, 1), ("gradient_accumulation_plugin", plugin, None)
    )
    if plugin is None and (other := others.get("gradient_accumulation_steps")):
        options = int(other.text)  # the environment variable overrides the argument in Accelerate, too
    elif plugin is None and type(steps) is int and steps == 1:
        options = settings.gradient_accumulation_steps
    return Accumulation(options)


def _build_dynamo_plugin(argument: Any, compiler: Compile) -> TorchDynamoPlugin:
    """Return the compilation options of the argument, else those of the profile and of Accelerate's variables."""
    if isinstance(argument, TorchDynamoPlugin):
        return argument
    if argument is not None:
        return TorchDynamoPlugin(argument)
    return TorchDynamoPlugin(
        compiler.backend,
        None if compiler.mode == "default" else compiler.mode,
        fullgraph=compiler.fullgraph,
        dynamic=None if compiler.dynamic == "auto" else compiler.dynamic,
        use_regional_compilation=compiler.regional,
    )


def _read_dynamo_plugin(plugin: TorchDynamoPlugin) -> Compile:
    """Return compilation options as settings, for the description of the run."""
    if plugin.name == "no":
        return Compile()
    return Compile(
        plugin.name,
        cast("CompileMode", plugin.mode or "default"),
        plugin.fullgraph,
        "auto" if plugin.dynamic is None else plugin.dynamic,
        plugin.use_regional_compilation,
    )


@cache
def _warn_once(sentence: str) -> None:
    """Log a warning once per process."""
    _LOG.warning("%s", sentence)


def _parse_precision(mixed_precision: str | None, *, fp16: bool | None) -> MixedPrecision | None:
    from_fp16: MixedPrecision | None = None if fp16 is None else "fp16" if fp16 else "no"
    if mixed_precision is None:
        return from_fp16
    if from_fp16 not in {None, mixed_precision}:
        raise ValueError(
            f"fp16={fp16} and mixed_precision={mixed_precision!r} contradict each other. Pass only one."
        )
    for name in FORMATS:
        if mixed_precision == name:
            return name
    raise ValueError(f"Invalid mixed_precision {mixed_precision!r}: expected one of {', '.join(FORMATS)}.")


def _merge_loader_config(
    config: DataLoaderConfiguration | None, split_batches: bool, dispatch_batches: bool | None
) -> DataLoaderConfiguration:
    config = config or DataLoaderConfiguration()
    if dispatch_batches is not None and config.dispatch_batches not in {None, dispatch_batches}:
        raise ValueError("dispatch_batches and dataloader_config contradict each other. Pass only one.")
    if dispatch_batches is not None:
        config.dispatch_batches = dispatch_batches
    if split_batches is not False:
        config.split_batches = split_batches
    return config


def _choose_one(*arguments: tuple[str, Any, Any]) -> Any:
    """Return the value of the only (name, value, default) that is not its default, else the first; refuse several."""
    chosen = [(name, value) for name, value, default in arguments if value != default]
    if len(chosen) > 1:
        raise ValueError(f"Pass either {' or '.join(name for name, _ in chosen)}, not both.")
    return chosen[0][1] if chosen else arguments[0][1]
