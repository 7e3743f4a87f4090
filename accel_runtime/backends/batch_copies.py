"""Copies of batches to the device: on a stream of their own, and one batch ahead."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from accel_runtime.foundation import nested
from accel_runtime.foundation.epoch_progress import EpochProgress, StepInfo
from accel_runtime.foundation.nested import is_strided_tensor

__all__ = ["StreamCopies", "copy_each", "prefetch_batches"]


class Carrier(Protocol):
    """Copy batches to a device, in order."""

    def put(self, batch: Any) -> None:
        """Start to copy the tensors of a batch."""

    def take(self, batch: Any) -> Any:
        """Return the oldest batch on the device."""

    def close(self) -> None:
        """Stop copying."""


class StreamCopies:
    """Copy batches on a stream of their own, in parallel to the computation and without blocking the script.

    Only plain CPU tensors are copied, also in lists, tuples and mappings. Objects that move themselves are not: memory that
    they allocate could not be recorded for the current stream.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        # Not `with stream:`, which stores the previous stream in the stream itself, where another thread overwrites it.
        self._module = torch.get_device_module(stream.device)
        self._pending: deque[tuple[Any, list[torch.Tensor], torch.Event]] = deque()

    def put(self, batch: Any) -> None:
        """Start to copy the tensors of a batch."""
        copies: list[torch.Tensor] = []

        def copy_leaf(leaf: Any) -> Any:
            if isinstance(leaf, UserDict):  # a BatchEncoding or BatchFeature of transformers
                copied = copy.copy(leaf)
                copied.data = nested.map_movable(copy_leaf, leaf.data)
                return copied
            if not _is_plain_on_cpu(leaf):
                return leaf
            copies.append(leaf.to(self._stream.device, non_blocking=True))
            return copies[-1]

        with self._module.stream(self._stream):
            on_device = nested.map_movable(copy_leaf, batch)
        self._pending.append((on_device, copies, self._stream.record_event()))

    def take(self, batch: Any) -> Any:  # noqa: ARG002 - the batch was kept
        """Return the oldest batch; only the current stream waits for its copies."""
        on_device, copies, copied = self._pending.popleft()
        current = self._module.current_stream(self._stream.device)
        current.wait_event(copied)
        for tensor in copies:
            # Freed, its memory must not be used for a later copy before the current stream has read it.
            tensor.record_stream(current)
        return on_device

    def close(self) -> None:
        """Drop pending copies."""
        self._pending.clear()


def copy_each(batches: Iterator[Any], carrier: Carrier) -> Iterator[Any]:
    """Yield the batches on the device, each copied on request."""
    for batch in batches:
        carrier.put(batch)
        yield carrier.take(batch)


def _is_plain_on_cpu(leaf: Any) -> bool:
    # A copy of a tensor that requires gradients would be a step of the graph, which runs backward on the same stream.
    return (
        type(leaf) is torch.Tensor
        and leaf.is_cpu
        and is_strided_tensor(leaf)
        and not (leaf.is_nested or leaf.requires_grad)
    )


_END = object()


class _PrefetchedBatch(NamedTuple):
    """A batch whose copy is pending."""

    batch: Any
    step_info: StepInfo | None
    source_state: Any


def prefetch_batches(
    batches_of: Callable[[EpochProgress], Iterator[Any]],
    epoch: EpochProgress,
    build_carrier: Callable[[], Carrier],
) -> Iterator[Any]:
    """Yield the batches of an epoch on the device, fetching and copying one ahead.

    Batches are fetched in the script's thread, so random numbers are drawn in order. An error in fetching a batch is raised
    after the batch before it.
    """
    ahead = EpochProgress(epoch.epoch)
    batches, carrier = batches_of(ahead), build_carrier()

    def fetch() -> _PrefetchedBatch | Exception | None:
        try:
            batch = next(batches, _END)
            if batch is _END:
                return None
            carrier.put(batch)
        except Exception as error:  # noqa: BLE001 - raised after the current batch
            return error
        return _PrefetchedBatch(batch, ahead.step_info, ahead.state())

    try:
        following = fetch()
        if not isinstance(following, _PrefetchedBatch):
            epoch.read_states_from(_return_state(ahead.state()))  # the start of the epoch
        while following is not None:
            if isinstance(following, Exception):
                raise following
            current, following = following, fetch()
            batch = carrier.take(current.batch)
            epoch.advance(current.step_info)
            epoch.read_states_from(_return_state(current.source_state))
            yield batch
    finally:
        following = None  # an exception references this frame, and a cycle would keep loader workers alive until garbage collection
        carrier.close()


def _return_state(state: Any) -> Callable[[StepInfo | None], Any]:
    return lambda _: state
