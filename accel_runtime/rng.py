"""Random state: one call to seed everything, and states kept, put back, and shared from the first rank."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.topology import Topology

__all__ = ["KINDS", "RNG_TYPES", "Drawing", "agreed", "capture", "restore", "set_seed", "share_states"]

RNG_TYPES = ("generator", "torch", "cuda", "xpu")
"""What `Accelerator(rng_types=...)` may name. Loaders share their order always, so `generator` asks nothing more."""

KINDS = ("torch", "python", "numpy")
"""The global generators a sampler may draw from."""

States = dict[str, Any]
"""States of generators, of numbers, text, lists and tensors only, so that they can be saved."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy (where it is loaded) and torch on every device.

    Args:
        seed: From 0 up to, not including, 2**32 (NumPy's range).
        device_specific: Add the rank, so that processes draw different numbers.
        deterministic: Also allow deterministic algorithms only.

    Raises:
        ValueError: The seed lies outside NumPy's range.
    """
    seed += Topology.here().rank if device_specific else 0
    if not 0 <= seed < 2**32:
        raise ValueError(f"a seed lies from 0 to 2**32 - 1; it is {seed}")
    random.seed(seed)
    torch.manual_seed(seed)
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
        module = torch if kind == "torch" else getattr(torch, kind)
        module.set_rng_state(backend.broadcast(module.get_rng_state()))


def capture(generators: Sequence[torch.Generator] = (), kinds: Sequence[str] = KINDS) -> States:
    """The states of what a sampler may draw from: the global generators named in `kinds`, and `generators`."""
    states: States = {"generators": [generator.get_state() for generator in generators]}
    if "torch" in kinds:
        states["torch"] = torch.get_rng_state()
    if "python" in kinds:
        version, numbers, spare = random.getstate()
        states["python"] = [version, list(numbers), spare]
    if "numpy" in kinds and (numpy := _numpy()):
        name, keys, *rest = numpy.get_state()
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def restore(states: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Put back what `capture` gave; what is not in `states`, and `generators` not given, are left alone."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        version, numbers, spare = states["python"]
        random.setstate((version, tuple(numbers), spare))
    if "numpy" in states and (numpy := _numpy()):
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, keys.numpy().astype("uint32"), *rest))
    for generator, state in zip(generators, states["generators"], strict=False):
        generator.set_state(state)


def agreed(states: States, backend: Backend) -> States:
    """The first rank's states: eight bytes tell whether all have them, and only where not do they travel.

    Returns:
        The very dict given if all ranks have the same, on every rank; another otherwise.
    """
    if backend.topology.world_size == 1:
        return states
    prints = backend.all_gather(torch.tensor(_fingerprint(states), device=backend.device))
    if bool((prints == prints[0]).all()):
        return states
    return dict(backend.broadcast_object(states))


class Drawing:
    """Under what random states the order of one epoch is drawn.

    A generator that is in that state already is left to itself, so drawing is what it is without accel. Elsewhere,
    on a rank whose states differ from the first's or in an epoch that is resumed, the states are in force inside
    only, and the own ones come back.

    Args:
        states: What the epoch began with.
        here: The states now in force, of the same kinds.
        generators: The loader's own generators among them; these stay where drawing leaves them.
    """

    def __init__(self, states: States, here: States, generators: Sequence[torch.Generator]) -> None:
        differ = states is not here
        self._kinds = [kind for kind in states if differ and _print(here.get(kind)) != _print(states[kind])]
        self._states = {"generators": states["generators"]} | {kind: states[kind] for kind in self._kinds}
        self._generators = generators if "generators" in self._kinds else ()
        self._inside = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, whoever draws draws for the epoch; a second time goes on where the first ended."""
        if not self._kinds or self._inside:
            yield
            return
        own = capture((), self._kinds)
        restore(self._states, self._generators)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._states = capture(self._generators, self._kinds)
            restore(own)


def _numpy() -> Any:
    """NumPy's random module where NumPy is loaded: it loads that late, and whoever draws next may be the first."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _fingerprint(states: States) -> int:
    """Eight bytes that differ where states differ."""
    text = "".join(f"{kind}{_print(states[kind])}" for kind in sorted(states))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _print(part: Any) -> str:
    """Text that differs where states differ."""
    if isinstance(part, torch.Tensor):
        return hashlib.blake2b(ctypes.string_at(part.data_ptr(), part.nbytes)).hexdigest()
    return " ".join(map(_print, part)) if isinstance(part, (list, tuple)) else repr(part)
