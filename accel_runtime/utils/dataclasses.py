"""Configuration objects and enumerations under the name of Accelerate's `utils.dataclasses`."""

from accel_runtime.accelerate.package import build_getattr
from accel_runtime.extensions.deepspeed.plugin import DeepSpeedPlugin
from accel_runtime.foundation.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    PrecisionType,
    ProjectConfiguration,
)
from accel_runtime.monitoring.profiling import ProfileKwargs
from accel_runtime.parallel.plugins import (
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_runtime.tracking import LoggerType
from accel_runtime.training.compile import DynamoBackend, TorchDynamoPlugin

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",  # of extensions.deepspeed
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

__getattr__ = build_getattr(__name__)
