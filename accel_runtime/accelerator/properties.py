"""Configuration objects and other properties of an `Accelerator`, and `describe()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.accelerator.description import (
    Description,
    OptionFacts,
    ProcessFacts,
    SchedulerFacts,
    loader_facts,
    model_facts,
)
from accel_runtime.accelerator.state import AcceleratorState, GradientState, ProcessMethods
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.loader import LoaderOptions, PreparedLoader
from accel_runtime.data.prepare import loader_options
from accel_runtime.environment.settings import (
    FullyShard,
    MixedPrecision,
    Settings,
    check_layout,
    flatten_settings,
)
from accel_runtime.foundation.heartbeat import Progress, call_site
from accel_runtime.foundation.options import (
    AutocastKwargs,
    Configuration,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    changed_fields,
)
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.monitoring.profiling import ProfileKwargs
from accel_runtime.monitoring.recording import RankRecorder
from accel_runtime.monitoring.tracking import Trackers
from accel_runtime.parallel.big_modeling import MetaModels
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.training.accumulation import Accumulation, AveragingCheck
from accel_runtime.training.bypass_check import BypassCheck
from accel_runtime.training.forward import Precision, TorchDynamoPlugin
from accel_runtime.training.gradients import Gradients
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.replica_check import ReplicaCheck
from accel_runtime.training.scheduler import PreparedScheduler

if TYPE_CHECKING:
    from accel_runtime.parallel.plugins import FullyShardedDataParallelPlugin, ParallelismConfig

__all__ = ["HANDLER_TYPES", "AcceleratorProperties"]

_LOG = MultiProcessAdapter(logging.getLogger("accel_runtime.options"))
HANDLER_TYPES: tuple[type[KwargsHandler], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
"""The types that `kwargs_handlers` accepts."""
_BEFORE = "Set it before you create the Accelerator"
_READ_AT_ONCE: Mapping[type[Any], tuple[str, str]] = MappingProxyType(
    {
        AutocastKwargs: ("the Accelerator has read it", f"{_BEFORE}, or assign accelerator.autocast_handler"),
        DistributedDataParallelKwargs: (
            "the Accelerator has read it",
            f"{_BEFORE}, or assign accelerator.ddp_handler before prepare()",
        ),
        GradScalerKwargs: (
            "the loss scaler exists already",
            f"{_BEFORE}, or call the methods of accelerator.scaler",
        ),
        InitProcessGroupKwargs: ("the process group exists already", _BEFORE),
        TorchDynamoPlugin: ("the Accelerator has read it", _BEFORE),
    }
)
"""Why an assignment to a field of these objects comes too late, and what to do instead; others are read when they are used."""


class AcceleratorProperties(ProcessMethods):
    """Attributes and properties of `Accelerator`, and its configuration objects.

    The constructor of `Accelerator` assigns the attributes. See docs/design/configuration.md for what can be assigned later.
    """

    deepspeed_plugin = None
    """None: DeepSpeed is not supported."""

    settings: Settings
    """The settings of the launcher, with those of the arguments."""
    project_configuration: ProjectConfiguration
    """The directories of the project."""
    _accumulation: Accumulation
    _averaging_check: AveragingCheck
    _replica_check: ReplicaCheck
    _bypass_check: BypassCheck
    _device_placement: bool
    _dynamo: TorchDynamoPlugin
    _gradients: Gradients
    _handlers: dict[type[KwargsHandler], Any]
    _find_origins: Callable[..., Mapping[str, OptionFacts]]
    _initial_settings: Settings
    _is_argument: dict[str, bool]
    _is_distributed: bool
    _loader_config: DataLoaderConfiguration
    _loaders: WeakValueDictionary[int, PreparedLoader]
    _loaders_prepared: int
    _loops: ActiveLoops
    _models: list[nn.Module]
    _number: int
    _optimizers: list[PreparedOptimizer]
    _plugin_options: FullyShard
    """The options of the plugin when they were read last."""
    _precision: Precision
    _progress: Progress | None
    _recorder: RankRecorder | None
    _rng_types: tuple[str, ...]
    _schedulers: list[PreparedScheduler]
    _state: AcceleratorState
    _strategy: Strategy
    _step_with_optimizer: bool
    _trackers: Trackers

    def _init_sharding(
        self, config: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin | None
    ) -> None:
        """Store the configuration objects of sharded models; create those that only the profile defines."""
        self._parallelism_config, self._fsdp_plugin = config, plugin
        parallel = self.settings.parallel
        if config is None and parallel.plain:
            return
        from accel_runtime.parallel.plugins import build_parallelism_config, build_plugin  # noqa: PLC0415 - slow to import

        mesh = "the device mesh exists already", _BEFORE
        if config is not None:
            config.freeze(*mesh)
        if config is not None or replace(parallel, dp_shard=1) != type(parallel)():
            self._parallelism_config = build_parallelism_config(parallel, self.num_processes)
            self._parallelism_config.freeze(*mesh)
        if parallel.shards:
            self._fsdp_plugin = plugin or build_plugin(self.settings.fully_shard)
            self._plugin_options = self._fsdp_plugin.fully_shard(self._initial_settings.fully_shard)

    def _freeze_configurations(self) -> None:
        """Refuse later assignments to the objects that the constructor has read."""
        self.project_configuration.freeze(
            "the directories of the project are in use",
            _BEFORE,
            but={
                "automatic_checkpoint_naming",
                "total_limit",
                "iteration",
                "save_on_each_node",
                "async_save",
            },
        )
        for kind, handler in {**self._handlers, TorchDynamoPlugin: self._dynamo}.items():
            _freeze(kind, handler)

    # Loaders ---------------------------------------------------------------------------

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Return the configuration of loaders; assigned fields take effect for loaders prepared later."""
        return self._loader_config

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        _check_kind("dataloader_config", config, DataLoaderConfiguration)
        if (self._loaders or self._schedulers) and config.split_batches != self.split_batches:
            raise RuntimeError(
                f"Cannot assign Accelerator.dataloader_config with split_batches={config.split_batches}: loaders and schedulers are "
                "prepared with the other value. Pass Accelerator(dataloader_config=...)."
            )
        self._loader_config = config
        config.freeze(
            "schedules count by it",
            f"{_BEFORE}, or pass Accelerator(split_batches=...)",
            but={item.name for item in fields(config)} - {"split_batches"},
        )

    @property
    def _strides(self) -> int:
        """Return the number of scheduler steps per training step: schedules count batches of one process."""
        return 1 if self._loader_config.split_batches else self._backend.data_rank.world_size

    @property
    def _loader_options(self) -> LoaderOptions:
        return loader_options(self._loader_config, self._device_placement, self._rng_types)

    # Keyword arguments of torch --------------------------------------------------------

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """Return the DDP arguments for models prepared later; None means the defaults of torch."""
        return self._handlers.get(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        options = {} if handler is None else changed_fields(handler)
        self._strategy.check_options(options, self.settings.mixed_precision)
        self._set_handler("ddp_handler", DistributedDataParallelKwargs, handler)
        if options and self.use_distributed and self._models:
            _LOG.warning(
                "Accelerator.ddp_handler, assigned at %s, has no effect on %d model(s) that are prepared already. "
                "Assign it before prepare().",
                call_site(),
                len(self._models),
            )

    @property
    def _ddp_options(self) -> dict[str, Any]:
        """Return the arguments of DDP and of its communication hook that differ from their defaults."""
        return {} if self.ddp_handler is None else changed_fields(self.ddp_handler)

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """Return the autocast arguments; None means the defaults of torch."""
        return self._handlers.get(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._set_handler("autocast_handler", AutocastKwargs, handler)
        self._precision.set_autocast({} if handler is None else handler.to_kwargs())

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """Return the arguments of `profile()`; None means the defaults of torch."""
        return self._handlers.get(ProfileKwargs)

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._set_handler("profile_handler", ProfileKwargs, handler)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """Return the arguments of the loss scaler; None means the defaults of torch."""
        return self._handlers.get(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """Return the arguments of `init_process_group`; None means those of the profile."""
        return self._handlers.get(InitProcessGroupKwargs)

    def _set_handler(self, attribute: str, kind: type[KwargsHandler], handler: Any) -> None:
        if handler is None:
            self._handlers.pop(kind, None)
            return
        _check_kind(attribute, handler, kind)
        self._handlers[kind] = handler
        _freeze(kind, handler)

    # Models ----------------------------------------------------------------------------

    @property
    def _meta_models(self) -> MetaModels:
        """Return the object that allocates the parameters of models on the meta device."""
        offloaded = self.settings.fully_shard.cpu_offload
        return MetaModels(self.device, torch.device("cpu") if offloaded else self.device)

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Return the sizes of the parallel dimensions; None if only parameters are sharded or nothing is."""
        return self._parallelism_config

    def _read_fsdp_plugin(self) -> None:
        """Take the options of sharding as they are now: scripts and libraries assign to the plugin until `prepare`."""
        if self._fsdp_plugin is None or not self.settings.parallel.shards:
            return
        options = self._fsdp_plugin.fully_shard(self._initial_settings.fully_shard)
        if options == self._plugin_options:
            return
        settings = replace(self.settings, fully_shard=options)
        check_layout(settings.parallel, settings.fully_shard, self.num_processes)
        self._strategy.set_sharding(settings)
        before = dict(flatten_settings(self.settings))
        self._is_argument |= {key: True for key, value in flatten_settings(settings) if value != before[key]}
        self.settings, self._plugin_options = settings, options

    # Other properties -----------------------------------------------------------------

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
        return self._strategy.mesh.full if self._strategy.mesh is not None else None

    @property
    def tensor_parallel_rank(self) -> int:
        """Return the tensor-parallel rank of this process, from 0."""
        return self.process_index % self.settings.parallel.tp

    @property
    def context_parallel_rank(self) -> int:
        """Return the context-parallel rank of this process, from 0."""
        parallel = self.settings.parallel
        return self.process_index // parallel.tp % parallel.cp

    @property
    def data_parallel_shard_rank(self) -> int:
        """Return the rank of this process among those that shard parameters, from 0."""
        mesh = self._strategy.mesh
        return 0 if mesh is None else self._backend.data_rank.rank % mesh.sizes.dp_shard

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
        return self._precision.scaler

    @property
    def split_batches(self) -> bool:
        """Return whether the batch size of a loader is the global one."""
        return self._loader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Return whether the last global batch is padded; an assignment takes effect for loaders prepared later."""
        return self._loader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._loader_config.even_batches = even_batches

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        return self._accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulation.steps = steps

    @property
    def sync_gradients(self) -> bool:
        """Return whether the current backward pass completes an accumulation cycle."""
        return self._accumulation.synced

    @sync_gradients.setter
    def sync_gradients(self, synced: bool) -> None:
        self._accumulation.synced = synced

    @property
    def step(self) -> int:
        """Return the number of micro-batches of `accumulate` since the last epoch end; an assignment sets the count."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.step = step

    @property
    def should_save_model(self) -> bool:
        """Return whether this process writes models: the main process; with `save_on_each_node` the first of each node."""
        each = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each else self.is_main_process)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether the last step of any prepared optimizer was skipped because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def multi_device(self) -> bool:
        """Return whether there are several processes, each with its own GPU or other accelerator device."""
        return self.use_distributed and self.device.index is not None

    @property
    def native_amp(self) -> bool:
        """Return whether autocast is enabled."""
        return self.mixed_precision != "no"

    @property
    def state(self) -> AcceleratorState:
        """Return the process topology, number format and plugins as one object."""
        return self._state

    @property
    def gradient_state(self) -> GradientState:
        """Return the state of gradient accumulation and of the current batch."""
        return GradientState.of(self._number, self._accumulation, self._loops)

    @property
    def dispatch_batches(self) -> bool | None:
        """Return whether the main process reads batches for all."""
        return self._loader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Return whether shuffled orders depend on a seed and the epoch number only."""
        return self._loader_config.use_seedable_sampler

    @property
    def device_placement(self) -> bool:
        """Return whether `prepare` moves models, and loaders move batches, to the device."""
        return self._device_placement

    @property
    def rng_types(self) -> list[str]:
        """Return the generators whose state every rank copies from rank 0 at each epoch."""
        return list(self._rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Return whether prepared schedulers advance with their optimizers; otherwise the script steps them."""
        return self._step_with_optimizer

    @property
    def non_blocking(self) -> bool:
        """Return whether copies to the device overlap with computation."""
        return self._loader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Return whether `load_state` resumes loaders after their last batch; every prepared loader has a state."""
        return self._loader_config.use_stateful_dataloader

    def describe(self) -> Description:
        """Return a description of the run: processes, precision, models, loaders, and the origin of each option.

        `print` shows text, `rich.print` a panel; `as_dict()` returns data.
        """
        self._read_fsdp_plugin()
        topology = self._backend.topology
        computes_in, hook = self._precision.format.dtype, self._ddp_options.get("comm_hook")
        return Description(
            processes=ProcessFacts(
                world_size=topology.world_size,
                rank=topology.rank,
                local_world_size=topology.local_world_size,
                device=str(self.device),
                process_group=self._backend.collective_backend or "",
            ),
            precision=self._precision.description,
            accumulation_steps=self._accumulation.steps,
            gradients=self._accumulation.describe(
                self._backend.data_rank.world_size,
                split_batches=self._loader_config.split_batches and not self._accumulation.weighted,
            ),
            models=tuple(
                model_facts(
                    self._strategy.unwrap_model(model),
                    computes_in,
                    getattr(hook, "value", None),
                    self._strategy.describe_model(model, computes_in),
                )
                for model in self._models
            ),
            optimizers=tuple(type(optimizer.optimizer).__name__ for optimizer in self._optimizers),
            schedulers=tuple(
                SchedulerFacts(type(scheduler.scheduler).__name__, scheduler.advances)
                for scheduler in self._schedulers
            ),
            loaders=tuple(
                loader_facts(loader, self._backend.data_rank, self._accumulation.steps)
                for loader in list(self._loaders.values())
            ),
            options=self._find_origins(self.settings, is_argument=self._is_argument),
            device=self._backend.runtime.describe(),
        )


def _check_kind(attribute: str, value: object, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"Invalid Accelerator.{attribute} {value!r}: expected a {kind.__name__}.")


def _freeze(kind: type[Any], handler: Configuration) -> None:
    """Refuse later assignments to an object that is read at once."""
    if kind in _READ_AT_ONCE:
        handler.freeze(*_READ_AT_ONCE[kind])
