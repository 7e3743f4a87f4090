"""Data that the first rank reads for all: every step, each rank is handed its batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.data.ordered import Ordered
from accel_runtime.data.sampling import Sharding, factor
from accel_runtime.data.source import Loop, Share, Source
from accel_runtime.data.streams import Stream
from accel_runtime.exchange.samples import scatter_object
from accel_runtime.randomness import alike, in_force, kept, restore

__all__ = ["DispatchError", "Dispatched"]


class DispatchError(RuntimeError):
    """The first rank, which reads for all, could not; raised on the others."""


class Handed(NamedTuple):
    """What a rank is handed for one step."""

    batch: Any
    share: Share
    stand: dict[str, Any]
    """The position after the step; its random states come with the first step only."""


class _Failure(NamedTuple):
    """The first rank could not read."""

    text: str


class _Parcel(NamedTuple):
    """What a rank is sent."""

    item: Handed | _Failure | None
    """None at the end."""
    states: dict[str, Any] | None = None
    """What reading made of the first rank's random states, for those that compute one part with it."""


class Dispatched(Source):
    """The batches of all ranks, read by the first only, and the same for ranks that have the same part; positions are those of the source it reads.

    Args:
        loader: The script's loader, over a dataset of any kind; the other ranks never walk theirs.
        backend: Carries the batches.
        sharding: How samples are divided.
        seed: As for `Ordered`.
    """

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, sharding: Sharding, seed: int | None = None
    ) -> None:
        self._backend = backend
        self._source: Ordered | Stream
        if isinstance(loader.dataset, IterableDataset):
            self._source = Stream(loader, backend, sharding, for_all=True)
        else:
            self._source = Ordered(loader, backend, sharding, seed, for_all=True)
        self.inner = self._source.inner
        self._subject = f"the batches of a {type(loader.dataset).__name__}, batches of {sharding.batch_size}"

    @property
    @override
    def kind(self) -> str:
        return self._source.kind

    @override
    def overridden(self, *, even: bool) -> AbstractContextManager[None]:
        return self._source.overridden(even=even)

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        place = self._backend.data
        parts = [place.of(rank) for rank in range(self._backend.topology.world_size)]
        stand = start
        loop.where = lambda _: stand
        leads = self._backend.topology.rank == 0
        read = self._read(Loop(loop.epoch), start) if leads else iter(())
        last = False
        while not last:
            parcels, error = self._fetched(read, parts) if leads else (None, None)
            item, states = scatter_object(parcels, self._backend, self._subject)
            if states is not None:
                restore(states)
            if error is not None:
                raise error
            if isinstance(item, _Failure):
                raise DispatchError(f"rank 0, which reads for all ranks, failed: {item.text}")
            if item is None:
                return
            stand = {"random": stand.get("random")} | item.stand
            share = item.share
            loop.share = share._replace(factor=factor(share.valid, place.rank) if share.by_samples else 1.0)
            last = item.share.last
            yield item.batch

    def _fetched(
        self, read: Iterator[list[Handed]], parts: list[int]
    ) -> tuple[list[_Parcel], Exception | None]:
        """The next items by rank, whose part is said, or what tells the others of the end or of a failure."""
        copies = self._backend.data.copies
        before = in_force() if copies > 1 else {}
        error: Exception | None = None
        items: list[Any] = [None] * len(parts)
        try:
            handed = next(read, None)
            items = items if handed is None else [handed[part] for part in parts]
        except Exception as failed:  # noqa: BLE001 - the others wait: whatever it is, they are told
            items, error = [_Failure(f"{type(failed).__name__}: {failed}")] * len(parts), failed
        after = in_force() if copies > 1 else {}
        states = None if alike(before, after) else kept(after)
        return [_Parcel(item, states if 0 < r < copies else None) for r, item in enumerate(items)], error

    @override
    def steps(self) -> int:
        return self._source.steps()

    @override
    def beginning(self) -> dict[str, Any]:
        return self._source.beginning()

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        return self._source.after(steps, start)

    @override
    def check(self, start: dict[str, Any]) -> None:
        self._source.check(start)

    @override
    def following(self, start: dict[str, Any]) -> dict[str, Any]:
        return self._source.following(start)

    @override
    def restart(self, start: dict[str, Any]) -> dict[str, Any]:
        return self._source.restart(start)

    def _read(self, loop: Loop, start: dict[str, Any]) -> Iterator[list[Handed]]:
        """What the ranks of each part are handed, step by step."""
        walk = self._source.walk(loop, start)
        told = False
        for first in walk:
            batches = [first, *islice(walk, self._backend.data.world_size - 1)]
            stand, share = loop.position(), loop.share
            assert share is not None
            if told:
                del stand["random"]
            told = True
            yield [Handed(batch, share, stand) for batch in batches]
