"""What runs where samples are read: a stream made into batches for some ranks, in a loader's worker or without one."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torchs
from typing_extensions import override

from accel_runtime.data.passing import Samples
from accel_runtime.data.prints import printed
from accel_runtime.data.sampling import Sharding, slices
from accel_runtime.data.seeding import begin, hashed
from accel_runtime.randomness import Apart

__all__ = ["Made", "Reading", "Recipe", "misplaced"]


class Made(NamedTuple):
    """A global batch as its reader made it; travels with the batch."""

    size: int
    """How many samples it has, without repeats."""
    samples: int
    """How many samples of what this reader reads lie before its end."""
    last: bool
    """Whether it is the last of what this reader reads."""
    worker: int | None
    """Which worker's part of the stream it is of; None: of the whole stream."""
    before: int
    """The print of what was read before it."""
    after: int
    """The print of what was read up to its end."""
    state: Any
    """The dataset's own state at its end, or None."""
    reading: dict[str, Any] | None
    """With a state: the random states it was taken under, unless they are those the reader began with."""


@dataclass(frozen=True)
class Recipe:
    """What is read, and what becomes of it."""

    dataset: Any
    collate: Callable[[Any], Any]
    worker_init: Callable[[int], Any] | None
    sharding: Sharding
    ranks: tuple[int, ...]
    """The ranks whose batches are made."""
    single: bool = False
    """Whether a batch is one sample, as with `batch_size=None`."""
    compared: bool = False
    """Whether ranks compare what they read."""

    @property
    def keep(self) -> int:
        """How many samples of the start of an epoch may be repeated at its end."""
        return self.sharding.size if self.sharding.fills else 0


class Reading(IterableDataset[tuple[Made, list[Any]]]):
    """A stream in place of which it stands, batched: for every global batch, the batches of some ranks.

    A dataset that splits itself among the workers (it asks `torch.utils.data.get_worker_info()` which of
    them it is, or its `worker_init_fn` changes it) keeps its split: each worker batches its own part. Any
    other is read whole by every worker, and each makes every num_workers-th batch, so that torch's round
    of the workers brings them in order.

    Args:
        recipe: What is read.
        start: The position to begin at, for the first walk; the next ones begin at the start.
        apart: The random states to read under without workers; None: those in force.
        replay: Those to read under what lies before the position, and what had been read beyond it; by default those
            of the rest.
        begin: Those under which the epoch was begun to read, where that was in another process.
    """

    def __init__(
        self,
        recipe: Recipe,
        start: dict[str, Any],
        apart: Apart | None = None,
        replay: Apart | None = None,
        begin: Apart | None = None,
    ) -> None:
        self._recipe = recipe
        self._start = start
        self._apart = apart
        self._replay = replay
        self._begin = begin
        self._seat: _Seat | None = None

    @override
    def __iter__(self) -> Iterator[tuple[Made, list[Any]]]:
        start, self._start = self._start, {}
        replay, self._replay = self._replay, None
        begin, self._begin = self._begin, None
        seat = self._seated(start)
        parts = start.get("workers")
        if parts is not None and (seat is None or len(parts) != seat.count):
            raise misplaced(len(parts))
        where = start if parts is None or seat is None else parts[seat.place]
        if where.get("ended"):
            return
        if seat is not None:
            begin = Apart() if parts is None or seat.own is None else copy.copy(seat.own)
            if "reading" in where:
                seat.own = None  # what is read under is said here
        source = Samples(
            self._recipe.dataset, self._recipe.keep, apart=self._apart, replay=replay, begin=begin
        )
        try:
            source.open(where.get("state"), where.get("reading"))
            whole = seat is None or not seat.splits()
            if whole and parts is not None:
                raise misplaced(len(parts))
            if not whole and start.get("whole"):
                raise misplaced(0)
            begun = where.get("position", 0) if whole or parts is not None else 0
            source.skip(begun - where.get("state_at", 0))
            source.replayed(self._beyond)
            yield from self._made(source, begun, start.get("skip", 0), whole=whole)
        finally:
            source.close()

    @property
    def _beyond(self) -> int:
        """How many samples have to follow for a batch not to be the last."""
        sharding = self._recipe.sharding
        return sharding.size if sharding.drop_last else 1

    def _seated(self, start: dict[str, Any]) -> _Seat | None:
        """This worker's seat, with the random states of a new walk in force."""
        init = None
        if self._seat is None:
            info = get_worker_info()
            if info is None:
                return None
            self._seat = _Seat(info, self._recipe.dataset, start)
            torchs._worker_info = self._seat  # type: ignore[assignment] # noqa: SLF001 - there is no public door
            init = self._recipe.worker_init
        seat = self._seat
        seat.reseed(seat.place)
        seat.initialise(init, seat.place)
        seat.own = None if seat.aware else Apart()
        if seat.place and not seat.aware:
            # A stream that all workers read whole is read as the first of them would read it.
            seat.reseed(0)
            seat.initialise(init, 0)
        self._apart = Apart()
        seat.epoch += 1
        return seat

    def _made(
        self, source: Samples, samples: int, skip: int, *, whole: bool
    ) -> Iterator[tuple[Made, list[Any]]]:
        """The batches of this reader.

        Args:
            source: What is left of the samples.
            samples: How many lie before them.
            skip: How many steps of all workers together are not wanted, where each reads its part.
            whole: Whether every worker reads everything.
        """
        seat, sharding = self._seat, self._recipe.sharding
        count, turn = (seat.count, seat.turn) if seat is not None else (1, 0)
        beyond = self._beyond
        ahead: list[Any] = []
        running, step = 0, 0
        while True:
            mine = not whole or step % count == turn
            found, state, reading = source.read(sharding.size - len(ahead), beyond if mine else 0)
            batch, ahead = (ahead + found)[: sharding.size], (ahead + found)[sharding.size :]
            if not batch or (sharding.drop_last and len(batch) < sharding.size):
                return
            samples += len(batch)
            before, running = running, self._print(batch, running)
            if mine:
                worker = None if whole or seat is None else seat.place
                made = Made(len(batch), samples, len(ahead) < beyond, worker, before, running, state, reading)
                wanted = whole or step * count + turn >= skip
                if wanted and seat is not None:
                    seat.begin_batch(samples, self._recipe.ranks[0])  # for the script's collate_fn
                yield made, self._collated(batch, source) if wanted else [None] * len(self._recipe.ranks)
            step += 1

    def _print(self, batch: list[Any], running: int) -> int:
        # Without workers, one who reads for all has nobody to compare prints with.
        compared = self._recipe.compared or self._seat is not None
        return printed(batch, running) if compared else 0

    def _collated(self, batch: list[Any], source: Samples) -> list[Any]:
        """The batch of every rank, out of one global batch."""
        sharding, collate = self._recipe.sharding, self._recipe.collate
        share = sharding.share(len(batch), last=False)
        start = source.begin() if share.valid != share.sizes and sharding.even else []
        step, parts = sharding.completed(batch, share, start), slices(share)
        own = [step[parts[rank]] for rank in self._recipe.ranks]
        return [collate(part[0] if self._recipe.single else part) for part in own]


class _Seat:
    """What a dataset sees of its worker; notes whether it asks which of the workers it is.

    Args:
        info: What torch would show.
        dataset: The script's dataset.
        start: The position. Its `turn` is the worker whose turn comes first: the places of all are moved by it, so that
            torch's round, which begins with the first process, goes on where it was left. Its `base` and `walks` are
            those of workers that persisted.
    """

    def __init__(self, info: Any, dataset: Any, start: dict[str, Any]) -> None:
        turn: int = start.get("turn", 0)
        self.turn: int = info.id
        self.count: int = info.num_workers
        self.place: int = (info.id + turn) % info.num_workers
        self.aware = False
        self.epoch: int = start.get("walks", 0)
        self.own: Apart | None = None
        """The random states of this worker, for a dataset that asks which it is."""
        self._base: int = start.get("base", info.seed - info.id)
        self._info: Any = info
        self._dataset: Any = dataset
        self._shown: int = self.place
        self._asked = self._touched = False

    @property
    def id(self) -> int:
        self._ask()
        return self._shown

    @property
    def num_workers(self) -> int:
        self._ask()
        return self.count

    @property
    def seed(self) -> int:
        return self._base + self._shown

    @property
    def dataset(self) -> Any:
        self._touched = True
        return self._dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)

    def _ask(self) -> None:
        if self.own is not None and not self._asked:
            self.own.take_over()
        self._asked = True

    def initialise(self, init: Callable[[int], Any] | None, place: int) -> None:
        """Call the script's `worker_init_fn` as the worker of this place."""
        if init is None:
            return
        self._shown, self._touched = place, False
        init(place)
        # Many only seed by the worker's number; who splits changes the dataset.
        self.aware |= self._touched
        self._shown, self._asked = self.place, False

    def splits(self) -> bool:
        """Whether the dataset splits itself among several, now that its first sample has been read."""
        self.aware |= self._asked
        self.own = None
        return self.aware and self.count > 1

    def begin_batch(self, samples: int, rank: int) -> None:
        """Begin the random numbers of a batch, which do not depend on those before it."""
        part = self.place if self.aware else -1
        begin(hashed(self._base, self.epoch, rank, part, samples))

    def reseed(self, place: int) -> None:
        """Seed as torch seeds the worker of this place; later epochs of the same process differ."""
        base = (self._base + self.epoch * 2**32) % 2**63
        random.seed(base + place)
        torch.manual_seed(base + place)
        if "numpy" in sys.modules:
            torch_seed: Any = torchs._generate_state  # noqa: SLF001 - what torch seeds NumPy with
            state = torch_seed(base, place)
            sys.modules["numpy"].random.seed(state)


def misplaced(workers: int) -> ValueError:
    """The error of a position that another division of the stream has left."""
    return ValueError(
        "this dataset splits itself among the workers of its loader, so a position in it holds for the same number "
        f"of workers only: resume with num_workers={workers}"
    )
