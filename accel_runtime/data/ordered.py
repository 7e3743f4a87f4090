"""Datasets with indices: one order on all ranks, walked from any position."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler
from typing_extensions import override

from accel_runtime import rng
from accel_runtime.backends.base import Backend
from accel_runtime.data.order import Order, Samples, order_of
from accel_runtime.data.sampling import Index, Sharding, Step
from accel_runtime.data.source import Loop, Share, Source

__all__ = ["Ordered"]


class Ordered(Source):
    """A map-style dataset: the script's sampler says the order, and `Sharding` whose part is whose.

    Args:
        loader: The script's loader. It is copied, so subclasses and every option stay as they are.
        backend: Carries what the ranks have to agree on.
        sharding: How batches are divided.
        seed: With a number, a shuffled order is drawn anew for every epoch from `seed + epoch`.
    """

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, sharding: Sharding, seed: int | None = None
    ) -> None:
        self._backend = backend
        # With batch_size=None, the sampler gives what the dataset is asked for: an index, or a list of them.
        batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        bare = loader.batch_sampler is None and not isinstance(batches, BatchSampler)
        self._order = (
            Samples(batches, 1, sharding, backend, seed)
            if bare
            else order_of(batches, sharding, backend, seed)
        )
        self.batch_size = 1 if bare else getattr(batches, "batch_size", None)
        self.generators = _generators(loader, batches, getattr(batches, "sampler", None))
        self._steps = _Steps(self._order, batches, bare=bare)
        self.inner = copy.copy(loader)
        # DataLoader guards these names against assignment; the copy is ours to change.
        slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(self.inner).update({slot: self._steps, "_iterator": None})

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
        loop.start = start.get("position", 0)
        kinds = self._order.draws_from
        here = rng.capture(self.generators, kinds)
        # Nothing is asked of the others where nothing is drawn.
        loop.random = start.get("random") or (rng.agreed(here, self._backend) if kinds else here)
        drawing = rng.Drawing(loop.random, here, self.generators)
        self._steps.begin(loop.start, start.get("epoch", 0), drawing, resumed="random" in start)
        with drawing():
            batches = iter(self.inner)
        steps: deque[Share] | None = None
        for batch in batches:
            # Not before the first batch: a subclass may begin its walk as late as that.
            steps = self._steps.shares if steps is None else steps
            loop.share = steps.popleft()
            yield batch

    @override
    def steps(self) -> int:
        return self._order.steps()

    @override
    def position(self, loop: Loop) -> dict[str, Any]:
        if loop.share is not None and loop.share.last:
            return {"position": len(self._order.source)}
        return self.after(loop.steps, {"position": loop.start})

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        return {"position": start.get("position", 0) + steps * self._order.stride}


class _Steps(Sampler[Any]):
    """The batch sampler of one rank: its parts of an order that is the same on all ranks."""

    def __init__(self, order: Order, source: Any, *, bare: bool) -> None:
        self._order = order
        self._bare = bare
        # torch's own attributes of a BatchSampler, which callers read.
        self.sampler = getattr(source, "sampler", source)
        self.batch_size = getattr(source, "batch_size", None)
        self.drop_last = bool(getattr(source, "drop_last", False))
        self.shares: deque[Share] = deque()
        """The steps whose indices were given out by the newest iterator and whose batches were not yet."""

    def begin(self, position: int, epoch: int, drawing: rng.Drawing, *, resumed: bool) -> None:
        """The next iterator walks from here."""
        self._next = (position, epoch, drawing, resumed)

    @override
    def __iter__(self) -> Iterator[list[Index] | Index]:
        # Not a generator: each iterator has its own queue, and the loader picks it up with its first batch.
        self.shares = deque()
        return self._walk(self.shares, *self._next)

    def __len__(self) -> int:
        return self._order.steps()

    def _walk(
        self, shares: deque[Share], position: int, epoch: int, drawing: rng.Drawing, resumed: bool
    ) -> Iterator[list[Index] | Index]:
        with drawing():
            steps = self._order.walk(position, epoch, eager=resumed)
            first: Step | None = next(steps, None)
        if first is None:
            return
        bare, note = self._bare, shares.append
        note(first[1])
        yield first[0][0] if bare else first[0]
        for indices, share in steps:
            note(share)
            yield indices[0] if bare else indices


def _generators(*parts: Any) -> tuple[Any, ...]:
    """The generators of a loader and its samplers, each once."""
    found = [getattr(part, "generator", None) for part in parts]
    return tuple({id(g): g for g in found if g is not None}.values())
