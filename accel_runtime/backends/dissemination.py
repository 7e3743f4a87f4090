"""The rounds in which n ranks come to know what each of them has: log2(n), whatever carries the bytes."""

from __future__ import annotations

from typing import NamedTuple

from accel_runtime.exchange.agreement import SLOT

__all__ = ["Round", "in_rank_order", "rounds"]


class Round(NamedTuple):
    """One round: row i is the slot of the i-th rank after this one, and all rows so far are sent on."""

    to: int
    """Who gets the first `rows` rows."""
    source: int
    """Who sends the rows from `have` on."""
    have: int
    """How many rows are there already."""
    rows: int
    """How many rows travel each way."""


def rounds(rank: int, size: int) -> list[Round]:
    """Rounds in which each rank sends all it has, and so has twice as much after each."""
    found, have = [], 1
    while have < size:
        count = min(have, size - have)
        found.append(Round((rank - have) % size, (rank + have) % size, have, count))
        have += count
    return found


def in_rank_order(rows: memoryview, rank: int) -> bytearray:
    """The slots of all ranks, out of rows that begin with the one of `rank`."""
    first = len(rows) - rank * SLOT
    return bytearray().join((rows[first:], rows[:first]))
