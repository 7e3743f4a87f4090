"""The prepared loader: the script's own DataLoader, walking one order of batches shared by all ranks."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)
from typing_extensions import override

from accel_runtime import rng, tree
from accel_runtime.backends.base import Backend
from accel_runtime.data.sampling import Sharding, Share

__all__ = ["Batches", "LoaderOptions", "PreparedLoader"]

_END = object()


@dataclass(frozen=True)
class LoaderOptions:
    """How loaders are prepared."""

    split_batches: bool = False
    """Whether the script's batch size is the global one, to be split among the ranks."""
    place: bool = True
    """Whether batches are moved to the device."""
    rng_types: tuple[str, ...] = ()
    """The generators every rank takes over from the first at the start of an epoch."""


class Batches:
    """The batches in hand: which step of which loader the script is working on."""

    def __init__(self) -> None:
        self._open: dict[object, Share] = {}

    def enter(self, loop: object, share: Share) -> None:
        """A loop has been handed the batch of this step; a loop not seen before becomes the innermost."""
        self._open[loop] = share

    def leave(self, loop: object) -> None:
        """A loop is over: at its end, by `break`, or by an exception."""
        self._open.pop(loop, None)

    @property
    def current(self) -> Share | None:
        """The step of the innermost loop, or None outside of all loops."""
        return next(reversed(self._open.values()), None)


class PreparedLoader(DataLoader[Any]):
    """A DataLoader that gives this rank its slice of every global batch, on the device.

    The script's loader is copied, not rebuilt, so subclasses and every option stay as they are; only
    its batch sampler is seen through `Sharding`. Attributes are those of the script's loader.

    Args:
        loader: The script's loader, over a map-style dataset if there are several processes.
        backend: Carries the order of an epoch between the ranks.
        batches: Learns of every batch handed out.
        options: See `LoaderOptions`.

    Raises:
        ValueError: The loader cannot be shared out exactly; the message says why and what to do.
    """

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, batches: Batches, options: LoaderOptions
    ) -> None:
        _check(loader, backend.topology.world_size, options)
        self._inner = copy.copy(loader)
        self._order: _Order | None = None
        if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
            self._order = _Order(loader, backend, options)
            # DataLoader guards these names against assignment; the copy is ours to change.
            vars(self._inner).update(batch_sampler=self._order, _iterator=None)
        vars(self).update({k: v for k, v in vars(loader).items() if k != "_iterator"})
        self._backend = backend
        self._batches = batches
        self._options = options

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        rng.share_states(list(self._options.rng_types), self._backend)
        steps = self._ordered(self._order) if self._order is not None else self._streamed()
        placed, enter, loop = self._placed, self._batches.enter, object()
        try:
            for batch, share in steps:
                enter(loop, share)
                yield placed(batch)
        finally:
            self._batches.leave(loop)

    @override
    def __len__(self) -> int:
        """The number of steps; the same on every rank."""
        return len(self._inner)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler, batch sampler or dataset that wants it."""
        for part in (self.batch_sampler, self.sampler, self.dataset):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)  # type: ignore[union-attr]

    @property
    def total_batch_size(self) -> int:
        """Samples in a full global batch.

        Raises:
            ValueError: The loader's batches have no fixed size.
        """
        size: int | None = getattr(self._order, "batch_size", None)
        if size is None:
            raise ValueError("this loader's batches have no fixed size")
        return size if self._options.split_batches else size * self._backend.topology.world_size

    def _ordered(self, order: _Order) -> Iterator[tuple[Any, Share]]:
        """Batches of a known order, each with its share."""
        shares: deque[Share] | None = None
        for batch in self._inner:
            # Not before the first batch: a subclass may begin its walk as late as that.
            shares = order.shares if shares is None else shares
            yield batch, shares.popleft()

    def _streamed(self) -> Iterator[tuple[Any, Share]]:
        """Batches whose number is not known: the next one is fetched to tell the last."""
        iterator = iter(self._inner)
        ahead = next(iterator, _END)
        while ahead is not _END:
            batch, ahead = ahead, next(iterator, _END)
            yield batch, Share([], valid=(0,), size=0, last=ahead is _END)

    def _placed(self, batch: Any) -> Any:
        if not self._options.place:
            return batch
        return tree.send(batch, self._backend.device, non_blocking=self.pin_memory)

    def __getattr__(self, name: str) -> Any:
        # Attributes a subclass of DataLoader computes live on the copy.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


class _Order(Sampler[list[Any]]):
    """The batch sampler of one rank: its slices of an order that is the same on all ranks."""

    def __init__(self, loader: DataLoader[Any], backend: Backend, options: LoaderOptions) -> None:
        source: Any = loader.batch_sampler
        self._source: Any = source
        self._backend = backend
        self._fixed = _is_sequential(source)
        # torch's own attributes of a BatchSampler, which callers read.
        self.sampler = getattr(source, "sampler", loader.sampler)
        self.batch_size = getattr(source, "batch_size", None)
        self.drop_last = bool(getattr(source, "drop_last", False))
        topology = backend.topology
        self._sharding = Sharding(topology.rank, topology.world_size, options.split_batches, self.drop_last)
        self.shares: deque[Share] = deque()
        """The steps whose indices were given out by the newest iterator and whose batches were not yet."""

    @override
    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator: each iterator has its own queue, and the loader picks it up with its first batch.
        self.shares = deque()
        return self._walk(self.shares)

    def __len__(self) -> int:
        return self._sharding.steps(len(self._source))

    def _walk(self, shares: deque[Share]) -> Iterator[list[Any]]:
        for share in self._sharding.shares(self._batches(), self.batch_size):
            shares.append(share)
            yield share.indices

    def _batches(self) -> Iterable[list[Any]]:
        """One epoch of the script's batches: what the first rank drew.

        Every rank draws, so that equal random states stay equal; eight bytes tell whether the draws
        agree, and only where they do not does the first rank's order travel.
        """
        if self._fixed or self._backend.topology.world_size == 1:
            source: Iterable[list[Any]] = self._source
            return source
        drawn = [list(batch) for batch in self._source]
        prints = self._backend.all_gather(_fingerprint(drawn).to(self._backend.device))
        if bool((prints == prints[0]).all()):
            return drawn
        first: list[list[Any]] = self._backend.broadcast_object(drawn)
        return first


def _is_sequential(source: object) -> bool:
    return type(source) is BatchSampler and type(source.sampler) is SequentialSampler


def _fingerprint(batches: list[list[Any]]) -> torch.Tensor:
    """Eight bytes that differ where orders differ: `[1]`, int64."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in batches:
        digest.update(pickle.dumps(batch))
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)


def _has_length(source: Any) -> bool:
    try:
        len(source)
    except (TypeError, NotImplementedError):  # a BatchSampler has one only if its sampler has
        return False
    return True


def _check(loader: DataLoader[Any], world_size: int, options: LoaderOptions) -> None:
    """Refuse what could not be shared out exactly."""
    if world_size == 1:
        return
    source = loader.batch_sampler
    size = getattr(source, "batch_size", None)
    refusals = {
        "its dataset is a stream (IterableDataset), which this version shares out on one process only": isinstance(
            loader.dataset, IterableDataset
        ),
        "batch_size=None loads samples one by one, which this version shares out on one process only": source
        is None,
        "its sampler is a DistributedSampler, and sharding twice would skip samples: leave the sampler to "
        "prepare()": isinstance(loader.sampler, DistributedSampler)
        or isinstance(getattr(source, "sampler", None), DistributedSampler),
        "its sampler has no length, so an epoch cannot be shared out": not _has_length(source),
        "in_order=False lets batches overtake each other": not getattr(loader, "in_order", True),
        f"split_batches needs a batch size that {world_size} processes divide; it is {size}": bool(
            options.split_batches and (size is None or size % world_size)
        ),
    }
    for reason, applies in refusals.items():
        if applies:
            raise ValueError(f"this DataLoader cannot be prepared for {world_size} processes: {reason}")
