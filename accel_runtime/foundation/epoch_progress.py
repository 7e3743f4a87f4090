"""Types of one step and of one iteration over a loader, which loaders, backends and metrics share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CyclePart", "EpochProgress", "StepInfo"]


class CyclePart(NamedTuple):
    """Part of an accumulation cycle that has a given number of samples; see `Accelerator(global_batch_size=...)`."""

    size: int
    """Samples of a complete cycle."""
    num_samples: int
    """Samples in this cycle, over all ranks and micro-batches, without padding: fewer at the end of an epoch."""
    begins: bool
    """True for the first micro-batch of the cycle."""
    ends: bool
    """True for the last micro-batch of the cycle."""


class StepInfo(NamedTuple):
    """Batch sizes and padding of one step, equal on all ranks except for `loss_scale`."""

    num_valid: tuple[int, ...]
    """Number of samples at the front of each rank's batch that are not padding."""
    batch_sizes: tuple[int, ...]
    """Number of samples in each rank's batch, padding included."""
    is_last: bool
    """True for the last step of the epoch."""
    by_samples: bool = False
    """If true, ranks are weighted by their number of valid samples; otherwise all equally, padding included."""
    loss_scale: float = 1.0
    """Weight of this rank's mean loss, so that the average over the ranks is the mean over the step's samples:
    `num_valid[rank] * world_size / sum(num_valid)` if weighted by samples, else 1. In a part of a cycle, the sum of such averages
    over its micro-batches is the mean over the samples of the cycle: the divisor is their number."""
    cycle: CyclePart | None = None
    """The accumulation cycle that the step is a part of; None if the script counts its micro-batches."""
    tokens: tuple[int, ...] = ()
    """Number of tokens of each rank's valid samples, by which losses are weighted; empty if they have no lengths."""

    @property
    def num_padding(self) -> int:
        """Return the number of padding samples in the batches of all ranks."""
        return sum(self.batch_sizes) - sum(self.num_valid)

    def weigh_for(self, rank: int) -> StepInfo:
        """Return the step with the weight of this rank's mean loss."""
        if not self.by_samples:
            return self._replace(loss_scale=1.0)
        divisor = sum(self.num_valid) if self.cycle is None else self.cycle.num_samples
        return self._replace(loss_scale=self.num_valid[rank] * len(self.num_valid) / divisor)


class EpochProgress:
    """Progress of one iteration over a loader.

    Args:
        epoch: The number of the epoch.
        num_batches: The number of batches that were skipped, or returned before the state that it continues from.
    """

    def __init__(self, epoch: int = 0, num_batches: int = 0) -> None:
        self.epoch = epoch
        self.step_info: StepInfo | None = None
        """Step of the last batch returned; None before the first. Only `advance` assigns it."""
        self.num_batches = num_batches
        """Number of batches that were returned or skipped. Only `advance` changes it."""
        self._state_at: Callable[[StepInfo | None], Any] = lambda _: None

    def read_states_from(self, state_at: Callable[[StepInfo | None], Any]) -> None:
        """Set the function that returns the state after a step; a source calls it before its first batch.

        The function must not hold this object: in a reference cycle the loader's workers would end only at a garbage
        collection, and torch waits for each of them.
        """
        self._state_at = state_at

    def advance(self, step_info: StepInfo | None) -> None:
        """Count the batch that is returned next, and record its step."""
        self.step_info = step_info
        self.num_batches += 1

    def state(self) -> Any:
        """Return the state of the source after the last batch returned."""
        return self._state_at(self.step_info)
