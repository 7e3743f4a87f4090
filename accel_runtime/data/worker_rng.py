"""Random numbers of workers over map-style datasets: every batch has a seed that does not depend on the worker."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from typing_extensions import override

from accel_runtime.data.source import copy_loader, sampler_attribute, sampler_of_loader
from accel_runtime.rng import fingerprint_states, hash_text

__all__ = ["BatchSeed", "draw_epoch_seed", "hash_seed", "seed_batches", "seed_worker"]


class BatchSeed(NamedTuple):
    """Parts of the seed of one batch."""

    epoch: int
    """Epoch seed, from `draw_epoch_seed`."""
    offset: int
    """Offset of its first sample in the epoch, so that the seed does not depend on the worker or the time."""
    rank: int
    """Rank that the batch belongs to, if ranks share an offset; otherwise 0."""


class _SeededIndices(NamedTuple):
    """Message to a worker: what to fetch, and with which seed."""

    indices: Any
    """Indices of the samples, or one index with `batch_size=None`."""
    seed: BatchSeed


def draw_epoch_seed(states: dict[str, Any], epoch: int) -> int:
    """Return the seed that all batches of an epoch share, from torch's random states at its start and its number.

    The number matters for persistent workers: they draw nothing at the start of an epoch, so states may not change.
    """
    kinds = ("generators", "torch")
    return hash_seed(epoch, fingerprint_states({kind: states[kind] for kind in kinds if kind in states}))


def seed_worker(seed: int) -> None:
    """Seed torch, Python and, if it is loaded, NumPy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device too
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])


def seed_batches(loader: DataLoader[Any], seed: Callable[[int], BatchSeed]) -> DataLoader[Any]:
    """Return a copy of a loader with workers that fetches its n-th batch under the seed `seed(n)`."""
    return copy_loader(
        loader,
        dataset=_SeededDataset(loader.dataset),
        worker_init_fn=_UnwrappingInit(loader.worker_init_fn),
        **{sampler_attribute(loader): _SeededSampler(sampler_of_loader(loader), seed)},
    )


class _SeededSampler(Sampler[_SeededIndices]):
    """Sampler that adds a seed to everything that another one yields."""

    def __init__(self, source: Any, seed: Callable[[int], BatchSeed]) -> None:
        self._source = source
        self._seed = seed

    @override
    def __iter__(self) -> Iterator[_SeededIndices]:
        # Not a generator: the source must be notified of a new iteration at once.
        return map(self._add_seed, enumerate(iter(self._source)))

    def _add_seed(self, item: tuple[int, Any]) -> _SeededIndices:
        return _SeededIndices(item[1], self._seed(item[0]))

    def __len__(self) -> int:
        return len(self._source)


class _SeededDataset(Dataset[Any]):
    """Dataset that seeds the generators before each batch; the collate function then draws from them too."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, item: _SeededIndices) -> Any:
        seed_worker(hash_seed(*item.seed))
        getitems = getattr(self.dataset, "__getitems__", None)
        return getitems(item.indices) if getitems else [self.dataset[index] for index in item.indices]

    @override
    def __getitem__(self, item: _SeededIndices) -> Any:
        seed_worker(hash_seed(*item.seed))
        return self.dataset[item.indices]


class _UnwrappingInit:
    """`worker_init_fn` that shows the worker the script's own dataset, and then calls the script's function."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch guards it against assignment
        if self._init is not None:
            self._init(worker)


def hash_seed(*numbers: int) -> int:
    """Return a seed that depends on all numbers."""
    return hash_text(" ".join(map(str, numbers)))
