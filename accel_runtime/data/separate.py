"""Data that are split by rank already: each rank walks its own loader, and all take equally many steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.data.sampling import factor
from accel_runtime.data.source import Loop, Share, Source

__all__ = ["Separate"]

_UNKNOWN = (-1, -1)


class Separate(Source):
    """Every rank's own batches, used as they are.

    Ranks may have different numbers of batches. All take as many steps as the longest; a rank that is out
    is given its first batch of the epoch again, of which nothing is valid. A rank without any data is given
    a batch of another's.

    Args:
        local: This rank's batches, as one process would walk them.
        loader: The script's loader of this rank.
        backend: Carries the number of samples of every step.
    """

    def __init__(self, local: Source, loader: DataLoader[Any], backend: Backend) -> None:
        self._local = local
        self._backend = backend
        self._known = _known(loader)

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        world = self._backend.topology.world_size
        if start.get("world_size", world) != world:
            raise ValueError(
                f"this position was taken on {start['world_size']} processes over data split by process, and holds "
                f"for as many only; there are {world}. Resume with {start['world_size']} processes"
            )
        step = start.get("position", 0)
        loop.where = lambda _: {"position": step, "world_size": world}
        reader = _Reader(self._local, Loop(loop.epoch), self._local.after(step, {}))
        agree = self._agreement()
        now = agree(step, reader)
        spare = self._spare(reader, now)
        sizes = [count or next(filter(None, now)) for count in now] if any(now) else []
        while any(now):
            own, batch, step = now[self._backend.topology.rank], reader.take(), step + 1
            if own and batch is None:
                raise RuntimeError(f"the sampler gave fewer samples than its length says: no batch {step}")
            valid, now = tuple(now), agree(step, reader)
            loop.share = self._share(valid, sizes, last=not any(now))
            yield batch if own else copy.deepcopy(spare)

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
        return {"position": start.get("position", 0) + steps, "world_size": self._backend.topology.world_size}

    def _agreement(self) -> _Agree:
        """How the numbers of samples of a step become known: from all lengths, or by asking each time."""
        lengths = self._backend.all_gather(torch.tensor(self._known, device=self._backend.device)).tolist()
        if any(length == list(_UNKNOWN) for length in lengths):
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
        return list(counts)

    def _spare(self, reader: _Reader, first: list[int]) -> Any:
        """The batch this rank is given when it is out: its first, or that of the first rank which has any."""
        spare = copy.deepcopy(reader.ahead)  # scripts change the batches they are given
        if all(first) or not any(first):
            return spare
        giver = next(rank for rank, count in enumerate(first) if count)
        given = self._backend.broadcast_object(spare, giver)
        return spare if first[self._backend.topology.rank] else given

    def _share(self, valid: tuple[int, ...], first: list[int], *, last: bool) -> Share:
        sizes = tuple(count or size for count, size in zip(valid, first, strict=True))
        return Share(valid, sizes, last, factor(valid, self._backend.topology.rank))


class _Reader:
    """One rank's batches, one ahead."""

    def __init__(self, local: Source, loop: Loop, start: dict[str, Any]) -> None:
        self._loop = loop
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

    def take(self) -> Any:
        """The batch that came next; the one after it is read."""
        self.check()
        taken = self.ahead
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
    """How many samples an epoch of this rank has, and how many a batch, where the lengths tell it."""
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return _UNKNOWN
    sampler: Any = batches.sampler
    if not hasattr(sampler, "__len__"):
        return _UNKNOWN
    count, size = len(sampler), batches.batch_size
    return count - count % size if batches.drop_last else count, size
