"""The order of an epoch: what the script's sampler draws, from any position, equal on all ranks."""

from __future__ import annotations

import copy
import hashlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.data.sampling import Index, Sharding, Step
from accel_runtime.data.script import gives_single, sampler_of
from accel_runtime.randomness import KINDS

__all__ = ["Batches", "Order", "Samples", "order_of"]

_OF_TORCH = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
"""Samplers that draw from a generator of torch's and from nothing else."""
_AHEAD = 64
"""Steps that a sampler without length is drawn ahead, to be compared in one go."""


class Order(ABC):
    """What a sampler draws, divided among the ranks."""

    def __init__(self, source: Any, sharding: Sharding, backend: Backend) -> None:
        self.source = source
        """The script's sampler, or batch sampler."""
        self.sharding = sharding
        self.seed: int | None = None
        """With a number, a shuffled order is drawn anew for every epoch from `seed + epoch`."""
        self._backend = backend

    @property
    def draws_from(self) -> tuple[str, ...]:
        """The global generators that may be drawn from, out of `randomness.KINDS`."""
        return KINDS

    @property
    @abstractmethod
    def stride(self) -> int:
        """How far a full step advances."""

    @abstractmethod
    def steps(self) -> int:
        """How many steps an epoch has."""

    @abstractmethod
    def walk(self, position: int, epoch: int, *, eager: bool) -> Iterator[Step]:
        """The steps from `position` on; `eager` draws the whole order with the first."""

    def _drawn(self, items: Iterable[Any], *, eager: bool) -> Iterator[Any]:
        """What the first rank drew. A sampler of the script may draw from anything, so the ranks compare."""
        if not eager and self._backend.topology.world_size == 1:
            return iter(items)
        exchanged = _handed_on if self._backend.threads else _compared
        many = _length(self.source, self.stride * _AHEAD) + 1
        subject = f"the order of a {type(self.source).__name__} that is read {many} at a time"
        return exchanged(items, many, self._backend, subject)


class Samples(Order):
    """An order of samples, cut into batches of one size.

    Args:
        sampler: The script's.
        sharding: How batches are divided.
        backend: Carries what the ranks have to agree on.
        seed: With a number, a shuffled order is drawn anew for every epoch from `seed + epoch`.
    """

    def __init__(self, sampler: Any, sharding: Sharding, backend: Backend, seed: int | None = None) -> None:
        super().__init__(sampler, sharding, backend)
        self.seed = seed

    @property
    @override
    def draws_from(self) -> tuple[str, ...]:
        if type(self.source) is SequentialSampler:
            return ()
        return ("torch",) if type(self.source) in _OF_TORCH else KINDS

    @property
    @override
    def stride(self) -> int:
        return self.sharding.size

    @override
    def steps(self) -> int:
        return self.sharding.steps(len(self.source))

    @override
    def walk(self, position: int, epoch: int, *, eager: bool) -> Iterator[Step]:
        order, head = self._from(position, self._seeded(epoch), eager=eager)
        return self.sharding.cut(order, head)

    def _from(
        self, position: int, sampler: Any, *, eager: bool
    ) -> tuple[Iterable[Index], Sequence[Index] | None]:
        """The order from `position` on and, unless that is its start, the first step of all."""
        if type(sampler) is SequentialSampler:
            everything = range(len(sampler))
            return everything[position:], everything[: self.stride] if position else None
        threads = self._backend.threads
        if position and _is_permutation(sampler) and not threads:
            return _permuted(sampler, position, self.stride)
        known = type(sampler) in _OF_TORCH and not threads
        drawn = iter(sampler) if known else self._drawn(sampler, eager=eager)
        return _split(drawn, position, self.stride)

    def _seeded(self, epoch: int) -> Any:
        if self.seed is None or type(self.source) is not RandomSampler:
            return self.source
        sampler = copy.copy(self.source)
        sampler.generator = torch.Generator().manual_seed(self.seed + epoch)
        return sampler


class Batches(Order):
    """An order of batches, which may be of any size: whole batches are shared out."""

    @property
    @override
    def stride(self) -> int:
        return self.sharding.batches

    @override
    def steps(self) -> int:
        return self.sharding.rounds(len(self.source))

    @override
    def walk(self, position: int, epoch: int, *, eager: bool) -> Iterator[Step]:
        order, head = _split(self._drawn(map(list, self.source), eager=eager), position, self.stride)
        return self.sharding.group(order, head)


def order_of(loader: DataLoader[Any], sharding: Sharding, backend: Backend, seed: int | None) -> Order:
    """The order of the script's loader."""
    sampler = sampler_of(loader)
    if type(sampler) is BatchSampler:
        return Samples(sampler.sampler, sharding, backend, seed)
    single = gives_single(loader)
    return Samples(sampler, sharding, backend, seed) if single else Batches(sampler, sharding, backend)


def _split(drawn: Iterator[Any], position: int, stride: int) -> tuple[Iterator[Any], list[Any] | None]:
    """What follows `position`, and the first `stride` items where something was left out."""
    if not position:
        return drawn, None
    passed = list(islice(drawn, max(position, stride)))
    return chain(passed[position:], drawn), passed[:stride]


def _is_permutation(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _permuted(sampler: RandomSampler, position: int, stride: int) -> tuple[Iterator[int], list[int]]:
    """What RandomSampler draws, without walking what lies before `position`.

    The draws are those of torch's own `RandomSampler.__iter__`, to the last one, which leaves the generator where
    a whole walk does.
    """
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    count = sampler.num_samples
    order = torch.randperm(count, generator=generator)

    def rest() -> Iterator[int]:
        yield from order[position:].tolist()
        torch.randperm(count, generator=generator)

    return rest(), order[:stride].tolist()


def _compared(items: Iterable[Any], many: int, backend: Backend, subject: str) -> Iterator[Any]:
    """The first rank's items: so many at a time are drawn on all ranks, and travel only where they differ."""
    source = iter(items)
    while True:
        drawn = list(islice(source, many))
        prints = backend.all_gather(_fingerprint(drawn).to(backend.device))
        if not bool((prints == prints[0]).all()):
            drawn = backend.broadcast_object(drawn, subject)
        yield from drawn
        if len(drawn) < many:
            return


def _handed_on(items: Iterable[Any], many: int, backend: Backend, subject: str) -> Iterator[Any]:
    """The first rank's items, of which it alone draws: so many travel at a time."""
    source = iter(items) if backend.topology.rank == 0 else iter(())
    while True:
        drawn = backend.broadcast_object(list(islice(source, many)), subject)
        yield from drawn
        if len(drawn) < many:
            return


def _length(source: Any, otherwise: int) -> int:
    try:
        return len(source)
    except (TypeError, NotImplementedError):  # a BatchSampler has one only if its sampler has
        return otherwise


def _fingerprint(items: list[Any]) -> torch.Tensor:
    """Eight bytes that differ where orders differ: `[1]`, int64."""
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(items), 4096):
        digest.update(pickle.dumps(items[start : start + 4096]))
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
