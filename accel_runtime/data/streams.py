"""Streams on several ranks: each reads the whole stream and keeps its slice of every global batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
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
from accel_runtime.data.source import Loop, Source, ahead, inside
from accel_runtime.data.workers import Made, Reading, Recipe, misplaced
from accel_runtime.randomness import Apart, agreed, capture, fingerprint, kept, restore
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
            compared=self._backend.topology.world_size > 1,
        )
        self._generators = () if loader.generator is None else (loader.generator,)
        self._kept: _Bare | None = None

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        self.check(start)
        if "random" in start:
            restore({"generators": start["random"]["generators"]}, self._generators)
        here = capture(self._generators)
        random = self._random(start, here)
        place = _Place(start, random, self._loader.num_workers)
        loop.where = lambda _: place.position()
        steps = among_workers(
            self._unskipped(self._started(start, random, here, place), start.get("skip", 0), place)
        )
        for made, batches, last in among_ranks(_with_end(steps, self._loader.num_workers), self._backend):
            place.move(made)
            loop.share = self.sharding.share(made.size, last=last)
            yield from batches

    def _random(self, start: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
        """The random states the epoch is begun under; `here` itself, where all ranks are in the same."""
        if inside(start):
            return dict(start["random"])
        # Between two epochs nothing has been drawn yet, and every rank has kept its own.
        saved = here | start.get("random", {})
        return agreed(here if fingerprint(saved) == fingerprint(here) else saved, self._backend)

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
        skip = start.get("skip", 0) + steps
        return start | {"position": samples, "skip": skip} | ahead(steps, start)

    @override
    def beginning(self) -> dict[str, Any]:
        return {"random": capture(self._generators)} | (
            self._kept.beginning(self._kept.walks) if self._kept else {}
        )

    @override
    def check(self, start: dict[str, Any]) -> None:
        parts = start.get("workers")
        if parts is not None and len(parts) != self._loader.num_workers:
            raise misplaced(len(parts))

    def _started(
        self, start: dict[str, Any], random: dict[str, Any], here: dict[str, Any], place: _Place
    ) -> Steps:
        """All batches; the first is read under random states that are the same on all ranks."""
        if random is not here:
            restore({"generators": random["generators"]}, self._generators)
        resumed, alone = inside(start), self._loader.num_workers == 0
        live = bool(start.get("live") and start.get("restored")) if resumed else random is here
        leads = self._backend.data.rank == 0 and not resumed and fingerprint(random) == fingerprint(here)
        apart = None if random is here else Apart(random)
        reads = self._reads(random) if alone and not live else None
        # What was read in turn with the loop is read again on its own, up to where it stood, and then in turn again.
        replay, begin = (
            self._reads(random) if alone and resumed and wanted else None
            for wanted in (live and start.get("position"), True)
        )
        bare = self._bare(start, Reading(self._recipe, start, reads, replay, begin))
        walks = bare.walks
        place.epoch = lambda: _said(live=alone and live) | bare.beginning(walks)
        # Inside an epoch the seed for workers has been drawn, and what it was drawn from is where it was afterwards.
        bare.drawing(spare=bool(start.get("walks")) or (alone and resumed and not self._generators))
        walk = iter(self._walk(bare))
        # With workers only their seeds are drawn here.
        with nullcontext() if apart is None or alone or leads else apart():
            first = next(walk, None)
        if reads and leads:
            reads.take_over()  # the states of the first part go on as if it were alone
        if first is not None:
            yield first
            yield from walk

    def _reads(self, random: dict[str, Any]) -> Apart:
        """The random states that an epoch begun under these is read under, without workers."""
        reads = Apart(random)
        if not self._generators:
            with reads():  # torch draws a seed for workers, also where there are none
                torch.empty((), dtype=torch.int64).random_()
        return reads

    def _bare(self, start: dict[str, Any], reading: Reading) -> _Bare:
        """What torch walks; where workers persist, it is kept as long as no position is given."""
        if self._kept is not None and not start:
            return self._kept
        bare = _Bare(self._loader, reading, start)
        self._kept = bare if self._loader.persistent_workers else None
        return bare

    def _walk(self, bare: _Bare) -> Steps:
        others = len(self._recipe.ranks) - 1
        bare.aside.clear()
        bare.walks += 1
        walk = iter(bare.loader)
        for batch in walk:
            batches = [batch, *islice(walk, others)]
            made, *_ = [bare.aside.popleft() for _ in batches]
            yield made, batches

    def _unskipped(self, walk: Steps, skip: int, place: _Place) -> Steps:
        """Without the steps that workers with parts of their own could not leave out themselves."""
        for step, (made, batches) in enumerate(walk):
            if made.worker is not None and step < skip:
                place.move(made)
            else:
                yield made, batches


class _Bare:
    """A copy of the script's loader whose walk gives bare batches, and puts aside how they were made."""

    def __init__(self, loader: DataLoader[Any], reading: Reading, start: dict[str, Any]) -> None:
        self.aside: deque[Made] = deque()
        self.walks: int = start.get("walks", 0)
        """How many walks its workers have begun, or the workers in whose place they are."""
        self._seeds: list[int] = [start["base"]] if "base" in start else []
        self._script = loader
        ours: dict[str, Any] = {
            "dataset": reading,
            "batch_sampler": None,
            "collate_fn": _same,
            "worker_init_fn": None,
        }
        self._inner = altered(loader, **ours, drop_last=False, _IterableDataset_len_called=None)
        # What `DataLoader.__iter__` asks, so that the walk of a subclass sees nothing but batches.
        # Not a method: in a cycle, workers end only when the collector comes.
        self.loader = altered(loader, _get_iterator=partial(_walk, self._inner, self.aside, self._seeds))

    def drawing(self, *, spare: bool) -> None:
        """Have torch draw a seed for workers from the script's generator, or from a spare one."""
        vars(self._inner)["generator"] = torch.Generator() if spare else self._script.generator

    def beginning(self, walks: int) -> dict[str, Any]:
        """What says the random numbers of workers that persist: their first seed, and the walks they began before."""
        if not self._script.persistent_workers:
            return {}
        return {"walks": walks} | ({"base": self._seeds[0]} if self._seeds else {})


def _walk(loader: DataLoader[Any], aside: deque[Made], seeds: list[int]) -> _Walk:
    """A walk; its seed joins those of the walks before it."""
    walk = _Walk(loader, aside)
    seeds.append(walk.base)
    return walk


class _Walk:
    """An iterator of torch's, with its items taken apart."""

    def __init__(self, loader: DataLoader[Any], aside: deque[Made]) -> None:
        self._loader = loader
        self._inner: Any = type(loader)._get_iterator(loader)  # noqa: SLF001 - a subclass may have its own
        self._aside = aside
        self._ready: deque[tuple[Made, Any]] = deque()
        self.base = int(self._inner._base_seed)  # noqa: SLF001 - what workers are told
        """The seed its workers have in common."""

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
        self._parts: list[dict[str, Any] | Made] = start.get("workers") or [{"position": 0}] * max(1, workers)
        self.epoch: Callable[[], dict[str, Any]] = dict
        """What a position says of its epoch, beside its random states."""

    def move(self, made: Made) -> None:
        """A batch is handed out, or left out."""
        self._made = made
        self._samples += made.size
        if made.worker is not None:
            self._parts = [made if worker == made.worker else part for worker, part in enumerate(self._parts)]

    def position(self) -> dict[str, Any]:
        """The position after the last batch."""
        made = self._made
        if made is None:
            return self._start
        epoch = {"random": self._random} | self.epoch()
        if made.worker is None:
            return epoch | {"whole": True} | _stand(made)
        turn = (made.worker + 1) % len(self._parts)
        parts = [_stand(part) if isinstance(part, Made) else part for part in self._parts]
        return epoch | {"position": self._samples, "workers": parts, "turn": turn}


def _stand(made: Made) -> dict[str, Any]:
    if made.last:  # a dataset may have set itself back to its start already
        return {"position": made.samples, "ended": True}
    state = {} if made.state is None else {"state": made.state, "state_at": made.samples}
    reading = {} if made.reading is None else {"reading": kept(made.reading)}
    return {"position": made.samples} | state | reading


def _said(**facts: bool) -> dict[str, Any]:
    """Those that are so."""
    return {name: True for name, fact in facts.items() if fact}


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
