"""How an answer is typed: text stays as it is, names with their values and lists are read out of one line."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from accel_cli.profile import document

__all__ = ["NONE", "may_be_none", "read", "show"]

NONE = "-"
"""What is typed to have nothing where something is suggested."""
_NEXT = re.compile(r",\s*(?=[^\s,=]+\s*=)")
"""A comma before another `name=`: a value may have commas of its own."""


def read(text: str, annotation: Any) -> Any:
    """The value of what was typed, for a field of this type.

    Args:
        text: What was typed, and is not empty.
        annotation: The field's type; only one that takes no text is read as YAML would read it.

    Raises:
        ValueError: Names and their values were expected, and came otherwise.
        ProfileError: It is no YAML.
    """
    text = text.strip()
    if text == NONE and may_be_none(annotation):
        return None
    if get_origin(annotation) is dict:
        return _mapping(text)
    if get_origin(annotation) is list:
        return [part for part in re.split(r"[,\s]+", text) if part]
    return text if _is_text(annotation) else document.scalar(text, "answer")


def show(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_inner(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def may_be_none(annotation: Any) -> bool:
    """Whether a field of this type may have nothing."""
    return get_origin(annotation) in {dict, list} or types.NoneType in _members(annotation)


def _is_text(annotation: Any) -> bool:
    """Whether a field takes text, and nothing that YAML has another word for."""
    return set(_members(annotation)) <= {str, types.NoneType}


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in {Union, types.UnionType}:
        yield from get_args(annotation)
    else:
        yield annotation


def _mapping(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in _NEXT.split(text.rstrip(", ")):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not (name and equals and value.strip()):
            raise ValueError(f"expected name=value, with a comma before the next name; {part!r} is none")
        if name in found:
            raise ValueError(f"{name} comes twice")
        found[name] = value.strip()
    return found


def _inner(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return "{" + ", ".join(f"{name}: {each}" for name, each in value.items()) + "}"
