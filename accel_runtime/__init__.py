"""The library inside each process: device, replication, precision, exact data and gathering.

Importing it is cheap: torch arrives with the first name that needs it (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.accelerator import Accelerator
    from accel_runtime.env import Settings
    from accel_runtime.logging import get_logger
    from accel_runtime.options import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from accel_runtime.profiling import ProfileKwargs
    from accel_runtime.progress import tqdm
    from accel_runtime.project import ProjectConfiguration
    from accel_runtime.rng import set_seed
    from accel_runtime.topology import Topology
    from accel_runtime.tracking import GeneralTracker, LoggerType

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GeneralTracker",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "LoggerType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Settings",
    "Topology",
    "get_logger",
    "set_seed",
    "tqdm",
]

_HOMES = {
    "Accelerator": "accel_runtime.accelerator",
    "AutocastKwargs": "accel_runtime.options",
    "DistributedDataParallelKwargs": "accel_runtime.options",
    "GeneralTracker": "accel_runtime.tracking",
    "GradScalerKwargs": "accel_runtime.options",
    "InitProcessGroupKwargs": "accel_runtime.options",
    "LoggerType": "accel_runtime.tracking",
    "ProfileKwargs": "accel_runtime.profiling",
    "ProjectConfiguration": "accel_runtime.project",
    "Settings": "accel_runtime.env",
    "Topology": "accel_runtime.topology",
    "get_logger": "accel_runtime.logging",
    "set_seed": "accel_runtime.rng",
    "tqdm": "accel_runtime.progress",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("accel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
