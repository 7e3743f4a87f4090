"""Sizes as people write them: `10GB`, `500MB`, `2GiB`, or a number of bytes."""

from __future__ import annotations

import re

__all__ = ["size_of"]

_UNITS = {"B": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for ending, base in (("B", 1000), ("iB", 1024))
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def size_of(given: int | str, what: str) -> int:
    """How many bytes a size is.

    Args:
        given: A number of bytes, or a number and a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB.
        what: The argument's name, for the message.

    Raises:
        ValueError: It is no such size, or nothing fits into it.
    """
    size = given if type(given) is int else _written(given)
    if size is None or size < 1:
        raise ValueError(
            f"{what} is a number of bytes, at least 1, or a number and a unit such as '500MB', '10GB' or '2GiB' "
            f"({', '.join(_UNITS)}); it is {given!r}{_bits(given)}"
        )
    return size


def _written(given: object) -> int | None:
    matched = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    unit = _UNITS.get(matched[2]) if matched else None
    return None if matched is None or unit is None else int(float(matched[1]) * unit)


def _bits(given: object) -> str:
    # The libraries around disagree about it: to some it is bits, to others bytes.
    return (
        "; a small b may mean bits: write B" if isinstance(given, str) and given.strip().endswith("b") else ""
    )
