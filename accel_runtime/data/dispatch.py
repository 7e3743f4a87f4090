"""Data that the first rank reads for all: every step, each rank is handed its batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.single import Single
from accel_runtime.data.rounds import Rounds
from accel_runtime.data.slices import factor, slicing_of
from accel_runtime.data.source import Loop, Share, Source
from accel_runtime.data.streams import Flow, Place
from accel_runtime.samples import scatter_object
from accel_runtime.topology import Topology

__all__ = ["DispatchError", "Dispatched"]


class DispatchError(RuntimeError):
    """The first rank, which reads for all, could not; raised on the others."""


class Handed(NamedTuple):
    """What a rank is handed for one step."""

    batch: Any
    valid: tuple[int, ...]
    sizes: tuple[int, ...]
    last: bool
    stand: dict[str, Any]
    """The position after the step; with the first of a walk, also what holds for all of it."""


class _Failure(NamedTuple):
    """The first rank could not read."""

    text: str


class Dispatched(Source):
    """Global batches of one process, read by the first rank only.

    Args:
        loader: The script's loader, over a dataset of any kind; the other ranks never walk theirs.
        backend: Carries the batches.
        split: Whether the script's batch size is the global one.
        even: Whether a tail is completed by repeats.
        seed: With a number, a shuffled order is drawn anew for every epoch from `seed + epoch`.

    Raises:
        ValueError: `split` is wanted, and the ranks cannot divide the batch size.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        backend: Backend,
        *,
        split: bool = False,
        even: bool = True,
        seed: int | None = None,
    ) -> None:
        world = backend.topology.world_size
        self._backend = backend
        self._slicing = slicing_of(loader, world, split=split, even=even)
        self._streams = isinstance(loader.dataset, IterableDataset)
        self._flow = Flow(loader, self._slicing, tuple(range(world)))
        self._rounds = Rounds(loader, self._slicing, split=split, seed=seed)
        self._stood: WeakKeyDictionary[Loop, dict[str, Any]] = WeakKeyDictionary()

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        self._stood[loop] = start
        began: dict[str, Any] = {}
        leads = self._backend.topology.rank == 0
        read = self._read(start, began, loop.epoch) if leads else iter(())
        while True:
            items, error = _fetched(read, self._backend.topology.world_size) if leads else (None, None)
            item = scatter_object(items, self._backend)
            if error is not None:
                raise error
            if isinstance(item, _Failure):
                raise DispatchError(f"rank 0, which reads for all ranks, failed: {item.text}")
            if item is None:
                return
            began = began or {name: item.stand[name] for name in ("rng", "generator") if name in item.stand}
            self._stood[loop] = item.stand | began
            loop.share = self._share(item)
            last = item.last
            yield item.batch
            if last:
                return

    @override
    def steps(self) -> int:
        return self._flow.steps() if self._streams else self._rounds.steps()

    @override
    def position(self, loop: Loop) -> dict[str, Any]:
        return self._stood.get(loop, {})

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        return self._flow.after(steps, start)

    def _share(self, item: Handed) -> Share:
        rank = self._backend.topology.rank
        level = len(set(item.valid)) == 1 or self._slicing.even
        return Share(item.valid, item.sizes, item.last, 1.0 if level else factor(item.valid, rank))

    def _read(self, start: dict[str, Any], began: dict[str, Any], epoch: int) -> Iterator[list[Handed]]:
        """What each rank is handed, step by step."""
        steps = self._of_stream(start, began) if self._streams else self._of_map(start, began, epoch)
        first = True
        for batches, share, stand in steps:
            told = stand | began if first else stand
            first = False
            yield [Handed(batch, share.valid, share.sizes, share.last, told) for batch in batches]

    def _of_stream(
        self, start: dict[str, Any], began: dict[str, Any]
    ) -> Iterator[tuple[list[Any], Share, dict[str, Any]]]:
        place = Place(start, self._flow.workers)
        alone = Single(Topology(), self._backend.device)
        for made, batches, last in self._flow.batches(start, alone, place):
            place.move(made)
            began.update(place.began)
            yield batches, self._slicing.share(made.size, 0, last=last), place.stand()

    def _of_map(
        self, start: dict[str, Any], began: dict[str, Any], epoch: int
    ) -> Iterator[tuple[list[Any], Share, dict[str, Any]]]:
        samples = start.get("samples", 0)
        for round_, batches in self._rounds.batches(start, began, epoch):
            samples += sum(round_.valid)
            share = Share(round_.valid, tuple(map(len, round_.indices)), round_.last)
            yield batches, share, {"samples": samples}


def _fetched(read: Iterator[list[Handed]], world_size: int) -> tuple[list[Any], Exception | None]:
    """The next items, or what tells the others of the end or of a failure."""
    try:
        items: list[Any] | None = next(read, None)
    except Exception as error:  # noqa: BLE001 - the others wait: whatever it is, they are told
        return [_Failure(f"{type(error).__name__}: {error}")] * world_size, error
    return [None] * world_size if items is None else items, None
