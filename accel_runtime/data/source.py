"""What a prepared loader draws from: the steps of an epoch, from any position, each with what is valid in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["Loop", "Share", "Source", "ahead", "inside"]

_EPOCH = ("random", "seed", "persisted", "walks", "base", "live")
"""The keys of a position that hold for its whole epoch."""


class Share(NamedTuple):
    """One step as all ranks know it: whose rows are samples of the epoch, and whose are repeats."""

    valid: tuple[int, ...]
    """For every rank, how many samples at the front of its batch are no repeats."""
    sizes: tuple[int, ...]
    """For every rank, how many samples its batch has."""
    last: bool
    """Whether the epoch ends with this step."""
    by_samples: bool = False
    """Whether ranks count by their numbers of samples; else all count alike, repeats included."""
    factor: float = 1.0
    """What this rank's mean loss counts for, so that the average over the ranks is the mean over the step's
    samples: `valid[rank] * world_size / sum(valid)` if they count by samples, else 1."""


class Loop:
    """One walk over a loader that is under way.

    Args:
        epoch: The number of the epoch.
    """

    share: Share | None = None
    """The step whose batch was handed out last; None before the first."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.where: Callable[[Share | None], dict[str, Any]] = lambda _: {}
        """Where the walk stands at a step; set by the source that is walked. It must not hold the loop: in a cycle,
        a loader's workers end only when the collector comes, and torch waits for each of them."""

    def position(self) -> dict[str, Any]:
        """Where the walk stands, counting the batches handed out."""
        return self.where(self.share)


def inside(start: dict[str, Any]) -> bool:
    """Whether a position lies in an epoch that had begun, so that what is drawn at its start has been drawn."""
    begun = start.get("begun") or (start.get("position") and not start.get("ahead"))
    return "random" in start and bool(begun)


def ahead(steps: int, start: dict[str, Any]) -> dict[str, Any]:
    """What a position says of itself that lies so many steps after `start`, in an epoch that may not have begun."""
    return {"ahead": True} if steps and not inside(start) else {}


class Source(ABC):
    """Where the batches of one rank come from.

    A position is a dict that is equal on all ranks, valid for another world size (but for `Separate`), and made of numbers, text,
    tensors, lists and dicts only, so that it can be saved. Its `position` is a number, in the source's own unit, and
    its `random` the random states the epoch is drawn under, as `randomness.capture` gives them. A position of 0, or none,
    is that of an epoch which has not begun, unless it is marked as `begun`.
    """

    inner: DataLoader[Any] | None = None
    """The copy of the script's loader that is walked, where attributes computed on the way are found on it."""

    @property
    def kind(self) -> str:
        """The name of what positions of this source hold for."""
        return type(self).__name__

    @abstractmethod
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        """The batches of one epoch that follow the position `start` (empty: all), as the script's loader gives them.

        Sets `loop.share` before each batch, and `loop.where` before the first.
        """

    def overridden(self, *, even: bool) -> AbstractContextManager[None]:
        """Inside, epochs that begin treat their end so.

        Raises:
            ValueError: It has no indices, so that its end cannot be treated otherwise once it is prepared.
        """
        raise ValueError(
            f"even_batches={even} for a while can be asked of loaders over datasets with indices only: say it of all, "
            f"Accelerator(dataloader_config=DataLoaderConfiguration(even_batches={even}))"
        )

    def check(self, start: dict[str, Any]) -> None:  # noqa: B027 - most positions hold everywhere
        """Refuse a position that does not hold here.

        Raises:
            ValueError: It does not.
        """

    @abstractmethod
    def steps(self) -> int:
        """How many steps a whole epoch has; the same on every rank.

        Raises:
            TypeError: It is not known beforehand.
        """

    def beginning(self) -> dict[str, Any]:
        """The position at which the next epoch begins."""
        return {}

    def following(self, start: dict[str, Any]) -> dict[str, Any]:
        """The position `start` for one who puts the global generators back: what comes next draws from them.

        An epoch that has not begun is drawn from them; and what was read in turn with the loop goes on so.
        """
        if inside(start):
            return start | {"restored": True}
        if "random" not in start:
            return start
        return start | {"random": {"generators": start["random"]["generators"]}}

    def restart(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return the start of the epoch that `start` lies in: the same order, with no batch left out."""
        if not inside(start):
            return start
        return {key: start[key] for key in _EPOCH if key in start} | {"begun": True}

    @abstractmethod
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        """The position that lies so many steps after `start`."""
