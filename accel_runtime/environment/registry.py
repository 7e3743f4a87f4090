"""Tables of parts that are chosen by name: launchers, commands, engines, stores, formats. Standard library only.

A part of accel is a line of its table, and that of another package an entry point of the table's group, if it has one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Registry"]

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry]):
    """Entries by name: those of accel, and entry points of other packages.

    The module of an entry is imported when the entry is looked up. Entry points are read only for a name that accel does not
    have, and to list all names: finding them takes as long as importing a large package.
    """

    def __init__(
        self, locations: Mapping[str, str], group: str = "", error: type[Exception] = ImportError
    ) -> None:
        """Create a registry.

        Args:
            locations: The entries of accel, as `module:attribute`.
            group: The group of entry points of other packages; empty if they cannot add any.
            error: Raised for an entry point that cannot be loaded.
        """
        self.names = tuple(locations)
        self._locations = dict(locations)
        self._group = group
        self._error = error

    def __getitem__(self, name: str) -> Entry:
        """Import the module of an entry and return the entry; raise KeyError for an unknown name."""
        if location := self._locations.get(name):
            module, _, attribute = location.partition(":")
            entry: Entry = getattr(importlib.import_module(module), attribute)
        else:
            entry = self._load(_find_entry_points(self._group)[name])
        return entry

    def __contains__(self, name: object) -> bool:
        """Return whether there is an entry of a name, without importing it."""
        return isinstance(name, str) and (name in self._locations or name in _find_entry_points(self._group))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names: those of accel first."""
        yield from self._locations
        yield from (name for name in _find_entry_points(self._group) if name not in self._locations)

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(1 for _ in self)

    def _load(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except Exception as error:
            package = f"the package {point.dist.name}" if point.dist else "another package"
            raise self._error(
                f"Cannot load {point.name!r} of {package} (entry point {self._group}: {point.value}): "
                f"{type(error).__name__}: {error}. Update or uninstall that package."
            ) from error


@cache
def _find_entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group, by name."""
    if not group:
        return {}
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import

    return {point.name: point for point in entry_points(group=group)}
