"""The facade a script talks to: short methods that hand over to the rooms behind them."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from torch import nn

from accel_runtime import collectives
from accel_runtime.accumulation import Accumulation
from accel_runtime.averaging_check import AveragingCheck
from accel_runtime.backends import connect
from accel_runtime.backends.base import Reduction
from accel_runtime.backends.detached import DetachedBackend
from accel_runtime.checkpoint.resuming import Origin, Resuming
from accel_runtime.compilation import DynamoBackend, TorchDynamoPlugin
from accel_runtime.current import find_accelerator, register_accelerator
from accel_runtime.data.copies import alike_in_copies
from accel_runtime.data.loader import PreparedLoader
from accel_runtime.data.loops import Loops
from accel_runtime.description import origins
from accel_runtime.env import MixedPrecision, Settings, accelerate_variables
from accel_runtime.facade.checkpointing import Checkpointing
from accel_runtime.facade.exporting import Exporting
from accel_runtime.facade.in_force import InForce
from accel_runtime.facade.in_the_loop import InTheLoop
from accel_runtime.facade.preempting import Preempting
from accel_runtime.facade.preparing import Preparing
from accel_runtime.facade.recording import Recording
from accel_runtime.facade.triggers import Triggers
from accel_runtime.facade.uneven import UnevenInputs
from accel_runtime.gradients import Gradients
from accel_runtime.heartbeat import heartbeat
from accel_runtime.memory import release_memory
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.options import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
)
from accel_runtime.precision import FORMATS, Precision
from accel_runtime.preemption import Preemption
from accel_runtime.project import ProjectConfiguration
from accel_runtime.replaced import Replaced
from accel_runtime.rng import RNG_TYPES
from accel_runtime.scheduler import PreparedScheduler
from accel_runtime.state import AcceleratorState
from accel_runtime.topology import Topology

if TYPE_CHECKING:
    from accel_runtime.accelerate_env import Equivalent
    from accel_runtime.parallel.config import FullyShardedDataParallelPlugin, ParallelismConfig

__all__ = ["Accelerator", "DetachedAccelerator"]

_LOG = logging.getLogger("accel_runtime.env")


class Accelerator(
    Preparing, InTheLoop, InForce, Checkpointing, Exporting, Preempting, Recording, Triggers, UnevenInputs
):
    """What a training loop needs to run on any number of processes.

    Args:
        device_placement: Whether `prepare` moves models, and loaders their batches, to the device.
        split_batches: Whether a loader's batch size is the global one, to be split among the processes.
        mixed_precision: `no`, `bf16` or `fp16`; None takes what the launcher said, else `no`.
        gradient_accumulation_steps: Micro-batches whose gradients make one optimizer step.
        cpu: Compute on the CPU, whatever else is there.
        dataloader_config: How loaders are shared out.
        log_with: Trackers, by name, class or instance, one or a list; `all` is every one that is installed.
        project_dir: Where the project keeps its data.
        project_config: The same and more, as an object.
        rng_types: Generators each rank takes over from the first at every epoch: `torch`, `cuda`, `xpu`, `xla`.
            Loaders share their order always, so `generator` is accepted and asks nothing more.
        step_scheduler_with_optimizer: False leaves prepared schedulers entirely to the script.
        kwargs_handlers: At most one of each kind in `accel_runtime.options`.
        gradient_accumulation_plugin: More about accumulation; in place of `gradient_accumulation_steps`.
        dynamo_backend: Compile models with this backend of `torch.compile`.
        dynamo_plugin: More about compilation; in place of `dynamo_backend`.
        dispatch_batches: The early spelling of that field of `dataloader_config`.
        parallelism_config: Over how many processes what is divided; what it leaves open is the profile's.
        fsdp_plugin: How models are sharded, likewise.
        fp16: The early spelling of `mixed_precision="fp16"` (True) or `"no"` (False).

    Raises:
        ValueError: Options that contradict each other or that the device cannot honour, or an environment variable we
            cannot use.
        RuntimeError: The device asked for is not there.
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
        settings, others = Settings.from_env(os.environ), accelerate_variables(os.environ)
        asked = _precision(mixed_precision, fp16=fp16)
        wanted = asked or settings.mixed_precision
        settings = replace(settings, mixed_precision=wanted, device="cpu" if cpu else settings.device)
        self._given_settings = settings
        self.settings = _divided(settings, parallelism_config, fsdp_plugin)
        """What the launcher and the arguments came to."""
        self._hold_handlers(kwargs_handlers)
        options = self.init_handler.to_kwargs() if self.init_handler else {}
        self._connected(connect(self.settings, Topology.here(), options))
        self._progress = heartbeat()
        alike_in_copies(self._backend)
        self._backend.check(self._replication, wanted)
        self._preemption = Preemption(self._backend.agreement)
        self._record(log_with, project_dir, project_config)
        self._precision = Precision(
            wanted,
            self._backend.device,
            self.autocast_handler.to_kwargs() if self.autocast_handler else {},
            self.scaler_handler.to_kwargs() if self.scaler_handler else {},
        )
        accumulation = _one_of(
            ("gradient_accumulation_steps", gradient_accumulation_steps, 1),
            ("gradient_accumulation_plugin", gradient_accumulation_plugin, None),
        )
        if gradient_accumulation_plugin is None and (
            other := others.arguments.get("gradient_accumulation_steps")
        ):
            accumulation = int(other.text)  # Accelerate's variable wins over the argument there, too
        self._accumulation = Accumulation(accumulation)
        dynamo = _one_of(("dynamo_backend", dynamo_backend, None), ("dynamo_plugin", dynamo_plugin, None))
        self._dynamo = _dynamo_plugin(dynamo, others.arguments)
        self.dataloader_config = _loader_config(dataloader_config, split_batches, dispatch_batches)
        self._check_loader_config()
        self._device_placement, self._rng_types = device_placement, _rng_types(rng_types)
        self._step_with_optimizer = step_scheduler_with_optimizer
        self._loops = Loops(self._backend.data.rank, repeats=self._backend.repeats)
        self._backend.loops = self._loops
        self._replaced = Replaced()
        self._compared: WeakSet[Any] = WeakSet()
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._averaging_check = AveragingCheck(self._backend, self._accumulation, self._models)
        self._gradients = Gradients(
            self._accumulation, self._precision, self._backend, self._models, self._optimizers
        )
        self._loaders: WeakValueDictionary[int, PreparedLoader] = WeakValueDictionary()
        self._loaders_prepared = 0
        self._schedulers: list[PreparedScheduler] = []
        self._keep_checkpoints(Resuming(self.settings.resume, Origin.from_env(os.environ)))
        given = {
            "mixed_precision": asked is not None,
            "device": cpu,
            "parallel": parallelism_config is not None,
            "fully_shard": fsdp_plugin is not None,
            "gradient": gradient_accumulation_plugin is not None,
            "dynamo": dynamo is not None,
        }
        self._origins = origins(self.settings, given, os.environ)
        self._hold_sharding(parallelism_config, fsdp_plugin)
        self._observe_handlers()
        plugins = {
            "dynamo_plugin": self._dynamo,
            "fsdp_plugin": self._fsdp_plugin,
            "parallelism_config": self._parallelism_config,
        }
        self._state = AcceleratorState.of(self, wanted, plugins)
        self._number = register_accelerator(self, self._state)
        if self.is_main_process:
            for sentence in others.idle:
                _warn_once(sentence)

    # Between processes -----------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Every process's tensors, concatenated along the first dimension; see `collectives.gather`."""
        return collectives.gather(tensor, self._backend)

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, batch: Any = None
    ) -> Any:
        """What the processes computed for the step in hand: every sample once, in the dataset's order.

        Args:
            input_data: Tensors of a whole number of rows a sample, also nested; or lists of objects, one a sample.
            use_gather_object: Send tensors as objects too: for lists of tensors of different shapes, one a sample.
            batch: The batch the data were computed from, where several loops advance together (`zip`).

        Raises:
            ValueError: A tensor whose rows have nothing to do with the batch.
            MismatchError: The processes' data differ in structure, dtype or trailing shape.
        """
        steps = self._loops.steps_of(input_data, batch)
        return collectives.gather_valid(input_data, steps, self._backend, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Every process's tensors combined element by element; see `collectives.reduce`."""
        return collectives.reduce(tensor, reduction, self._backend, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors made as long as the longest of all processes; see `collectives.pad_across_processes`."""
        return collectives.pad_across_processes(tensor, self._backend, dim, pad_index, pad_first)

    # Letting go ------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget everything prepared and give memory back; for between two trainings.

        Args:
            *objects: Assign the result to their names: `model, loader = accelerator.free_memory(model, loader)`.

        Returns:
            As many None as there are objects.
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
        """Itself: there is one group of processes, and what holds an accelerator may be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._number, self.settings, self._state)


class DetachedAccelerator(Accelerator):
    """An `Accelerator` in a process that has not joined the ranks: it has the facts of the rank that pickled it.

    Args:
        number: Of the `Accelerator` that was pickled, among those of its rank.
        settings: Its settings.
        state: Its state.
    """

    def __init__(self, number: int, settings: Settings, state: AcceleratorState) -> None:
        self._number, self.settings, self._state = number, settings, state
        self._backend = state._backend  # noqa: SLF001 - the other half of one object
        self._parallelism_config = state.parallelism_config

    def __getattr__(self, name: str) -> Any:
        # An attribute that an Accelerator makes when it joins the ranks.
        if name == "project_configuration" or (name.startswith("_") and not name.startswith("__")):
            raise DetachedBackend.of(self._backend).refusal()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _unpickle(number: int, settings: Settings, state: AcceleratorState) -> Accelerator:
    """Return the `Accelerator` of this process that has the number of one that was pickled, else a detached one."""
    found: Accelerator | None = find_accelerator(number)
    return DetachedAccelerator(number, settings, state) if found is None else found


def _divided(
    settings: Settings,
    parallelism_config: ParallelismConfig | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
) -> Settings:
    """The settings with what a script says of how models are divided."""
    if parallelism_config is None and fsdp_plugin is None:
        return settings
    from accel_runtime.parallel.config import settled  # noqa: PLC0415 - loading it costs time that most runs need not spend

    return settled(settings, parallelism_config, fsdp_plugin)


def _dynamo_plugin(given: Any, others: Mapping[str, Equivalent]) -> TorchDynamoPlugin:
    """Return how models are compiled: as an argument says, else as variables of Accelerate say."""
    if isinstance(given, TorchDynamoPlugin):
        return given
    options = {
        name.removeprefix("dynamo_"): other.text
        for name, other in others.items()
        if name.startswith("dynamo_")
    }
    if given is not None or not options:
        return TorchDynamoPlugin(given or "no")
    return TorchDynamoPlugin(
        options["backend"],
        options.get("mode"),
        fullgraph="use_fullgraph" in options,
        dynamic=True if "use_dynamic" in options else None,
        use_regional_compilation="use_regional_compilation" in options,
    )


@functools.cache
def _warn_once(sentence: str) -> None:
    """Warn, once in a process."""
    _LOG.warning("%s", sentence)


def _precision(mixed_precision: str | None, *, fp16: bool | None) -> MixedPrecision | None:
    early: MixedPrecision | None = None if fp16 is None else "fp16" if fp16 else "no"
    if mixed_precision is None:
        return early
    if early not in {None, mixed_precision}:
        raise ValueError(
            f"fp16={fp16} and mixed_precision={mixed_precision!r} contradict each other; give one"
        )
    for known in FORMATS:
        if mixed_precision == known:
            return known
    raise ValueError(f"mixed_precision must be one of {', '.join(FORMATS)}; it is {mixed_precision!r}")


def _loader_config(
    config: DataLoaderConfiguration | None, split_batches: bool, dispatch_batches: bool | None
) -> DataLoaderConfiguration:
    config = config or DataLoaderConfiguration()
    if dispatch_batches is not None and config.dispatch_batches not in {None, dispatch_batches}:
        raise ValueError("dispatch_batches and dataloader_config contradict each other; give one")
    if dispatch_batches is not None:
        config.dispatch_batches = dispatch_batches
    if split_batches is not False:
        config.split_batches = split_batches
    return config


def _one_of(*given: tuple[str, Any, Any]) -> Any:
    """The one of (name, value, default) that is not its default; the first where all are.

    Raises:
        ValueError: Several are not.
    """
    chosen = [(name, value) for name, value, default in given if value != default]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(name for name, _ in chosen)} say the same; give one")
    return chosen[0][1] if chosen else given[0][1]


def _rng_types(wanted: Iterable[str] | None) -> tuple[str, ...]:
    kinds = tuple(wanted or ())
    for kind in kinds:
        if kind not in RNG_TYPES:
            raise ValueError(f"rng_types may hold {', '.join(RNG_TYPES)}; it holds {kind!r}")
    return kinds
