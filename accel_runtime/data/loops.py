"""Which step is in hand: the loops over prepared loaders that are under way, and what they handed out."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel_runtime import tree
from accel_runtime.data.source import Loop, Share

__all__ = ["Feeding", "Loops"]

_REMEMBERED = 4
"""Batches of a loop whose tensors are known again: a script may look ahead."""


class _Track:
    """What is known of one loop beside its step."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.handed: deque[tuple[list[weakref.ref[torch.Tensor]], Share]] = deque(maxlen=_REMEMBERED)
        self.steps: list[tuple[Share, int]] = []
        """The steps so far: a share, and how many times in a row."""
        self.times = (0, 0)
        """When the last batch and the one before it were handed out, counting all loops."""

    def note(self, batch: Any, now: int) -> None:
        share = self.loop.share
        assert share is not None
        tensors = (leaf for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor))
        self.handed.append(([weakref.ref(tensor) for tensor in tensors], share))
        self.times = (now, self.times[0])
        if self.steps and self.steps[-1][0] is share:
            self.steps[-1] = (share, self.steps[-1][1] + 1)
        else:
            self.steps.append((share, 1))

    def known(self, tensor: torch.Tensor) -> Share | None:
        """The step whose batch this tensor, or what it is a view of, came with."""
        same = (tensor, tensor._base)  # noqa: SLF001 - torch's documented way to ask what a view is of
        for references, share in reversed(self.handed):
            if any(
                found is not None and any(found is t for t in same) for found in (r() for r in references)
            ):
                return share
        return None

    def rows(self, rank: int) -> int:
        """How many samples this rank was handed so far."""
        return sum(share.sizes[rank] * times for share, times in self.steps)

    @property
    def repeats(self) -> int:
        """How many samples handed out to all ranks were repeats."""
        return sum((sum(share.sizes) - sum(share.valid)) * times for share, times in self.steps)

    def shares(self) -> list[Share]:
        return [share for share, times in self.steps for _ in range(times)]


class Loops:
    """The loops under way, the innermost last, and those just finished.

    Args:
        rank: The rank of this process.
        repeats: Whether batches may have repeats; where nothing is ever one, nothing is remembered.
    """

    def __init__(self, rank: int, *, repeats: bool) -> None:
        self._rank = rank
        self._repeats = repeats
        self._open: list[_Track] = []
        self._finished: deque[_Track] = deque(maxlen=_REMEMBERED)
        self._clock = 0
        self._fed: weakref.ref[torch.Tensor] | None = None

    @property
    def current(self) -> Share | None:
        """The newest step of the innermost loop; None outside of all loops."""
        return self._open[-1].loop.share if self._open else None

    @property
    def computed(self) -> Share | None:
        """The step a prepared model computed on last, where that is known, else the newest."""
        return (self._of_model() if self._repeats else None) or self.current

    def opened(self, loop: Loop) -> _Track:
        """A loop has begun; what it returns is told of every batch, by `note`."""
        track = _Track(loop)
        self._open.append(track)
        return track

    def note(self, track: _Track, batch: Any) -> None:
        """A batch is about to be handed out."""
        if self._repeats:
            self._clock += 1
            track.note(batch, self._clock)

    def closed(self, track: _Track, *, finished: bool) -> None:
        """A loop is over: at its end, or by `break` or an exception."""
        self._open.remove(track)
        # What was computed before is not what is in hand now.
        self._fed = None
        if finished and self._repeats:
            self._finished.append(track)

    def fed(self, batch: Any) -> None:
        """A prepared model is about to compute on this."""
        tensor = next((leaf for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)), None)
        self._fed = None if tensor is None else weakref.ref(tensor)

    def steps_of(self, data: Any, batch: Any = None) -> Sequence[Share]:
        """The steps whose samples `data` was computed from; empty if it belongs to no loop, and where there are no repeats.

        Known are, in this order: the batch given, tensors that came with a batch, what a prepared model
        computed on last, a loop that is just over and handed out as many samples, the innermost loop.

        Args:
            data: What a script gathers.
            batch: The batch it was computed from, where the script says so.

        Raises:
            ValueError: The batch given is not known; or nothing says which of several steps with different repeats
                `data` belongs to.
        """
        if not self._repeats:
            return []
        if batch is not None:
            return [self._given(batch)]
        leaves = tree.leaves(data)
        if found := self._known([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]):
            return [found]
        if found := self._of_model():
            return [found]
        return self._in_hand(self._count(data, leaves))

    def _given(self, batch: Any) -> Share:
        found = self._known([leaf for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)])
        if found is None:
            raise ValueError(
                "gather_for_metrics(batch=...) takes a batch as a prepared loader gave it, one of its "
                f"last {_REMEMBERED}, with a tensor in it"
            )
        return found

    def _known(self, tensors: Sequence[torch.Tensor]) -> Share | None:
        tracks = [*reversed(self._open), *reversed(self._finished)]
        found = (track.known(tensor) for track in tracks for tensor in tensors)
        return next((share for share in found if share is not None), None)

    def _of_model(self) -> Share | None:
        fed = self._fed() if self._fed is not None else None
        return self._known([fed]) if fed is not None else None

    def _in_hand(self, rows: int | None) -> Sequence[Share]:
        """What data of which only the number of rows is known may belong to."""
        newest = self._open[-1] if self._open else None
        since = newest.times[0] if newest else 0
        for track in reversed(self._finished):
            if rows and track.times[0] > since and rows == track.rows(self._rank):
                return self._collected(track)
        if newest is None or newest.loop.share is None:
            return []
        share = newest.loop.share
        if any(other.loop.share and other.loop.share[:2] != share[:2] for other in self._abreast(newest)):
            raise ValueError(
                "several loops advance together (zip), and their batches have different repeats at this step; "
                "say which batch the data come from: gather_for_metrics(data, batch=batch)"
            )
        return [share]

    def _collected(self, track: _Track) -> Sequence[Share]:
        """The steps of a loop that is over, whose number of samples some data have."""
        shares = track.shares()
        if len(shares) == 1 and shares[0].valid != shares[0].sizes:
            raise ValueError(
                f"these data have {track.rows(self._rank)} rows, as many as the only batch of the loop that is over, "
                "which had repeats: gather them inside the loop or with batch=batch; or, if they have nothing to do "
                "with it, use gather()"
            )
        return shares

    def _abreast(self, track: _Track) -> Iterator[_Track]:
        """Other loops that have advanced since this one's last batch but one: it is no loop inside theirs."""
        before = track.times[1]
        return (other for other in self._open[:-1] if before and other.times[0] > before)

    @staticmethod
    def _count(data: Any, leaves: list[Any]) -> int | None:
        """How many rows the data have, if it can be said."""
        if leaves and isinstance(leaves[0], torch.Tensor):
            return leaves[0].shape[0] if leaves[0].dim() else None
        return len(data) if isinstance(data, list) else None


class Feeding:
    """A forward hook that tells which batch a prepared model computes on."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops

    def __call__(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Remember the batch."""
        self._loops.fed((args, kwargs))

    def __reduce__(self) -> tuple[type[Feeding], tuple[Loops]]:
        # A copy or a saved model belongs to no run.
        return Feeding, (Loops(0, repeats=False),)
