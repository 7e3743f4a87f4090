"""Streams on several ranks: each reads the whole stream and keeps its slice of every global batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.single import Single
from accel_runtime.data.alike import among_ranks, among_workers
from accel_runtime.data.sampling import Sharding
from accel_runtime.data.script import altered
from accel_runtime.data.source import Loop, Source
from accel_runtime.data.workers import Made, Reading, Recipe
from accel_runtime.randomness import Apart, agreed, capture, restore
from accel_runtime.topology import Topology

__all__ = ["Stream", "split_by_node"]

Steps = Iterator[tuple[Made, list[Any]]]
"""Global batches: how each was made, and the batch of each rank."""


def split_by_node(dataset: object) -> bool:
    """Whether `datasets.distributed.split_dataset_by_node` has given every rank a part of its own."""
    return getattr(dataset, "_distributed", None) is not None


class Stream(Source):
    """The global batches of one process, made of a stream that every rank reads whole.

    The script's loader is copied, not rebuilt: workers, pinning, collating and the walk of a subclass stay
    as they are. Only its dataset is seen through `Reading`.

    Args:
        loader: The script's loader over an IterableDataset.
        backend: Carries random states and prints between the ranks.
        sharding: How samples are divided.
        for_all: Read the batches of all ranks, one after the other in every step, without asking the others.
    """

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, sharding: Sharding, *, for_all: bool = False
    ) -> None:
        self.sharding = sharding
        self._backend = Single(Topology(), backend.device) if for_all else backend
        self._loader = loader
        self._recipe = Recipe(
            loader.dataset,
            loader.collate_fn,
            loader.worker_init_fn,
            sharding,
            tuple(range(sharding.world_size)) if for_all else (sharding.rank,),
            single=loader.batch_size is None,
        )
        self._generators = () if loader.generator is None else (loader.generator,)
        self._kept: _Bare | None = None

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        here = capture(self._generators)
        random = start.get("random") or agreed(here, self._backend)
        place = _Place(start, random, self._loader.num_workers)
        loop.where = lambda _: place.position()
        steps = among_workers(
            self._unskipped(self._started(start, random, here), start.get("skip", 0), place)
        )
        for made, batches, last in among_ranks(_with_end(steps, self._loader.num_workers), self._backend):
            place.move(made)
            loop.share = self.sharding.share(made.size, last=last)
            yield from batches

    @override
    def steps(self) -> int:
        if not hasattr(self._loader.dataset, "__len__"):
            kind = type(self._loader.dataset).__name__
            raise TypeError(
                f"the stream {kind} has no length; give it __len__, or count the steps as they come"
            )
        return self.sharding.steps(len(self._loader.dataset))

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        if not steps:
            return start
        samples = start.get("position", 0) + steps * self.sharding.size
        return start | {"position": samples, "skip": start.get("skip", 0) + steps}

    def _started(self, start: dict[str, Any], random: dict[str, Any], here: dict[str, Any]) -> Steps:
        """All batches; the first is read under random states that are the same on all ranks."""
        if random is not here:
            restore({"generators": random["generators"]}, self._generators)
        leads = self._backend.topology.rank == 0 and "random" not in start
        apart = None if random is here else Apart(random)
        reads = apart if self._loader.num_workers == 0 else None
        if reads and not self._generators:
            with reads():  # torch draws a seed for workers, also where there are none
                torch.empty((), dtype=torch.int64).random_()
        walk = iter(self._walk(start, reads))
        # With workers only their seeds are drawn here.
        with nullcontext() if apart is None or reads or leads else apart():
            first = next(walk, None)
        if reads and leads:
            reads.take_over()  # the states of the first rank go on as if it were alone
        if first is not None:
            yield first
            yield from walk

    def _walk(self, start: dict[str, Any], apart: Apart | None) -> Steps:
        others = len(self._recipe.ranks) - 1
        if self._kept is None or start:
            bare = _Bare(self._drawn(start), Reading(self._recipe, start, apart))
            self._kept = bare if self._loader.persistent_workers else None
        else:
            bare = self._kept
        bare.aside.clear()
        walk = iter(bare.loader)
        for batch in walk:
            batches = [batch, *islice(walk, others)]
            made, *_ = [bare.aside.popleft() for _ in batches]
            yield made, batches

    def _drawn(self, start: dict[str, Any]) -> DataLoader[Any]:
        """The loader; inside an epoch, torch's seed for workers, also where there are none, was drawn already."""
        inside = "random" in start and not self._generators and self._loader.num_workers == 0
        return altered(self._loader, generator=torch.Generator()) if inside else self._loader

    def _unskipped(self, walk: Steps, skip: int, place: _Place) -> Steps:
        """Without the steps that workers with parts of their own could not leave out themselves."""
        for step, (made, batches) in enumerate(walk):
            if made.worker is not None and step < skip:
                place.move(made)
            else:
                yield made, batches


class _Bare:
    """A copy of the script's loader whose walk gives bare batches, and puts aside how they were made."""

    def __init__(self, loader: DataLoader[Any], reading: Reading) -> None:
        aside: deque[Made] = deque()
        self.aside = aside
        ours = {"dataset": reading, "batch_sampler": None, "collate_fn": _same, "worker_init_fn": None}
        inner = altered(loader, **ours, drop_last=False, _IterableDataset_len_called=None)
        # What `DataLoader.__iter__` asks, so that the walk of a subclass sees nothing but batches.
        self.loader = altered(loader, _get_iterator=lambda: _Walk(inner, aside))


class _Walk:
    """An iterator of torch's, with its items taken apart."""

    def __init__(self, loader: DataLoader[Any], aside: deque[Made]) -> None:
        self._loader = loader
        self._inner: Any = type(loader)._get_iterator(loader)  # noqa: SLF001 - a subclass may have its own
        self._aside = aside
        self._ready: deque[tuple[Made, Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ready:
            made, batches = next(self._inner)
            self._ready.extend((made, batch) for batch in batches)
        made, batch = self._ready.popleft()
        self._aside.append(made)
        return batch

    def _reset(self, _: DataLoader[Any]) -> None:
        """Begin anew with the same workers."""
        self._ready.clear()
        self._inner._reset(self._loader)  # noqa: SLF001 - what `DataLoader.__iter__` calls


class _Place:
    """Where a walk stands.

    Args:
        start: Where it began.
        random: The random states of the epoch.
        workers: The workers of the loader.
    """

    def __init__(self, start: dict[str, Any], random: dict[str, Any], workers: int) -> None:
        self._start = start
        self._random = random
        self._made: Made | None = None
        self._samples: int = start.get("position", 0)
        self._parts: list[dict[str, Any]] = start.get("workers") or [{"position": 0}] * max(1, workers)

    def move(self, made: Made) -> None:
        """A batch is handed out, or left out."""
        self._made = made
        self._samples += made.size
        if made.worker is not None:
            self._parts = [
                _stand(made) if worker == made.worker else part for worker, part in enumerate(self._parts)
            ]

    def position(self) -> dict[str, Any]:
        """The position after the last batch."""
        made = self._made
        if made is None:
            return self._start
        if made.worker is None:
            return {"random": self._random, "whole": True} | _stand(made)
        turn = (made.worker + 1) % len(self._parts)
        return {"position": self._samples, "random": self._random, "workers": self._parts, "turn": turn}


def _stand(made: Made) -> dict[str, Any]:
    if made.last:  # a dataset may have set itself back to its start already
        return {"position": made.samples, "ended": True}
    state = {} if made.state is None else {"state": made.state, "state_at": made.samples}
    return {"position": made.samples} | state


def _with_end(walk: Steps, workers: int) -> Iterator[tuple[Made, list[Any], bool]]:
    """Which batch is the last: where workers have parts of their own, when all are through."""
    open_ = max(1, workers)
    ahead = next(walk, None)
    while ahead is not None:
        made, batches = ahead
        if made.worker is None or not made.last:
            yield made, batches, made.last
            ahead = next(walk, None)
            continue
        open_ -= 1
        # A worker without a sample never says that it is through.
        ahead = next(walk, None) if open_ else None
        yield made, batches, ahead is None


def _same(item: Any) -> Any:
    return item
