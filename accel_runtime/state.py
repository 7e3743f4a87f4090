"""The state objects scripts read, as views: nothing is kept here, and nothing can be set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_runtime.accumulation import Accumulation
from accel_runtime.current import connected, set_current_backend
from accel_runtime.data.source import Share
from accel_runtime.env import MixedPrecision
from accel_runtime.facade.processes import Processes
from accel_runtime.kinds import DistributedType
from accel_runtime.options import InitProcessGroupKwargs

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]


class State(Processes):
    """What both states say about the process."""

    @property
    def backend(self) -> str | None:
        """What carries collectives: `gloo`, `nccl`, ...; None on one process."""
        return self._backend.name

    @property
    def initialized(self) -> bool:
        """True: a state that exists is ready."""
        return True

    @property
    def default_device(self) -> torch.device:
        """The device of this process."""
        return self.device

    def _facts(self) -> dict[str, Any]:
        carried = f" over {self.backend}" if self.backend else ""
        return {
            "Distributed": f"{self.distributed_type.value}{carried}",
            "Processes": self.num_processes,
            "Process": f"{self.process_index} (on its machine: {self.local_process_index})",
            "Device": self.device,
        }

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._facts().items())


class PartialState(State):
    """This process among the others, without anything to train.

    It joins them if nothing in this thread has yet; else it is where the newest `Accelerator` or
    `PartialState` is.

    Args:
        cpu: Compute on the CPU, whatever else is there.
        **options: `backend`, `init_method` and `timeout` of `torch.distributed.init_process_group`.

    Raises:
        TypeError: Another option.
        RuntimeError: The device asked for is not there.
    """

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self._connected(connected(cpu=cpu, options=InitProcessGroupKwargs(**options).to_kwargs()))

    def set_device(self) -> None:
        """Make this process's device torch's current one, should the script have changed it."""
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)

    def destroy_process_group(self) -> None:
        """Leave the other processes; whoever wants to speak to them again makes a new state."""
        self._backend.leave()
        set_current_backend(None)


class AcceleratorState(State):
    """What `accelerator.state` says: the process, and the number format.

    Args:
        processes: Whose state.
        mixed_precision: The number format in force.
    """

    deepspeed_plugin = None
    """None: there is no DeepSpeed here."""

    def __init__(self, processes: Processes, mixed_precision: MixedPrecision) -> None:
        self._backend = processes._backend  # noqa: SLF001 - the other half of one object
        self.mixed_precision = mixed_precision
        """The number format in force."""

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "Mixed precision": self.mixed_precision}


class GradientState:
    """What `accelerator.gradient_state` says about the step in hand.

    Args:
        accumulation: Counts the window.
        share: Gives the step of the innermost loop, or None outside of all loops.
    """

    def __init__(self, accumulation: Accumulation, share: Callable[[], Share | None]) -> None:
        self._accumulation = accumulation
        self._share = share

    @property
    def sync_gradients(self) -> bool:
        """Whether the backward pass in hand completes an accumulation window."""
        return self._accumulation.synced

    @property
    def num_steps(self) -> int:
        """Micro-batches whose gradients make one optimizer step."""
        return self._accumulation.steps

    @property
    def in_dataloader(self) -> bool:
        """Whether the script is in a loop over a prepared loader."""
        return self._share() is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the last of the innermost loop."""
        share = self._share()
        return share is not None and share.last

    @property
    def remainder(self) -> int:
        """Samples in the last global batch that are no repeats: 0 if none is, -1 before it and outside of loops."""
        share = self._share()
        if share is None or not share.last:
            return -1
        return 0 if share.valid == share.sizes else sum(share.valid)

    def __repr__(self) -> str:
        names = ("sync_gradients", "num_steps", "in_dataloader", "end_of_dataloader", "remainder")
        return "\n".join(f"{name}: {getattr(self, name)}" for name in names)
