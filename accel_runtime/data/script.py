"""The script's loader: what it says of its batches, and copies of it that walk something else."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accel_runtime.data.sampling import Sharding
from accel_runtime.topology import DataPlace

__all__ = ["altered", "batch_size_of", "gives_single", "sampler_of", "sharding_of", "slot_of"]


def slot_of(loader: DataLoader[Any]) -> str:
    """The attribute with what says which samples a batch has."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What says which samples a batch has: its batch sampler; with `batch_size=None`, its sampler."""
    return getattr(loader, slot_of(loader))


def gives_single(loader: DataLoader[Any]) -> bool:
    """Whether a batch is one sample. With `batch_size=None`, a sampler gives indices, but it may give lists of them."""
    return loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Samples in a full batch of the script's; None where its batches have no fixed size."""
    return 1 if gives_single(loader) else getattr(sampler_of(loader), "batch_size", None)


def sharding_of(
    loader: DataLoader[Any], place: DataPlace, *, split: bool, even: bool, static: bool = False
) -> Sharding:
    """How the batches of a loader are divided."""
    drop_last = bool(getattr(sampler_of(loader), "drop_last", False))
    return Sharding(place.rank, place.world_size, batch_size_of(loader), split, drop_last, even, static)


def altered(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """A copy, not a new loader: subclasses and every option stay as they are."""
    copied = copy.copy(loader)
    # DataLoader guards names against assignment; the copy is ours to change.
    vars(copied).update(parts, _iterator=None)
    return copied
