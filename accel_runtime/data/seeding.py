"""Random numbers of workers over datasets with indices: a stream of its own for every batch, whoever fetches it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from typing_extensions import override

from accel_runtime.data.script import altered, sampler_of, slot_of
from accel_runtime.randomness import fingerprint, seed_of

__all__ = ["BatchSeed", "begin", "epoch_seed", "hashed", "seeding"]


class BatchSeed(NamedTuple):
    """What says the random numbers of a batch."""

    epoch: int
    """`epoch_seed`."""
    position: int
    """Where in the epoch its samples begin, so that it does not matter who fetches it, and when."""
    part: int
    """Which part of that position it is; 0 where it is all of it."""

    @property
    def number(self) -> int:
        """What their generators are seeded with."""
        return hashed(*self)


class _Fetch(NamedTuple):
    """What a worker is sent: what to fetch, and under which random numbers."""

    of: Any
    """The indices, or with `batch_size=None` the index."""
    seed: BatchSeed


def epoch_seed(states: dict[str, Any], epoch: int) -> int:
    """What all batches of an epoch have in common.

    Args:
        states: What `randomness.capture` gave when it began; only torch's generators count.
        epoch: Its number. Workers that persist draw nothing when an epoch begins, so that states may stay the same.
    """
    kinds = ("generators", "torch")
    return hashed(epoch, fingerprint({kind: states[kind] for kind in kinds if kind in states}))


def begin(seed: int) -> None:
    """Begin the streams of torch, Python and, where it is loaded, NumPy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every device too
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])


def seeding(loader: DataLoader[Any], seed: Callable[[int], BatchSeed]) -> DataLoader[Any]:
    """What torch walks in place of a loader with workers.

    Args:
        loader: The loader; itself it is left as it is, so that a subclass sees what is the script's.
        seed: Says the random numbers of the n-th batch of the walk that begins.
    """
    return altered(
        loader,
        dataset=_Seeding(loader.dataset),
        worker_init_fn=_Unwrapping(loader.worker_init_fn),
        **{slot_of(loader): _Fetches(sampler_of(loader), seed)},
    )


class _Fetches(Sampler[_Fetch]):
    """What a batch sampler gives, each with its stream."""

    def __init__(self, source: Any, seed: Callable[[int], BatchSeed]) -> None:
        self._source = source
        self._seed = seed

    @override
    def __iter__(self) -> Iterator[_Fetch]:
        # Not a generator: the source has to learn at once that a walk begins.
        return map(self._fetch, enumerate(iter(self._source)))

    def _fetch(self, item: tuple[int, Any]) -> _Fetch:
        return _Fetch(item[1], self._seed(item[0]))

    def __len__(self) -> int:
        return len(self._source)


class _Seeding(Dataset[Any]):
    """A dataset whose batches are fetched under streams of their own; collating follows in the same stream."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, fetch: _Fetch) -> Any:
        begin(fetch.seed.number)
        together = getattr(self.dataset, "__getitems__", None)
        return together(fetch.of) if together else [self.dataset[index] for index in fetch.of]

    @override
    def __getitem__(self, fetch: _Fetch) -> Any:
        begin(fetch.seed.number)
        return self.dataset[fetch.of]


class _Unwrapping:
    """A `worker_init_fn` that shows the worker the script's own dataset, and then calls the script's."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch's own guard is for scripts
        if self._init is not None:
            self._init(worker)


def hashed(*parts: int) -> int:
    """A seed that any change of the parts changes."""
    return seed_of(" ".join(map(str, parts)))
