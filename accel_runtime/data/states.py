"""The random states a stream is read under: those of the first rank on all ranks, apart from a script's own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from accel_runtime.backends.base import Backend

__all__ = ["Agreed", "Apart", "agreed", "capture", "restore"]

_Live = tuple[tuple[Any, ...], torch.Tensor, Any]


def capture() -> dict[str, Any]:
    """The states of the generators of Python, torch on the CPU and, where it is loaded, NumPy."""
    python, torch_, numpy = _live()
    version, internal, gauss = python
    states = {"python": [version, torch.tensor(internal), gauss], "torch": torch_}
    if numpy is not None:
        _, keys, position, has_gauss, cached = numpy
        states["numpy"] = [
            torch.from_numpy(keys.astype("int64")),
            int(position),
            int(has_gauss),
            float(cached),
        ]
    return states


def restore(states: dict[str, Any]) -> None:
    """Set the generators to what `capture` returned."""
    _set(_loaded(states))


def _loaded(states: dict[str, Any]) -> _Live:
    version, internal, gauss = states["python"]
    numpy = None
    if "numpy" in states:
        keys, position, has_gauss, cached = states["numpy"]
        numpy = ("MT19937", keys.numpy().astype("uint32"), position, has_gauss, cached)
    return (version, tuple(internal.tolist()), gauss), states["torch"], numpy


def _live() -> _Live:
    """What the generators give out themselves: the fast form, which cannot be saved."""
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return random.getstate(), torch.get_rng_state(), numpy


def _set(live: _Live) -> None:
    python, torch_, numpy = live
    random.setstate(python)
    torch.set_rng_state(torch_)
    if numpy is not None:
        import numpy as np  # noqa: PLC0415 - torch works without NumPy, so we do

        np.random.set_state(numpy)  # noqa: NPY002 - the legacy global state is what datasets draw from


class Agreed(NamedTuple):
    """The first rank's states."""

    states: dict[str, Any]
    equal: bool
    """Whether they are every rank's states."""


def agreed(backend: Backend) -> Agreed:
    """The first rank's states; they travel only where eight bytes tell that some rank's differ."""
    states = capture()
    if backend.topology.world_size == 1:
        return Agreed(states, equal=True)
    prints = backend.all_gather(_print(states).to(backend.device))
    if bool((prints == prints[0]).all()):
        return Agreed(states, equal=True)
    return Agreed(backend.broadcast_object(states), equal=False)


def _print(states: dict[str, Any]) -> torch.Tensor:
    """Eight bytes that differ where states differ: `[1]`, int64."""
    digest = hashlib.blake2b(digest_size=8)
    for kind, state in sorted(states.items()):
        digest.update(kind.encode())
        for part in state if isinstance(state, list) else [state]:
            digest.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)


class Apart:
    """Random states that are in force inside `with`, and go on from where the last `with` left them.

    Args:
        states: What `capture` returned; by default those in force.
    """

    def __init__(self, states: dict[str, Any] | None = None) -> None:
        self._states = _live() if states is None else _loaded(states)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Put these states in force, and the others back at the end."""
        own = _live()
        _set(self._states)
        try:
            yield
        finally:
            self._states = _live()
            _set(own)

    def take_over(self) -> None:
        """Put these states in force, for good."""
        _set(self._states)
