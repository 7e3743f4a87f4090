"""The one table of launchers: a new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_cli.launchers.base import Launcher
from accel_cli.launchers.sagemaker.section import SageMaker
from accel_cli.launchers.single import Single
from accel_cli.launchers.slurm import Slurm
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.launchers.xla import Xla
from accel_cli.planning.machine import Machine

__all__ = ["LAUNCHERS", "suggest"]

LAUNCHERS: Mapping[str, type[Launcher]] = MappingProxyType(
    {"single": Single, "torchrun": Torchrun, "slurm": Slurm, "xla": Xla, "sagemaker": SageMaker}
)
"""Every launcher, by the `kind` that chooses it."""


def suggest(machine: Machine) -> str:
    """The kind that suits a machine: its TPU, one process, or one for each of several accelerators."""
    if machine.tpu.found:
        return "xla"
    return "torchrun" if len(machine.devices) > 1 else "single"
