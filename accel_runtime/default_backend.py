"""Default backend of this thread, for functions that are called without one: `gather(x)`, `PartialState()`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from accel_runtime import backends
from accel_runtime.backends import connect
from accel_runtime.backends.base import Backend
from accel_runtime.env import Settings
from accel_runtime.topology import Topology

__all__ = [
    "connect_default_backend",
    "current_backend",
    "current_data_rank",
    "current_state",
    "current_topology",
    "find_accelerator",
    "known_backend",
    "register_accelerator",
    "seed_device",
    "set_current_backend",
    "wait_for_everyone",
]

_LOCAL = threading.local()
# The only global state. It is per thread, as XLA runs replicas as threads of one process; a context variable would be lost
# between cells of a notebook. Only functions without an Accelerator use it: methods of an Accelerator use its own backend.


def current_backend() -> Backend:
    """Return the backend of the newest `Accelerator` or `PartialState` of this thread, or connect one."""
    backend = known_backend()
    return backend if backend is not None else connect_default_backend()


def set_current_backend(backend: Backend | None) -> None:
    """Set the current backend of this thread; None removes it."""
    # With the process id, as a forked process has another rank than its parent.
    _LOCAL.backend = None if backend is None else (os.getpid(), backend)


def register_accelerator(accelerator: Any, state: Any) -> int:
    """Register an `Accelerator` as the newest of this thread, with its state, and return its number, from 0."""
    registry = _registry()
    if registry is None:
        registry = _LOCAL.accelerators = os.getpid(), count(), WeakValueDictionary()
    _, numbers, accelerators = registry
    number = next(numbers)
    accelerators[number] = accelerator
    _LOCAL.state = os.getpid(), state
    return number


def find_accelerator(number: int = -1) -> Any:
    """Return the `Accelerator` with this number, or the newest of this thread; None if it does not exist."""
    registry = _registry()
    if registry is None or not registry[2]:
        return None
    return registry[2].get(number) or registry[2][max(registry[2])]


def current_state() -> Any:
    """Return the state of the newest `Accelerator` of this thread, or None."""
    owner, state = getattr(_LOCAL, "state", None) or (0, None)
    return state if owner == os.getpid() else None


def _registry() -> tuple[int, Iterator[int], WeakValueDictionary[int, Any]] | None:
    registry: tuple[int, Iterator[int], WeakValueDictionary[int, Any]] | None
    registry = getattr(_LOCAL, "accelerators", None)
    return registry if registry is not None and registry[0] == os.getpid() else None


def connect_default_backend(*, cpu: bool = False, options: dict[str, Any] | None = None) -> Backend:
    """Return the current backend, or connect one if it is missing, or not on the CPU although `cpu` is set.

    `options` are arguments for `init_process_group`.
    """
    current = known_backend()
    if current is not None and not (cpu and current.device.type != "cpu"):
        return current
    settings = Settings.from_env(os.environ)
    backend = connect(replace(settings, device="cpu" if cpu else settings.device), Topology.here(), options)
    set_current_backend(backend)
    return backend


def current_topology() -> Topology:
    """Return the topology of this process or replica, from its backend or, without one, environment and device."""
    backend = known_backend()
    if backend is not None:
        return backend.topology
    return backends.read_topology(Settings.from_env(os.environ), Topology.here())


def current_data_rank() -> int:
    """Return the data-parallel rank of this process, from its backend or, without one, its settings."""
    backend = known_backend()
    if backend is not None:
        return backend.data.rank
    topology = current_topology()
    _, _, cp, tp = Settings.from_env(os.environ).parallel.sizes(topology.world_size)
    return topology.rank // (cp * tp)


def seed_device(seed: int) -> None:
    """Seed the generator of this process's device if `torch.manual_seed` does not reach it."""
    backend = known_backend()
    if backend is not None and backend.device.type != "cpu":
        backend.device_rng.manual_seed(seed)
    elif backend is None:
        backends.seed_device(Settings.from_env(os.environ), seed)


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


def known_backend() -> Backend | None:
    """Return the current backend of this thread, if there is one."""
    owner, backend = getattr(_LOCAL, "backend", None) or (0, None)
    return backend if owner == os.getpid() else None
