"""Execution on a device: random numbers, streams, copies of batches, and recorded operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from accel_runtime.foundation.epoch_progress import EpochProgress

__all__ = ["DeviceRuntime"]


class DeviceRuntime:
    """Execution on one device; the defaults are those of devices that run each operation when it is called.

    Args:
        device: The device of this process.
    """

    static_shapes = False
    """Programs are compiled for their shapes and constants, and all ranks run the same one: the last batch is padded on one
    process too, and a number that differs between ranks or steps must be a tensor."""

    num_batch_shards = 1
    """The number of devices over which a batch of this process is sharded; its size must be a multiple."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device of this process."""

    @property
    def rng(self) -> Any:
        """Functions `get_rng_state(device)`, `set_rng_state(state, device)`, `manual_seed`; states are CPU tensors."""
        return torch.get_device_module(self.device)

    @cached_property
    def copy_stream(self) -> torch.Stream | None:
        """The stream on which batches are copied in the background; None if the device has no streams.

        One per process: memory that is allocated on a stream is reused on this stream only.
        """
        module = torch.get_device_module(self.device)
        has_streams = self.device.type != "cpu" and hasattr(module, "Stream")
        return module.Stream(self.device) if has_streams else None

    def describe(self) -> dict[str, str]:
        """Return what the runtime of the device reports about itself, by title."""
        return {}

    def synchronize(self) -> None:
        """Execute all pending operations; collective."""

    def iterate_batches(
        self,
        batches_of: Callable[[EpochProgress], Iterator[Any]],
        epoch: EpochProgress,
        *,
        to_device: bool,  # noqa: ARG002 - for devices that compute lazily
        loaded_by_workers: bool,  # noqa: ARG002
    ) -> Iterator[Any]:
        """Iterate over the batches of an epoch.

        Args:
            batches_of: Yields the batches and records the offset of each in the epoch iterator it gets.
            epoch: Receives the offset of the batch that was yielded last.
            to_device: Batches may be copied to the device here; others are copied later.
            loaded_by_workers: Workers load batches, so the next one can be fetched in advance.
        """
        return batches_of(epoch)

    def state_to_host(self, state: Any) -> Any:
        """Return nested state with tensors on the CPU if files cannot be written from device memory.

        Tensors that are the same object stay the same object.
        """
        return state

    def build_step_hook(self) -> Callable[[], None] | None:
        """Return a function for one optimizer to call after each step, or None."""
        return None
