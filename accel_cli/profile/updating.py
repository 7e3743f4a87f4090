"""Values into a profile's file: comments stay, and what could not be used is refused before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_cli.errors import Problem, ProfileError
from accel_cli.profile import document, edit, layers, store
from accel_cli.profile.layers import Layer, flat
from accel_cli.profile.schema import SCHEMA_VERSION, Profile
from accel_cli.profile.store import DEFAULT, Store

__all__ = ["below", "layer", "remove", "update"]


def update(where: Store, target: Path, updates: Mapping[str, Any], by: str) -> tuple[Profile, list[str]]:
    """Set values in a profile file, which is made if there is none.

    Args:
        where: The folders of profiles.
        target: The file.
        updates: New values by dotted key; None takes a key out.
        by: Who says them, for messages.

    Returns:
        What holds now, with the user's own profile below it, and the keys that the new launcher does not have.

    Raises:
        UsageError: The file cannot be read or written, or what it would say could not be used.
    """
    with store.lock(target):
        exists = target.exists()
        text = store.read_text(target) if exists else store.render({"schema_version": SCHEMA_VERSION})
        found = store.read(target) if exists else document.parse(text, str(target))
        if found.problems:
            raise ProfileError(list(found.problems))
        data, lost = edit.changed(found.data, updates)
        resolved = layers.resolve([*below(where, target), layer(data, target, updates, by)])
        store.write(target, edit.edited(text, found, data))
    return resolved.profile, lost


def remove(where: Store, target: Path, keys: Collection[str], by: str) -> list[Problem]:
    """Take keys out of a profile file, which may have other mistakes.

    Args:
        where: The folders of profiles.
        target: The file.
        keys: Dotted keys.
        by: The command, for messages.

    Returns:
        The mistakes that the file still has.

    Raises:
        UsageError: The file cannot be read or written, or it would have a mistake that it does not have yet.
    """
    with store.lock(target):
        text, found = store.read_text(target), store.read(target)
        data, _ = edit.changed(found.data, dict.fromkeys(keys))
        before, after = (
            [*found.problems, *_find_problems([*below(where, target), layer(each, target, keys, by)])]
            for each in (found.data, data)
        )
        known = {(problem.key, problem.expected) for problem in before}
        if added := [problem for problem in after if (problem.key, problem.expected) not in known]:
            raise ProfileError(added)
        store.write(target, edit.edited(text, found, data))
        return _find_problems([*below(where, target), layers.file(target, "file")])


def _find_problems(stack: Iterable[Layer]) -> list[Problem]:
    """Return the mistakes of layers."""
    try:
        layers.resolve(stack)
    except ProfileError as error:
        return error.problems
    return []


def below(where: Store, target: Path) -> list[Layer]:
    """The layers a file stands on: the user's own profile, for any other file."""
    user = where.path(DEFAULT)
    return [layers.file(user, "user")] if user.is_file() and user != target else []


def layer(data: Mapping[str, Any], target: Path, said: Collection[str] = (), by: str = "") -> Layer:
    """The layer of a file that is not written yet.

    Args:
        data: What it will hold.
        target: Where.
        said: The keys that somebody has just said.
        by: Who that is, for messages.
    """
    values = {key: value for key, value in flat(data).items() if key != "schema_version"}
    sections = {key.partition(".")[0] for key in said if "." in key}
    return Layer("file", values, {"": str(target)} | dict.fromkeys([*said, *sections], by))
