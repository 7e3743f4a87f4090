"""Whose batch is it: the pure arithmetic that shares one order of samples among ranks.

One process with the global batch size would walk global batches of one order. Here each step takes
the next global batch, and a rank its contiguous slice, so the slices in rank order are that batch.
Nothing in this file talks to another process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, pairwise
from typing import TypeVar

from accel_runtime.data.source import Share

__all__ = ["Sharding", "with_last"]

Index = Hashable
Step = tuple[list[Index], Share]
"""What one rank loads in a step, and what all ranks know of it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """How the batches of a sampler are divided.

    By default the sampler's batch is one rank's batch, and a global batch is `world_size` of them.
    With `split` the sampler's batch is the global batch, and each rank takes its part.

    A tail that does not fill a global batch is, with `drop_last`, left out. With `even` it is completed from the
    start of the epoch, so that all ranks see equal shapes. Without, it is divided so that the ranks' numbers of
    samples differ by at most one, and a rank for which nothing is left repeats one sample that counts for nothing,
    so that all ranks take the same steps. `Share.valid` says which samples are no repeats.
    """

    rank: int
    world_size: int
    split: bool = False
    drop_last: bool = False
    even: bool = True

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size

    def global_size(self, batch_size: int) -> int:
        """Samples in a full global batch."""
        return batch_size if self.split else batch_size * self.world_size

    def steps(self, samples: int, batch_size: int) -> int:
        """How many steps an epoch of so many samples has; the same on every rank."""
        full, rest = divmod(samples, self.global_size(batch_size))
        return full + (rest > 0 and not self.drop_last)

    def rounds(self, batches: int) -> int:
        """How many steps an epoch of so many sampler batches has; the same on every rank."""
        full, rest = divmod(batches, 1 if self.split else self.world_size)
        return full + (rest > 0 and not self.drop_last)

    def cut(
        self, order: Iterable[Index], batch_size: int, head: Sequence[Index] | None = None
    ) -> Iterator[Step]:
        """This rank's steps over an order of samples, all batches being of one size but the last.

        Args:
            order: The samples of one epoch, or what is left of them.
            batch_size: The script's.
            head: The first global batch of the epoch, where `order` does not begin with it.
        """
        total = self.global_size(batch_size)
        size = -(-total // self.world_size)
        own = slice(self.rank * size, (self.rank + 1) * size)
        full = self._share([size] * self.world_size, [size] * self.world_size, last=False)
        final, whole, regular = (
            full._replace(last=True),
            self.world_size == 1,
            total == size * self.world_size,
        )
        for step, last in _chunks(order, total, drop_last=self.drop_last):
            head = step if head is None else head
            if regular and len(step) == total:
                yield (step if whole else step[own]), (final if last else full)
            else:
                yield self._complete(self._parts(step, size), size, head, last=last)

    def group(
        self, batches: Iterable[Sequence[Index]], batch_size: int | None, head: Sequence[Index] | None = None
    ) -> Iterator[Step]:
        """This rank's steps over a sampler's batches, which may be of any size.

        Args:
            batches: The sampler's batches of one epoch, or what is left of them.
            batch_size: The length of a full batch; None where the sampler has no fixed one.
            head: The samples of the first step of the epoch, where `batches` does not begin with them.
        """
        many = 1 if self.split else self.world_size
        for round_, last in _chunks(batches, many, drop_last=self.drop_last):
            samples = list(chain.from_iterable(round_))
            head = samples if head is None else head
            if self.split or _regular(round_, batch_size):
                size = batch_size if batch_size and not self.split else -(-len(samples) // self.world_size)
                size = max(size, -(-(batch_size or 0) // self.world_size)) if self.split else size
                parts: list[Sequence[Index]] = self._parts(samples, size)
            else:
                parts = [*round_, *([[]] * (self.world_size - len(round_)))]
                size = max(map(len, round_))
            yield self._complete(parts, size, head, last=last)

    def _parts(self, samples: list[Index], size: int) -> list[Sequence[Index]]:
        """Every rank's own samples of a step: full batches one after the other, or near-equal ones."""
        if self.even:
            return [samples[rank * size : (rank + 1) * size] for rank in range(self.world_size)]
        each, more = divmod(len(samples), self.world_size)
        ends = [rank * each + min(rank, more) for rank in range(self.world_size + 1)]
        return [samples[start:end] for start, end in pairwise(ends)]

    def _complete(
        self, parts: list[Sequence[Index]], size: int, head: Sequence[Index], *, last: bool
    ) -> Step:
        """A step whose parts are not all of one size, brought to `size` or to at least one sample each."""
        valid = [len(part) for part in parts]
        sizes = [size] * self.world_size if self.even and self.world_size > 1 else [max(n, 1) for n in valid]
        own = list(parts[self.rank])
        missing = sizes[self.rank] - len(own)
        if missing and self.even:
            # One walk over the start fills all ranks, in rank order.
            taken = sum(size - count for count in valid[: self.rank])
            own += islice(cycle(head), taken, taken + missing)
        elif missing:
            own = [next(chain.from_iterable(parts))]
        return own, self._share(valid, sizes, last=last)

    def _share(self, valid: list[int], sizes: list[int], *, last: bool) -> Share:
        factor = 1.0 if self.even else valid[self.rank] * self.world_size / sum(valid)
        return Share(tuple(valid), tuple(sizes), last, factor)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Every item, with whether it is the last."""
    source = iter(items)
    held = list(islice(source, 1))
    for following in source:
        yield held.pop(), False
        held.append(following)
    for item in held:
        yield item, True


def _chunks(items: Iterable[T], size: int, *, drop_last: bool) -> Iterator[tuple[list[T], bool]]:
    """So many items at a time, with whether they are the last."""
    source = iter(items)
    least = size if drop_last else 1
    ahead = list(islice(source, size))
    while len(ahead) >= least:
        chunk, ahead = ahead, list(islice(source, size))
        yield chunk, len(ahead) < least


def _regular(round_: Sequence[Sequence[Index]], batch_size: int | None) -> bool:
    """Whether all batches but the last are full, so that only the end of the order is missing."""
    *full, tail = map(len, round_)
    return batch_size is not None and all(size == batch_size for size in full) and tail <= batch_size
