"""The record that the parts of an `Accelerator` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from accel_runtime.accelerator.options import RunOptions
from accel_runtime.backends import current_loops
from accel_runtime.backends.base import Backend
from accel_runtime.checks.checks import Checks
from accel_runtime.collectives.handshake import ObjectGroup
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.loader import PreparedLoader, check_model_parallel_ranks
from accel_runtime.foundation.options import AutocastKwargs, GradScalerKwargs
from accel_runtime.foundation.precision import FORMATS
from accel_runtime.observe.recording import RankRecorder, rank_recorder
from accel_runtime.parallel import choose_strategy
from accel_runtime.parallel.big_modeling import MetaModels
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import AllGatherObjects
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.gradients import Gradients
from accel_runtime.training.loss_scaler import LossScaler
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.precision import Precision
from accel_runtime.training.scheduler import PreparedScheduler

__all__ = ["PreparedObjects", "Run"]


@dataclass
class PreparedObjects:
    """The objects that `prepare` has prepared, in their order; the lists stay the same objects."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    num_loaders: int = 0
    """Number of loaders prepared so far, deleted ones included."""
    _loaders: WeakValueDictionary[int, PreparedLoader[Any]] = field(default_factory=WeakValueDictionary)

    def add_loader(self, loader: PreparedLoader[Any]) -> None:
        """Add a loader, which the script may delete."""
        self._loaders[self.num_loaders] = loader
        self.num_loaders += 1

    @property
    def loaders(self) -> list[PreparedLoader[Any]]:
        """Return the loaders that still exist."""
        return list(self._loaders.values())

    @property
    def all_loaders(self) -> list[PreparedLoader[Any] | None]:
        """Return all loaders by the order of their preparation; None for one that the script has deleted."""
        return [self._loaders.get(number) for number in range(self.num_loaders)]

    def clear(self) -> None:
        """Forget all objects."""
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self._loaders.clear()
        self.num_loaders = 0


@dataclass(frozen=True)
class Run:
    """The parts of a run that several parts of an `Accelerator` use."""

    options: RunOptions
    backend: Backend
    """Ranks and device."""
    strategy: Strategy
    """What happens to models."""
    precision: Precision
    """Number format and loss scaler."""
    accumulation: Accumulation
    """Counts accumulation cycles."""
    gradients: Gradients
    """Backward passes and gradients."""
    loops: ActiveLoops
    """The loops over prepared loaders."""
    prepared: PreparedObjects
    checks: Checks
    """Checks of how the script trains."""
    recorder: RankRecorder | None
    """Records for the launcher; None without one."""

    @classmethod
    def build(cls, options: RunOptions, backend: Backend) -> Run:
        """Return the run of connected ranks, without prepared objects; collective.

        Raises:
            ValueError: If an option is not supported by the strategy of the run.
        """
        config = None if options.engine is None else options.engine.config
        strategy = choose_strategy(backend, options.settings, config)
        check_model_parallel_ranks(backend)
        strategy.check_options(options.ddp_options, options.settings.mixed_precision)
        accumulation, prepared = options.accumulation, PreparedObjects()
        mixed_precision, scaler = options.settings.mixed_precision, None
        if FORMATS[mixed_precision].scales_loss and not strategy.scales_losses:
            kwargs = options.get_kwargs(GradScalerKwargs)
            scaler = LossScaler(backend.device.type, strategy.gradients.unscale, **kwargs)
        precision = Precision(mixed_precision, backend.device, options.get_kwargs(AutocastKwargs), scaler)
        gradients = Gradients(accumulation, precision, strategy, prepared.models, prepared.optimizers)
        loops = ActiveLoops(
            backend.data_rank.rank,
            has_padding=backend.may_have_padding or accumulation.global_batch_size is not None,
            peers=current_loops(),
        )
        checks = Checks(
            strategy,
            accumulation,
            precision,
            prepared.models,
            prepared.optimizers,
            prepared.schedulers,
            loops,
        )
        return cls(
            options,
            backend,
            strategy,
            precision,
            accumulation,
            gradients,
            loops,
            prepared,
            checks,
            rank_recorder(backend.topology.rank),
        )

    def count_micro_batches(self) -> int:
        """Return the micro-batches of an optimizer step: with a global batch size, those of the first loader."""
        loader = next(iter(self.prepared.loaders), None)
        if self.accumulation.global_batch_size is None or loader is None:
            return self.accumulation.steps
        return loader.steps_per_cycle

    @property
    def original_models(self) -> list[nn.Module]:
        """Return the models of the script."""
        return [self.strategy.unwrap_model(model) for model in self.prepared.models]

    @property
    def meta_models(self) -> MetaModels:
        """Return the object that allocates the parameters of models on the meta device."""
        device = self.backend.device
        is_offloaded = self.options.settings.fully_shard.cpu_offload
        return MetaModels(device, torch.device("cpu") if is_offloaded else device)

    def build_group(self, operation: str, *, one_rank: bool = False) -> ObjectGroup:
        """Return the group in which all processes exchange objects for an operation, or this process alone."""
        is_single = one_rank or self.backend.topology.world_size == 1
        return ObjectGroup(operation, None if is_single else self.backend.handshake)

    def build_all_gather(self, operation: str) -> AllGatherObjects:
        """Return the function that gathers an object from all processes for an operation."""
        return self.build_group(operation).all_gather

    def build_gather(self, subject: str) -> Callable[[Any], list[Any]] | None:
        """Return a function that gathers an object of each rank in a step; None on one process."""
        if self.backend.topology.world_size == 1:
            return None
        return partial(self.backend.all_gather_objects, subject=subject)
