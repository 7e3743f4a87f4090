"""Properties of a script's loader, and copies of it with other parts."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accel_runtime.data.sharding import BatchSharding
from accel_runtime.topology import DataRank

__all__ = [
    "batch_size_of",
    "copy_loader",
    "len_or_none",
    "sampler_attribute",
    "sampler_of_loader",
    "sharding_of_loader",
    "yields_single_samples",
]


def sampler_attribute(loader: DataLoader[Any]) -> str:
    """Return the name of the attribute with the sampler that defines the batches."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def sampler_of_loader(loader: DataLoader[Any]) -> Any:
    """Return the sampler that defines the batches: the batch sampler or, with `batch_size=None`, the sampler."""
    return getattr(loader, sampler_attribute(loader))


def yields_single_samples(loader: DataLoader[Any]) -> bool:
    """Return whether a batch is one sample: `batch_size=None`, with a sampler that does not yield lists of indices."""
    return loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Return the samples in a full batch of the script's loader; None if its batches have no fixed size."""
    return 1 if yields_single_samples(loader) else getattr(sampler_of_loader(loader), "batch_size", None)


def len_or_none(sized: Any) -> int | None:
    """Return the length of a sampler, dataset or loader; None if it is unknown."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a BatchSampler has a length only if its sampler has
        return None


def sharding_of_loader(
    loader: DataLoader[Any], data_rank: DataRank, *, split: bool, pad_last: bool, static_shapes: bool = False
) -> BatchSharding:
    """Return the sharding of a loader's batches."""
    drop_last = bool(getattr(sampler_of_loader(loader), "drop_last", False))
    return BatchSharding(
        data_rank.rank, data_rank.world_size, batch_size_of(loader), split, drop_last, pad_last, static_shapes
    )


def copy_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy with other attributes; a copy, not a new loader, keeps subclasses and all options."""
    copied = copy.copy(loader)
    # DataLoader guards some attributes against assignment.
    vars(copied).update(attributes, _iterator=None)
    return copied
