"""Reading YAML: plain data, and for every key the line it stands on.

The scalars are those of YAML 1.2: `no`, `on` and `off` are text, `1:30` is no number in base 60, and a
date is no date. Keys that come twice, anchors and tags are refused: a profile needs none of them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import yaml

from accel_cli.errors import Problem, ProfileError

__all__ = ["Document", "comment_lines", "dump", "inline", "parse", "scalar"]

Path = tuple[str | int, ...]
_MAX_DEPTH = 30
_WIDTH = 80


class _Loader(yaml.SafeLoader):
    """A safe loader that knows the scalars of YAML 1.2's core schema only."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_TYPES = MappingProxyType(
    {
        "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
        "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
        "int": re.compile(r"[-+]?[0-9]{1,18}\Z"),
        "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?\Z"),
    }
)
"""The texts that are values of each tag; the first type that fits is that of a value without a tag."""
for _tag, _first in zip(
    _TYPES, (["~", "n", "N", ""], [*"tTfF"], [*"-+0123456789"], [*"-+.0123456789"]), strict=True
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _TYPES[_tag], _first)


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML's plain and single-quoted styles lose line breaks such as U+0085.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


@dataclass(frozen=True)
class Document:
    """What a YAML text says."""

    data: dict[str, Any]
    lines: Mapping[Path, int] = field(default_factory=dict)
    """The line, from 1, of every key and list entry."""
    problems: tuple[Problem, ...] = ()
    """Mistakes that do not keep the rest from being judged."""


def parse(text: str, where: str) -> Document:
    """Read a YAML mapping.

    Args:
        text: The YAML.
        where: What to call it in errors: a file's path, or an option.

    Raises:
        ProfileError: It is no YAML, no mapping, or uses what a profile does not need.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        raise ProfileError(
            [Problem(place, "", f"this is not YAML: {error.problem or error.context}")]
        ) from None
    except yaml.YAMLError as error:
        raise ProfileError([Problem(where, "", f"this is not YAML: {str(error).splitlines()[0]}")]) from None
    except RecursionError:
        raise ProfileError([Problem(where, "", "this is nested too deeply for a profile")]) from None
    if node is None:
        return Document({})
    reader = _Reader(where)
    data = reader.read(node, ())
    if not isinstance(data, dict):
        reader.problems.append(Problem(f"{where}:1", "", "expected keys and values", came=_kind(data)))
    if reader.problems:
        raise ProfileError(reader.problems)
    return Document(data, reader.lines)


def scalar(text: str, where: str) -> Any:
    """Read one value as YAML would: `2` is a number, `no` is text, `[a, b]` is a list.

    Raises:
        ProfileError: It is no YAML.
    """
    return parse(f"value: {text}", where).data["value"]


def dump(data: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """The YAML of plain data, in the order of its keys; `parse(dump(data)).data == data`.

    Args:
        data: The data.
        comments: What stands above a key of the first two levels, by dotted key.
    """
    text = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    if not comments:
        return text
    commented = "".join(_with_comments(data, comments, ""))
    return commented if parse(commented, "").data == data else text


def _with_comments(data: Mapping[str, Any], comments: Mapping[str, str], section: str) -> Iterator[str]:
    """Give the lines of keys and values, each below its comment."""
    indent = "  " if section else ""
    for key, value in data.items():
        yield from (f"{line}\n" for line in comment_lines(comments.get(section + key, ""), indent))
        if isinstance(value, Mapping) and value and not section:
            yield f"{key}:\n"
            yield from _with_comments(value, comments, f"{key}.")
        else:
            yield textwrap.indent(dump({key: value}), indent)


def comment_lines(text: str, indent: str = "") -> list[str]:
    """The lines of a comment; none of an empty one."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def inline(value: Any) -> str:
    """A value on one line, as YAML writes it behind a key."""
    if not isinstance(value, (list, dict)):
        return dump({"v": value}).removeprefix("v:").strip()
    # As wide as it needs: a line break would end the value for an editor that works line by line.
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=sys.maxsize
    )
    return str(text).strip()


class _Reader:
    """Turns nodes into data, noting lines and collecting everything that is wrong."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: set[int] = set()
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._seen:
            return self._refuse(
                node, path, "anchors and aliases have no place in a profile: write the value out"
            )
        self._seen.add(id(node))
        if len(path) > _MAX_DEPTH:
            return self._refuse(node, path, "this is nested too deeply for a profile")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                self._refuse(key_node, path, "a key must be a word")
                continue
            if key in data:
                self._refuse(
                    key_node,
                    (*path, key),
                    f"this key comes twice; it is also on line {self.lines[(*path, key)]}",
                )
                continue
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            data[key] = self.read(value_node, (*path, key))
        return data

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        if tag == "str":
            return node.value
        if tag not in _TYPES:
            return self._refuse(node, path, f"the tag {node.tag} has no place in a profile")
        # A tag that is written out, as in `!!float .`, may stand before anything.
        if not _TYPES[tag].match(node.value):
            return self._refuse(node, path, f"{node.value!r} is not a value of the tag !!{tag}")
        if tag == "null":
            return None
        if tag == "bool":
            return node.value.lower() == "true"
        return int(node.value) if tag == "int" else float(node.value)

    def _refuse(self, node: yaml.Node, path: Path, reason: str) -> None:
        place = f"{self._where}:{node.start_mark.line + 1}"
        self.problems.append(Problem(place, ".".join(map(str, path)), reason))


def _kind(value: object) -> str:
    names = {list: "a list", str: "text", int: "a number", float: "a number", bool: "a truth value"}
    return names.get(type(value), "nothing")
