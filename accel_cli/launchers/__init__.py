"""The table of launchers.

A new launcher is a module, and a line here or an entry point of its distribution; CONTRIBUTING.md lists its tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_cli.errors import UsageError
from accel_runtime.environment.registry import Registry

if TYPE_CHECKING:
    from accel_cli.launchers.launcher import Launcher
    from accel_cli.planning.launch_options import LaunchOption
    from accel_cli.planning.machine import Machine

__all__ = [
    "LAUNCHERS",
    "check_options",
    "describe_environment",
    "find_selected",
    "list_options",
    "suggest_launcher",
]

LAUNCHERS: Registry[type[Launcher]] = Registry(
    {
        "single": "accel_cli.launchers.single:Single",
        "torchrun": "accel_cli.launchers.torchrun:Torchrun",
        "slurm": "accel_cli.extensions.slurm.launcher:Slurm",
        "ssh": "accel_cli.extensions.ssh.launcher:Ssh",
        "xla": "accel_cli.extensions.xla.launcher:Xla",
        "sagemaker": "accel_cli.extensions.sagemaker.launcher:SageMaker",
        "kubernetes": "accel_cli.extensions.kubernetes.launcher:Kubernetes",
        "ray": "accel_cli.extensions.ray.launcher:Ray",
        "skypilot": "accel_cli.extensions.skypilot.launcher:SkyPilot",
    },
    group="accel.launchers",
    error=UsageError,
)
"""The class of each launcher, by the `kind` that chooses it."""


def suggest_launcher(machine: Machine, device: Any = None) -> str:
    """Return the kind that suits a machine: for devices that torch does not detect, for one process, or for one per accelerator.

    Args:
        machine: The machine.
        device: The device of the profile, not validated; None if it has none.
    """
    for other in machine.others:
        if other.exists and device in {None, "auto", other.device}:
            return other.launcher
    return "torchrun" if len(machine.devices) > 1 else "single"


def describe_environment(machine: Machine, environ: Mapping[str, str]) -> dict[str, Mapping[str, str] | str]:
    """Return the sections of `accel env` about the devices and services of accel's launchers, by title."""
    sections: dict[str, Mapping[str, str] | str] = {}
    for kind in LAUNCHERS.names:
        sections |= LAUNCHERS[kind].describe_environment(machine, environ)
    return sections


def list_options() -> dict[LaunchOption, list[str]]:
    """Return the options that launchers declare, with the kinds that have each."""
    options: dict[str, tuple[LaunchOption, list[str]]] = {}
    for kind, launcher in LAUNCHERS.items():
        for option in launcher.launch_options:
            options.setdefault(option.name, (option, []))[1].append(kind)
    return dict(options.values())


def find_selected(options: Mapping[str, Any]) -> tuple[str, LaunchOption] | None:
    """Return the kind that a typed option selects, with the option; None if no option selects a launcher."""
    for option, kinds in list_options().items():
        if option.selects_launcher and option.name in options:
            return kinds[0], option
    return None


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Raise if a typed option is declared by other launchers than the chosen one."""
    for option, kinds in list_options().items():
        if option.name in options and kind not in kinds:
            *others, last = kinds
            launchers = f"launchers {', '.join(others)} and {last}" if others else f"launcher {last}"
            raise UsageError(
                f"Cannot use {option.flag} with launcher.kind: {kind}: it is an option of the {launchers}. Leave it out, "
                f"or choose the launcher with --set launcher.kind={kinds[0]}."
            )
