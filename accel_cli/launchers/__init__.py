"""The table of launchers: a new one is a module, and a line here or an entry point of its distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_cli.errors import UsageError
from accel_cli.registry import Registry

if TYPE_CHECKING:
    from accel_cli.launchers.base import Launcher
    from accel_cli.planning.machine import Machine
    from accel_cli.planning.options import LaunchOption

__all__ = ["LAUNCHERS", "check_options", "list_options", "suggest"]

LAUNCHERS: Registry[type[Launcher]] = Registry(
    {
        "single": "accel_cli.launchers.single:Single",
        "torchrun": "accel_cli.launchers.torchrun:Torchrun",
        "slurm": "accel_cli.launchers.slurm:Slurm",
        "xla": "accel_cli.launchers.xla:Xla",
        "sagemaker": "accel_cli.sagemaker.config:SageMaker",
    },
    group="accel.launchers",
)
"""The class of each launcher, by the `kind` that chooses it."""


def suggest(machine: Machine) -> str:
    """Return the kind that suits a machine: for its TPU, for one process, or for one per accelerator."""
    if machine.tpu.exists:
        return "xla"
    return "torchrun" if len(machine.devices) > 1 else "single"


def list_options() -> dict[LaunchOption, list[str]]:
    """Return the options that launchers declare, with the kinds that have each."""
    options: dict[str, tuple[LaunchOption, list[str]]] = {}
    for kind, launcher in LAUNCHERS.items():
        for option in launcher.launch_options:
            options.setdefault(option.name, (option, []))[1].append(kind)
    return dict(options.values())


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Raise if an option is declared by other launchers than the chosen one.

    Args:
        kind: The chosen launcher.
        options: The options of launchers that were typed, by name.

    Raises:
        UsageError: The launcher does not have one of the options.
    """
    for option, kinds in list_options().items():
        if option.name in options and kind not in kinds:
            launchers = f"launcher{'s' if len(kinds) > 1 else ''} {' and '.join(kinds)}"
            raise UsageError(
                f"Cannot use {option.flag} with launcher.kind: {kind}: it is an option of the {launchers}. Leave it out, "
                f"or choose the launcher with --set launcher.kind={kinds[0]}."
            )
