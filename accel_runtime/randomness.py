"""The states of random number generators: kept, put back, made those of the first rank, and set apart for a while."""

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

__all__ = [
    "KINDS",
    "Apart",
    "agreed",
    "alike",
    "capture",
    "fingerprint",
    "in_force",
    "kept",
    "portable",
    "restore",
    "seed_of",
]

KINDS = ("torch", "python", "numpy")
"""The global generators that samplers, datasets and transforms draw from."""

States = dict[str, Any]
"""States of generators by their kind; those of a loader's own are a list, by the name of `generators`."""


def capture(generators: Sequence[torch.Generator] = (), kinds: Sequence[str] = KINDS) -> States:
    """The states of the global generators named in `kinds`, and of `generators`.

    Returns:
        Numbers, text, lists and tensors only, so that they can be saved.
    """
    return {"generators": [generator.get_state() for generator in generators]} | kept(in_force(kinds))


def portable(states: States) -> States:
    """What `in_force` gave, without tensors, which would go to another process through shared memory."""
    return states | ({"torch": states["torch"].numpy().tobytes()} if "torch" in states else {})


def kept(states: States) -> States:
    """What `in_force` gave, or `portable`, so that it can be saved."""
    states = dict(states)
    if isinstance(states.get("torch"), bytes):
        states["torch"] = torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8)
    if "python" in states:
        version, numbers, spare = states["python"]
        states["python"] = [version, list(numbers), spare]
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def restore(states: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Put back what `capture` gave; what is not in `states`, and `generators` not given, are left alone."""
    for generator, state in zip(generators, states.get("generators", ()), strict=False):
        generator.set_state(state)
    live = {kind: states[kind] for kind in KINDS if kind in states}
    if "python" in live:
        version, numbers, spare = live["python"]
        live["python"] = (version, tuple(numbers), spare)
    if "numpy" in live:
        name, keys, *rest = live["numpy"]
        live["numpy"] = (name, keys.numpy().astype("uint32"), *rest)
    _enforce(live)


def alike(states: States, others: States) -> bool:
    """Whether what `in_force` gave at two times is the same."""
    if states.keys() != others.keys() or states.get("python") != others.get("python"):
        return False
    pairs = zip(states.get("numpy", ()), others.get("numpy", ()), strict=True)
    numpys = all(bool((one == two).all()) if hasattr(one, "all") else one == two for one, two in pairs)
    return numpys and ("torch" not in states or torch.equal(states["torch"], others["torch"]))


def agreed(states: States, backend: Backend) -> States:
    """The first rank's states: eight bytes tell whether all have them, and only where not do they travel.

    Returns:
        The very dict given if all ranks have the same, on every rank; another otherwise.
    """
    if backend.topology.world_size == 1:
        return states
    prints = backend.all_gather(torch.tensor(fingerprint(states), device=backend.device))
    if bool((prints == prints[0]).all()):
        return states
    return dict(backend.broadcast_object(states, "random states"))


class Apart:
    """Random states that are in force inside `with`, and go on from where the last `with` left them.

    Args:
        states: What `capture` gave; by default those in force. A loader's own generators are no part of it.
        beside: What `capture` gave of those in force. A generator that is in its state already is then left to
            itself, so that drawing from it is what it is without accel.
    """

    def __init__(self, states: States | None = None, beside: States | None = None) -> None:
        kinds = [kind for kind in KINDS if states is None or kind in states]
        if states is not None and beside is not None:
            same = states is beside
            kinds = [kind for kind in kinds if not same and _print(states[kind]) != _print(beside.get(kind))]
        own = in_force(kinds)
        if states is not None:
            restore({kind: states[kind] for kind in kinds})
        self._kinds = kinds
        self._states = in_force(kinds)
        self._inside = False
        _enforce(own)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Put these states in force, and the others back at the end; inside another `with`, change nothing."""
        if self._inside or not self._kinds:
            yield
            return
        own = in_force(self._kinds)
        self.take_over()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._states = in_force(self._kinds)
            _enforce(own)

    def take_over(self) -> None:
        """Put these states in force, for good."""
        _enforce(self._states)


def in_force(kinds: Sequence[str] = KINDS) -> States:
    """What generators give out themselves: quick, but it cannot be saved."""
    states: States = {}
    if "torch" in kinds:
        states["torch"] = torch.get_rng_state()
    if "python" in kinds:
        states["python"] = random.getstate()
    if "numpy" in kinds and (numpy := _numpy()):
        states["numpy"] = numpy.get_state()
    return states


def _enforce(states: States) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and (numpy := _numpy()):
        numpy.set_state(states["numpy"])


def _numpy() -> Any:
    """NumPy's random module where NumPy is loaded: it loads that late, and whoever draws next may be the first."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def fingerprint(states: States) -> int:
    """Eight bytes that differ where states differ."""
    text = "".join(f"{kind}{_print(states[kind])}" for kind in sorted(states))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def seed_of(text: str) -> int:
    """A seed that any change of the text changes: 63 bits, which generators and readers of JSON take."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _print(part: Any) -> str:
    """Text that differs where states differ."""
    if isinstance(part, torch.Tensor):
        return hashlib.blake2b(ctypes.string_at(part.data_ptr(), part.nbytes)).hexdigest()
    return " ".join(map(_print, part)) if isinstance(part, (list, tuple)) else repr(part)
