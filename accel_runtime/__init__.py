"""Runtime library of accel for training scripts.

Names are imported on first use (PEP 562), so that importing the package does not import torch. Type checkers execute the
imports below; at run time a table has the module of each name.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # before a module of POSIX is imported, whose absence explains nothing
    raise ImportError(
        "Cannot run on Windows: accel needs the processes, signals and file locks of POSIX. Install Python and accel in WSL, "
        "which this command sets up: wsl --install"
    )

if TYPE_CHECKING:
    from accel_runtime.accelerate.imports import is_rich_available as is_rich_available
    from accel_runtime.accelerate.operations import broadcast as broadcast
    from accel_runtime.accelerate.operations import broadcast_object_list as broadcast_object_list
    from accel_runtime.accelerate.operations import gather as gather
    from accel_runtime.accelerate.operations import gather_object as gather_object
    from accel_runtime.accelerate.operations import pad_across_processes as pad_across_processes
    from accel_runtime.accelerate.operations import reduce as reduce
    from accel_runtime.accelerate.operations import send_to_device as send_to_device
    from accel_runtime.accelerate.operations import split_between_processes as split_between_processes
    from accel_runtime.accelerate.operations import synchronize_rng_states as synchronize_rng_states
    from accel_runtime.accelerator.accelerator import Accelerator as Accelerator
    from accel_runtime.accelerator.description import Description as Description
    from accel_runtime.accelerator.local_sgd import LocalSGD as LocalSGD
    from accel_runtime.accelerator.state import PartialState as PartialState
    from accel_runtime.backends.rng import set_seed as set_seed
    from accel_runtime.collectives.handshake import MismatchError as MismatchError
    from accel_runtime.collectives.handshake import RankLostError as RankLostError
    from accel_runtime.collectives.handshake import StallError as StallError
    from accel_runtime.data.loader import skip_first_batches as skip_first_batches
    from accel_runtime.environment.settings import Settings as Settings
    from accel_runtime.environment.topology import Topology as Topology
    from accel_runtime.extensions.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from accel_runtime.foundation.options import AutocastKwargs as AutocastKwargs
    from accel_runtime.foundation.options import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_runtime.foundation.options import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_runtime.foundation.options import (
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from accel_runtime.foundation.options import DistributedType as DistributedType
    from accel_runtime.foundation.options import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_runtime.foundation.options import GradScalerKwargs as GradScalerKwargs
    from accel_runtime.foundation.options import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_runtime.foundation.options import PrecisionType as PrecisionType
    from accel_runtime.foundation.options import ProjectConfiguration as ProjectConfiguration
    from accel_runtime.monitoring.logging import get_logger as get_logger
    from accel_runtime.monitoring.logging import tqdm as tqdm
    from accel_runtime.monitoring.profiling import ProfileKwargs as ProfileKwargs
    from accel_runtime.notebook import debug_launcher as debug_launcher
    from accel_runtime.notebook import notebook_launcher as notebook_launcher
    from accel_runtime.parallel.big_modeling import init_empty_weights as init_empty_weights
    from accel_runtime.parallel.big_modeling import init_on_device as init_on_device
    from accel_runtime.parallel.plugins import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from accel_runtime.parallel.plugins import ParallelismConfig as ParallelismConfig
    from accel_runtime.parallel.plugins import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_runtime.parallel.plugins import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_runtime.storage.errors import CheckpointError as CheckpointError
    from accel_runtime.tracking import GeneralTracker as GeneralTracker
    from accel_runtime.tracking import LoggerType as LoggerType
    from accel_runtime.training.compile import DynamoBackend as DynamoBackend
    from accel_runtime.training.compile import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_runtime.training.memory import find_executable_batch_size as find_executable_batch_size
    from accel_runtime.training.memory import release_memory as release_memory

accelerate_version = "1.15.0"
"""The version of Accelerate whose API this library provides, for scripts that compare versions."""


_EXPORTS = {
    "accelerate.imports": "is_rich_available",
    "accelerate.operations": (
        "broadcast broadcast_object_list gather gather_object pad_across_processes reduce send_to_device"
        " split_between_processes synchronize_rng_states"
    ),
    "accelerator.accelerator": "Accelerator",
    "accelerator.description": "Description",
    "accelerator.local_sgd": "LocalSGD",
    "accelerator.state": "PartialState",
    "backends.rng": "set_seed",
    "collectives.handshake": "MismatchError RankLostError StallError",
    "data.loader": "skip_first_batches",
    "environment.settings": "Settings",
    "environment.topology": "Topology",
    "extensions.deepspeed.plugin": "DeepSpeedPlugin",
    "foundation.options": (
        "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs"
        " DistributedType GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs PrecisionType"
        " ProjectConfiguration"
    ),
    "monitoring.logging": "get_logger tqdm",
    "monitoring.profiling": "ProfileKwargs",
    "notebook": "debug_launcher notebook_launcher",
    "parallel.big_modeling": "init_empty_weights init_on_device",
    "parallel.plugins": (
        "FullyShardedDataParallelPlugin ParallelismConfig TorchContextParallelConfig"
        " TorchTensorParallelConfig"
    ),
    "storage.errors": "CheckpointError",
    "tracking": "GeneralTracker LoggerType",
    "training.compile": "DynamoBackend TorchDynamoPlugin",
    "training.memory": "find_executable_batch_size release_memory",
}
"""The names of each module, which are those that type checkers import above."""
_MODULES = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names.split()}
_SUBMODULES = "accelerator big_modeling data_loader hooks launchers logging optimizer parallelism_config scheduler state tracking utils"
"""The modules that `import accelerate` makes attributes of the package, which scripts use without another import."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_MODULES)
    if name == "__version__":
        return importlib.import_module("accel_runtime.environment.settings").__version__
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in _SUBMODULES.split():
        return importlib.import_module(f"{__name__}.{name}")
    return importlib.import_module("accel_runtime.accelerate.package").import_from_accelerate(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_SUBMODULES.split()})
