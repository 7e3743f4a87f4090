"""Change values in the text of a profile and keep its comments and order."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_cli.errors import Problem, ProfileError
from accel_cli.launchers import LAUNCHERS
from accel_cli.profile import layers, store, yaml_io
from accel_cli.profile.layers import Layer, Resolved, flatten, nest
from accel_cli.profile.schema import SCHEMA_VERSION, SECTIONS, Profile, describe
from accel_cli.profile.store import DEFAULT, ProfileStore
from accel_cli.profile.yaml_io import Document

__all__ = [
    "build_layer",
    "change_values",
    "edit_text",
    "read_layers_below",
    "remove_keys",
    "resolve_file",
    "update_profile",
]


def change_values(data: Mapping[str, Any], updates: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a profile's data with updated values, and the launcher keys that its new kind does not have.

    `updates` has new values by dotted key; None removes a key.
    """
    values = {**flatten(data), **updates}
    launcher = LAUNCHERS.get(str(updates.get("launcher.kind")))
    fields = {f"launcher.{name}" for name in launcher.model_fields} if launcher else set()
    dropped = [
        key
        for key in values
        if launcher and key.startswith("launcher.") and key not in fields and key not in updates
    ]
    return nest(
        {key: value for key, value in values.items() if key not in dropped and value is not None}
    ), dropped


def edit_text(text: str, data: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the text of a file changed to hold `data`, with comments above added keys.

    Single lines are replaced, removed or added, and the result is parsed to check it; if it is not equal to
    `data`, the whole file is rendered.
    """
    document = yaml_io.parse(text, "profile")
    before, after = flatten(document.data), flatten(data)
    lines = text.splitlines()
    for key, value in after.items():
        if key in before and before[key] != value:
            index = _find_line(document, key)
            lines[index] = _replace_value(lines[index], key, value)
    removed = [key for key in before if key not in after]
    # Remove the line of a section with the last of its keys.
    removed += [name for name in document.data if name in SECTIONS and name not in data]
    edits: list[tuple[int, int, list[str]]] = [
        (index, index + 1, []) for index in _find_lines(lines, document, removed)
    ]
    edits += _renew_comments(lines, document, after)
    for first, end, new in sorted(edits, reverse=True):
        lines[first:end] = new
    for key in after:
        if key not in before:
            _insert(lines, key, after[key], comments.get(key, ""))
    result = "\n".join(lines) + "\n"
    try:
        is_equal = yaml_io.parse(result, "result").data == data
    except ProfileError:
        is_equal = False
    return result if is_equal else store.render(data, comments)


def _find_line(document: Document, key: str) -> int:
    """Return the index of the line of a key."""
    return document.lines.get(key, 1) - 1


def _find_lines(lines: list[str], document: Document, keys: Iterable[str]) -> set[int]:
    """Return the indices of the lines of keys and of the comments that accel wrote above them."""
    described = _describe_kind(flatten(document.data).get("launcher.kind"))
    indices: set[int] = set()
    for key in keys:
        index = _find_line(document, key)
        comment = yaml_io.comment_lines(described.get(key, ""), "  " if "." in key else "")
        first = max(0, index - len(comment))
        indices |= {index, *(range(first, index) if lines[first:index] == comment else ())}
    return indices


def _renew_comments(
    lines: list[str], document: Document, after: Mapping[str, Any]
) -> list[tuple[int, int, list[str]]]:
    """Return the lines of comments that accel wrote for keys of the old launcher, with those for the new one."""
    before = flatten(document.data)
    old, new = (_describe_kind(values.get("launcher.kind")) for values in (before, after))
    edits = []
    for key in (key for key in before if key in after and key.startswith("launcher.")):
        index = _find_line(document, key)
        comment, renewed = (yaml_io.comment_lines(each.get(key, ""), "  ") for each in (old, new))
        first = max(0, index - len(comment))
        if comment != renewed and comment and lines[first:index] == comment:
            edits.append((first, index, renewed))
    return edits


def _describe_kind(kind: Any) -> Mapping[str, str]:
    return describe(kind) if isinstance(kind, str) and kind in LAUNCHERS else {}


def _replace_value(line: str, key: str, value: Any) -> str:
    """Return the line with a new value; a comment after ` #` stays."""
    name = re.escape(key.rpartition(".")[2])
    text = yaml_io.inline(value)
    return re.sub(
        rf"^(\s*{name}\s*:)\s*.*?(\s+#.*)?$", lambda match: f"{match[1]} {text}{match[2] or ''}", line
    )


def _insert(lines: list[str], key: str, value: Any, comment: str) -> None:
    """Add a key with its comment at the end of its section or of the file."""
    section, dot, name = key.partition(".")
    indent = "  " if dot else ""
    added = [*yaml_io.comment_lines(comment, indent), f"{indent}{name or section}: {yaml_io.inline(value)}"]
    headers = [index for index, line in enumerate(lines) if re.match(rf"{section}\s*:\s*(#.*)?$", line)]
    if not dot:
        lines += added
    elif not headers:
        lines += [f"{section}:", *added]
    else:
        end = headers[0] + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        lines[end:end] = added


def update_profile(
    profiles: ProfileStore, target: Path, updates: Mapping[str, Any], source: str
) -> tuple[Profile, list[str]]:
    """Set values in a profile file; create it if it does not exist.

    Errors name `source`, the command, for its updates. Return the resulting profile, over the user's default profile,
    and the removed keys, which the new launcher does not have.

    Raises:
        UsageError: The file cannot be read or written, or the result would be invalid.
    """
    with store.lock(target):
        exists = target.exists()
        text = store.read_text(target) if exists else store.render({"schema_version": SCHEMA_VERSION})
        document = store.parse(text, target)
        if document.problems:
            raise ProfileError(list(document.problems))
        data, dropped = change_values(document.data, updates)
        profile = resolve_file(profiles, target, build_layer(data, target, updates, source)).profile
        store.write(target, edit_text(text, data))
    return profile, dropped


def remove_keys(profiles: ProfileStore, target: Path, keys: Collection[str], source: str) -> list[Problem]:
    """Remove keys from a profile file, which may have other problems; return those.

    Raises:
        UsageError: The file cannot be read or written, or the change would add a problem.
    """

    def find_problems(layer: Layer) -> list[Problem]:
        try:
            resolve_file(profiles, target, layer)
        except ProfileError as error:
            return error.problems
        return []

    with store.lock(target):
        text = store.read_text(target)
        document = store.parse(text, target)
        data, _ = change_values(document.data, dict.fromkeys(keys))
        before = find_problems(build_layer(document.data, target, keys, source))
        known = {(problem.key, problem.expected) for problem in before}
        after = find_problems(build_layer(data, target, keys, source))
        if added := [problem for problem in after if (problem.key, problem.expected) not in known]:
            raise ProfileError(added)
        store.write(target, edit_text(text, data))
        return find_problems(layers.read_file(target, "file"))


def resolve_file(profiles: ProfileStore, target: Path, layer: Layer) -> Resolved:
    """Return the resolved profile of the layer of a file, over the layers below it.

    Raises:
        ProfileError: All problems of the layers and of the result.
    """
    return layers.resolve([*read_layers_below(profiles, target), layer])


def read_layers_below(profiles: ProfileStore, target: Path) -> list[Layer]:
    """Return the layers below a file: the user's default profile, unless it is that file."""
    user = profiles.get_path(DEFAULT)
    return [layers.read_file(user, "user")] if store.has_file(user) and user != target else []


def build_layer(data: Mapping[str, Any], target: Path, keys: Collection[str] = (), source: str = "") -> Layer:
    """Return the layer of a file that is not written yet; `source` is the command that sets some of its keys."""
    values = {key: value for key, value in flatten(data).items() if key != "schema_version"}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    return Layer("file", values, {"": str(target)} | dict.fromkeys([*keys, *sections], source))
