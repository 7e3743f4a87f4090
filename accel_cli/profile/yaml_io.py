"""Read and write YAML: plain data, and the line number of every key.

Scalars follow YAML 1.2: `no`, `on` and `off` are text, and so are `1:30` and dates, which are written in quotes for readers of YAML 1.1. In `env` numbers and truth
values are text too, as they stand in the file. Duplicate keys, anchors and unknown tags are errors.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import yaml

from accel_cli.errors import Problem, ProfileError

__all__ = ["Document", "comment_lines", "dump", "inline", "parse", "scalar"]

_MAX_DEPTH = 30
_TEXT_TAG = "tag:yaml.org,2002:str"
_TOO_DEEP = "this is nested too deeply for a profile"
_WIDTH = 80
_TEXT_KEYS = re.compile(
    r"(env|additional_args\.(environment|tags))\."
    r"|(launcher\.trainer_version|additional_args\.framework_version|pytorch_version|profile|base_job_name)\Z"
)
"""Matches keys whose numbers and truth values are text: environment variables, tags, versions and names, also of Accelerate's files."""


class _Loader(yaml.SafeLoader):
    """A safe loader that knows the scalars of YAML 1.2's core schema only."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as in PyYAML


class _Dumper(yaml.SafeDumper):
    """A dumper whose output `_Loader` reads back."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_TYPES = MappingProxyType(
    {
        "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
        "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
        "int": re.compile(r"[-+]?[0-9]{1,18}\Z"),
        "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?\Z"),
    }
)
"""The pattern of each tag's values; a value without a tag has the first type that matches."""
for _tag, _first in zip(
    _TYPES, (["~", "n", "N", ""], [*"tTfF"], [*"-+0123456789"], [*"-+.0123456789"]), strict=True
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _TYPES[_tag], _first)


_YAML_1_1 = yaml.resolver.Resolver()


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML's plain and single-quoted styles lose line breaks such as U+0085. Other programs read `no` and 1:30 as YAML 1.1.
    is_text = _YAML_1_1.resolve(yaml.ScalarNode, text, (True, False)) == _TEXT_TAG  # type: ignore[no-untyped-call]
    style = '"' if not text.isprintable() else None if is_text else "'"
    return dumper.represent_scalar(_TEXT_TAG, text, style=style)


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True)
class Document:
    """The content of a YAML text."""

    data: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line number, from 1, by dotted key."""
    problems: tuple[Problem, ...] = ()
    """Problems after which the rest can still be checked."""


def parse(text: str, where: str) -> Document:
    """Read a YAML mapping; errors name its source, `where`: the path of a file, or an option.

    Raises:
        ProfileError: The text is not YAML, not a mapping, or has duplicate keys, anchors or unknown tags.
    """
    node = _compose(text, where)
    if node is None:
        return Document({})
    reader = _NodeReader(where)
    data = reader.read(node)
    if not isinstance(data, dict):
        reader.problems.append(Problem(f"{where}:1", "", "expected keys and values", actual=_name_type(data)))
    if reader.problems:
        raise ProfileError(reader.problems)
    return Document(data, reader.lines)


def scalar(text: str, where: str, key: str = "") -> Any:
    """Return the value of a YAML scalar or flow collection: `2` is a number, `no` is text, `[a, b]` is a list.

    It is read as the value of the dotted `key` of a profile.

    Raises:
        ProfileError: The text is not YAML.
    """
    reader = _NodeReader(where)
    node = _compose(f"value: {text}", where)
    assert isinstance(node, yaml.MappingNode)
    value = reader.read(node.value[0][1], key)
    if len(node.value) > 1:
        reader.problems.append(Problem(where, "", "expected one value"))
    if reader.problems:
        raise ProfileError(reader.problems)
    return value


def _compose(text: str, where: str) -> yaml.Node | None:
    """Return the root node of a YAML text; None for an empty one."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        location = f"{where}:{mark.line + 1}" if mark else where
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        if reason.startswith("but "):  # the context of the error has the beginning
            reason = f"{getattr(error, 'context', '')}, {reason}"
        raise ProfileError([Problem(location, "", f"invalid YAML: {reason}")]) from None
    except RecursionError:
        raise ProfileError([Problem(where, "", _TOO_DEEP)]) from None
    return node


def dump(data: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return plain data as YAML, in the order of its keys, with comments above keys of the first two levels.

    `parse(dump(data)).data == data`; `comments` are by dotted key.
    """
    text: str = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    if not comments:
        return text
    lines = text.splitlines()
    for key, number in reversed(list(parse(text, "dump").lines.items())):
        if key in comments:
            lines[number - 1 : number - 1] = comment_lines(comments[key], "  " if "." in key else "")
    return "\n".join(lines) + "\n"


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return the lines of a comment; empty for an empty text."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def inline(value: Any) -> str:
    """Return a value on one line, as YAML writes it after a key."""
    text: str = yaml.dump(
        [value],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=sys.maxsize,
    )
    return text.strip()[1:-1]


class _NodeReader:
    """Converts nodes to data and collects line numbers and problems."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._nodes: set[yaml.Node] = set()
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, key: str = "", depth: int = 0) -> Any:
        if node in self._nodes:
            return self._add_problem(
                node, key, "anchors and aliases are not supported in a profile: write the value out"
            )
        self._nodes.add(node)
        if depth > _MAX_DEPTH:
            return self._add_problem(node, key, _TOO_DEEP)
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, key, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, key, depth + 1) for item in node.value]
        return self._read_scalar(node, key)

    def _read_mapping(self, node: yaml.MappingNode, section: str, depth: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = key_node.value
            key = f"{section}.{name}" if section else name
            if not isinstance(name, str):
                self._add_problem(key_node, section, "expected text as a key")
            elif name in data:
                self._add_problem(key_node, key, f"duplicate key; first on line {lines[name]}")
            else:
                self.lines[key] = lines[name] = key_node.start_mark.line + 1
                data[name] = self.read(value_node, key, depth + 1)
        return data

    def _read_scalar(self, node: yaml.Node, key: str) -> Any:
        tag, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
        if tag == "str":
            return text
        if tag not in _TYPES:
            return self._add_problem(node, key, f"the tag {node.tag} is not supported in a profile")
        # An explicit tag, as in `!!float .`, may precede any text.
        if not _TYPES[tag].match(text):
            return self._add_problem(node, key, f"{text!r} is not a value of the tag !!{tag}")
        if tag == "null":
            return None
        if _TEXT_KEYS.match(key):
            return text
        return text.lower() == "true" if tag == "bool" else int(text) if tag == "int" else float(text)

    def _add_problem(self, node: yaml.Node, key: str, reason: str) -> None:
        self.problems.append(Problem(f"{self._where}:{node.start_mark.line + 1}", key, reason))


def _name_type(value: object) -> str:
    names = {list: "a list", str: "text", int: "a number", float: "a number", bool: "a truth value"}
    return names.get(type(value), "nothing")
