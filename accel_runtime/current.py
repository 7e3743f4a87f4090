"""The backend that functions without an argument for it use: `gather(x)`, `PartialState()`."""

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
    "connected",
    "current_backend",
    "current_state",
    "data_rank",
    "find_accelerator",
    "known_backend",
    "register_accelerator",
    "seed_device",
    "set_current_backend",
    "standing",
    "wait",
]

_HERE = threading.local()
# The one thing that outlives a call in a module. It belongs to the thread, since XLA runs replicas as threads
# of one process; a context variable would be lost from one cell of a notebook to the next. It decides only
# where functions without an Accelerator turn to: the methods of an Accelerator use its own backend.


def current_backend() -> Backend:
    """What the newest `Accelerator` or `PartialState` of this thread uses; without one, what the environment says."""
    known = known_backend()
    return known if known is not None else connected()


def set_current_backend(backend: Backend | None) -> None:
    """Make a backend the current one of this thread; None forgets it."""
    # A process that was forked off stands elsewhere than its parent.
    _HERE.backend = None if backend is None else (os.getpid(), backend)


def register_accelerator(accelerator: Any, state: Any) -> int:
    """Make an `Accelerator` the newest of this thread, and its state the current one; return its number, from 0."""
    known = _accelerators()
    if known is None:
        known = _HERE.accelerators = os.getpid(), count(), WeakValueDictionary()
    _, numbers, accelerators = known
    number = next(numbers)
    accelerators[number] = accelerator
    _HERE.state = os.getpid(), state
    return number


def find_accelerator(number: int = -1) -> Any:
    """Return the `Accelerator` of this number, else the newest of this thread; None if it has none."""
    known = _accelerators()
    if known is None or not known[2]:
        return None
    return known[2].get(number) or known[2][max(known[2])]


def current_state() -> Any:
    """Return the state of the newest `Accelerator` of this thread; None if there was none."""
    owner, state = getattr(_HERE, "state", None) or (0, None)
    return state if owner == os.getpid() else None


def _accelerators() -> tuple[int, Iterator[int], WeakValueDictionary[int, Any]] | None:
    known: tuple[int, Iterator[int], WeakValueDictionary[int, Any]] | None
    known = getattr(_HERE, "accelerators", None)
    return known if known is not None and known[0] == os.getpid() else None


def connected(*, cpu: bool = False, options: dict[str, Any] | None = None) -> Backend:
    """The current backend, or a new one where there is none, or none that computes on the CPU as is asked.

    Args:
        cpu: Compute on the CPU, whatever else is there.
        options: Arguments for `init_process_group`.
    """
    known = known_backend()
    if known is not None and not (cpu and known.device.type != "cpu"):
        return known
    settings = Settings.from_env(os.environ)
    backend = connect(replace(settings, device="cpu" if cpu else settings.device), Topology.here(), options)
    set_current_backend(backend)
    return backend


def standing() -> Topology:
    """Where this process or replica stands: what its backend knows; before there is one, environment and device."""
    known = known_backend()
    if known is not None:
        return known.topology
    return backends.standing(Settings.from_env(os.environ), Topology.here())


def data_rank() -> int:
    """Which part of every global batch this process has: what its backend knows, else settings and environment.

    Raises:
        SettingsError: The settings do not make this many processes.
    """
    known = known_backend()
    if known is not None:
        return known.data.rank
    here = standing()
    _, _, cp, tp = Settings.from_env(os.environ).parallel.sizes(here.world_size)
    return here.rank // (cp * tp)


def seed_device(seed: int) -> None:
    """Seed the generator of this process's device where `torch.manual_seed` does not reach it."""
    known = known_backend()
    if known is not None and known.device.type != "cpu":
        known.random.manual_seed(seed)
    elif known is None:
        backends.seed_device(Settings.from_env(os.environ), seed)


def wait() -> None:
    """Until every process is here, of those that are connected.

    Raises:
        RuntimeError: None are.
    """
    known = known_backend()
    if known is not None and known.topology.world_size > 1:
        known.barrier()
    elif dist.is_initialized():
        dist.barrier()
    else:
        raise RuntimeError("in_order=True needs connected processes: make the Accelerator before this call")


def known_backend() -> Backend | None:
    """Return the current backend of this thread, if there is one."""
    owner, backend = getattr(_HERE, "backend", None) or (0, None)
    return backend if owner == os.getpid() else None
