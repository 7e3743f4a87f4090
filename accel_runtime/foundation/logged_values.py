"""Conversions of the values that a script logs, and of its configuration, to numbers and text; secrets are masked."""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

__all__ = [
    "MAX_ELEMENTS",
    "add_suffix",
    "count_elements",
    "finite_or_text",
    "flatten_values",
    "mask_login",
    "mask_secrets",
    "split_curves",
    "split_numbers",
    "to_number",
    "to_numbers",
    "to_plain",
    "with_text_names",
]

# `token` alone would hide `max_tokens` and `pad_token_id`, which are not secret.
_SECRET = re.compile(
    r"secret|password|passwd|credential|private_?key|api_?key|access_?key|cookie|(^|[_.-])(auth|pat)$|(^|[_.-])token$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


def to_number(value: Any) -> Any:
    """Convert a tensor, array or NumPy scalar of one element to a Python number; return other values unchanged."""
    if isinstance(value, (bool, int, float, str)) or not callable(getattr(value, "item", None)):
        # A NumPy float64 is a Python float too, and text formats would print its type.
        return float(value) if isinstance(value, float) else value
    if count_elements(value) != 1 or _is_dtensor(value):
        # The value of a DTensor would need a collective, which only this rank would call.
        return value
    try:
        return value.item()
    except Exception:  # noqa: BLE001 - a tensor may have no value, such as one on the meta device
        return value


def _is_dtensor(value: Any) -> bool:
    # torch is not imported for a tracker alone.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def count_elements(array: Any) -> Any:
    """Return the number of elements of a tensor or array."""
    return getattr(array, "numel", lambda: getattr(array, "size", None))()


_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def finite_or_text(number: float) -> float | str:
    """Return a number, or the text `NaN`, `Infinity` or `-Infinity`, since JSON supports finite numbers only."""
    return number if math.isfinite(number) else _NON_FINITE[str(number)]


MAX_ELEMENTS = 1024
"""The most elements of an array in a configuration."""
_MAX_DEPTH = 32
"""The most levels of a configuration; deeper ones, such as those of an object that contains itself, become text."""


_BITS = 64
"""Integers with fewer bits, without the sign, are numbers in every format."""
_LISTS = (list, tuple, set, frozenset, range)


def to_plain(values: Mapping[Any, Any], large: dict[str, Any]) -> dict[str, Any]:
    """Convert a configuration to one that every format of settings supports.

    Names become text. Values become booleans, finite numbers, text, None, lists and mappings: those of a dataclass or a
    namespace are its fields, and other objects are their text. Arrays with too many elements are moved to `large`, by name.
    """
    converted = _convert(values, "", large, 0)
    assert isinstance(converted, dict)
    return converted


def _convert(value: Any, name: str, large: dict[str, Any], depth: int) -> Any:
    """Convert a value of a configuration, or the configuration itself, whose name is empty."""
    value = _to_scalar(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > _MAX_DEPTH:
        return str(value)
    entries = dict(enumerate(value)) if isinstance(value, _LISTS) else _read_fields(value)
    if entries is None:
        return str(value)
    names = {key: f"{name}/{key}" if name else str(key) for key in entries}
    for key, item in entries.items():
        if callable(getattr(item, "tolist", None)) and count_elements(item) > MAX_ELEMENTS:
            large[names.pop(key)] = item
    converted = {key: _convert(entries[key], path, large, depth + 1) for key, path in names.items()}
    return list(converted.values()) if isinstance(value, _LISTS) else with_text_names(converted)


def _to_scalar(value: Any) -> Any:
    """Return a value as a plain number, text or list, if it is one; return others unchanged."""
    value = to_number(value.value if isinstance(value, Enum) else value)
    if isinstance(value, float):
        return finite_or_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if value.bit_length() < _BITS else str(int(value))
    if isinstance(value, str):
        return str.__str__(value)
    if callable(getattr(value, "tolist", None)) and not _is_dtensor(value):
        with suppress(Exception):  # a tensor on the meta device has no elements
            return value.tolist()
    return value


def _read_fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a mapping, dataclass or namespace, or None if it is something else."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return vars(value) if isinstance(value, (Namespace, SimpleNamespace)) else None


def with_text_names(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping whose names are text: `1` is `"1"`, or `"1_2"` if there is another `"1"`."""
    named = {name: value for name, value in values.items() if type(name) is str}
    if len(named) == len(values):
        return named
    named = {}
    taken = {name for name in values if type(name) is str}
    for key, value in values.items():
        name = key
        if type(key) is not str:
            name = add_suffix(_name_of(key), taken)
            taken.add(name)
        named[name] = value
    return named


def _name_of(key: Any) -> str:
    return str(key.value if isinstance(key, Enum) else key)


def add_suffix(name: str, taken: Container[str]) -> str:
    """Return the name, with `_2`, `_3`, ... if it is taken."""
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique


def to_numbers(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping with text as names and `to_number` of every value, at any depth."""
    return {
        key: to_numbers(value) if isinstance(value, Mapping) else to_number(value)
        for key, value in with_text_names(values).items()
    }


def flatten_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Flatten nested mappings, with names joined by `/` and `to_number` of every value.

    A name that occurs twice, such as `a/b` and `b` in `a`, gets a suffix. An empty mapping is a value.
    """
    flat: dict[str, Any] = {}
    for name, value in _list_leaves(values, ""):
        flat[add_suffix(name, flat)] = value
    return flat


def _list_leaves(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in with_text_names(values).items():
        if isinstance(value, Mapping) and value:
            yield from _list_leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", to_number(value)


def split_numbers(values: Mapping[Any, Any]) -> tuple[dict[str, int | float], dict[str, Any]]:
    """Split flattened values into numbers and others."""
    flat = flatten_values(values)
    numbers = {key: value for key, value in flat.items() if isinstance(value, (bool, int, float))}
    return numbers, {key: value for key, value in flat.items() if key not in numbers}


def split_curves(values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split flattened values into points of curves and media, and others: None and arrays."""
    flat = flatten_values(values)
    others = {k: v for k, v in flat.items() if v is None or callable(getattr(v, "tolist", None))}
    return {key: value for key, value in flat.items() if key not in others}, others


def mask_secrets(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Mask values whose name looks like a secret, and logins in URLs, by `***`."""
    return {key: _mask_value(str(key), value) for key, value in values.items()}


def _mask_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return mask_secrets(value)
    if type(value) in {list, tuple}:
        return type(value)(_mask_value(name, item) for item in value)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and _SECRET.search(name):
        return _HIDDEN if value else value
    return mask_login(value) if isinstance(value, str) else value


def mask_login(text: str) -> str:
    """Mask logins in the URLs of a text."""
    return _IN_URL.sub(_HIDDEN, text)
