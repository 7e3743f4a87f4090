"""Interface of the sources that prepared loaders read batches from, and the parts of a script's loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import BatchSampler, DataLoader

from accel_runtime.data.state import SourceState
from accel_runtime.foundation.epoch_progress import EpochProgress

__all__ = [
    "Source",
    "batch_size_of",
    "len_or_none",
    "sampler_attribute",
    "sampler_of_loader",
    "yields_single_samples",
]

_State = TypeVar("_State", bound=SourceState)


class Source(ABC, Generic[_State]):
    """Source of one rank's batches; `_State` is the state of an epoch, as checkpoints hold it."""

    inner: DataLoader[Any] | None = None
    """Copy of the script's loader that is iterated over; holds the attributes computed on the way."""

    state_type: type[_State]
    """Class of the states; called without arguments, it returns the start of an epoch that draws from the current
    generators."""

    @property
    def can_fetch_ahead(self) -> bool:
        """Return True if the next batch may be fetched before the script computes on this one.

        False if fetching may draw from random generators that the script draws from, or needs the other ranks.
        """
        return False

    @property
    @abstractmethod
    def stride(self) -> int:
        """Return how far a full step advances the offset of a state."""

    def skip(self, state: _State, steps: int) -> _State:
        """Return the state `steps` steps later; raise ValueError if it is unknown."""
        return cast("_State", state.skip(steps, self.stride))

    @abstractmethod
    def iterate(self, progress: EpochProgress, start: _State) -> Iterator[Any]:
        """Yield the batches of one epoch after the state `start`, as the script's loader returns them.

        Calls `progress.advance` before each batch, and `progress.read_states_from` before the first.
        """

    def override_padding(self, *, pad_last: bool) -> AbstractContextManager[None]:
        """Return a context in which new epochs pad their last batch, or do not; ValueError without indices."""
        raise ValueError(
            f"Cannot override even_batches={pad_last} for this loader: its dataset has no indices. Set it for all loaders: "
            f"Accelerator(dataloader_config=DataLoaderConfiguration(even_batches={pad_last}))."
        )

    def check(self, start: _State) -> None:
        """Raise ValueError if a state is not valid here."""

    def restore(self, next_epoch: _State) -> None:
        """Continue with the seed of a loaded state, in which the next epoch begins."""

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Return the steps of a whole epoch, the same on every rank; raise TypeError if it is unknown."""

    @abstractmethod
    def next_epoch(self) -> _State:
        """Return the state in which the next epoch begins."""


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
