"""Interface of the sources that prepared loaders read batches from, and the parts of a script's loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accel_runtime.foundation.steps import EpochIterator

__all__ = [
    "Source",
    "batch_size_of",
    "is_inside_epoch",
    "len_or_none",
    "mark_skipped",
    "sampler_attribute",
    "sampler_of_loader",
    "yields_single_samples",
]

_EPOCH_KEYS = ("random", "seed", "persisted", "walks", "base", "live")
"""Keys of a state that hold for its whole epoch."""


def is_inside_epoch(start: dict[str, Any]) -> bool:
    """Return whether a state belongs to an epoch that had begun, so the draws of its start are done."""
    begun = start.get("begun") or (start.get("position") and not start.get("ahead"))
    return "random" in start and bool(begun)


def mark_skipped(steps: int, start: dict[str, Any]) -> dict[str, Any]:
    """Return the mark of a state that skips steps of a future epoch; empty otherwise."""
    return {"ahead": True} if steps and not is_inside_epoch(start) else {}


class Source(ABC):
    """Source of one rank's batches.

    A state is a dict that is equal on all ranks, valid for another world size (except for `PreshardedSource`) and made of
    numbers, text, tensors, lists and dicts only, so that it can be saved. Its `position` is an offset in the unit of the
    source, and its `random` the random states of the epoch, as `rng.capture_states` returns them. A `position` of 0, or
    none, is the start of an epoch that has not begun, unless the state is marked as `begun`.
    """

    inner: DataLoader[Any] | None = None
    """Copy of the script's loader that is iterated over; holds the attributes computed on the way."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return the kind of source in a saved state: `Ordered`, `Stream` or `Separate`.

        Checkpoints hold it, so that a state is loaded into a loader of the same kind only. It never changes, even if a
        class is renamed.
        """

    @property
    def can_fetch_ahead(self) -> bool:
        """Return True if the next batch may be fetched before the script computes on this one.

        False if fetching may draw from random generators that the script draws from, or needs the other ranks.
        """
        return False

    @abstractmethod
    def iterate(self, loop: EpochIterator, start: dict[str, Any]) -> Iterator[Any]:
        """Yield the batches of one epoch after the state `start` (empty: all), as the script's loader returns them.

        Calls `loop.advance` before each batch, and `loop.read_states_from` before the first.
        """

    def override_padding(self, *, pad_last: bool) -> AbstractContextManager[None]:
        """Return a context in which new epochs pad their last batch, or do not; ValueError without indices."""
        raise ValueError(
            f"Cannot override even_batches={pad_last} for this loader: its dataset has no indices. Set it for all loaders: "
            f"Accelerator(dataloader_config=DataLoaderConfiguration(even_batches={pad_last}))."
        )

    def check(self, start: dict[str, Any]) -> None:  # noqa: B027 - most states are valid everywhere
        """Raise ValueError if a state is not valid here."""

    @abstractmethod
    def num_steps(self) -> int:
        """Return the steps of a whole epoch, the same on every rank; raise TypeError if it is unknown."""

    def next_epoch(self) -> dict[str, Any]:
        """Return the state at the start of the next epoch."""
        return {}

    def with_restored_rng(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return the state `start` for a caller that restores the global generators, from which later draws are made."""
        if is_inside_epoch(start):
            return start | {"restored": True}
        if "random" not in start:
            return start
        return start | {"random": {"generators": start["random"]["generators"]}}

    def restart(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return the start of the epoch that `start` belongs to: the same order, with no batch left out."""
        if not is_inside_epoch(start):
            return start
        return {key: start[key] for key in _EPOCH_KEYS if key in start} | {"begun": True}

    @abstractmethod
    def skip_steps(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        """Return the state `steps` steps after `start`."""


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
