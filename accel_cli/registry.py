"""Registries of commands and launchers, which are imported when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Registry"]

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
        return name in self._locations or (isinstance(name, str) and name in _find_entry_points(self._group))

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
