"""Runtime library of accel for training scripts.

Names are imported on first use (PEP 562), so that importing the package does not import torch. Each is declared once, by an
import that type checkers execute; at run time, its module is read from the same line.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.accelerator import Accelerator as Accelerator
    from accel_runtime.backends.rng import set_seed as set_seed
    from accel_runtime.big_modeling import init_empty_weights as init_empty_weights
    from accel_runtime.big_modeling import init_on_device as init_on_device
    from accel_runtime.collectives.handshake import MismatchError as MismatchError
    from accel_runtime.collectives.handshake import RankLostError as RankLostError
    from accel_runtime.collectives.handshake import StallError as StallError
    from accel_runtime.data.loader import skip_first_batches as skip_first_batches
    from accel_runtime.description import Description as Description
    from accel_runtime.environment.settings import Settings as Settings
    from accel_runtime.environment.topology import Topology as Topology
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
    from accel_runtime.launchers import debug_launcher as debug_launcher
    from accel_runtime.launchers import notebook_launcher as notebook_launcher
    from accel_runtime.local_sgd import LocalSGD as LocalSGD
    from accel_runtime.logging import get_logger as get_logger
    from accel_runtime.logging import tqdm as tqdm
    from accel_runtime.memory import find_executable_batch_size as find_executable_batch_size
    from accel_runtime.memory import release_memory as release_memory
    from accel_runtime.parallel.plugins import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from accel_runtime.parallel.plugins import ParallelismConfig as ParallelismConfig
    from accel_runtime.parallel.plugins import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_runtime.parallel.plugins import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_runtime.profiling import ProfileKwargs as ProfileKwargs
    from accel_runtime.state import PartialState as PartialState
    from accel_runtime.storage.errors import CheckpointError as CheckpointError
    from accel_runtime.tracking import GeneralTracker as GeneralTracker
    from accel_runtime.tracking import LoggerType as LoggerType
    from accel_runtime.training.forward import DynamoBackend as DynamoBackend
    from accel_runtime.training.forward import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_runtime.utils.imports import is_rich_available as is_rich_available
    from accel_runtime.utils.operations import broadcast as broadcast
    from accel_runtime.utils.operations import broadcast_object_list as broadcast_object_list
    from accel_runtime.utils.operations import gather as gather
    from accel_runtime.utils.operations import gather_object as gather_object
    from accel_runtime.utils.operations import pad_across_processes as pad_across_processes
    from accel_runtime.utils.operations import reduce as reduce
    from accel_runtime.utils.operations import send_to_device as send_to_device
    from accel_runtime.utils.operations import split_between_processes as split_between_processes
    from accel_runtime.utils.operations import synchronize_rng_states as synchronize_rng_states

accelerate_version = "1.15.0"
"""The version of Accelerate whose API this library provides, for scripts that compare versions."""


@functools.cache
def _modules() -> dict[str, str]:
    """Return the public names, and the module of each."""
    import ast  # noqa: PLC0415 - the launcher, which imports `accel_runtime.environment.settings` only, does without
    from pathlib import Path  # noqa: PLC0415

    imports = [
        node
        for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{__name__}.")
    ]
    return {alias.name: f"{node.module}" for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_modules())
    if name == "__version__":
        return importlib.import_module("accel_runtime.environment.settings").__version__
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_modules()])
