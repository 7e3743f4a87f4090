"""Random numbers as a script asks for them: one call to seed everything, and states shared from the first rank."""

from __future__ import annotations

import random

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.current import data_rank, seed_device

__all__ = ["RNG_TYPES", "set_seed", "share_states"]

RNG_TYPES = ("generator", "torch", "cuda", "xpu", "xla")
"""What `Accelerator(rng_types=...)` may name. Loaders share their order always, so `generator` asks nothing more."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy (where it is loaded) and torch on every device.

    Args:
        seed: From 0 up to, not including, 2**32 (NumPy's range).
        device_specific: Add the rank, so that processes draw different numbers; those that have the same part of every
            batch (tensor and context parallel) draw the same, as they compute it together.
        deterministic: Also allow deterministic algorithms only.

    Raises:
        ValueError: The seed lies outside NumPy's range.
    """
    seed += data_rank() if device_specific else 0
    if not 0 <= seed < 2**32:
        raise ValueError(f"a seed lies from 0 to 2**32 - 1; it is {seed}")
    random.seed(seed)
    torch.manual_seed(seed)
    seed_device(seed)
    try:
        import numpy as np  # noqa: PLC0415 - torch works without NumPy, so we do
    except ImportError:
        pass
    else:
        np.random.seed(seed)  # noqa: NPY002 - the legacy global state is what scripts draw from
    if deterministic:
        torch.use_deterministic_algorithms(mode=True)


def share_states(kinds: list[str], backend: Backend) -> None:
    """Give every rank the first rank's state of the random number generators named.

    Args:
        kinds: Names out of `RNG_TYPES`.
        backend: What carries the states.
    """
    for kind in kinds:
        if kind == "generator":
            continue
        if kind == "xla":
            _share_seed(backend)
            continue
        module = torch if kind == "torch" else getattr(torch, kind)
        module.set_rng_state(backend.broadcast(module.get_rng_state()))


def _share_seed(backend: Backend) -> None:
    if backend.device.type != "xla":
        raise ValueError(f"rng_types names xla, and the device is {backend.device}: leave it out")
    state = backend.broadcast(backend.random.get_rng_state(backend.device))
    backend.random.set_rng_state(state, backend.device)
