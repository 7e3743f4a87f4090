"""Whether what a manifest says can be true: names that stay inside, sizes that agree, tensors without holes. No torch.

Everything after this may rely on it, and takes no memory for tensors whose bytes are not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

__all__ = ["Doubt", "check"]

_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_WIDTHS = {1, 2, 4, 8, 16}
"""Bytes an element may have."""
_MOST_RANKS = 1 << 20


class Doubt(ValueError):  # noqa: N818 - it is no error before somebody says of which file
    """Something that cannot be true; a sentence."""


def check(body: Mapping[str, Any], reserved: frozenset[str]) -> None:
    """Look at a manifest.

    Args:
        body: Its JSON.
        reserved: Names of files that it must not list.

    Raises:
        Doubt: It cannot be used.
    """
    _keys("the manifest", body, _FIELDS, optional=_FIELDS_DEFAULTS)
    if not 1 <= body["world_size"] <= _MOST_RANKS:
        raise Doubt(f"world_size is {body['world_size']}")
    for name, own in body["own"].items():
        if not isinstance(own, list) or len(own) != body["world_size"]:
            raise Doubt(f"own has not one state of {name} for each of {body['world_size']} ranks")
    for name, file in body["files"].items():
        _file(name, file, reserved)
    places: dict[str, list[tuple[int, int]]] = {}
    for name, stored in body["tensors"].items():
        _tensor(name, stored, body["files"])
        for chunk in stored["chunks"]:
            places.setdefault(chunk["file"], []).append((chunk["start"], chunk["bytes"]))
    for name, parts in places.items():
        _filled(name, body["files"][name], parts)


def _file(name: str, file: Any, reserved: frozenset[str]) -> None:
    plain = PurePosixPath(name)
    inside = name and plain.as_posix() == name and not plain.is_absolute() and ".." not in plain.parts
    if not inside or name == "." or "\0" in name or name in reserved:
        raise Doubt(f"{name!r} is no name of a file inside of a checkpoint")
    _keys(f"file {name}", file, _FILE, optional=_FILE_DEFAULTS)
    if file.get("header", 0) > file["bytes"]:
        raise Doubt(f"the header of {name} is longer than the file")


def _tensor(name: str, stored: Any, files: Mapping[str, Any]) -> None:
    where = f"tensor {name}"
    _keys(where, stored, _STORED)
    for chunk in stored["chunks"]:
        _keys(where, chunk, _CHUNK)
        if chunk["file"] not in files:
            raise Doubt(f"{where} is in {chunk['file']!r}, which is no file of the checkpoint")
        if chunk["start"] + chunk["bytes"] > files[chunk["file"]]["bytes"]:
            raise Doubt(f"{where} goes beyond the end of {chunk['file']}")
        if len(chunk["offsets"]) != len(stored["shape"]) or len(chunk["sizes"]) != len(stored["shape"]):
            raise Doubt(f"{where} has a part of another number of dimensions")
    _width(where, stored["chunks"])
    if not _whole(stored["shape"], [(chunk["offsets"], chunk["sizes"]) for chunk in stored["chunks"]]):
        raise Doubt(f"{where} is not made up of its parts: they overlap, or leave something out")


def _width(where: str, chunks: Sequence[Mapping[str, Any]]) -> None:
    """All parts must take the same, possible number of bytes an element."""
    widths = set()
    for chunk in chunks:
        count = math.prod(chunk["sizes"])
        if count and chunk["bytes"] % count == 0:
            widths.add(chunk["bytes"] // count)
        elif chunk["bytes"] or count:
            raise Doubt(f"{where} has {count} elements in {chunk['bytes']} bytes")
    if len(widths) > 1 or not widths <= _WIDTHS:
        raise Doubt(f"{where} has elements of {sorted(widths)} bytes")


def _whole(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether every element is in exactly one box."""
    for offsets, sizes in boxes:
        if any(start + size > end for start, size, end in zip(offsets, sizes, shape, strict=True)):
            return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    filled = sorted((offsets, sizes) for offsets, sizes in boxes if math.prod(sizes))
    if not shape:
        return len(filled) == 1
    # As many elements as there are places, and none twice: then all are there. Sorted by their first dimension, a box
    # can only overlap those that begin before it ends.
    for index, (offsets, sizes) in enumerate(filled):
        for later, its_sizes in filled[index + 1 :]:
            if later[0] >= offsets[0] + sizes[0]:
                break
            if _overlap(offsets, sizes, later, its_sizes):
                return False
    return True


def _overlap(
    one: Sequence[int], sizes: Sequence[int], other: Sequence[int], its_sizes: Sequence[int]
) -> bool:
    return all(
        start < its_start + its_size and its_start < start + size
        for start, size, its_start, its_size in zip(one, sizes, other, its_sizes, strict=True)
    )


def _filled(name: str, file: Mapping[str, Any], parts: Sequence[tuple[int, int]]) -> None:
    """Header and chunks must be all there is in a file: then every byte of it has a checksum that loading looks at."""
    end = file.get("header", 0)
    if not file.get("header_checksum"):
        raise Doubt(f"the header of {name} has no checksum")
    for start, length in sorted(part for part in parts if part[1]):
        if start != end:
            raise Doubt(f"{name} has {'a gap' if start > end else 'two tensors'} at byte {min(start, end)}")
        end = start + length
    if end != file["bytes"]:
        raise Doubt(f"{name} has {file['bytes']} bytes, and tensors only until {end}")


def _keys(
    where: str,
    told: Any,
    wanted: Mapping[str, Callable[[Any], bool]],
    *,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Refuse an object without the fields that are wanted; those that only a newer accel knows are left alone."""
    if not isinstance(told, dict):
        raise Doubt(f"{where} is {type(told).__name__}, and should be an object")
    if missing := sorted(wanted.keys() - told.keys() - optional):
        raise Doubt(f"{where} lacks {', '.join(missing)}")
    for key, fits in wanted.items():
        if key in told and not fits(told[key]):
            raise Doubt(f"{key} of {where} is {str(told[key])[:60]!r}")


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return _object(value) and all(map(_text, value.values()))


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _sum(value: Any) -> bool:
    return _text(value) and _CHECKSUM.fullmatch(value) is not None


_FIELDS = {
    "save": _text,
    "saved_at": _text,
    "world_size": _count,
    "step": _count,
    "versions": _texts,
    "values": _object,
    "own": _object,
    "tensors": _object,
    "files": _object,
    "about": _texts,
    "run": _texts,
}
_FILE = {
    "bytes": _count,
    "checksum": _sum,
    "header": _count,
    "header_checksum": lambda value: value == "" or _sum(value),
}
_FIELDS_DEFAULTS = frozenset({"about", "run"})
_FILE_DEFAULTS = frozenset({"header", "header_checksum"})
_STORED = {"dtype": _text, "shape": _counts, "chunks": lambda value: isinstance(value, list)}
_CHUNK = {
    "file": _text,
    "start": _count,
    "bytes": _count,
    "checksum": _sum,
    "offsets": _counts,
    "sizes": _counts,
}
