"""The attributes that the parts of `Accelerator` share."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import nn

from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.loader import PreparedLoader
from accel_runtime.env import Settings
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.options import DataLoaderConfiguration, ProjectConfiguration
from accel_runtime.parallel.meta_init import MetaModels
from accel_runtime.scheduler import PreparedScheduler
from accel_runtime.state import ProcessMethods
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.checks import AveragingCheck
from accel_runtime.training.gradients import Gradients
from accel_runtime.training.precision import Precision

__all__ = ["AcceleratorBase"]


class AcceleratorBase(ProcessMethods):
    """Base of the parts of `Accelerator`, whose constructor assigns the attributes."""

    settings: Settings
    """The settings of the launcher, with those of the arguments."""
    project_configuration: ProjectConfiguration
    """The directories of the project."""
    _accumulation: Accumulation
    _averaging_check: AveragingCheck
    _gradients: Gradients
    _loader_config: DataLoaderConfiguration
    _loaders: WeakValueDictionary[int, PreparedLoader]
    _loaders_prepared: int
    _loops: ActiveLoops
    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]
    _precision: Precision
    _schedulers: list[PreparedScheduler]

    @property
    def _meta_models(self) -> MetaModels:
        """Return the object that allocates the parameters of models on the meta device."""
        offloaded = self.settings.fully_shard.cpu_offload
        return MetaModels(self.device, torch.device("cpu") if offloaded else self.device)
