"""What a prepared loader draws from: the steps of an epoch, from any position, each with what is valid in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

__all__ = ["Loop", "Share", "Source"]


class Share(NamedTuple):
    """One step as all ranks know it: whose rows are samples of the epoch, and whose are repeats."""

    valid: tuple[int, ...]
    """For every rank, how many samples at the front of its batch are no repeats."""
    sizes: tuple[int, ...]
    """For every rank, how many samples its batch has."""
    last: bool
    """Whether the epoch ends with this step."""
    factor: float = 1.0
    """What this rank's mean loss counts for, so that the average over the ranks is the mean over the step's
    samples: `valid[rank] * world_size / sum(valid)` where ranks may have different numbers of samples, else 1."""


class Loop:
    """One walk over a loader that is under way."""

    share: Share | None = None
    """The step whose batch was handed out last; None before the first."""
    steps: int = 0
    """How many batches were handed out."""
    start: int = 0
    """The position it began at."""
    random: dict[str, Any] | None = None
    """The random states the epoch is drawn under, as `rng.capture` gives them."""


class Source(ABC):
    """Where the batches of one rank come from.

    A position is a dict that is equal on all ranks, valid for another world size, and made of numbers, text,
    tensors, lists and dicts only, so that it can be saved.
    """

    inner: DataLoader[Any]
    """The loader that is walked: the script's, or a copy."""
    batch_size: int | None
    """Samples in a full batch of the script; None where batches have no fixed size."""
    generators: tuple[torch.Generator, ...] = ()
    """What the script gave its loader and sampler to draw from."""

    @abstractmethod
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        """The batches of one epoch that follow the position `start` (empty: all), as the script's loader gives them.

        Sets `loop.share` before each batch. `start` may also hold `epoch`, its number, and `random`, the states
        it is to be drawn under.
        """

    def overridden(self, *, even: bool) -> AbstractContextManager[None]:
        """Inside, epochs that begin treat their end so."""
        raise ValueError(f"even_batches={even} cannot be asked of this loader: it has no indices")

    @abstractmethod
    def steps(self) -> int:
        """How many steps a whole epoch has; the same on every rank.

        Raises:
            TypeError: It is not known beforehand.
        """

    @abstractmethod
    def position(self, loop: Loop) -> dict[str, Any]:
        """Where a walk stands, counting the batches handed out."""

    @abstractmethod
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        """The position that lies so many steps after `start`."""
