"""Whose batch is it: the pure arithmetic that shares one order of batches among ranks.

One process with the global batch size would walk global batches of one order. Here each step takes
the next global batch, and a rank its contiguous slice, so the slices in rank order are that batch.
Nothing in this file talks to another process.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import NamedTuple

__all__ = ["Sharding", "Share"]


class Share(NamedTuple):
    """One rank's part of one step."""

    indices: list[Hashable]
    """What this rank loads: its own samples, then repeats that fill the shape."""
    valid: tuple[int, ...]
    """For every rank, how many samples at the front of its batch are no repeats."""
    size: int
    """How many samples every rank's batch has."""
    last: bool
    """Whether the epoch ends with this step."""


@dataclass(frozen=True)
class Sharding:
    """How the batches of a sampler are divided.

    By default the sampler's batch is one rank's batch, and a global batch is `world_size` of them.
    With `split` the sampler's batch is the global batch, and each rank takes its part.
    A tail that does not fill a global batch is completed from the start of the epoch, so that all ranks
    see equal shapes; `Share.valid` says which samples are repeats. With `drop_last` the tail is left out.
    """

    rank: int
    world_size: int
    split: bool = False
    drop_last: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size

    def steps(self, batches: int) -> int:
        """How many steps an epoch of so many sampler batches has; the same on every rank."""
        if self.split:
            return batches
        return batches // self.world_size if self.drop_last else math.ceil(batches / self.world_size)

    def shares(self, batches: Iterable[Sequence[Hashable]], batch_size: int | None) -> Iterator[Share]:
        """This rank's share of every step, in order.

        Args:
            batches: The sampler's batches of indices, for one epoch.
            batch_size: The length of a full batch; None where the sampler has no fixed one.
        """
        start: list[Hashable] = []
        for round_, last in _with_last(self._rounds(batches)):
            if not start:
                start = list(chain.from_iterable(round_))
            yield self._share(round_, start, batch_size, last=last)

    def _rounds(self, batches: Iterable[Sequence[Hashable]]) -> Iterator[list[Sequence[Hashable]]]:
        """The sampler batches of one step each."""
        source = iter(batches)
        if self.split:
            yield from ([batch] for batch in source)
            return
        while round_ := list(islice(source, self.world_size)):
            if not (self.drop_last and len(round_) < self.world_size):
                yield round_

    def _share(
        self, round_: list[Sequence[Hashable]], start: list[Hashable], batch_size: int | None, *, last: bool
    ) -> Share:
        parts, size = self._parts(round_, batch_size)
        own = list(parts[self.rank])
        if len(own) < size:
            # One walk over the start fills all ranks, in rank order.
            taken = sum(size - len(part) for part in parts[: self.rank])
            own += islice(cycle(start), taken, taken + size - len(own))
        return Share(own, tuple(map(len, parts)), size, last)

    def _parts(
        self, round_: list[Sequence[Hashable]], batch_size: int | None
    ) -> tuple[list[Sequence[Hashable]], int]:
        """Every rank's own samples in this step, and the size its batch is brought to."""
        if self.world_size == 1:
            return round_, len(round_[0])
        if not self.split and not _regular(round_, batch_size):
            missing = self.world_size - len(round_)
            return [*round_, *([[]] * missing)], max(len(batch) for batch in round_)
        order = list(chain.from_iterable(round_))
        size = batch_size or 0
        if self.split:
            size = math.ceil(max(size, len(order)) / self.world_size)
        return [order[rank * size : (rank + 1) * size] for rank in range(self.world_size)], size


def _regular(round_: list[Sequence[Hashable]], batch_size: int | None) -> bool:
    """Whether all batches but the last are full, so that only the end of the order is missing."""
    *full, tail = map(len, round_)
    return batch_size is not None and all(size == batch_size for size in full) and tail <= batch_size


def _with_last(rounds: Iterator[list[Sequence[Hashable]]]) -> Iterator[tuple[list[Sequence[Hashable]], bool]]:
    """Every round, with whether it is the last."""
    ahead = next(rounds, None)
    while ahead is not None:
        current, ahead = ahead, next(rounds, None)
        yield current, ahead is None
