"""The options of a run: configuration objects, arguments and variables, and what can be assigned later.

docs/design/configuration.md has the reasons.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from accel_runtime.data.loader import LoaderOptions
from accel_runtime.data.prepare import check_loader_configuration, loader_options
from accel_runtime.environment.engines import ENGINES, Engine, EngineConfig, find_engine
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import (
    Compile,
    FullyShard,
    MixedPrecision,
    Settings,
    accelerate_variables,
    check_layout,
    flatten_settings,
    variable_name,
)
from accel_runtime.foundation.options import (
    AutocastKwargs,
    Configuration,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    changed_fields,
    find_handlers,
    parse_rng_types,
)
from accel_runtime.foundation.precision import FORMATS
from accel_runtime.monitoring.profiling import ProfileKwargs
from accel_runtime.observe.throughput import build_token_counter
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.compile import DynamoBackend, TorchDynamoPlugin

if TYPE_CHECKING:
    from accel_runtime.environment.accelerate import Equivalent, Translation
    from accel_runtime.environment.settings import CompileMode
    from accel_runtime.parallel.plugins import FullyShardedDataParallelPlugin, ParallelismConfig
    from accel_runtime.parallel.strategy import Strategy

__all__ = ["Arguments", "EngineOptions", "OptionFacts", "RunOptions", "origins"]

_LOG = logging.getLogger("accel_runtime.options")
_HANDLER_TYPES: tuple[type[KwargsHandler], ...] = (
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


class EngineOptions(Protocol):
    """The options of an engine in a run, by the plugin of the script that is selected."""

    plugins: dict[str, Any]
    """The plugins of the script by name."""

    @property
    def config(self) -> EngineConfig:
        """Return the configuration of models that are prepared now."""

    @property
    def plugin(self) -> Any:
        """Return the selected plugin."""

    @property
    def section(self) -> Engine:
        """Return the section of the settings that the options amount to."""

    def select(self, name: str) -> None:
        """Select the plugin of models that are prepared from now on; raise ValueError if there is none of this name."""

    def read_plugin(self, configure: Callable[[EngineConfig], None]) -> None:
        """Read the selected plugin as it is now; if the configuration has changed, pass it to a function that may refuse it."""

    @classmethod
    def build(
        cls, plugins: Any, section: Any, mixed_precision: str, accumulation_steps: int
    ) -> EngineOptions:
        """Return the options of a run.

        Args:
            plugins: The plugin of the script, or several by name; None for those of the section alone.
            section: The section of the settings, an `Engine`.
            mixed_precision: The number format that other options state; `no` without one.
            accumulation_steps: The micro-batches of an optimizer step that they state; 1 without a statement.
        """


ENGINE_OPTIONS: Registry[type[EngineOptions]] = Registry(
    {
        "deepspeed": "accel_runtime.extensions.deepspeed.plugin:DeepSpeedOptions",
    }
)
"""The options of each engine in a run, by its name."""


@dataclass(frozen=True)
class OptionFacts:
    """The effective value of an option."""

    value: Any
    origin: str
    """`argument`, the name of an environment variable, or `default`."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of `Accelerator`, which has their documentation; those that are used once are not here."""

    mixed_precision: str | None
    fp16: bool | None
    cpu: bool
    device_placement: bool
    gradient_accumulation_steps: int
    gradient_accumulation_plugin: GradientAccumulationPlugin | None
    global_batch_size: int | None
    dynamo_backend: DynamoBackend | str | None
    dynamo_plugin: TorchDynamoPlugin | None
    dataloader_config: DataLoaderConfiguration | None
    split_batches: bool
    dispatch_batches: bool | None
    rng_types: Iterable[str] | None
    step_scheduler_with_optimizer: bool
    kwargs_handlers: list[KwargsHandler] | None
    parallelism_config: ParallelismConfig | None
    fsdp_plugin: FullyShardedDataParallelPlugin | None
    engine_plugin: Any
    project_config: ProjectConfiguration | None
    throughput: str | Callable[[Any], int] | Literal[True] | None


class RunOptions:
    """The options of a run: arguments override the variables of the launcher.

    Args:
        arguments: Those of the `Accelerator`.
        environ: The environment variables.

    Raises:
        ValueError: If options contradict each other, or a variable is invalid.
        TypeError: If a configuration object has another type.
    """

    def __init__(self, arguments: Arguments, environ: Mapping[str, str]) -> None:
        self._launched, self.accelerate = Settings.from_env(environ), accelerate_variables(environ)
        self._environ = dict(environ)
        precision = _parse_precision(arguments.mixed_precision, fp16=arguments.fp16)
        self._initial = self.settings = replace(
            self._launched,
            mixed_precision=precision or self._launched.mixed_precision,
            device="cpu" if arguments.cpu else self._launched.device,
        )
        """The settings of the launcher, with those of the arguments."""
        self.parallelism_config, self.fsdp_plugin = arguments.parallelism_config, arguments.fsdp_plugin
        if self.parallelism_config is not None or self.fsdp_plugin is not None:
            from accel_runtime.parallel.plugins import merge_settings  # noqa: PLC0415 - slow to import

            self.settings = merge_settings(self._initial, self.parallelism_config, self.fsdp_plugin)
        self.engine: EngineOptions | None = None
        """The options of the engine; None if torch trains models, or the engine takes none from a script."""
        engine = self._initial.engine
        if arguments.engine_plugin is not None or (engine and engine.name in ENGINE_OPTIONS):
            self._set_engine(arguments, precision)
        self._plugin_options: FullyShard | None = None
        """The options of the plugin when they were read last."""
        self.handlers = find_handlers(arguments.kwargs_handlers, _HANDLER_TYPES)
        """Arguments of torch by the type of their object."""
        self.project = arguments.project_config or ProjectConfiguration()
        """The directories of the project."""
        self.accumulation = _build_accumulation(arguments, self.accelerate.arguments, self._initial)
        """Counts accumulation cycles."""
        dynamo = _choose_one(
            ("dynamo_backend", arguments.dynamo_backend, None),
            ("dynamo_plugin", arguments.dynamo_plugin, None),
        )
        self.dynamo = _build_dynamo_plugin(dynamo, self._initial.compile)
        """How models are compiled."""
        self.settings = replace(
            self.settings,
            gradient_accumulation_steps=self.accumulation.steps,
            global_batch_size=self.accumulation.global_batch_size or "none",
            node_dir=os.fspath(self.project.node_dir or self.settings.node_dir),
            store_every=self.project.store_every or self.settings.store_every,
            compile=_read_dynamo_plugin(self.dynamo),
        )
        self.loaders = _merge_loader_config(
            arguments.dataloader_config, arguments.split_batches, arguments.dispatch_batches
        )
        """How loaders are sharded."""
        check_loader_configuration(self.loaders)
        if self.loaders.split_batches and self.accumulation.global_batch_size is not None:
            raise ValueError(
                f"split_batches=True and global_batch_size={self.accumulation.global_batch_size} contradict each other: with the second, the "
                "batch size of a loader is that of one micro-batch of one process. Pass only one."
            )
        self.device_placement = arguments.device_placement
        """True if models and batches are moved to the device."""
        self.rng_types = parse_rng_types(arguments.rng_types)
        """Generators whose states are copied from the first rank at every epoch."""
        self.count_tokens = build_token_counter(arguments.throughput)
        """Counts the tokens of batches."""
        self.logs_rates = arguments.throughput is not None
        """True if `log` adds the throughput to the values."""
        self.step_with_optimizer = arguments.step_scheduler_with_optimizer
        """True if schedulers step with their optimizers."""
        self._is_argument = {
            "mixed_precision": precision is not None,
            "device": arguments.cpu,
            "parallel": self.parallelism_config is not None,
            "fully_shard": self.fsdp_plugin is not None,
            **dict.fromkeys(ENGINES.names, arguments.engine_plugin is not None),
            "gradient": arguments.gradient_accumulation_plugin is not None
            or (arguments.gradient_accumulation_steps != 1 and not self.accelerate.arguments),
            "global_batch_size": arguments.global_batch_size is not None,
            "compile": dynamo is not None,
            "node_dir": self.project.node_dir is not None,
            "store_every": self.project.store_every is not None,
        }

    def _set_engine(self, arguments: Arguments, precision: MixedPrecision | None) -> None:
        """Read the options of the engine, and take number format and accumulation from it if nothing else states them."""
        engine = self._initial.engine or find_engine(arguments.engine_plugin)
        if not self.settings.parallel.plain:
            raise ValueError(
                f"{engine.title} and parallel: shard models in different ways. Use one: {engine.key}, or parallel: with fully_shard."
            )
        steps = arguments.gradient_accumulation_steps
        if arguments.gradient_accumulation_plugin is not None:
            steps = arguments.gradient_accumulation_plugin.num_steps or 1
        steps = steps if steps != 1 else self._initial.gradient_accumulation_steps
        self.engine = ENGINE_OPTIONS[engine.name].build(
            arguments.engine_plugin, engine, precision or self._initial.mixed_precision, steps
        )
        config = self.engine.config
        self._initial = replace(
            self._initial,
            mixed_precision=config.mixed_precision or self._initial.mixed_precision,
            gradient_accumulation_steps=config.accumulation_steps or steps,
        ).with_engine(self.engine.section)
        self.settings = replace(self.settings, mixed_precision=self._initial.mixed_precision).with_engine(
            self.engine.section
        )

    def complete(self, num_processes: int) -> None:
        """Create the configuration objects that only the profile defines, and refuse later assignments to those that are read."""
        self._build_sharding(num_processes)
        self.project.freeze(
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
        self._freeze_loaders()
        for kind, handler in {**self.handlers, TorchDynamoPlugin: self.dynamo}.items():
            _freeze(kind, handler)

    def _build_sharding(self, num_processes: int) -> None:
        """Create the configuration objects of sharded models that only the profile defines."""
        parallel, config = self.settings.parallel, self.parallelism_config
        if config is None and parallel.plain:
            return
        from accel_runtime.parallel.plugins import build_parallelism_config, build_plugin  # noqa: PLC0415 - slow to import

        mesh = "the device mesh exists already", _BEFORE
        if config is not None:
            config.freeze(*mesh)
        if config is not None or replace(parallel, dp_shard=1) != type(parallel)():
            self.parallelism_config = build_parallelism_config(parallel, num_processes)
            self.parallelism_config.freeze(*mesh)
        if parallel.shards:
            self.fsdp_plugin = self.fsdp_plugin or build_plugin(self.settings.fully_shard)
            self._plugin_options = self.fsdp_plugin.fully_shard(self._initial.fully_shard)

    # Loaders ---------------------------------------------------------------------------

    @property
    def loader_options(self) -> LoaderOptions:
        """Return the options of loaders that are prepared now."""
        return loader_options(
            self.loaders,
            self.device_placement,
            self.rng_types,
            self.count_tokens,
            self.accumulation.global_batch_size,
        )

    def set_loaders(self, config: DataLoaderConfiguration, *, are_prepared: bool) -> None:
        """Replace the configuration of loaders; `are_prepared` if a loader or scheduler counts by the earlier one."""
        _check_kind("dataloader_config", config, DataLoaderConfiguration)
        if are_prepared and config.split_batches != self.loaders.split_batches:
            raise RuntimeError(
                f"Cannot assign Accelerator.dataloader_config with split_batches={config.split_batches}: loaders and schedulers are "
                "prepared with the other value. Pass Accelerator(dataloader_config=...)."
            )
        self.loaders = config
        self._freeze_loaders()

    def _freeze_loaders(self) -> None:
        self.loaders.freeze(
            "schedules count by it",
            f"{_BEFORE}, or pass Accelerator(split_batches=...)",
            but={item.name for item in fields(self.loaders)} - {"split_batches"},
        )

    # Keyword arguments of torch --------------------------------------------------------

    @property
    def ddp_options(self) -> dict[str, Any]:
        """Return the arguments of DDP and of its communication hook that differ from their defaults."""
        handler = self.handlers.get(DistributedDataParallelKwargs)
        return {} if handler is None else changed_fields(handler)

    def get_kwargs(self, kind: type[KwargsHandler]) -> dict[str, Any]:
        """Return the arguments of torch in the object of a type; empty without one."""
        handler = self.handlers.get(kind)
        return {} if handler is None else dict(handler.to_kwargs())

    def set_handler(self, attribute: str, kind: type[KwargsHandler], handler: Any) -> None:
        """Replace the object of a type, or remove it with None; `attribute` is that of the `Accelerator`."""
        if handler is None:
            self.handlers.pop(kind, None)
            return
        _check_kind(attribute, handler, kind)
        self.handlers[kind] = handler
        _freeze(kind, handler)

    # Sharding --------------------------------------------------------------------------

    def read_plugin(self, strategy: Strategy) -> None:
        """Read the options of sharding as they are now: scripts and libraries assign to the plugin until `prepare`."""
        if self.engine is not None:
            self.engine.read_plugin(strategy.configure)
        if self.fsdp_plugin is None or not self.settings.parallel.shards:
            return
        options = self.fsdp_plugin.fully_shard(self._initial.fully_shard)
        if options == self._plugin_options:
            return
        settings = replace(self.settings, fully_shard=options)
        check_layout(settings.parallel, settings.fully_shard, strategy.backend.topology.world_size)
        strategy.configure(options)
        before = dict(flatten_settings(self.settings))
        self._is_argument |= {key: True for key, value in flatten_settings(settings) if value != before[key]}
        self.settings, self._plugin_options = settings, options

    # Description -----------------------------------------------------------------------

    def find_origins(self) -> Mapping[str, OptionFacts]:
        """Return the value and origin of each setting."""
        return origins(self.settings, self._launched, self.accelerate, self._is_argument, self._environ)


def origins(
    settings: Settings,
    launched: Settings,
    others: Translation,
    is_argument: Mapping[str, bool],
    environ: Mapping[str, str],
) -> dict[str, OptionFacts]:
    """Return the value and origin of each setting, given those of the environment and its variables of Accelerate.

    `is_argument` marks options and sections set by an argument; `gradient` means all arguments of the plugin.
    """
    from_env = dict(flatten_settings(launched))

    def find_origin(name: str, value: object) -> str:
        # An argument may set only some options of a section.
        in_section = any(name.startswith(f"{section}_") for section in is_argument)
        if is_argument.get(name) or (in_section and value != from_env[name]):
            return "argument"
        if variable_name(name) in environ:
            return variable_name(name)
        return others.settings[name].variable if name in others.settings else "default"

    facts = {name: OptionFacts(value, find_origin(name, value)) for name, value in flatten_settings(settings)}
    return facts | {
        name: OptionFacts(other.text, other.variable)
        for name, other in others.arguments.items()
        if not is_argument.get(name.partition("_")[0])
    }


def _check_kind(attribute: str, value: object, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"Invalid Accelerator.{attribute} {value!r}: expected a {kind.__name__}.")


def _freeze(kind: type[Any], handler: Configuration) -> None:
    """Refuse later assignments to an object that is read at once."""
    if kind in _READ_AT_ONCE:
        handler.freeze(*_READ_AT_ONCE[kind])


def _build_accumulation(
    arguments: Arguments, others: Mapping[str, Equivalent], settings: Settings
) -> Accumulation:
    """Return the accumulation of the variable of Accelerate, else of the arguments, else of the profile."""
    steps, plugin = arguments.gradient_accumulation_steps, arguments.gradient_accumulation_plugin
    options = _choose_one(
        ("gradient_accumulation_steps", steps, 1), ("gradient_accumulation_plugin", plugin, None)
    )
    if plugin is None and (other := others.get("gradient_accumulation_steps")):
        options = int(other.text)  # the environment variable overrides the argument in Accelerate, too
    elif plugin is None and type(steps) is int and steps == 1:
        options = settings.gradient_accumulation_steps
    size: Any = arguments.global_batch_size
    if size is None and settings.global_batch_size != "none":
        size = settings.global_batch_size
    accumulation = Accumulation(options, None if size is None else _check_global_batch_size(size))
    if accumulation.global_batch_size is not None:
        _check_counted_samples(accumulation)
    return accumulation


def _check_global_batch_size(size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"Invalid global_batch_size={size!r}: expected a number of samples, at least 1.")
    return size


def _check_counted_samples(accumulation: Accumulation) -> None:
    """Raise ValueError for options of accumulation that count micro-batches, and refuse to set them later."""
    plugin, size = accumulation.plugin, accumulation.global_batch_size
    if plugin.num_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={plugin.num_steps} and global_batch_size={size} contradict each other: the batch size of a loader "
            "and the number of processes determine the micro-batches of a global batch. Pass only one."
        )
    if not plugin.sync_with_dataloader:
        raise ValueError(
            f"sync_with_dataloader=False and global_batch_size={size} contradict each other: a global batch ends with the epoch. Leave "
            "out sync_with_dataloader."
        )
    plugin.freeze(
        f"global_batch_size={size} determines the micro-batches",
        "Leave it out",
        but={"sync_each_batch", "adjust_scheduler"},
    )


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
