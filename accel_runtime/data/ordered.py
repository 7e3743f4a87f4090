"""Datasets with indices: one order on all ranks, walked from any position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.single import Single
from accel_runtime.data.order import Order, order_of
from accel_runtime.data.sampling import Index, Sharding, Step, slices
from accel_runtime.data.script import altered, gives_single, sampler_of, slot_of
from accel_runtime.data.seeding import BatchSeed, epoch_seed, seeding
from accel_runtime.data.source import Loop, Share, Source, ahead, inside
from accel_runtime.randomness import Apart, agreed, capture, restore
from accel_runtime.topology import Topology

__all__ = ["Ordered"]

Note = Callable[[Share], None]


class Ordered(Source):
    """A map-style dataset: the script's sampler says the order, and `Sharding` whose part is whose.

    Args:
        loader: The script's loader.
        backend: Carries what the ranks have to agree on.
        sharding: How batches are divided.
        seed: With a number, a shuffled order is drawn anew for every epoch from `seed + epoch`.
        for_all: Read the batches of all ranks, one after the other in every step, without asking the others.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        backend: Backend,
        sharding: Sharding,
        seed: int | None = None,
        *,
        for_all: bool = False,
    ) -> None:
        self._backend = Single(Topology(), backend.device) if for_all else backend
        self._order = order_of(loader, sharding, self._backend, seed)
        sampler = sampler_of(loader)
        self._generator = loader.generator
        self._generators = _generators(loader, sampler, getattr(sampler, "sampler", None))
        self._steps = _Steps(
            self._order, sampler, None if for_all else sharding.rank, single=gives_single(loader)
        )
        self.inner: DataLoader[Any] = altered(loader, **{slot_of(loader): self._steps})
        self._walked = self.inner
        """What draws a seed for workers when a walk begins, as torch always does, unless they are there already."""
        if loader.num_workers:
            self._walked = seeding(self.inner, self._steps.batch_seed)
            # What `DataLoader.__iter__` asks, so that the walk of a subclass sees what it knows.
            vars(self.inner)["_get_iterator"] = partial(_iterator, self._walked)

    @property
    def sharding(self) -> Sharding:
        """How batches are divided."""
        return self._order.sharding

    @override
    @contextmanager
    def overridden(self, *, even: bool) -> Iterator[None]:
        before = self._order.sharding
        self._order.sharding = replace(before, even=even)
        try:
            yield
        finally:
            self._order.sharding = before

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        here = capture(self._generators, self._kinds)
        random = self._random(start, here)
        if random is not here:
            restore({"generators": random["generators"]}, self._generators)
        self._order.seed = start.get("seed", self._order.seed)
        begun, batches = start.get("position", 0), 0
        persisted = self._persisted(start)

        def where(share: Share | None) -> dict[str, Any]:
            whole = share is not None and share.last
            at = len(self._order.source) if whole else self._beyond(begun, batches)
            return {"position": at, "random": random} | persisted | self._seed

        loop.where = where
        drawing = Apart(random, random if self._spared else here)
        self._steps.begin(begun, loop.epoch, drawing, resumed="random" in start)
        if self.inner.num_workers:
            self._steps.seed = epoch_seed(random, loop.epoch)
        walk = self._begun(start, drawing, drawn=bool(persisted))
        shares: deque[Share] | None = None
        for batch in walk:
            # Not before the first batch: a subclass may begin its walk as late as that.
            shares = self._steps.shares if shares is None else shares
            loop.share = shares.popleft()
            batches += 1
            yield batch

    @property
    def _seed(self) -> dict[str, int]:
        """What a position says of the seed that orders are drawn from, if they are."""
        return {} if self._order.seed is None else {"seed": self._order.seed}

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The global generators that count."""
        kinds = self._order.draws_from
        # Workers' numbers follow from torch's state.
        return ("torch",) if self.inner.num_workers and not kinds else kinds

    def _random(self, start: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
        """The random states the epoch is drawn under."""
        if "random" not in start:
            # Nothing is asked of the others where nothing is drawn.
            return agreed(here, self._backend) if self._kinds else here
        saved: dict[str, Any] = start["random"]
        # Between two epochs nothing has been drawn yet, and every rank has kept its own.
        return saved if inside(start) else agreed(here | saved, self._backend)

    def _persisted(self, start: dict[str, Any]) -> dict[str, Any]:
        """What a position says of workers that were there when the epoch began, so that no seed was drawn for them."""
        there = bool(start.get("persisted")) if "random" in start else self._there
        return {"persisted": True} if there else {}

    @property
    def _spared(self) -> bool:
        """Whether another thread draws for this one, from the random numbers they have in common."""
        return self._backend.threads and self._backend.topology.rank > 0

    @property
    def _there(self) -> bool:
        return getattr(self.inner, "_iterator", None) is not None

    def _begun(self, start: dict[str, Any], drawing: Apart, *, drawn: bool) -> Iterator[Any]:
        """The walk of torch, with the seed for workers drawn if the uninterrupted run draws it here, and only then.

        Args:
            start: The position it begins at.
            drawing: The random states the epoch is drawn under.
            drawn: Whether it was drawn in an earlier epoch, as workers persist.
        """
        own = self._generator
        # Inside an epoch it has been drawn already, and what was drawn from is where it was afterwards.
        spare = drawn or self._spared or (inside(start) and own is None and "torch" not in start["random"])
        vars(self._walked)["generator"] = torch.Generator() if spare else own
        with drawing():
            if self._there and not spare and "random" in start:
                torch.empty((), dtype=torch.int64).random_(generator=own)
            return iter(self.inner)

    @override
    def steps(self) -> int:
        return self._order.steps()

    @override
    def beginning(self) -> dict[str, Any]:
        persisted = {"persisted": True} if self._there else {}
        return {"position": 0, "random": capture(self._generators, self._kinds)} | persisted | self._seed

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        at = start.get("position", 0) + steps * self._order.stride
        return start | {"position": at} | ahead(steps, start)

    def _beyond(self, begun: int, batches: int) -> int:
        """The position after so many batches, which are those of several ranks where one reads for all."""
        return begun + batches // self._steps.ranks * self._order.stride


class _Steps(Sampler[Any]):
    """The batch sampler of some ranks: their parts of an order that is the same on all ranks."""

    def __init__(self, order: Order, source: Any, rank: int | None, *, single: bool) -> None:
        self._order = order
        self._rank = rank
        self._single = single
        self.ranks = order.sharding.world_size if rank is None else 1
        """Of how many ranks it gives the batches, one after the other in every step."""
        # torch's own attributes of a BatchSampler, which callers read.
        self.sampler = getattr(source, "sampler", source)
        self.batch_size = getattr(source, "batch_size", None)
        self.drop_last = bool(getattr(source, "drop_last", False))
        self.shares: deque[Share] = deque()
        """The batches whose indices were given out by the newest iterator and that did not come yet: their steps."""
        self.seed = 0
        """What all batches of the epoch have in common, where workers draw random numbers."""

    def batch_seed(self, batch: int) -> BatchSeed:
        """The random numbers of the n-th batch that the newest iterator gives."""
        step, rank = divmod(batch, self.ranks) if self._rank is None else (batch, self._rank)
        stride = self._order.stride
        each, shared = divmod(stride, self._order.sharding.world_size)
        return BatchSeed(self.seed, self._next[0] + step * stride + rank * each, rank if shared else 0)

    def begin(self, position: int, epoch: int, drawing: Apart, *, resumed: bool) -> None:
        """The next iterator walks from here."""
        self._next = (position, epoch, drawing, resumed)

    @override
    def __iter__(self) -> Iterator[list[Index] | Index]:
        # Not a generator: each iterator has its own queue, and the loader picks it up with its first batch.
        self.shares = deque()
        give = self._for_one if self.ranks == 1 else self._for_all
        return give(self.shares.append, *self._next)

    def __len__(self) -> int:
        return self._order.steps() * self.ranks

    def _for_one(self, note: Note, *begin: Any) -> Iterator[list[Index] | Index]:
        known: Share | None = None
        part: Any = None
        for steps in self._drawn(*begin):
            for samples, share in steps:
                if share is not known:
                    known, part = share, self._parts(share)[self._rank or 0]
                note(share)
                yield samples if part is None else samples[part]

    def _for_all(self, note: Note, *begin: Any) -> Iterator[list[Index] | Index]:
        for samples, share in chain(*self._drawn(*begin)):
            for part in self._parts(share):
                note(share)
                yield samples[part]

    def _drawn(
        self, position: int, epoch: int, drawing: Apart, resumed: bool
    ) -> tuple[list[Step], Iterator[Step]]:
        """The first step, with which the order is drawn, and the others."""
        with drawing():
            steps = self._order.walk(position, epoch, eager=resumed)
            return list(islice(steps, 1)), steps

    def _parts(self, share: Share) -> list[Any]:
        """What each rank takes of a step: a slice, or one index; None: all, as it is."""
        if self._single:
            return [part.start for part in slices(share)]
        return [None] if len(share.sizes) == 1 else slices(share)


def _iterator(loader: DataLoader[Any]) -> Iterator[Any]:
    """What torch, or a subclass, walks a loader with."""
    return type(loader)._get_iterator(loader)  # noqa: SLF001


def _generators(*parts: Any) -> tuple[Any, ...]:
    """The generators of a loader and its samplers, each once."""
    found = [getattr(part, "generator", None) for part in parts]
    return tuple({id(g): g for g in found if g is not None}.values())
