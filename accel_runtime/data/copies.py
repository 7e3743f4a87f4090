"""Ranks that have the same part of every batch: that they draw the same random numbers, and read the same."""

from __future__ import annotations

from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint import random
from accel_runtime.data.prints import printed
from accel_runtime.randomness import fingerprint
from accel_runtime.topology import DataPlace

__all__ = ["CopiesDifferError", "Reads", "alike_in_copies", "each_part"]


class CopiesDifferError(RuntimeError):
    """Ranks that have to read the same samples do not. Raised on every rank."""


def each_part(everyone: list[Any], place: DataPlace) -> list[Any]:
    """What each part is, out of what every rank said of its own.

    Raises:
        CopiesDifferError: Ranks of one part said different things.
    """
    if not _equal(everyone, place.copies):
        raise CopiesDifferError(
            f"ranks that compute one part of the batch together ({place.copies} each) have read different samples (by "
            f'rank: {everyone}). With data="sharded", the data have to be split into {place.world_size} parts, by '
            "accelerator.data_parallel_rank of accelerator.data_parallel_size, and not by process. If each process "
            "shuffles on its own, seed it by that rank."
        )
    return everyone[:: place.copies]


def alike_in_copies(backend: Backend) -> None:
    """Give ranks that have the same part of every batch the random states of their first; all ranks together."""
    place = backend.data
    if place.copies == 1:
        return
    module = None if backend.device.type == "cpu" else backend.random
    states = random.captured(backend.device, module)
    prints = backend.all_gather(torch.tensor(fingerprint(states), device=backend.device)).tolist()
    if _equal(prints, place.copies):
        return
    first = place.rank * place.copies
    leads = backend.topology.rank == first
    everyone = backend.all_gather_objects(states if leads else None, "random states")
    if not leads:
        random.restored(everyone[first], backend.device, module)


class Reads:
    """What a rank has read of data of its own, compared with what its copies have: at first, and ever more seldom.

    Args:
        backend: Carries prints.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running = self._batches = 0

    def add(self, batch: Any, *, last: bool) -> None:
        """One more batch has been read; all ranks together.

        Raises:
            CopiesDifferError: It is another one on another rank of the same part.
        """
        if self._backend.data.copies == 1:
            return
        self._running = 0 if batch is None else printed([batch], self._running)
        self._batches += 1
        if last or self._batches & (self._batches - 1) == 0:
            mine = torch.tensor(self._running, device=self._backend.device)
            each_part(self._backend.all_gather(mine).tolist(), self._backend.data)


def _equal(everyone: list[Any], copies: int) -> bool:
    return all(said == everyone[rank - rank % copies] for rank, said in enumerate(everyone))
