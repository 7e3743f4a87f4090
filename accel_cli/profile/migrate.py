"""Bringing older profile files up to date, one version at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from accel_cli.errors import Problem, ProfileError
from accel_cli.profile.schema import SCHEMA_VERSION

__all__ = ["MIGRATIONS", "UnversionedError", "is_accelerate", "migrated"]

Migration = Callable[[dict[str, Any]], dict[str, Any]]


class UnversionedError(ProfileError):
    """A file does not say its version; the rest of it is read as one of today's layout."""


MIGRATIONS: Mapping[int, Migration] = MappingProxyType({})
"""For every older version, what makes it the next one; a release that changes the layout adds a line."""


def is_accelerate(data: Mapping[str, Any]) -> bool:
    """Return True if this is a config file of Accelerate rather than a profile."""
    return "compute_environment" in data or "distributed_type" in data


def migrated(
    data: dict[str, Any],
    where: str,
    migrations: Mapping[int, Migration] = MIGRATIONS,
    newest: int = SCHEMA_VERSION,
) -> dict[str, Any]:
    """The data of a file in today's layout.

    Raises:
        UnversionedError: The version is missing, or is no version.
        ProfileError: The version is newer than this accel, or this is a config file of Accelerate.
    """
    version = data.get("schema_version")
    if version is None and is_accelerate(data):
        cure = "Make a profile of it: accel config import FILE"
        raise ProfileError(
            [Problem(where, "", f"this is a config file of Accelerate, not a profile. {cure}")]
        )
    if version is None:
        hint = f"add the line: schema_version: {newest}"
        raise UnversionedError(
            [Problem(where, "schema_version", "every profile says its version", "nothing", hint)]
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UnversionedError(
            [Problem(where, "schema_version", "expected a whole number above 0", repr(version))]
        )
    if version > newest:
        reason = f"this file was written by a newer accel; this one reads up to version {newest}"
        raise ProfileError([Problem(where, "schema_version", reason, repr(version))])
    for step in range(version, newest):
        data = {**migrations[step](data), "schema_version": step + 1}
    return data
