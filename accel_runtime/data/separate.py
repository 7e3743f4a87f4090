"""Data that are split by rank already: each rank walks its own loader, and all take equally many steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.data.copies import Reads, each_part
from accel_runtime.data.sampling import factor
from accel_runtime.data.script import batch_size_of
from accel_runtime.data.source import Loop, Share, Source
from accel_runtime.randomness import Apart, capture, in_force, kept

__all__ = ["Separate", "elsewhere"]

_UNKNOWN = -1
_BEGINNING = ("random", "persisted")
"""What of a position is the same all through its epoch."""


class Separate(Source):
    """Every rank's own batches, used as they are.

    Ranks may have different numbers of batches. All take as many steps as the longest; a rank that is out
    is given its first batch of the epoch again, of which nothing is valid. A rank without any data is given
    a batch of another's. A position has every rank's own in it, and holds for as many ranks only. Ranks that have the
    same part of every batch read the same, and count as one.

    Args:
        local: This rank's batches, as one process would walk them.
        loader: The script's loader of this rank.
        backend: Carries the number of samples of every step.
        filled: Whether every rank completes its own tail.
    """

    def __init__(
        self, local: Source, loader: DataLoader[Any], backend: Backend, *, filled: bool = False
    ) -> None:
        self._local = local
        self._backend = backend
        self._known = _known(loader)
        self._filled = filled and batch_size_of(loader) is not None
        self._draws = loader.num_workers == 0

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        self.check(start)
        step = start.get("position", 0)
        local = start.get("local", {}) if "local" in start or not step else self._local.after(step, {})
        began = {"began": start["began"] if "began" in start else capture()} if self._draws else {}
        agree = self._agreement()
        # Before the walk itself: both may go through the same workers.
        spare = self._again(loop.epoch, local, began, agree) if step and "random" in local else None
        with Apart(start["reading"])() if "reading" in start else nullcontext():
            reader = _Reader(self._local, Loop(loop.epoch), local, draws=self._draws)
        place, reads = self._backend.data, Reads(self._backend)
        world = place.world_size
        loop.where = lambda _: {"position": step, "world_size": world} | began | reader.position()
        now = agree(step, reader)
        spare = spare or self._spare(reader, now)
        while any(now):
            own, batch, step = now[place.rank], reader.take(), step + 1
            if own and batch is None:
                raise RuntimeError(f"the sampler gave fewer samples than its length says: no batch {step}")
            valid, now = tuple(now), agree(step, reader)
            loop.share = self._share(valid, spare.sizes, last=not any(now))
            reads.add(batch, last=loop.share.last)
            yield batch if own else copy.deepcopy(spare.batch)

    @override
    def steps(self) -> int:
        """How many steps this rank's own data give; the epoch has as many as the longest rank's.

        Raises:
            TypeError: It is not known beforehand.
        """
        return self._local.steps()

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        if not steps:
            return start
        local = self._local.after(steps, start.get("local", {}))
        return {
            "position": start.get("position", 0) + steps,
            "world_size": self._backend.data.world_size,
            "local": local,
        }

    @override
    def beginning(self) -> dict[str, Any]:
        return {"local": self._local.beginning()}

    @override
    def check(self, start: dict[str, Any]) -> None:
        world = self._backend.data.world_size
        if start.get("world_size", world) != world:
            raise elsewhere(start["world_size"], world)
        self._local.check(start.get("local", {}))

    @override
    def following(self, start: dict[str, Any]) -> dict[str, Any]:
        return start | {"local": self._local.following(start["local"])} if "local" in start else start

    @override
    def restart(self, start: dict[str, Any]) -> dict[str, Any]:
        if "local" not in start:
            return start
        kept_keys = {key: start[key] for key in ("world_size", "began") if key in start}
        return kept_keys | {"local": self._local.restart(start["local"])}

    def _again(self, epoch: int, local: dict[str, Any], began: dict[str, Any], agree: _Agree) -> _Spare:
        """The spare of an epoch that is gone on with: its start is read once more, as it was then."""
        with Apart(began.get("began"))():
            reader = _Reader(self._local, Loop(epoch), {k: local[k] for k in _BEGINNING if k in local})
        now = agree(0, reader)
        reader.check()
        return self._spare(reader, now)

    def _agreement(self) -> _Agree:
        """How the numbers of samples of a step become known: from all lengths, or by asking each time."""
        everyone = self._backend.all_gather(torch.tensor(self._known, device=self._backend.device)).tolist()
        lengths = each_part(everyone, self._backend.data)
        self._full = [size for _, size in lengths]
        if any(count == _UNKNOWN for count, _ in lengths):
            return self._asked
        return lambda step, _: [min(size, max(0, count - step * size)) for count, size in lengths]

    def _asked(self, _: int, reader: _Reader) -> list[int]:
        """Every rank's number of samples in the batch that comes next."""
        mine = torch.tensor([reader.count, int(reader.failed)], device=self._backend.device)
        counts, failed = self._backend.all_gather(mine).t().tolist()
        if any(failed) and not reader.failed:
            ranks = ", ".join(str(rank) for rank, lost in enumerate(failed) if lost)
            raise RuntimeError(f"rank {ranks} could not read its data: see its own error")
        reader.check()
        return each_part(counts, self._backend.data)

    def _spare(self, reader: _Reader, first: list[int]) -> _Spare:
        """What this rank is given when it is out: its first batch, or that of the first rank which has any.

        Args:
            reader: At the start of the epoch.
            first: Every rank's number of samples there.
        """
        batch = copy.deepcopy(reader.ahead)  # scripts change the batches they are given
        first = [self._full[rank] if count and self._filled else count for rank, count in enumerate(first)]
        if all(first) or not any(first):
            return _Spare(batch, first)
        giver = next(rank for rank, count in enumerate(first) if count)
        given = self._backend.broadcast_object(batch, "a batch", giver * self._backend.data.copies)
        mine = first[self._backend.data.rank]
        return _Spare(batch if mine else given, [count or first[giver] for count in first])

    def _share(self, valid: tuple[int, ...], first: list[int], *, last: bool) -> Share:
        pairs = zip(valid, first, strict=True)
        sizes = tuple(first) if self._filled else tuple(count or size for count, size in pairs)
        return Share(valid, sizes, last, True, factor(valid, self._backend.data.rank))


class _Spare(NamedTuple):
    """What a rank that is out is given."""

    batch: Any
    sizes: list[int]
    """For every rank, how many samples that batch has."""


def elsewhere(before: int, now: int) -> ValueError:
    """The error of a position that holds for another number of processes."""
    return ValueError(
        f"this position was taken on {before} processes over data split by process, and holds for as many only; there "
        f"are {now}. Resume with {before} processes"
    )


class _Reader:
    """One rank's batches, one ahead.

    Args:
        local: Where they come from.
        loop: The walk.
        start: Its position.
        draws: Whether reading may draw from the generators of this process.
    """

    def __init__(self, local: Source, loop: Loop, start: dict[str, Any], *, draws: bool = False) -> None:
        self._loop = loop
        self._stand = start
        self._draws = draws
        self._states: dict[str, Any] = {}
        self._walk = local.walk(loop, start)
        self._error: Exception | None = None
        self.ahead: Any = None
        """The batch that comes next."""
        self.count = 0
        """How many samples it has; 0 at the end."""
        self._read()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Raise what went wrong when the batch that comes next was read."""
        if self._error is not None:
            raise self._error

    def position(self) -> dict[str, Any]:
        """The position after what was taken, and the random states that what comes next was read under."""
        reading = {"reading": kept(self._states)} if self._states else {}
        return {"local": self._stand} | reading

    def take(self) -> Any:
        """The batch that came next; the one after it is read."""
        self.check()
        taken = self.ahead
        if taken is not None:
            self._stand = self._loop.position()
            self._states = in_force() if self._draws else {}
        self._read()
        return taken

    def _read(self) -> None:
        try:
            self.ahead = next(self._walk, None)
        except Exception as error:  # noqa: BLE001 - the others wait: whatever it is, they are told first
            self._error, self.ahead = error, None
        share = self._loop.share
        self.count = share.valid[0] if self.ahead is not None and share is not None else 0


_Agree = Callable[[int, _Reader], list[int]]


def _known(loader: DataLoader[Any]) -> tuple[int, int]:
    """How many samples an epoch of this rank has, where the lengths tell it, and how many a full batch."""
    batches, full = loader.batch_sampler, batch_size_of(loader) or 0
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return _UNKNOWN, full
    sampler: Any = batches.sampler
    if not hasattr(sampler, "__len__"):
        return _UNKNOWN, full
    count, size = len(sampler), batches.batch_size
    return count - count % size if batches.drop_last else count, size
