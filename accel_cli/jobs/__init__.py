"""Jobs that a scheduler runs: the one table of services, by the launcher that submits to them."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from accel_cli.jobs.base import Jobs

__all__ = ["SERVICES", "again", "service"]

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


def again(profile: str | None, assignments: Iterable[str]) -> str:
    """What `accel jobs ...` has to be told, beside a job's id, to look where it was looked, with a space before.

    Args:
        profile: The named profile that was asked for.
        assignments: What was typed over it, as `KEY=VALUE`.
    """
    options = [("--profile", profile)] if profile else []
    for text in assignments:
        key, _, value = text.partition("=")
        options.append(("--launcher", value) if key == "launcher.kind" else ("--set", text))
    return "".join(f" {option} {shlex.quote(value)}" for option, value in options)
