"""Runtime library of accel for training scripts.

Names are imported on first use (PEP 562), so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.accelerator.accelerator import Accelerator
    from accel_runtime.big_modeling import init_empty_weights, init_on_device
    from accel_runtime.checkpoint.errors import CheckpointError
    from accel_runtime.collectives.handshake import MismatchError, RankLostError, StallError
    from accel_runtime.data.loader import skip_first_batches
    from accel_runtime.description import Description
    from accel_runtime.env import Settings
    from accel_runtime.launchers import debug_launcher, notebook_launcher
    from accel_runtime.local_sgd import LocalSGD
    from accel_runtime.logging import get_logger, tqdm
    from accel_runtime.memory import find_executable_batch_size, release_memory
    from accel_runtime.options import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        PrecisionType,
        ProjectConfiguration,
    )
    from accel_runtime.parallel.plugins import (
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchContextParallelConfig,
        TorchTensorParallelConfig,
    )
    from accel_runtime.profiling import ProfileKwargs
    from accel_runtime.rng import set_seed
    from accel_runtime.state import PartialState
    from accel_runtime.topology import Topology
    from accel_runtime.tracking import GeneralTracker, LoggerType
    from accel_runtime.training.compilation import DynamoBackend, TorchDynamoPlugin
    from accel_runtime.utils.imports import is_rich_available
    from accel_runtime.utils.operations import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        send_to_device,
        split_between_processes,
        synchronize_rng_states,
    )

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
"""The version of Accelerate whose API this library provides, for scripts that compare versions."""

_MODULES = {
    "CheckpointError": "accel_runtime.checkpoint.errors",
    "MismatchError": "accel_runtime.collectives.handshake",
    "StallError": "accel_runtime.collectives.handshake",
    "RankLostError": "accel_runtime.collectives.handshake",
    "Description": "accel_runtime.description",
    "is_rich_available": "accel_runtime.utils.imports",
    "Accelerator": "accel_runtime.accelerator.accelerator",
    "AutocastKwargs": "accel_runtime.options",
    "DDPCommunicationHookType": "accel_runtime.options",
    "DistributedDataParallelKwargs": "accel_runtime.options",
    "GeneralTracker": "accel_runtime.tracking",
    "DynamoBackend": "accel_runtime.training.compilation",
    "DataLoaderConfiguration": "accel_runtime.options",
    "DistributedType": "accel_runtime.options",
    "FullyShardedDataParallelPlugin": "accel_runtime.parallel.plugins",
    "ParallelismConfig": "accel_runtime.parallel.plugins",
    "TorchContextParallelConfig": "accel_runtime.parallel.plugins",
    "TorchTensorParallelConfig": "accel_runtime.parallel.plugins",
    "GradScalerKwargs": "accel_runtime.options",
    "GradientAccumulationPlugin": "accel_runtime.options",
    "InitProcessGroupKwargs": "accel_runtime.options",
    "LoggerType": "accel_runtime.tracking",
    "ProfileKwargs": "accel_runtime.profiling",
    "ProjectConfiguration": "accel_runtime.options",
    "Settings": "accel_runtime.env",
    "Topology": "accel_runtime.topology",
    "get_logger": "accel_runtime.logging",
    "TorchDynamoPlugin": "accel_runtime.training.compilation",
    "set_seed": "accel_runtime.rng",
    "skip_first_batches": "accel_runtime.data.loader",
    "tqdm": "accel_runtime.logging",
    "LocalSGD": "accel_runtime.local_sgd",
    "PartialState": "accel_runtime.state",
    "PrecisionType": "accel_runtime.options",
    "broadcast": "accel_runtime.utils.operations",
    "broadcast_object_list": "accel_runtime.utils.operations",
    "debug_launcher": "accel_runtime.launchers",
    "find_executable_batch_size": "accel_runtime.memory",
    "gather": "accel_runtime.utils.operations",
    "gather_object": "accel_runtime.utils.operations",
    "init_empty_weights": "accel_runtime.big_modeling",
    "init_on_device": "accel_runtime.big_modeling",
    "notebook_launcher": "accel_runtime.launchers",
    "pad_across_processes": "accel_runtime.utils.operations",
    "reduce": "accel_runtime.utils.operations",
    "release_memory": "accel_runtime.memory",
    "send_to_device": "accel_runtime.utils.operations",
    "split_between_processes": "accel_runtime.utils.operations",
    "synchronize_rng_states": "accel_runtime.utils.operations",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("accel")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
