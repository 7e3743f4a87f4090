"""The table of launchers, and its class, which `accel_cli.main` uses for commands too.

A new launcher is a module, and a line here or an entry point of its distribution.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from accel_cli.launchers.base import Launcher
    from accel_cli.planning.machine import Machine
    from accel_cli.planning.options import LaunchOption

__all__ = [
    "LAUNCHERS",
    "Registry",
    "check_options",
    "describe_environment",
    "find_selected",
    "list_options",
    "suggest_launcher",
]

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry]):
    """Entries by name: those of accel, and entry points of other packages.

    Entry points are read only for a name that accel does not have, and to list all names: finding them takes as long
    as importing a large package.
    """

    def __init__(self, locations: Mapping[str, str], group: str) -> None:
        """Create a registry.

        Args:
            locations: The entries of accel, as `module:attribute`.
            group: The group of entry points of other packages.
        """
        self.names = tuple(locations)
        self._locations = dict(locations)
        self._group = group

    @override
    def __getitem__(self, name: str) -> Entry:
        if location := self._locations.get(name):
            module, _, attribute = location.partition(":")
            entry: Entry = getattr(importlib.import_module(module), attribute)
        else:
            entry = self._load(_find_entry_points(self._group)[name])
        return entry

    @override
    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._locations or name in _find_entry_points(self._group))

    @override
    def __iter__(self) -> Iterator[str]:
        yield from self._locations
        yield from (name for name in _find_entry_points(self._group) if name not in self._locations)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _load(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except Exception as error:
            package = f"the package {point.dist.name}" if point.dist else "another package"
            raise UsageError(
                f"Cannot load {point.name!r} of {package} (entry point {self._group}: {point.value}): "
                f"{type(error).__name__}: {error}. Update or uninstall that package."
            ) from error


@cache
def _find_entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group, by name."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import

    return {point.name: point for point in entry_points(group=group)}


LAUNCHERS: Registry[type[Launcher]] = Registry(
    {
        "single": "accel_cli.launchers.single:Single",
        "torchrun": "accel_cli.launchers.torchrun:Torchrun",
        "slurm": "accel_cli.extensions.slurm.config:Slurm",
        "ssh": "accel_cli.extensions.ssh.config:Ssh",
        "xla": "accel_cli.extensions.xla.launcher:Xla",
        "sagemaker": "accel_cli.extensions.sagemaker.config:SageMaker",
        "kubernetes": "accel_cli.extensions.kubernetes.config:Kubernetes",
        "ray": "accel_cli.extensions.ray.config:Ray",
        "skypilot": "accel_cli.extensions.skypilot.config:SkyPilot",
    },
    group="accel.launchers",
)
"""The class of each launcher, by the `kind` that chooses it."""


def suggest_launcher(machine: Machine, device: Any = None) -> str:
    """Return the kind that suits a machine: for its TPU, for one process, or for one per accelerator.

    Args:
        machine: The machine.
        device: The device of the profile, not validated; None if it has none.
    """
    if machine.tpu.exists and device in {None, "auto", "xla"}:
        return "xla"
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
