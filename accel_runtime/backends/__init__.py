"""Choose the backend of this process, and keep it for functions that are called without one: `gather(x)`, `PartialState()`."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist

from accel_runtime.backends.base import Backend, Devices
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.distributed import DistributedBackend, SingleRank, check_process_group
from accel_runtime.backends.single import Single
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import Settings, check_layout
from accel_runtime.environment.topology import Topology

__all__ = [
    "BACKEND_LISTENERS",
    "DEVICES",
    "Backend",
    "connect",
    "connect_default_backend",
    "current_backend",
    "current_data_rank",
    "current_loops",
    "current_state",
    "current_topology",
    "find_accelerator",
    "known_backend",
    "register_accelerator",
    "seed_device",
    "set_current_backend",
    "wait_for_everyone",
]

DEVICES: Registry[Devices] = Registry(
    {
        "xla": "accel_runtime.extensions.xla.devices:XlaDevices",
    },
)
"""Devices that another library connects than torch, by the `device` of the settings, which names all that there are."""

BACKEND_LISTENERS: Registry[Callable[[Callable[[], Backend | None]], None]] = Registry(
    {
        "accelerate": "accel_runtime.accelerate.state:share_backend",
    },
)
"""Functions that are called if the current backend of a thread changes, with the function that finds it."""


def connect(settings: Settings, topology: Topology, options: dict[str, Any] | None = None) -> Backend:
    """Select the device of this process and connect it to the other ranks.

    Args:
        settings: The settings of the launcher.
        topology: Rank and world size of this process.
        options: Arguments for `init_process_group`, which override `settings`.

    Raises:
        RuntimeError: The device is not available, ranks share it over a backend that cannot, or the script's process group has
            another rank or size.
        ValueError: The sharding does not fit the processes or the device.
    """
    check_layout(settings.parallel, settings.fully_shard, topology.world_size)
    if settings.spmd and settings.device not in DEVICES.names:
        names = " or ".join(DEVICES.names)
        cure = f"Set ACCEL_DEVICE={names}, as a launcher with spmd: true does, or unset" if names else "Unset"
        raise RuntimeError(
            f"SPMD (ACCEL_SPMD=1) needs the device {names or 'of another library than torch'}, but the device is {settings.device}. "
            f"{cure} ACCEL_SPMD."
        )
    if settings.device in DEVICES.names:
        return DEVICES[settings.device].connect(settings, topology, options or {})
    check_process_group(topology)
    backend = (options or {}).get("backend") or settings.process_group_backend
    device = _select_device(settings.device, topology, backend)
    runtime = DeviceRuntime(device)
    # Shards need the collectives of torch on one process too.
    if topology.world_size > 1 or not settings.parallel.plain or settings.engine:
        return DistributedBackend(topology, runtime, settings, options or {})
    return (
        SingleRank(topology, runtime, settings, options or {})
        if topology.launched
        else Single(topology, runtime)
    )


def _select_device(requested: str, topology: Topology, backend: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = (accelerator.type if accelerator else "cpu") if requested == "auto" else requested
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        raise RuntimeError(
            f"Device {kind!r} is not available: torch {torch.__version__} finds "
            f"{accelerator.type if accelerator else 'no accelerator'}. Set device: auto or cpu, or install a torch build for it."
        )
    if not topology.launched:
        # A script without a launcher may have chosen its device by torch.cuda.set_device().
        return torch.device(kind, torch.accelerator.current_device_index())
    count = torch.accelerator.device_count()
    # Two ranks of NCCL cannot use one GPU; over gloo they can. A CUDA device has a UUID, which ranks compare once they are
    # connected: each may see other GPUs than the others.
    if topology.local_world_size > count and backend != "gloo" and kind != "cuda":
        raise RuntimeError(
            f"{topology.local_world_size} processes on this machine, but it has {count} {kind} device(s). "
            "Start at most one process a device, share devices with process_group_backend: gloo, or set device: cpu."
        )
    index = topology.local_rank % count
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


@dataclass
class _Current:
    """The newest objects of one thread."""

    backend: Backend | None = None
    state: Any = None
    accelerators: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    numbers: count[int] = field(default_factory=count)
    loops: WeakSet[Any] = field(default_factory=WeakSet)


class _ThreadState(threading.local):
    """The only global state; methods of an `Accelerator` use its own backend.

    It is per thread, as XLA runs replicas as threads of one process; a context variable would be lost between cells of a
    notebook.
    """

    def __init__(self) -> None:
        # By process id, as a forked process has another rank than its parent.
        self.by_process: defaultdict[int, _Current] = defaultdict(_Current)

    @property
    def current(self) -> _Current:
        return self.by_process[os.getpid()]


_THREAD = _ThreadState()


def known_backend() -> Backend | None:
    """Return the current backend of this thread, if there is one."""
    return _THREAD.current.backend


def current_backend() -> Backend:
    """Return the backend of the newest `Accelerator` or `PartialState` of this thread, or connect one."""
    return _THREAD.current.backend or connect_default_backend()


def set_current_backend(backend: Backend | None) -> None:
    """Set the current backend of this thread; None removes it."""
    _THREAD.current.backend = backend
    for name in BACKEND_LISTENERS.names:
        BACKEND_LISTENERS[name](known_backend)


def connect_default_backend(*, cpu: bool = False, options: dict[str, Any] | None = None) -> Backend:
    """Return the current backend, or connect one if it is missing, or not on the CPU although `cpu` is set.

    `options` are arguments for `init_process_group`.
    """
    current = _THREAD.current.backend
    if current is not None and not (cpu and current.device.type != "cpu"):
        return current
    settings = Settings.from_env(os.environ)
    backend = connect(
        replace(settings, device="cpu" if cpu else settings.device), Topology.from_env(os.environ), options
    )
    set_current_backend(backend)
    return backend


def register_accelerator(accelerator: Any, state: Any) -> int:
    """Register an `Accelerator` as the newest of this thread, with its state, and return its number, from 0."""
    current = _THREAD.current
    number = next(current.numbers)
    current.accelerators[number] = accelerator
    current.state = state
    return number


def current_loops() -> WeakSet[Any]:
    """Return the `ActiveLoops` of all Accelerators of this thread."""
    return _THREAD.current.loops


def find_accelerator(number: int = -1) -> Any:
    """Return the `Accelerator` with this number, or the newest of this thread; None if it does not exist."""
    accelerators = _THREAD.current.accelerators
    return accelerators.get(number) or accelerators.get(max(accelerators, default=-1))


def current_state() -> Any:
    """Return the state of the newest `Accelerator` of this thread, or None."""
    return _THREAD.current.state


def current_topology() -> Topology:
    """Return the topology of this process or replica, from its backend or, without one, environment and device."""
    backend = known_backend()
    if backend is not None:
        return backend.topology
    settings, topology = Settings.from_env(os.environ), Topology.from_env(os.environ)
    if settings.device in DEVICES.names:
        return DEVICES[settings.device].read_topology(settings, topology)
    return topology


def current_data_rank() -> int:
    """Return the data-parallel rank of this process, from its backend or, without one, its settings."""
    backend = known_backend()
    if backend is not None:
        return backend.data_rank.rank
    topology = current_topology()
    grid = Settings.from_env(os.environ).parallel.build_grid(topology.world_size)
    return grid.data_rank(topology.rank).rank


def seed_device(seed: int) -> None:
    """Seed the generator of this process's device if `torch.manual_seed` does not reach it."""
    backend = known_backend()
    if backend is None:
        settings = Settings.from_env(os.environ)
        if settings.device in DEVICES.names:
            DEVICES[settings.device].seed_device(settings, seed)
    elif backend.device.type != "cpu":
        backend.runtime.rng.manual_seed(seed)


def wait_for_everyone() -> None:
    """Wait until all processes have made this call; raise RuntimeError if they are not connected."""
    backend = known_backend()
    if backend is not None and backend.topology.world_size > 1:
        backend.barrier()
    elif dist.is_initialized():
        dist.barrier()
    else:
        raise RuntimeError(
            "in_order=True needs connected processes. Create the Accelerator before this call."
        )
