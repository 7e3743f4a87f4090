"""Which source fits a script's loader, or why it cannot be shared out exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.data.loader import LoaderOptions, PreparedLoader
from accel_runtime.data.loops import Loops
from accel_runtime.data.ordered import Ordered
from accel_runtime.data.sampling import Sharding, with_last
from accel_runtime.data.source import Loop, Share, Source

__all__ = ["prepare_loader"]


def prepare_loader(
    loader: DataLoader[Any], backend: Backend, loops: Loops, options: LoaderOptions
) -> PreparedLoader:
    """The prepared form of a script's loader.

    Raises:
        ValueError: The loader cannot be shared out exactly; the message says why and what to do.
    """
    return PreparedLoader(loader, _source(loader, backend, options), backend, loops, options)


def _source(loader: DataLoader[Any], backend: Backend, options: LoaderOptions) -> Source:
    topology = backend.topology
    _check(loader, topology.world_size, options)
    if isinstance(loader.dataset, IterableDataset):
        return _Plain(loader)
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    sharding = Sharding(
        topology.rank, topology.world_size, options.split_batches, drop_last, options.even_batches
    )
    return Ordered(loader, backend, sharding, options.seed)


class _Plain(Source):
    """A stream on one process."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.inner = loader
        self.batch_size = loader.batch_size

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        for batch, last in with_last(self.inner):
            loop.share = Share((0,), (0,), last)
            yield batch

    @override
    def steps(self) -> int:
        return len(self.inner)

    @override
    def position(self, loop: Loop) -> dict[str, Any]:
        return {"position": loop.steps}

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        return {"position": start.get("position", 0) + steps}


def _check(loader: DataLoader[Any], world_size: int, options: LoaderOptions) -> None:
    """Refuse what could not be shared out exactly."""
    if world_size == 1:
        return
    source = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    size = getattr(source, "batch_size", None)
    split = isinstance(loader.sampler, DistributedSampler) or isinstance(
        getattr(source, "sampler", None), DistributedSampler
    )
    refusals = {
        "its dataset is a stream (IterableDataset), which this version shares out on one process only": isinstance(
            loader.dataset, IterableDataset
        ),
        "its sampler is a DistributedSampler, and sharding twice would skip samples: leave the sampler to "
        'prepare(), or prepare_data_loader(loader, data="sharded")': split,
        "in_order=False lets batches overtake each other": not getattr(loader, "in_order", True),
        f"split_batches needs a batch size that {world_size} processes divide; it is {size}": bool(
            options.split_batches and (size is None or size % world_size)
        ),
    }
    for reason, applies in refusals.items():
        if applies:
            raise ValueError(f"this DataLoader cannot be prepared for {world_size} processes: {reason}")
