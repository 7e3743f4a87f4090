"""Arithmetic that assigns the samples of an epoch to ranks and pads the last batch.

One process with the global batch size would iterate over global batches of one order. Here each step takes the next
global batch and each rank a contiguous slice of it, so the slices in rank order are that batch. Nothing in this module
communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from accel_runtime.data.source import batch_size_of, sampler_of_loader
from accel_runtime.environment.topology import DataRank
from accel_runtime.foundation.epoch_progress import CyclePart, StepInfo

__all__ = ["BatchSharding", "Index", "Step", "batch_slices", "sharding_of_loader"]

Index = Hashable
Step = tuple[list[Index], StepInfo]
"""Samples that all ranks load in a step, padding included and in rank order, and their step info."""
T = TypeVar("T")


@dataclass(frozen=True)
class BatchSharding:
    """Sharding of a loader's batches over the ranks, and the padding of the last batch.

    By default the script's batch is the local batch of one rank, and a global batch is `world_size` of them. With
    `split` the script's batch is the global batch, and each rank takes its slice.

    Batches of different sizes keep their sizes; with `pad_last`, a rank without a batch in the last step is given a
    batch of the first step as padding, which has no weight in the gradients. Only `static_shapes` pad every batch of a
    step to the largest one.

    A last batch that is smaller than the global batch is left out with `drop_last`. With `pad_last` it is padded with
    samples from the start of the epoch, so all ranks have equal shapes. Without, it is split so that the ranks' numbers
    of samples differ by at most one, and a rank without a sample is padded with one that has no weight, so all ranks
    take the same number of steps. `StepInfo.num_valid` counts the samples that are not padding. One rank alone does
    not pad, unless shapes are static.

    With `cycle_size`, the order is divided into cycles of that many samples, whatever the number of ranks, and each cycle into
    as few steps as the local batch size permits, whose numbers of samples differ by at most one. The script's own batches
    are not divided: a cycle takes whole ones until it has enough samples.
    """

    rank: int
    """Rank that `StepInfo.loss_scale` is for; all else is the same on every rank."""
    world_size: int
    batch_size: int | None = 1
    """Samples in a full batch of the script's loader; None if its batches have no fixed size."""
    split: bool = False
    drop_last: bool = False
    pad_last: bool = True
    static_shapes: bool = False
    """If true, one rank alone pads its last batch too."""
    cycle_size: int | None = None
    """Samples of an optimizer step; None if the script counts its micro-batches. Such steps are not padded to full size."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size
        assert self.cycle_size is None or not (self.split or self.pad_last)
        assert not self.split or (self.batch_size or 0) % self.world_size == 0

    @property
    def local_batch_size(self) -> int:
        """Return the samples of one rank in a full global batch; 0 if batches have no fixed size."""
        return (self.batch_size or 0) // (self.world_size if self.split else 1)

    @property
    def padded_size(self) -> int:
        """Return the samples in a global batch that is full or padded; 0 if batches have no fixed size."""
        return self.local_batch_size * self.world_size

    @property
    def batches_per_step(self) -> int:
        """Return how many of the script's batches form one global batch."""
        return 1 if self.split else self.world_size

    @property
    def pads_to_full_size(self) -> bool:
        """Return whether the last batch is padded to the full size, with samples from the start of the epoch."""
        return self.pad_last and (self.static_shapes or self.world_size > 1)

    def num_steps(self, count: int, stride: int) -> int:
        """Return the steps in an epoch of `count` samples or batches, of which `stride` are a full step."""
        if self.cycle_size is None:
            return count // stride if self.drop_last else -(-count // stride)
        size = self.cycle_size
        if stride != self.padded_size:  # of batches, all of one size
            size = -(-size // (self.batch_size or 1))
        cycles, rest = divmod(count, size)
        return cycles * -(-size // stride) + (0 if self.drop_last else -(-rest // stride))

    def find_offset(self, steps: int, length: int | None) -> int:
        """Return the samples in the first `steps` steps of cycles of an order of `length` samples; None is unknown."""
        assert self.cycle_size is not None
        size, end, offset = self.cycle_size, sys.maxsize if length is None else length, 0
        steps_of_cycle = -(-size // self.padded_size)
        while steps and offset < end:
            rest = min(size - offset % size, end - offset)
            cycles = min(steps // steps_of_cycle, rest // size * (end - offset) // size)
            if cycles:
                offset, steps = offset + cycles * size, steps - cycles * steps_of_cycle
            else:
                offset, steps = offset + self._part_size(rest, self.padded_size), steps - 1
        return offset

    @staticmethod
    def _part_size(rest: int, most: int) -> int:
        """Return the next part of `rest` items that are divided into as few parts of `most` as possible, all about equal.

        It depends on the rest only, so that a run that continues within a cycle divides the rest as one that did not stop.
        """
        return -(-rest // -(-rest // most))

    def split_samples(
        self, order: Iterable[Index], head: Sequence[Index] | None = None, num_before: int = 0
    ) -> Iterator[Step]:
        """Yield the steps over an order of samples; all batches but the last have one size, unless they are parts of cycles.

        `order` holds the (remaining) samples of one epoch, after `num_before` samples of its first cycle. `head` is the first
        global batch of the epoch, needed if `order` does not begin with it.
        """
        if self.cycle_size is not None:
            yield from self._split_cycles(order, self.cycle_size, num_before)
            return
        source, size, full = iter(order), self.padded_size, self._full_step
        least = size if self.drop_last else 1
        samples, following = list(islice(source, size)), list(islice(source, size))
        head = samples if head is None else head
        while len(following) >= least:
            yield samples, full
            samples, following = following, list(islice(source, size))
        if len(samples) >= least:
            info = self.step_info(len(samples), is_last=True)
            yield self.pad_last_batch(samples, info, head), info

    def _split_cycles(self, order: Iterable[Index], size: int, num_before: int) -> Iterator[Step]:
        """Yield the steps of cycles of `size` samples, of which `num_before` come before the first sample of the order."""
        source, least = iter(order), size if self.drop_last else 1
        samples = list(islice(source, size - num_before))
        while samples and num_before + len(samples) >= least:
            following = list(islice(source, size))
            for info in self.split_cycle(len(samples), num_before, is_last=len(following) < least):
                part, samples = samples[: sum(info.num_valid)], samples[sum(info.num_valid) :]
                yield self.pad_last_batch(part, info, part), info
            samples, num_before = following, 0

    def split_cycle(self, count: int, num_before: int, *, is_last: bool) -> Iterator[StepInfo]:
        """Yield the steps of `count` samples, which are the rest of a cycle after its first `num_before`.

        `is_last` is true if the epoch ends with them.
        """
        total, rest = num_before + count, count
        while rest:
            size = self._part_size(rest, self.padded_size)
            begins, rest = rest == total, rest - size
            part = CyclePart(self.cycle_size or 0, total, begins, not rest)
            yield _build_part(self, size, part, is_last and not rest)

    def _group_cycles(self, batches: Iterable[Sequence[Index]], size: int, num_before: int) -> Iterator[Step]:
        """Yield the steps of cycles of at least `size` samples, in whole batches; `num_before` samples of the first were before."""
        cycles, least = _list_cycles(batches, size, num_before), size if self.drop_last else 1
        cycle = next(cycles, [])
        while cycle and num_before + _count_samples(cycle) >= least:
            following = next(cycles, [])
            yield from self._assign_batches(cycle, num_before, is_last=_count_samples(following) < least)
            cycle, num_before = following, 0

    def _assign_batches(
        self, batches: list[Sequence[Index]], num_before: int, *, is_last: bool
    ) -> Iterator[Step]:
        """Yield the steps of the batches of a cycle, or of its rest after `num_before` samples."""
        total, begins = num_before + _count_samples(batches), not num_before
        while batches:
            number = self._part_size(len(batches), self.world_size)
            step, batches = batches[:number], batches[number:]
            num_valid = (*map(len, step), *[0] * (self.world_size - number))
            sizes = tuple(max(1, count) for count in num_valid)
            part = CyclePart(self.cycle_size or 0, total, begins, not batches)
            info = StepInfo(num_valid, sizes, is_last and not batches, True, cycle=part).weigh_for(self.rank)
            samples, begins = list(chain.from_iterable(step)), False
            yield self.pad_last_batch(samples, info, samples), info

    def group_batches(
        self,
        batches: Iterable[Sequence[Index]],
        head: Sequence[Sequence[Index]] | None = None,
        num_before: int = 0,
    ) -> Iterator[Step]:
        """Yield the steps over the script's batches, which may be of any size.

        `batches` holds the (remaining) batches of one epoch, after `num_before` samples of its first cycle. `head` is the
        batches of the first step of the epoch, needed if `batches` does not begin with them.
        """
        if self.cycle_size is not None:
            yield from self._group_cycles(batches, self.cycle_size, num_before)
            return
        for step, is_last in _chunks(batches, self.batches_per_step, drop_last=self.drop_last):
            head = step if head is None else head
            info = self._step_info_of_batches(list(map(len, step)), list(map(len, head)), is_last=is_last)
            samples, start = list(chain.from_iterable(step)), list(chain.from_iterable(head))
            yield self.pad_last_batch(samples, info, start), info

    def step_info(self, num_samples: int, *, is_last: bool) -> StepInfo:
        """Return the step info of a global batch of `num_samples` samples."""
        if num_samples == self.padded_size and not is_last:
            return self._full_step
        size = self.local_batch_size
        return self._build_step_info(self._split_count(num_samples, size), size, is_last=is_last)

    def pad_last_batch(self, samples: list[Any], info: StepInfo, head: Sequence[Any]) -> list[Any]:
        """Return the samples that all ranks load in a step, each rank's own followed by its padding.

        Padding comes from `head`, the samples of the first step of the epoch, or without `pad_last` from `samples`.
        """
        if not info.num_padding:
            return samples
        # One iterator for all ranks: the padding of a rank continues where that of the rank before it ended.
        valid, padding = iter(samples), cycle(head if self.pad_last else samples)
        counts = zip(info.num_valid, info.batch_sizes, strict=True)
        return [x for n, size in counts for x in chain(islice(valid, n), islice(padding, size - n))]

    @cached_property
    def _full_step(self) -> StepInfo:
        # One object for all full steps: `ActiveLoops` counts repeated steps by identity.
        size = self.local_batch_size
        return self._build_step_info((size,) * self.world_size, size, is_last=False)

    def _step_info_of_batches(
        self, lengths: list[int], first_lengths: list[int], *, is_last: bool
    ) -> StepInfo:
        """Return the step info of some of the script's batches; `first_lengths` are those of the first step."""
        *others, last = lengths
        # If all batches but the last are full, only the end of the order is missing.
        regular = all(length == self.batch_size for length in others) and last <= (self.batch_size or 0)
        if self.split or regular:
            size = max(self.local_batch_size, -(-sum(lengths) // self.world_size))
            return self._build_step_info(self._split_count(sum(lengths), size), size, is_last=is_last)
        missing = self.world_size - len(lengths)
        num_valid = (*lengths, *[0] * missing)
        if self.static_shapes or not self.pad_last:
            return self._build_step_info(num_valid, max(lengths), is_last=is_last)
        batch_sizes = (*lengths, *islice(cycle(first_lengths), missing))
        return StepInfo(num_valid, batch_sizes, is_last, True).weigh_for(self.rank)

    def _split_count(self, count: int, size: int) -> tuple[int, ...]:
        """Return every rank's number of samples: full batches first if they are padded, else near-equal ones."""
        if self.pad_last:
            return tuple(min(size, max(0, count - rank * size)) for rank in range(self.world_size))
        return self.split_evenly(count)

    def split_evenly(self, count: int) -> tuple[int, ...]:
        """Return every rank's number of `count` samples; they differ by at most one."""
        least, more = divmod(count, self.world_size)
        return tuple(least + (rank < more) for rank in range(self.world_size))

    def _build_step_info(self, num_valid: tuple[int, ...], size: int, *, is_last: bool) -> StepInfo:
        if self.pads_to_full_size:
            batch_sizes = (size,) * self.world_size
        else:
            batch_sizes = tuple(max(1, count) for count in num_valid)
        return StepInfo(num_valid, batch_sizes, is_last, not self.pad_last).weigh_for(self.rank)


def sharding_of_loader(  # noqa: PLR0913 - the options of a sharding
    loader: DataLoader[Any],
    data_rank: DataRank,
    *,
    split: bool,
    pad_last: bool,
    static_shapes: bool = False,
    cycle_size: int | None = None,
) -> BatchSharding:
    """Return the sharding of a loader's batches."""
    return BatchSharding(
        data_rank.rank,
        data_rank.world_size,
        batch_size_of(loader),
        split=split,
        drop_last=bool(getattr(sampler_of_loader(loader), "drop_last", False)),
        pad_last=pad_last,
        static_shapes=static_shapes,
        cycle_size=cycle_size,
    )


def batch_slices(info: StepInfo) -> list[slice]:
    """Return the slice of every rank in the samples of a step."""
    return [slice(begin, end) for begin, end in pairwise(accumulate(info.batch_sizes, initial=0))]


def _count_samples(batches: Iterable[Sequence[Index]]) -> int:
    return sum(map(len, batches))


def _list_cycles(batches: Iterable[Sequence[T]], size: int, num_before: int) -> Iterator[list[Sequence[T]]]:
    """Yield lists of batches that have `size` samples or more; `num_before` samples come before the first, the last has the rest."""
    cycle, count = [], num_before
    for batch in batches:
        cycle.append(batch)
        count += len(batch)
        if count >= size:
            yield cycle
            cycle, count = [], 0
    if cycle:
        yield cycle


@lru_cache(maxsize=256)
def _build_part(sharding: BatchSharding, size: int, part: CyclePart, is_last: bool) -> StepInfo:
    """Return the step of `size` samples, split evenly over the ranks: one object for all that are equal."""
    num_valid = sharding.split_evenly(size)
    sizes = tuple(max(1, count) for count in num_valid)
    return StepInfo(num_valid, sizes, is_last, True, cycle=part).weigh_for(sharding.rank)


def _chunks(items: Iterable[T], size: int, *, drop_last: bool) -> Iterator[tuple[list[T], bool]]:
    """Yield lists of `size` items, each with whether it is the last."""
    source = iter(items)
    least = size if drop_last else 1
    ahead = list(islice(source, size))
    while len(ahead) >= least:
        chunk, ahead = ahead, list(islice(source, size))
        yield chunk, len(ahead) < least
