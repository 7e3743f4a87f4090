"""Jobs that a scheduler runs: the one table of services, by the launcher that submits to them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accel_cli.jobs.base import Jobs

__all__ = ["SERVICES", "service"]

SERVICES: Mapping[str, str] = MappingProxyType(
    {
        "slurm": "accel_cli.jobs.slurm:SlurmJobs",
        "sagemaker": "accel_cli.jobs.sagemaker:SageMakerJobs",
    }
)
"""Where the class lives that asks about the jobs of a launcher, as `module:class`."""


def service(kind: str, values: Mapping[str, Any] = MappingProxyType({})) -> Jobs:
    """The jobs of a launcher; what its class imports is imported only here.

    Args:
        kind: The launcher's.
        values: What the profile in force says, by dotted key, where it is of this launcher.

    Raises:
        UsageError: There is no such service here.
    """
    module, _, name = SERVICES[kind].partition(":")
    found: type[Jobs] = getattr(importlib.import_module(module), name)
    return found.of(values)
