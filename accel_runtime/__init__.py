"""The library inside each process: device, replication, precision, exact data and gathering.

Importing it is cheap: torch arrives with the first name that needs it (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.accelerator import Accelerator
    from accel_runtime.checkpoint.errors import CheckpointError
    from accel_runtime.compilation import DynamoBackend, TorchDynamoPlugin
    from accel_runtime.data.loader import skip_first_batches
    from accel_runtime.description import Description
    from accel_runtime.env import Settings
    from accel_runtime.exchange.agreement import MismatchError, RankLostError, StallError
    from accel_runtime.initializing import init_empty_weights, init_on_device
    from accel_runtime.kinds import DistributedType, PrecisionType
    from accel_runtime.launchers import debug_launcher, notebook_launcher
    from accel_runtime.local_sgd import LocalSGD
    from accel_runtime.logging import get_logger
    from accel_runtime.memory import find_executable_batch_size, release_memory
    from accel_runtime.options import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from accel_runtime.parallel.config import (
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchContextParallelConfig,
        TorchTensorParallelConfig,
    )
    from accel_runtime.profiling import ProfileKwargs
    from accel_runtime.progress import tqdm
    from accel_runtime.project import ProjectConfiguration
    from accel_runtime.rng import set_seed
    from accel_runtime.state import PartialState
    from accel_runtime.topology import Topology
    from accel_runtime.tracking import GeneralTracker, LoggerType
    from accel_runtime.utils.between import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        split_between_processes,
        synchronize_rng_states,
    )
    from accel_runtime.utils.imports import is_rich_available
    from accel_runtime.utils.nested import send_to_device

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CheckpointError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "Description",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "LoggerType",
    "MismatchError",
    "ParallelismConfig",
    "PartialState",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RankLostError",
    "Settings",
    "StallError",
    "Topology",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "broadcast",
    "broadcast_object_list",
    "debug_launcher",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "notebook_launcher",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "split_between_processes",
    "synchronize_rng_states",
    "tqdm",
]

accelerate_version = "1.15.0"
"""The version of Accelerate whose names and arguments this library has, for scripts that compare versions."""

_HOMES = {
    "CheckpointError": "accel_runtime.checkpoint.errors",
    "MismatchError": "accel_runtime.exchange.agreement",
    "StallError": "accel_runtime.exchange.agreement",
    "RankLostError": "accel_runtime.exchange.agreement",
    "Description": "accel_runtime.description",
    "is_rich_available": "accel_runtime.utils.imports",
    "Accelerator": "accel_runtime.accelerator",
    "AutocastKwargs": "accel_runtime.options",
    "DDPCommunicationHookType": "accel_runtime.options",
    "DistributedDataParallelKwargs": "accel_runtime.options",
    "GeneralTracker": "accel_runtime.tracking",
    "DynamoBackend": "accel_runtime.compilation",
    "DataLoaderConfiguration": "accel_runtime.options",
    "DistributedType": "accel_runtime.kinds",
    "FullyShardedDataParallelPlugin": "accel_runtime.parallel.config",
    "ParallelismConfig": "accel_runtime.parallel.config",
    "TorchContextParallelConfig": "accel_runtime.parallel.config",
    "TorchTensorParallelConfig": "accel_runtime.parallel.config",
    "GradScalerKwargs": "accel_runtime.options",
    "GradientAccumulationPlugin": "accel_runtime.options",
    "InitProcessGroupKwargs": "accel_runtime.options",
    "LoggerType": "accel_runtime.tracking",
    "ProfileKwargs": "accel_runtime.profiling",
    "ProjectConfiguration": "accel_runtime.project",
    "Settings": "accel_runtime.env",
    "Topology": "accel_runtime.topology",
    "get_logger": "accel_runtime.logging",
    "TorchDynamoPlugin": "accel_runtime.compilation",
    "set_seed": "accel_runtime.rng",
    "skip_first_batches": "accel_runtime.data.loader",
    "tqdm": "accel_runtime.progress",
    "LocalSGD": "accel_runtime.local_sgd",
    "PartialState": "accel_runtime.state",
    "PrecisionType": "accel_runtime.kinds",
    "broadcast": "accel_runtime.utils.between",
    "broadcast_object_list": "accel_runtime.utils.between",
    "debug_launcher": "accel_runtime.launchers",
    "find_executable_batch_size": "accel_runtime.memory",
    "gather": "accel_runtime.utils.between",
    "gather_object": "accel_runtime.utils.between",
    "init_empty_weights": "accel_runtime.initializing",
    "init_on_device": "accel_runtime.initializing",
    "notebook_launcher": "accel_runtime.launchers",
    "pad_across_processes": "accel_runtime.utils.between",
    "reduce": "accel_runtime.utils.between",
    "release_memory": "accel_runtime.memory",
    "send_to_device": "accel_runtime.utils.nested",
    "split_between_processes": "accel_runtime.utils.between",
    "synchronize_rng_states": "accel_runtime.utils.between",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("accel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
