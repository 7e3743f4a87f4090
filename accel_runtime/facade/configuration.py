"""The part of the facade that holds configuration objects, and acts on assignments to their fields."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

from torch import nn

from accel_runtime.compilation import TorchDynamoPlugin
from accel_runtime.configuration import Configuration
from accel_runtime.data.loader import LoaderOptions, PreparedLoader
from accel_runtime.data.preparing import check_loader_configuration, loader_options
from accel_runtime.description import OptionFacts
from accel_runtime.env import Settings, check_layout, flat
from accel_runtime.exchange.callsite import call_site
from accel_runtime.facade.processes import Processes
from accel_runtime.logging import MultiProcessAdapter
from accel_runtime.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    changed_fields,
    find_handlers,
)
from accel_runtime.precision import Precision
from accel_runtime.profiling import ProfileKwargs
from accel_runtime.scheduler import PreparedScheduler

if TYPE_CHECKING:
    from accel_runtime.parallel.config import FullyShardedDataParallelPlugin, ParallelismConfig

__all__ = ["ConfigurationObjects"]

_LOG = MultiProcessAdapter(logging.getLogger("accel_runtime.configuration"))
_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


class ConfigurationObjects(Processes):
    """The objects that configure an `Accelerator`.

    A field that is assigned later has an effect from then on, wherever its value is still to be used; see
    docs/design/configuration.md.
    """

    settings: Settings
    _device_placement: bool
    _loader_config: DataLoaderConfiguration
    _dynamo: TorchDynamoPlugin
    _given_settings: Settings
    _loaders: WeakValueDictionary[int, PreparedLoader]
    _models: list[nn.Module]
    _origins: Mapping[str, OptionFacts]
    _precision: Precision
    _rng_types: tuple[str, ...]
    _schedulers: list[PreparedScheduler]

    def _hold_handlers(self, handlers: Iterable[object] | None) -> None:
        self._handlers = find_handlers(handlers, _HANDLERS)

    def _hold_sharding(
        self, config: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin | None
    ) -> None:
        """Hold the objects for sharded models; make those that the profile stands for."""
        self._parallelism_config, self._fsdp_plugin = config, plugin
        parallel = self.settings.parallel
        if config is None and parallel.plain:
            return
        from accel_runtime.parallel.config import build_parallelism_config, build_plugin  # noqa: PLC0415 - slow to import

        if config is not None:
            config.observe(self._parallelism_changed)
        if config is not None or replace(parallel, dp_shard=1) != type(parallel)():
            self._parallelism_config = build_parallelism_config(parallel, self.num_processes)
            self._parallelism_config.observe(self._parallelism_changed)
        if parallel.shards:
            self._fsdp_plugin = plugin or build_plugin(self.settings.fully_shard)
            self._fsdp_plugin.observe(self._fsdp_plugin_changed)

    def _observe_handlers(self) -> None:
        """Begin to act on assignments, once everything is made that they may change."""
        changes = {
            AutocastKwargs: self._autocast_changed,
            DistributedDataParallelKwargs: self._ddp_changed,
            GradScalerKwargs: self._scaler_changed,
            InitProcessGroupKwargs: self._process_group_changed,
        }
        for kind, changed in changes.items():
            if kind in self._handlers:
                self._handlers[kind].observe(changed)
        self._dynamo.observe(self._dynamo_changed)

    # Loaders ---------------------------------------------------------------------------

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are shared out; a field that is assigned holds for loaders prepared from then on."""
        return self._loader_config

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        _check_kind("dataloader_config", config, DataLoaderConfiguration)
        before = vars(self).get("_loader_config", config)
        self._loader_config = config
        config.observe(self._loader_config_changed)
        for name, value in vars(config).items():
            if value != getattr(before, name):
                self._loader_config_changed(config, name)

    def _loader_config_changed(self, config: DataLoaderConfiguration, name: str) -> None:
        if config is not self._loader_config or name == "use_stateful_dataloader":
            return
        if name != "split_batches":
            self._warn_if_prepared(config, name, self._loaders, "DataLoader(s)")
        elif self._loaders:
            # A scheduler counts the batches of the loaders that it was prepared with.
            prepared = [*self._loaders.values(), *self._schedulers]
            nouns = "DataLoader(s) and scheduler(s)" if self._schedulers else "DataLoader(s)"
            self._warn_if_prepared(config, name, prepared, nouns)
        else:
            for scheduler in self._schedulers:
                scheduler.set_strides(self._strides)

    @property
    def _strides(self) -> int:
        """Return how many steps of a schedule, which counts batches of one process, a step of the run is."""
        return 1 if self._loader_config.split_batches else self._backend.data.world_size

    @property
    def _loading(self) -> LoaderOptions:
        return loader_options(self._loader_config, self._device_placement, self._rng_types)

    def _check_loader_config(self) -> None:
        check_loader_configuration(self._loader_config)

    # Keyword arguments of torch --------------------------------------------------------

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The arguments of DDP, for models prepared from now on; None for torch's own."""
        return self._handlers.get(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        options = {} if handler is None else changed_fields(handler)
        self._backend.check(options, self.settings.mixed_precision)
        self._hold("ddp_handler", DistributedDataParallelKwargs, handler, self._ddp_changed)
        if handler is not None and self.use_distributed:
            for name in options:
                self._warn_if_prepared(handler, name, self._models, "model(s)")

    def _ddp_changed(self, handler: DistributedDataParallelKwargs, name: str) -> None:
        self._backend.check(changed_fields(handler), self.settings.mixed_precision)
        if handler is self.ddp_handler and self.use_distributed:
            self._warn_if_prepared(handler, name, self._models, "model(s)")

    @property
    def _replication(self) -> dict[str, Any]:
        """Return the arguments of DDP and of its hook that differ from their defaults."""
        return {} if self.ddp_handler is None else changed_fields(self.ddp_handler)

    def _options_of_torch(self) -> list[KwargsHandler]:
        """Return the objects whose fields must be equal on all ranks, with torch's defaults for those not given."""
        return [
            self.ddp_handler or DistributedDataParallelKwargs(),
            self.autocast_handler or AutocastKwargs(),
            self.scaler_handler or GradScalerKwargs(),
        ]

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The arguments of autocast; None for torch's own."""
        return self._handlers.get(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._hold("autocast_handler", AutocastKwargs, handler, self._autocast_changed)
        self._precision.set_autocast({} if handler is None else handler.to_kwargs())

    def _autocast_changed(self, handler: AutocastKwargs, _: str) -> None:
        if handler is self.autocast_handler:
            self._precision.set_autocast(handler.to_kwargs())

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The arguments of `profile()`; None for torch's own."""
        return self._handlers.get(ProfileKwargs)

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._hold("profile_handler", ProfileKwargs, handler)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The arguments with which the loss scaler was made; None for torch's own."""
        return self._handlers.get(GradScalerKwargs)

    def _scaler_changed(self, handler: GradScalerKwargs, name: str) -> NoReturn:
        _refuse(handler, name, "the loss scaler is made", "or call the methods of accelerator.scaler")

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The arguments with which the processes were connected; None for those of the profile."""
        return self._handlers.get(InitProcessGroupKwargs)

    def _process_group_changed(self, handler: InitProcessGroupKwargs, name: str) -> NoReturn:
        _refuse(handler, name, "the processes are connected")

    def _hold(self, attribute: str, kind: type[KwargsHandler], handler: Any, changed: Any = None) -> None:
        if handler is None:
            self._handlers.pop(kind, None)
            return
        _check_kind(attribute, handler, kind)
        self._handlers[kind] = handler
        if changed is not None:
            handler.observe(changed)

    # Models ----------------------------------------------------------------------------

    def _dynamo_changed(self, plugin: TorchDynamoPlugin, name: str) -> None:
        self._warn_if_prepared(plugin, name, self._models, "model(s)")

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Into how many parts what is divided, every size a number; None if at most parameters are sharded."""
        return self._parallelism_config

    def _parallelism_changed(self, config: ParallelismConfig, name: str) -> None:
        if name.endswith("_size"):
            _refuse(config, name, "the processes are divided already")
        given = self._given_settings.parallel
        self._set_sharding(
            replace(
                self.settings,
                parallel=replace(self.settings.parallel, tp_plan=config.parallel(given).tp_plan),
            ),
            config,
            name,
        )

    def _fsdp_plugin_changed(self, plugin: FullyShardedDataParallelPlugin, name: str) -> None:
        options = plugin.fully_shard(self._given_settings.fully_shard)
        self._set_sharding(replace(self.settings, fully_shard=options), plugin, name)

    def _set_sharding(self, settings: Settings, configuration: Configuration, name: str) -> None:
        """Shard models that are prepared from now on by other settings."""
        if settings == self.settings:
            return
        check_layout(settings.parallel, settings.fully_shard, self.num_processes)
        self._backend.set_sharding(settings)
        before = dict(flat(self.settings))
        self._origins = {
            **self._origins,
            **{one: OptionFacts(value, "argument") for one, value in flat(settings) if value != before[one]},
        }
        self.settings = settings
        self._warn_if_prepared(configuration, name, self._models, "model(s)")

    def _warn_if_prepared(self, configuration: Configuration, name: str, prepared: Any, noun: str) -> None:
        """Warn that an assignment comes too late for what is prepared."""
        if prepared:
            _LOG.warning(
                "%s.%s = %r at %s holds for what is prepared from now on: %d %s are prepared already, and keep the value "
                "before. Assign it before prepare() to have it hold for all.",
                type(configuration).__name__,
                name,
                getattr(configuration, name),
                call_site(),
                len(prepared),
                noun,
            )


def _check_kind(attribute: str, value: object, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"Accelerator: {attribute} must be a {kind.__name__}; it is {value!r}")


def _refuse(configuration: Configuration, name: str, why: str, otherwise: str = "") -> NoReturn:
    raise RuntimeError(
        f"Cannot set {type(configuration).__name__}.{name}: {why}. Set it before the Accelerator is made"
        f"{f', {otherwise}' if otherwise else ''}."
    )
