"""Which rank takes which samples of a global batch: the arithmetic for streams, whose length nobody knows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch.utils.data import DataLoader

from accel_runtime.data.source import Share

__all__ = ["Slicing", "factor", "slicing_of"]


@dataclass(frozen=True)
class Slicing:
    """How the samples of one step are divided among the ranks, in their order.

    A tail that does not fill a global batch is, with `even`, completed by repeats from the start of the
    epoch, so that all ranks see equal shapes. Without, it is split evenly: sizes differ by one at most,
    and a rank that would have nothing gets one sample that counts for nothing.
    """

    world_size: int
    per_rank: int
    """Samples of one rank in a full batch."""
    even: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        assert self.world_size > 0
        assert self.per_rank > 0

    @property
    def size(self) -> int:
        """Samples in a full global batch."""
        return self.world_size * self.per_rank

    def share(self, count: int, rank: int, *, last: bool) -> Share:
        """The step of a global batch of `count` samples, as `rank` takes it."""
        assert 0 < count <= self.size
        if self.world_size == 1:
            return Share((count,), (count,), last)
        if self.even or count == self.size:
            whole = self.per_rank
            valid = tuple(min(whole, max(0, count - r * whole)) for r in range(self.world_size))
            return Share(valid, (whole,) * self.world_size, last)
        least, more = divmod(count, self.world_size)
        valid = tuple(least + (r < more) for r in range(self.world_size))
        return Share(valid, tuple(max(1, own) for own in valid), last, factor(valid, rank))

    def part(self, samples: list[Any], start: list[Any], rank: int) -> list[Any]:
        """What `rank` loads: its own samples, then the repeats that its share names.

        Args:
            samples: The global batch.
            start: The first samples of the epoch, as many as there are up to a full batch.
            rank: Whose part.
        """
        share = self.share(len(samples), rank, last=False)
        before = sum(share.valid[:rank])
        own = samples[before : before + share.valid[rank]]
        if len(own) < share.sizes[rank]:
            # One walk over the start fills all ranks, in rank order.
            taken = sum(share.sizes[:rank]) - before
            own += islice(cycle(start), taken, taken + share.sizes[rank] - len(own))
        return own

    def steps(self, count: int) -> int:
        """How many steps an epoch of so many samples has."""
        return count // self.size if self.drop_last else -(-count // self.size)


def factor(valid: tuple[int, ...], rank: int) -> float:
    """What the mean loss of a rank counts for where ranks have different numbers of samples."""
    return valid[rank] * len(valid) / sum(valid)


def slicing_of(loader: DataLoader[Any], world_size: int, *, split: bool, even: bool) -> Slicing:
    """How the samples of a loader with a batch size, or with none, are divided.

    Raises:
        ValueError: `split` is wanted, and the ranks cannot divide the batch size.
    """
    batches = loader.batch_sampler
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    if split and (batches is None or (size or world_size) % world_size):
        raise ValueError(
            f"this DataLoader cannot be prepared for {world_size} processes: split_batches needs a batch size "
            f"that {world_size} processes divide; it is {None if batches is None else size}"
        )
    per_rank = (size or world_size) // world_size if split else size or 1
    return Slicing(world_size, per_rank, even, bool(getattr(batches, "drop_last", False)))
