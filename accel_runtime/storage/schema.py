"""Read and write frozen dataclasses as JSON or state dicts, one checker for all of them. Imports no torch at the top.

A record is a frozen dataclass. The annotation of a field is its type, or a name of the module for a type with `ValueRule`s as
metadata of `Annotated`; relations between fields are in the method `check`. Unknown fields are ignored, since a newer
version may have added them. Records of a union have a class variable `kind`, which is written with their fields.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from accel_runtime.storage.errors import CheckpointError

__all__ = [
    "ITEM_BYTES",
    "MAX_BYTES",
    "Checksum",
    "Count",
    "FieldError",
    "Shape",
    "ValueRule",
    "Word",
    "describe",
    "is_inside",
    "parse_strict_json",
    "read_regular_file",
    "read_value",
    "select_reader",
    "shorten",
    "write_record",
]

_MAX_SHOWN = 60
"""Characters of a wrong value in a message."""
_MAX_COUNT = 2**63 - 1
_MAX_DIMENSIONS = 64
"""Largest number of dimensions of a torch tensor."""


@dataclass(frozen=True)
class ValueRule:
    """A condition on a value; `expected` completes "should be"."""

    expected: str
    holds: Callable[[Any], object]
    """Returns a true value for a right one."""


class FieldError(ValueError):
    """A field is missing or wrong."""

    def __init__(self, problem: str, keys: tuple[str | int, ...] = ()) -> None:
        super().__init__(problem)
        self._problem, self._keys = problem, keys

    def inside(self, *keys: str | int) -> FieldError:
        """Return the error with the keys that lead to it."""
        return FieldError(self._problem, (*keys, *self._keys))

    def __str__(self) -> str:
        first, *others = self._keys or ("",)
        return (
            f"{shorten(str(first))}{''.join(f'[{describe(key)}]' for key in others)} {self._problem}".strip()
        )


Count = Annotated[int, ValueRule("from 0 to 2**63 - 1", lambda number: 0 <= number <= _MAX_COUNT)]
Shape = Annotated[
    tuple[Count, ...],
    ValueRule(f"at most {_MAX_DIMENSIONS} long", lambda sizes: len(sizes) <= _MAX_DIMENSIONS),
]
Checksum = Annotated[
    str,
    ValueRule("16 hexadecimal digits", re.compile("[0-9a-f]{16}").fullmatch),
]
Word = Annotated[str, ValueRule("at most 1000 characters long", lambda text: len(text) <= 1000)]  # noqa: PLR2004


def read_value(kind: Any, value: Any) -> Any:
    """Return JSON as a value of a type; raise `FieldError` if a field is missing or wrong."""
    return select_reader(kind)(value)


@cache
def select_reader(kind: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 - one for each kind of type
    """Return the function that reads JSON as this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _build_rule_reader(select_reader(arguments[0]), arguments[1:])
    if origin in {tuple, list}:
        return _build_list_reader(origin, select_reader(arguments[0]))
    if origin is Mapping:
        return _build_mapping_reader(*map(select_reader, arguments))
    if origin in {Union, UnionType}:
        present = [each for each in arguments if each is not type(None)]
        if len(present) > 1 and all(hasattr(each, "kind") for each in present):
            return _build_kind_reader(present, optional=type(None) in arguments)
        return _build_union_reader(list(map(select_reader, present)), optional=type(None) in arguments)
    if kind is bytes:
        return _read_bytes
    return _build_record_reader(kind) if is_dataclass(kind) else _build_type_reader(kind)


_EXPECTED: Mapping[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def _build_type_reader(kind: Any) -> Callable[[Any], Any]:
    if kind is Any:
        return lambda value: value
    if kind not in _EXPECTED:  # such as tensors, which have subclasses
        return _build_instance_reader(kind)
    expected = _EXPECTED[kind]

    def read(value: Any) -> Any:
        if type(value) is not kind:  # True is no number
            raise _build_error(value, expected)
        return value

    return read


def _build_instance_reader(kind: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _build_error(value, f"a {kind.__name__}")
        return value

    return read


def _read_bytes(value: Any) -> bytes:
    """Return bytes, which `write_record` writes as a tensor."""
    if isinstance(value, bytes):
        return value
    if str(getattr(value, "dtype", "")) != "torch.uint8":
        raise _build_error(value, "a tensor of bytes")
    return bytes(value.numpy().tobytes())


def _build_kind_reader(kinds: Sequence[Any], *, optional: bool) -> Callable[[Any], Any]:
    """Return the reader of one of several records, which their `kind` selects."""
    readers = {kind.kind: select_reader(kind) for kind in kinds}
    expected = f"one of {', '.join(sorted(readers))}"

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        if type(value) is not dict:
            raise _build_error(value, "an object")
        kind = value.get("kind")
        if not isinstance(kind, str) or kind not in readers:
            raise _build_error(kind, expected).inside("kind")
        return readers[kind](value)

    return read


def _build_rule_reader(read_base: Callable[[Any], Any], rules: Sequence[ValueRule]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        result = read_base(value)
        for rule in rules:
            if not rule.holds(result):
                raise _build_error(value, rule.expected)
        return result

    return read


def _build_union_reader(readers: Sequence[Callable[[Any], Any]], *, optional: bool) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        for reader in readers[:-1]:
            with suppress(FieldError):
                return reader(value)
        return readers[-1](value)

    return read


def _build_list_reader(kind: type, read_item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise _build_error(value, "a list")
        items: list[Any] = []
        try:
            for item in value:
                items.append(read_item(item))  # noqa: PERF401 - their number is that of the wrong one
        except FieldError as error:
            raise error.inside(len(items)) from None
        return kind(items)

    return read


def _build_mapping_reader(
    read_key: Callable[[Any], Any], read_item: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _build_error(value, "an object")
        items = {}
        for key, item in value.items():
            try:
                items[read_key(key)] = read_item(item)
            except FieldError as error:
                raise error.inside(key) from None
        return items

    return read


def _build_record_reader(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind, include_extras=True)
    readers = [
        (each.name, each.metadata.get("key", each.name), _is_required(each), select_reader(hints[each.name]))
        for each in fields(kind)
    ]
    check = getattr(kind, "check", lambda _: None)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _build_error(value, "an object")
        items = {}
        for name, key, required, read_item in readers:
            if key in value:
                try:
                    items[name] = read_item(value[key])
                except FieldError as error:
                    raise error.inside(key) from None
            elif required:
                raise FieldError("is missing", (key,))
        record = kind(**items)
        check(record)
        return record

    return read


def write_record(record: Any) -> dict[str, Any]:
    """Return the fields of a record by name, for `read_value`: numbers, text, tensors, lists and dicts of them.

    Fields that are None, or have the default of their class, are left out. Bytes become a tensor, and fields of type `Any`
    stay as they are.
    """
    written = {"kind": record.kind} if hasattr(type(record), "kind") else {}
    for name, key, default, is_any in _list_fields(record.__class__):
        value = getattr(record, name)
        if value is not None and (default is None or default is MISSING or value != default):
            written[key] = value if is_any else _write_value(value)
    return written


@cache
def _list_fields(kind: Any) -> list[tuple[str, str, Any, bool]]:
    """Return name, key, default and whether it has any type, of each field of a record."""
    hints = get_type_hints(kind)
    return [
        (
            each.name,
            each.metadata.get("key", each.name),
            each.default if each.default_factory is MISSING else each.default_factory(),
            hints[each.name] is Any,
        )
        for each in fields(kind)
    ]


def _write_value(value: Any) -> Any:
    if isinstance(value, bytes):
        import torch  # noqa: PLC0415 - slow to import, and only states of a run have bytes

        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    if is_dataclass(value) and not isinstance(value, type):
        return write_record(value)
    if isinstance(value, tuple):
        return [_write_value(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _write_value(item) for key, item in value.items()}
    return value


def _is_required(each: Any) -> bool:
    has_default = each.default is not MISSING or each.default_factory is not MISSING
    return bool(each.metadata.get("required", not has_default))


def _build_error(value: Any, expected: str) -> FieldError:
    return FieldError(f"is {describe(value)}, and should be {expected}")


def describe(value: Any) -> str:
    """Return a wrong value for a message, in at most one line."""
    if isinstance(value, (dict, list, tuple)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return repr(shorten(value))
    return shorten(json.dumps(value)) if value is None or isinstance(value, bool) else shorten(repr(value))


def shorten(text: str) -> str:
    """Return the beginning of a text for a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# JSON ------------------------------------------------------------------------------------

MAX_BYTES = 1 << 29
"""Largest file of JSON: a manifest of about three million chunks."""


def read_regular_file(opened: int, path: Path) -> str:
    """Return the text of an open file of JSON, and close it; raise `CheckpointError` if it is not regular, large or not text."""
    with os.fdopen(opened, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is damaged: it is not a regular file")
        if status.st_size > MAX_BYTES:
            raise CheckpointError(
                f"{path} is damaged: it has {status.st_size} bytes, and can have {MAX_BYTES}"
            )
        try:
            # Not more: memory is reserved for what is asked for.
            return file.read(status.st_size).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is damaged: it is not text") from error


def parse_strict_json(text: str | bytes) -> Any:
    """Return JSON; raise `ValueError` for a repeated key, a number that is not finite, and deep nesting."""
    try:
        return json.loads(
            text, object_pairs_hook=_build_object, parse_constant=_parse_float, parse_float=_parse_float
        )
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deep or too large") from None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {describe(repeated)} is repeated")
    return built


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shorten(text)} is not a finite number")
    return number


# Names and numbers -----------------------------------------------------------------------

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
}
"""Bytes of an element, by the name of the torch dtype; a newer torch may have others."""


def is_inside(name: str) -> bool:
    """Return whether a name is the relative path of a file inside a directory."""
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character
        return False
    return (
        bool(name)
        and "\0" not in name
        and path.as_posix() == name
        and name != "."
        and not path.is_absolute()
        and ".." not in path.parts
    )
