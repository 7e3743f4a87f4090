"""Whose output is on the screen: `all`, `none`, or ranks as in `0,2`."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["check_ranks", "format_ranks", "get_highest_rank", "select_ranks"]

_LIST = re.compile(r"\d+(,\d+)*", re.ASCII)


def check_ranks(said: int | str) -> int | str:
    """What was said, if it can be understood.

    Raises:
        ValueError: It cannot.
    """
    if said in {"all", "none"} or _LIST.fullmatch(str(said).replace(" ", "")):
        return said
    raise ValueError("expected all, none, or ranks as in 0,2")


def select_ranks(said: int | str, world_size: int) -> frozenset[int]:
    """The ranks meant, of so many."""
    if said in {"all", "none"}:
        return frozenset(range(world_size) if said == "all" else ())
    return frozenset(int(rank) for rank in str(said).split(","))


def get_highest_rank(said: int | str) -> int:
    """The highest rank named; -1 where none is."""
    return max(select_ranks(said, 0), default=-1)


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0, 2 and 3`, `ranks 0 to 7`."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    first, last = found[0], found[-1]
    if len(found) > 2 and last - first == len(found) - 1:  # noqa: PLR2004 - two are named both
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, found[:-1]))} and {last}"
