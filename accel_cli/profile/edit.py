"""Changing values in a profile's text, so that a person's comments and order stay."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_cli.errors import Problem, ProfileError
from accel_cli.launchers import LAUNCHERS
from accel_cli.profile import layers, store, yaml_io
from accel_cli.profile.layers import Layer, flat, nested
from accel_cli.profile.schema import SCHEMA_VERSION, Profile, describe
from accel_cli.profile.store import DEFAULT, Store, render
from accel_cli.profile.yaml_io import Document

__all__ = ["below", "change_values", "edit_text", "layer", "remove_keys", "update_profile"]


def change_values(data: Mapping[str, Any], updates: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A profile's data with values replaced, and the launcher keys that its new kind does not have.

    Args:
        data: The whole of a file.
        updates: New values by dotted key; None takes a key out.
    """
    values = {**flat(data), **updates}
    chosen = LAUNCHERS.get(str(updates.get("launcher.kind")))
    lost = [
        key
        for key in values
        if chosen
        and key not in updates
        and key.startswith("launcher.")
        and key.removeprefix("launcher.") not in chosen.model_fields
    ]
    kept = {key: value for key, value in values.items() if key not in lost and value is not None}
    return nested(kept), lost


def edit_text(
    text: str, found: Document, data: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The text of a file, made to say `data`.

    Single lines are replaced, taken out or added, and the result is read back; what cannot be done line by
    line is written anew.

    Args:
        text: What the file says.
        found: The same, read.
        data: What it is to say.
        comments: What stands above a key that is added, by dotted key.
    """
    before, after = flat(found.data), flat(data)
    lines = text.splitlines()
    gone = [key for key in before if key not in after]
    # The line of a section goes with the last of its keys.
    sections = {key.partition(".")[0] for key in gone if "." in key} - {
        key.partition(".")[0] for key in after
    }
    gone += [section for section in sections if (section,) in found.lines]
    for key, value in after.items():
        if key in before and before[key] != value:
            lines[_line(found, key)] = _replaced(lines[_line(found, key)], key, value)
    for index in sorted(_list_lines(lines, found, gone), reverse=True):
        del lines[index]
    for key in (key for key in after if key not in before):
        _insert(lines, key, after[key], comments.get(key, ""))
    result = "\n".join(lines) + "\n"
    try:
        faithful = yaml_io.parse(result, "result").data == data
    except ProfileError:
        faithful = False
    return result if faithful else render(data, comments)


def _line(found: Document, key: str) -> int:
    """The index of the line a key stands on."""
    return found.lines.get(tuple(key.split(".", 1)), found.lines.get((key,), 1)) - 1


def _list_lines(lines: list[str], found: Document, keys: Iterable[str]) -> set[int]:
    """Return the indices of the lines that keys stand on, with the comments above them that accel wrote."""
    kind = flat(found.data).get("launcher.kind")
    described = describe(kind) if isinstance(kind, str) and kind in LAUNCHERS else {}
    indices: set[int] = set()
    for key in keys:
        index = _line(found, key)
        comment = yaml_io.comment_lines(described.get(key, ""), "  " if "." in key else "")
        first = max(0, index - len(comment))
        indices |= {index, *(range(first, index) if lines[first:index] == comment else ())}
    return indices


def _replaced(line: str, key: str, value: Any) -> str:
    """The line with a new value; what follows ` #` stays."""
    name = re.escape(key.rpartition(".")[2])
    value_text = yaml_io.inline(value)
    return re.sub(rf"^(\s*{name}\s*:)\s*.*?(\s+#.*)?$", lambda m: f"{m[1]} {value_text}{m[2] or ''}", line)


def _insert(lines: list[str], key: str, value: Any, comment: str) -> None:
    """Add a line, below its comment: at the end of its section, or of the file."""
    section, dot, name = key.partition(".")
    if not dot:
        lines += [*yaml_io.comment_lines(comment), f"{key}: {yaml_io.inline(value)}"]
        return
    added = [*yaml_io.comment_lines(comment, "  "), f"  {name}: {yaml_io.inline(value)}"]
    heads = [index for index, line in enumerate(lines) if re.match(rf"{section}\s*:\s*(#.*)?$", line)]
    if heads:
        end = next(
            (i for i, line in enumerate(lines[heads[0] + 1 :], heads[0] + 1) if line[:1] != " "), len(lines)
        )
        lines[end:end] = added
    else:
        lines += [f"{section}:", *added]


def update_profile(
    where: Store, target: Path, updates: Mapping[str, Any], by: str
) -> tuple[Profile, list[str]]:
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
        found = store.read(target) if exists else yaml_io.parse(text, str(target))
        if found.problems:
            raise ProfileError(list(found.problems))
        data, lost = change_values(found.data, updates)
        resolved = layers.resolve([*below(where, target), layer(data, target, updates, by)])
        store.write(target, edit_text(text, found, data))
    return resolved.profile, lost


def remove_keys(where: Store, target: Path, keys: Collection[str], by: str) -> list[Problem]:
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
        data, _ = change_values(found.data, dict.fromkeys(keys))
        before, after = (
            [*found.problems, *_find_problems([*below(where, target), layer(each, target, keys, by)])]
            for each in (found.data, data)
        )
        known = {(problem.key, problem.expected) for problem in before}
        if added := [problem for problem in after if (problem.key, problem.expected) not in known]:
            raise ProfileError(added)
        store.write(target, edit_text(text, found, data))
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
