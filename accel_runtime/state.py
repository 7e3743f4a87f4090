"""The state objects scripts read, as views: nothing is kept here, and nothing can be set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from accel_runtime.accumulation import Accumulation
from accel_runtime.backends.detached import DetachedBackend
from accel_runtime.current import (
    connected,
    current_state,
    find_accelerator,
    known_backend,
    set_current_backend,
)
from accel_runtime.data.loops import Loops
from accel_runtime.data.source import Share
from accel_runtime.env import MixedPrecision
from accel_runtime.facade.processes import Processes
from accel_runtime.kinds import DistributedType
from accel_runtime.options import InitProcessGroupKwargs

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]


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

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the other processes; `PartialState()` and `Accelerator()` connect anew.

        Args:
            group: A process group of torch, which is ended instead; the processes stay connected.
        """
        if group is not None:
            dist.destroy_process_group(group)
            return
        self._backend.leave()
        set_current_backend(None)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_backend": DetachedBackend.of(self._backend)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # On a rank, it is the state of that rank.
        self._backend = known_backend() or state["_backend"]

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


class AcceleratorState(State):
    """The state of an `Accelerator`: the process, the number format, and its plugins.

    Made by a script, it is the state of the newest `Accelerator` of this thread.

    Args:
        mixed_precision: None, or the number format in force.
        cpu: Whether the device in use has to be the CPU.

    Raises:
        ValueError: No `Accelerator` has been made, or it has another format or device.
    """

    deepspeed_plugin = None
    """None: there is no DeepSpeed here."""

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        known = current_state()
        if known is None:
            raise ValueError(
                "AcceleratorState(): no Accelerator has been made in this thread. Make one first: accelerator = Accelerator()."
            )
        if mixed_precision not in {None, known.mixed_precision} or (cpu and known.device.type != "cpu"):
            raise ValueError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}, cpu={cpu}): the Accelerator has "
                f"mixed_precision={known.mixed_precision!r} and computes on {known.device}. Pass such options to Accelerator()."
            )
        vars(self).update(vars(known))

    @classmethod
    def of(
        cls, processes: Processes, mixed_precision: MixedPrecision, plugins: Mapping[str, Any]
    ) -> AcceleratorState:
        """Return the state of an `Accelerator`, of its connections, its number format and its plugins by name."""
        state = cls.__new__(cls)
        backend = processes._backend  # noqa: SLF001 - the other half of one object
        vars(state).update(_backend=backend, _mixed_precision=mixed_precision, _plugins=plugins)
        return state

    _mixed_precision: MixedPrecision
    _plugins: Mapping[str, Any]

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The number format in force."""
        return self._mixed_precision

    @property
    def dynamo_plugin(self) -> Any:
        """The `TorchDynamoPlugin` by which models are compiled."""
        return self._plugins["dynamo_plugin"]

    @property
    def fsdp_plugin(self) -> Any:
        """The `FullyShardedDataParallelPlugin` by which models are sharded; None if they are not."""
        return self._plugins["fsdp_plugin"]

    @property
    def parallelism_config(self) -> Any:
        """The same as `Accelerator.parallelism_config`."""
        return self._plugins["parallelism_config"]

    @property
    def is_fsdp2(self) -> bool:
        """Return True if models are sharded, by torch's `fully_shard`."""
        return self.fsdp_plugin is not None

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "Mixed precision": self.mixed_precision}


def is_initialized() -> bool:
    """Return whether an `Accelerator` has been made in this thread."""
    return current_state() is not None


class GradientState:
    """What `accelerator.gradient_state` says about the step in hand.

    Made by a script, it is the state of the newest `Accelerator` of this thread. Before there is one, every backward pass is
    an optimizer step, and the object becomes the state of the `Accelerator` that is made next.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._parts: tuple[Accumulation, Loops | None] | None = None

    @classmethod
    def of(cls, number: int, accumulation: Accumulation, loops: Loops) -> GradientState:
        """Return the state of the `Accelerator` with a number, of its count of micro-batches and its loops."""
        state = cls()
        state._number, state._parts = number, (accumulation, loops)
        return state

    def _find_parts(self) -> tuple[Accumulation, Loops | None]:
        if self._parts is None:
            newest = find_accelerator()
            if newest is None:
                return Accumulation(1), None
            vars(self).update(vars(newest.gradient_state))
            assert self._parts is not None
        return self._parts

    @property
    def _accumulation(self) -> Accumulation:
        return self._find_parts()[0]

    def _share(self) -> Share | None:
        """Return the step of the innermost loop, or None outside of all loops."""
        _, loops = self._find_parts()
        return None if loops is None else loops.current

    def __reduce__(self) -> tuple[Any, ...]:
        accumulation = self._accumulation
        return _unpickle_gradient_state, (self._number, accumulation.steps, accumulation.synced)

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


def _unpickle_gradient_state(number: int | None, steps: int, synced: bool) -> GradientState:
    """Return the state of the `Accelerator` of this process with a number, else one outside of all loops."""
    found = None if number is None else find_accelerator(number)
    state: GradientState = GradientState() if found is None else found.gradient_state
    if number is not None and found is None:
        accumulation = Accumulation(steps)
        accumulation.synced = synced
        state._number, state._parts = number, (accumulation, None)  # noqa: SLF001 - of this module
    return state
