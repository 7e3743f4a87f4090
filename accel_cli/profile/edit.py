"""Changing values in a profile's text, so that a person's comments and order stay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from accel_cli.errors import ProfileError
from accel_cli.launchers import LAUNCHERS
from accel_cli.profile import document
from accel_cli.profile.document import Document
from accel_cli.profile.layers import flat, nested
from accel_cli.profile.schema import describe
from accel_cli.profile.store import render

__all__ = ["changed", "edited"]


def changed(data: Mapping[str, Any], updates: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
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


def edited(
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
        faithful = document.parse(result, "result").data == data
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
        comment = document.comment_lines(described.get(key, ""), "  " if "." in key else "")
        first = max(0, index - len(comment))
        indices |= {index, *(range(first, index) if lines[first:index] == comment else ())}
    return indices


def _replaced(line: str, key: str, value: Any) -> str:
    """The line with a new value; what follows ` #` stays."""
    name = re.escape(key.rpartition(".")[2])
    value_text = document.inline(value)
    return re.sub(rf"^(\s*{name}\s*:)\s*.*?(\s+#.*)?$", lambda m: f"{m[1]} {value_text}{m[2] or ''}", line)


def _insert(lines: list[str], key: str, value: Any, comment: str) -> None:
    """Add a line, below its comment: at the end of its section, or of the file."""
    section, dot, name = key.partition(".")
    if not dot:
        lines += [*document.comment_lines(comment), f"{key}: {document.inline(value)}"]
        return
    added = [*document.comment_lines(comment, "  "), f"  {name}: {document.inline(value)}"]
    heads = [index for index, line in enumerate(lines) if re.match(rf"{section}\s*:\s*(#.*)?$", line)]
    if heads:
        end = next(
            (i for i, line in enumerate(lines[heads[0] + 1 :], heads[0] + 1) if line[:1] != " "), len(lines)
        )
        lines[end:end] = added
    else:
        lines += [f"{section}:", *added]
