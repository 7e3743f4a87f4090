"""Batches carried to a device in the background, one ahead of the script, each with the place it has in its walk."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_runtime import tree
from accel_runtime.data.source import Loop, Share

__all__ = ["Belt", "fed", "stepper"]


class Belt:
    """Carries batches to a device, in order.

    Args:
        loader: Makes torch_xla's parallel loader of what batches come from.
        device: Where they go.
    """

    def __init__(self, loader: Callable[[Any], Any], device: torch.device) -> None:
        self._waiting: queue.SimpleQueue[list[torch.Tensor] | None] = queue.SimpleQueue()
        self._loader = loader(self)
        self._arriving = self._loader.per_device_loader(device)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """What the loader carries: ends when the belt is closed."""
        return iter(self._waiting.get, None)

    def put(self, batch: Any) -> None:
        """Send a batch's tensors off."""
        self._waiting.put([leaf for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)])

    def take(self, batch: Any) -> Any:
        """The batch that was put first, on the device; what was computed until now is sent off before."""
        there = iter(next(self._arriving))
        return tree.map_tensors(lambda _: next(there), batch)

    def close(self) -> None:
        """Carry no more."""
        self._waiting.put(None)
        self._loader.close()


def fed(walk: Callable[[Loop], Iterator[Any]], loop: Loop, belt: Callable[[], Belt]) -> Iterator[Any]:
    """The batches of a walk on the device, one being fetched and carried while the script computes on another.

    Batches are fetched in the script's own thread, so that what is drawn for them is drawn in one order.
    """
    ahead = Loop(loop.epoch)
    carried = belt()
    try:
        waiting: tuple[Any, Share | None, dict[str, Any]] | None = None
        for batch in walk(ahead):
            carried.put(batch)
            coming = batch, ahead.share, ahead.position()
            if waiting is not None:
                yield _handed(waiting, loop, carried)
            waiting = coming
        if waiting is not None:
            yield _handed(waiting, loop, carried)
    finally:
        carried.close()


def _handed(waiting: tuple[Any, Share | None, dict[str, Any]], loop: Loop, carried: Belt) -> Any:
    batch, loop.share, position = waiting
    loop.where = lambda _: position
    return carried.take(batch)


def stepper(handed: Callable[[], int], cut: Callable[[], object]) -> Callable[[], None]:
    """What an optimizer calls after each step, so that what is recorded does not grow without end.

    Prepared loaders cut steps off. Where none has handed out a batch since the optimizer's last step, nobody would.

    Args:
        handed: How many batches loaders have handed out.
        cut: Sends what is recorded off to the device.
    """
    before = -1

    def stepped() -> None:
        nonlocal before
        now = handed()
        if now in {0, before}:
            cut()
        before = now

    return stepped
