"""The module that scripts import configuration objects and enumerations from, as in Accelerate."""

from accel_runtime.compilation import DynamoBackend, TorchDynamoPlugin
from accel_runtime.kinds import DistributedType, PrecisionType
from accel_runtime.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from accel_runtime.parallel.config import (
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_runtime.profiling import ProfileKwargs
from accel_runtime.project import ProjectConfiguration
from accel_runtime.tracking import LoggerType

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
]
