"""A map-style loader that one rank walks for all: the batches of every rank, step by step."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_runtime import rng
from accel_runtime.data.slices import Slicing
from accel_runtime.data.states import Apart

__all__ = ["Round", "Rounds"]


class Round(NamedTuple):
    """One step of all ranks."""

    indices: list[list[Any]]
    """For every rank, what it loads."""
    valid: tuple[int, ...]
    """For every rank, how many of them are no repeats."""
    last: bool
    """Whether the epoch ends with it."""


class Rounds:
    """The order of the script's sampler, cut into steps.

    Args:
        loader: The script's loader.
        slicing: How samples are divided, where batches have a fixed size.
        split: Whether the sampler's batch is the global one.
        seed: With a number, a shuffled order is drawn anew for every epoch from `seed + epoch`.
    """

    def __init__(
        self, loader: DataLoader[Any], slicing: Slicing, *, split: bool, seed: int | None = None
    ) -> None:
        self._loader = loader
        self._slicing = slicing
        self._split = split
        self._seed = seed
        self._source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._fixed = loader.batch_sampler is None or getattr(self._source, "batch_size", None) is not None

    def batches(
        self, start: dict[str, Any], began: dict[str, Any], epoch: int
    ) -> Iterator[tuple[Round, list[Any]]]:
        """Every step after `start`, with the batches of all ranks.

        Args:
            start: The position.
            began: Is told the random states the order was drawn under.
            epoch: The number of the epoch.
        """
        given: deque[Round] = deque()
        self._begin(start, began)
        inner = copy.copy(self._loader)
        name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        lists: Any = _Lists(self._rounds(start, epoch), given, single=name == "sampler")
        # DataLoader guards these names against assignment; the copy is ours to change.
        vars(inner).update({name: lists, "_iterator": None})
        walk = iter(inner)
        for first in walk:
            yield given.popleft(), [first, *islice(walk, self._slicing.world_size - 1)]

    def steps(self) -> int:
        """How many steps a whole epoch has.

        Raises:
            TypeError: The sampler has no length.
        """
        batches = len(self._source)
        if self._split:
            return batches
        if self._loader.batch_sampler is None or not self._slicing.drop_last:
            return -(-batches // self._slicing.world_size)
        return batches // self._slicing.world_size

    def _begin(self, start: dict[str, Any], began: dict[str, Any]) -> None:
        """Note the random states of the epoch, and put those of the generator in force that `start` remembers."""
        generator = getattr(getattr(self._source, "sampler", self._source), "generator", None)
        if generator is not None and "generator" in start:
            generator.set_state(start["generator"])
        began["rng"] = start.get("rng") or rng.capture()
        if generator is not None:
            began["generator"] = generator.get_state()

    def _seeded(self, epoch: int) -> Any:
        """The script's sampler; where there is a seed, torch's shuffling one draws from it."""
        source = self._source
        shuffling = source.sampler if type(source) is BatchSampler else source
        if self._seed is None or type(shuffling) is not RandomSampler:
            return source
        sampler = copy.copy(shuffling)
        sampler.generator = torch.Generator().manual_seed(self._seed + epoch)
        if shuffling is source:
            return sampler
        batches = copy.copy(source)
        batches.sampler = sampler
        return batches

    def _drawn(self, start: dict[str, Any], epoch: int) -> Iterable[Any]:
        """The sampler's order, drawn at once if it has an end, under the states `start` remembers."""
        source: Iterable[Any] = self._seeded(epoch)
        if not hasattr(source, "__len__"):
            return source
        if "rng" not in start:
            return list(source)
        with Apart(start["rng"])():
            if self._loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()  # torch draws a seed for workers first
            return list(source)

    def _rounds(self, start: dict[str, Any], epoch: int) -> Iterator[Round]:
        order, skipped = self._drawn(start, epoch), start.get("samples", 0)
        batches = ([index] for index in order) if self._loader.batch_sampler is None else map(list, order)
        steps = self._chunks(batches, skipped) if self._fixed else self._groups(batches, skipped)
        first: list[Any] = []
        ahead = next(steps, None)
        while ahead is not None:
            parts, ahead = ahead, next(steps, None)
            first = first or list(chain.from_iterable(parts))
            yield self._filled(parts, first, last=ahead is None)

    def _chunks(self, batches: Iterator[list[Any]], skipped: int) -> Iterator[list[list[Any]]]:
        """What each rank takes of every global batch of one flat order."""
        flat = islice(chain.from_iterable(batches), skipped, None)
        while chunk := list(islice(flat, self._slicing.size)):
            if self._slicing.drop_last and len(chunk) < self._slicing.size:
                return
            valid, at = self._slicing.share(len(chunk), 0, last=False).valid, 0
            parts = []
            for count in valid:
                parts.append(chunk[at : at + count])
                at += count
            yield parts

    def _groups(self, batches: Iterator[list[Any]], skipped: int) -> Iterator[list[list[Any]]]:
        """Batches of any size, one a rank and step."""
        while skipped > 0 and (gone := next(batches, None)) is not None:
            skipped -= len(gone)
        world = self._slicing.world_size
        while group := list(islice(batches, 1 if self._split else world)):
            if self._split:
                slicing = Slicing(world, -(-len(group[0]) // world), self._slicing.even)
                valid = slicing.share(len(group[0]), 0, last=False).valid
                flat = iter(group[0])
                group = [list(islice(flat, count)) for count in valid]
            yield group + [[]] * (world - len(group))

    def _filled(self, parts: list[list[Any]], start: list[Any], *, last: bool) -> Round:
        """The round, with repeats where a rank has less than it loads."""
        valid = tuple(map(len, parts))
        whole = self._slicing.per_rank if self._fixed else max(valid)
        size = whole if self._slicing.even and self._slicing.world_size > 1 else 1
        # One walk over the start fills all ranks, in rank order.
        repeats = iter(_endless(start))
        return Round([part + list(islice(repeats, max(0, size - len(part)))) for part in parts], valid, last)


class _Lists:
    """The sampler of the copy: every rank's indices in turn; tells which rounds it gave out."""

    def __init__(self, rounds: Iterator[Round], given: deque[Round], *, single: bool) -> None:
        self._rounds = rounds
        self._given = given
        self._single = single

    def __iter__(self) -> Iterator[Any]:
        for round_ in self._rounds:
            self._given.append(round_)
            for indices in round_.indices:
                yield indices[0] if self._single else indices


def _endless(start: list[Any]) -> Iterator[Any]:
    while True:
        yield from start
