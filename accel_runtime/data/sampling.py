"""Whose sample is it: the pure arithmetic that shares one order of samples among ranks.

One process with the global batch size would walk global batches of one order. Here each step takes
the next global batch, and a rank its contiguous slice, so the slices in rank order are that batch.
Nothing in this file talks to another process, or needs torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any, TypeVar

from accel_runtime.data.source import Share

__all__ = ["Index", "Sharding", "Step", "factor", "slices"]

Index = Hashable
Step = tuple[list[Index], Share]
"""What all ranks load in a step, one rank's part after the other's, and what all know of it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """How the batches of a loader are divided.

    By default the script's batch is one rank's batch, and a global batch is `world_size` of them.
    With `split` the script's batch is the global batch, and each rank takes its part.

    Batches of the script's that differ in size are given out as they are; with `even`, a rank without one in the last
    step is given a batch of the first step, which counts for nothing in the gradients. Only `static` shapes are padded
    to the largest batch of a step.

    A tail that does not fill a global batch is, with `drop_last`, left out. With `even` it is completed from the
    start of the epoch, so that all ranks see equal shapes. Without, it is divided so that the ranks' numbers of
    samples differ by at most one, and a rank for which nothing is left repeats one sample that counts for nothing,
    so that all ranks take the same steps. `Share.valid` says which samples are no repeats. On one rank there is nobody
    to keep step with, and its tail is as short as it is unless shapes are `static`.
    """

    rank: int
    """Whose `Share.factor` is told; all else is the same on every rank."""
    world_size: int
    batch_size: int | None = 1
    """Samples in a full batch of the script's; None where its batches have no fixed size."""
    split: bool = False
    drop_last: bool = False
    even: bool = True
    static: bool = False
    """Whether one rank, too, completes its tail."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size
        assert not self.split or (self.batch_size or 0) % self.world_size == 0

    @property
    def each(self) -> int:
        """Samples of one rank in a full global batch; 0 where batches have no fixed size."""
        return (self.batch_size or 0) // (self.world_size if self.split else 1)

    @property
    def size(self) -> int:
        """Samples in a full global batch; 0 where batches have no fixed size."""
        return self.each * self.world_size

    @property
    def batches(self) -> int:
        """How many of the script's batches are one global batch."""
        return 1 if self.split else self.world_size

    @property
    def fills(self) -> bool:
        """Whether a tail is completed from the start of the epoch."""
        return self.even and (self.static or self.world_size > 1)

    def steps(self, samples: int) -> int:
        """How many steps an epoch of so many samples has; the same on every rank."""
        return self._times(samples, self.size)

    def rounds(self, batches: int) -> int:
        """How many steps an epoch of so many of the script's batches has; the same on every rank."""
        return self._times(batches, self.batches)

    def cut(self, order: Iterable[Index], head: Sequence[Index] | None = None) -> Iterator[Step]:
        """The steps over an order of samples, all batches being of one size but the last.

        Args:
            order: The samples of one epoch, or what is left of them.
            head: The first global batch of the epoch, where `order` does not begin with it.
        """
        size, full = self.size, self._full
        for samples, last in _chunks(order, size, drop_last=self.drop_last):
            head = samples if head is None else head
            if len(samples) == size and not last:
                yield samples, full
            else:
                share = self.share(len(samples), last=last)
                yield self.completed(samples, share, head), share

    def group(
        self, batches: Iterable[Sequence[Index]], head: Sequence[Sequence[Index]] | None = None
    ) -> Iterator[Step]:
        """The steps over the script's batches, which may be of any size.

        Args:
            batches: The batches of one epoch, or what is left of them.
            head: The batches of the first step of the epoch, if `batches` does not begin with them.
        """
        for step, last in _chunks(batches, self.batches, drop_last=self.drop_last):
            head = step if head is None else head
            share = self._dealt(list(map(len, step)), list(map(len, head)), last=last)
            flat, start = list(chain.from_iterable(step)), list(chain.from_iterable(head))
            yield self.completed(flat, share, start), share

    def share(self, count: int, *, last: bool) -> Share:
        """The step of a global batch of `count` samples."""
        if count == self.size and not last:
            return self._full
        return self._known(self._divided(count, self.each), self.each, last=last)

    def completed(self, samples: list[Any], share: Share, head: Sequence[Any]) -> list[Any]:
        """What all ranks load in a step: their own samples, with repeats where they have fewer than they load.

        Args:
            samples: The global batch.
            share: Who has which of them.
            head: The samples of the first step of the epoch; needed with `even` only.
        """
        if share.valid == share.sizes:
            return samples
        # One walk over the start fills all ranks, in rank order.
        own, repeats = iter(samples), cycle(head if self.even else samples)
        parts = zip(share.valid, share.sizes, strict=True)
        return [x for n, size in parts for x in chain(islice(own, n), islice(repeats, size - n))]

    @cached_property
    def _full(self) -> Share:
        # One object for all full steps: whoever remembers steps counts how often it came.
        return self._known((self.each,) * self.world_size, self.each, last=False)

    def _times(self, count: int, size: int) -> int:
        full, rest = divmod(count, size)
        return full + (rest > 0 and not self.drop_last)

    def _dealt(self, lengths: list[int], first_lengths: list[int], *, last: bool) -> Share:
        """Return the step of some batches of the script's; `first_lengths` are those of the first step."""
        *full, tail = lengths
        # Where all but the last are full, only the end of the order is missing.
        regular = all(length == self.batch_size for length in full) and tail <= (self.batch_size or 0)
        if self.split or regular:
            size = max(self.each, -(-sum(lengths) // self.world_size))
            return self._known(self._divided(sum(lengths), size), size, last=last)
        missing = self.world_size - len(lengths)
        valid = (*lengths, *[0] * missing)
        if self.static or not self.even:
            return self._known(valid, max(lengths), last=last)
        sizes = (*lengths, *islice(cycle(first_lengths), missing))
        return Share(valid, sizes, last, True, factor(valid, self.rank))

    def _divided(self, count: int, size: int) -> tuple[int, ...]:
        """Every rank's number of samples: full batches one after the other, or near-equal ones."""
        if self.even:
            return tuple(min(size, max(0, count - rank * size)) for rank in range(self.world_size))
        least, more = divmod(count, self.world_size)
        return tuple(least + (rank < more) for rank in range(self.world_size))

    def _known(self, valid: tuple[int, ...], size: int, *, last: bool) -> Share:
        sizes = (size,) * self.world_size if self.fills else tuple(max(1, count) for count in valid)
        by_samples = not self.even
        return Share(valid, sizes, last, by_samples, factor(valid, self.rank) if by_samples else 1.0)


def slices(share: Share) -> list[slice]:
    """Where every rank's part of a step lies."""
    return [slice(begin, end) for begin, end in pairwise(accumulate(share.sizes, initial=0))]


def factor(valid: tuple[int, ...], rank: int) -> float:
    """What the mean loss of a rank counts for where ranks have different numbers of samples."""
    return valid[rank] * len(valid) / sum(valid)


def _chunks(items: Iterable[T], size: int, *, drop_last: bool) -> Iterator[tuple[list[T], bool]]:
    """So many items at a time, with whether they are the last."""
    source = iter(items)
    least = size if drop_last else 1
    ahead = list(islice(source, size))
    while len(ahead) >= least:
        chunk, ahead = ahead, list(islice(source, size))
        yield chunk, len(ahead) < least
