"""Batches carried to a device in the background, one ahead of the script, each with the place it has in its walk."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
        self._waiting.put(_carried(batch))

    def take(self, batch: Any) -> Any:
        """The batch that was put first, on the device; what was computed until now is sent off before.

        Raises:
            RuntimeError: It did not arrive; what the transfer raised is raised itself.
        """
        found = next(self._arriving, None)
        if found is None:
            raise RuntimeError(
                "a batch did not arrive on the device, and torch_xla's loader does not say why"
            )
        there = iter(found)
        return tree.map_tensors(lambda leaf: next(there) if _travels(leaf) else leaf, batch)

    def close(self) -> None:
        """Carry no more."""
        self._waiting.put(None)
        self._loader.close()


class _Fetched(NamedTuple):
    """A batch that is on its way."""

    batch: Any
    share: Share | None
    position: dict[str, Any]


def fed(walk: Callable[[Loop], Iterator[Any]], loop: Loop, belt: Callable[[], Belt]) -> Iterator[Any]:
    """The batches of a walk on the device, one being fetched and carried while the script computes on another.

    Batches are fetched in the script's own thread, so that what is drawn for them is drawn in one order. What is
    raised when one is fetched is raised in its place: after the batch before it.
    """
    ahead = Loop(loop.epoch)
    batches, carried = walk(ahead), belt()

    def fetched() -> _Fetched | Exception | None:
        try:
            batch = next(batches)
        except StopIteration:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised when its turn comes
            return error
        carried.put(batch)
        return _Fetched(batch, ahead.share, ahead.position())

    try:
        coming = fetched()
        while coming is not None:
            if isinstance(coming, Exception):
                raise coming
            now, coming = coming, fetched()
            batch = carried.take(now.batch)
            loop.share, loop.where = now.share, _at(now.position)
            yield batch
    finally:
        coming = None  # an exception knows this frame, and in a cycle loader workers end only when the collector comes
        carried.close()


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


def _at(position: dict[str, Any]) -> Callable[[Share | None], dict[str, Any]]:
    return lambda _: position


def _carried(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree.leaves(batch) if _travels(leaf)]


def _travels(leaf: Any) -> bool:
    """Whether a loader carries it: others are brought to the device later, by themselves."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
