"""The library inside each process: device, replication, precision, exact data and gathering.

Importing it is cheap: torch arrives with the first name that needs it (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.accelerator import Accelerator
    from accel_runtime.compilation import DynamoBackend, TorchDynamoPlugin
    from accel_runtime.env import Settings
    from accel_runtime.options import (
        AutocastKwargs,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from accel_runtime.rng import set_seed
    from accel_runtime.topology import Topology

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DistributedDataParallelKwargs",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Settings",
    "Topology",
    "TorchDynamoPlugin",
    "set_seed",
]

_HOMES = {
    "Accelerator": "accel_runtime.accelerator",
    "AutocastKwargs": "accel_runtime.options",
    "DDPCommunicationHookType": "accel_runtime.options",
    "DistributedDataParallelKwargs": "accel_runtime.options",
    "DynamoBackend": "accel_runtime.compilation",
    "GradScalerKwargs": "accel_runtime.options",
    "GradientAccumulationPlugin": "accel_runtime.options",
    "InitProcessGroupKwargs": "accel_runtime.options",
    "Settings": "accel_runtime.env",
    "Topology": "accel_runtime.topology",
    "TorchDynamoPlugin": "accel_runtime.compilation",
    "set_seed": "accel_runtime.rng",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("accel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
