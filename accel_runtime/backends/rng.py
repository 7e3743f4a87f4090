"""Random number generators: seeding, saving and restoring states, and sharing states between ranks."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Generator

from accel_runtime.backends import current_data_rank, seed_device
from accel_runtime.backends.base import Backend
from accel_runtime.environment.text import encode_text
from accel_runtime.foundation.keywords import check_keywords_of
from accel_runtime.storage.schema import Count, ValueRule

__all__ = [
    "KINDS",
    "IsolatedRNG",
    "NumPyState",
    "ProcessRandomStates",
    "PythonState",
    "RandomStates",
    "broadcast_from_first",
    "broadcast_rng_types",
    "derive_random_states",
    "hash_text",
    "set_seed",
]


@check_keywords_of
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy (if it is loaded) and torch on every device.

    Args:
        seed: A number from 0 to 2**32 - 1 (NumPy's range).
        device_specific: Add the data-parallel rank, so that processes draw different numbers; model-parallel ranks
            (tensor and context parallel) draw the same, as they compute on the same batch.
        deterministic: If true, allow deterministic algorithms only.

    Raises:
        ValueError: The seed is outside NumPy's range.
    """
    seed += current_data_rank() if device_specific else 0
    if not 0 <= seed < 2**32:
        raise ValueError(f"Invalid seed {seed}: expected 0 to 2**32 - 1.")
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


def broadcast_rng_types(kinds: Iterable[str], backend: Backend) -> None:
    """Set the states of the generators named in `kinds` (out of `RNG_TYPES`) to those of the first rank, on every rank."""
    for kind in kinds:
        if kind == "generator":
            continue
        module = torch if kind == "torch" else getattr(torch, kind, None)
        if module is not None:
            module.set_rng_state(backend.broadcast_object(module.get_rng_state(), f"random states of {kind}"))
        elif kind == backend.device.type:
            state = backend.broadcast(backend.runtime.rng.get_rng_state(backend.device))
            backend.runtime.rng.set_rng_state(state, backend.device)
        else:
            raise ValueError(
                f"Invalid rng_types: {kind} needs a device of this type, and the device is {backend.device}. Leave {kind} out."
            )


KINDS = ("torch", "python", "numpy")
"""Global generators that samplers, datasets and transforms draw from; their states are tensors in a checkpoint."""


@dataclass(frozen=True)
class PythonState:
    """State of Python's `random`."""

    version: int
    words: bytes
    """Numbers of the Mersenne Twister, 4 bytes each in native order."""
    gauss: float | None = None
    """The second number of a pair with normal distribution, if it was not drawn yet."""


@dataclass(frozen=True)
class NumPyState:
    """State of NumPy's global generator; see `numpy.random.get_state`."""

    name: str
    words: bytes
    """Numbers of the Mersenne Twister, 4 bytes each in native order."""
    offset: int
    has_gauss: int
    gauss: float


@dataclass(frozen=True)
class RandomStates:
    """States of random generators, as plain values that can be compared, sent and saved.

    A generator without a state keeps the one that it has when states are restored.
    """

    torch: bytes | None = None
    """State of torch's global generator on the CPU."""
    python: PythonState | None = None
    numpy: NumPyState | None = None
    """None if NumPy is not loaded."""
    generators: tuple[bytes, ...] = ()
    """States of a loader's own generators."""

    @classmethod
    def capture(cls, generators: Sequence[Generator] = (), kinds: Sequence[str] = KINDS) -> RandomStates:
        """Return the current states of the global generators in `kinds`, and of `generators`."""
        numpy = _numpy_random() if "numpy" in kinds else None
        return cls(
            torch.get_rng_state().numpy().tobytes() if "torch" in kinds else None,
            _capture_python() if "python" in kinds else None,
            None if numpy is None else _capture_numpy(numpy),
            tuple(generator.get_state().numpy().tobytes() for generator in generators),
        )

    def restore_generators(self, generators: Sequence[Generator]) -> None:
        """Set the states of a loader's own generators, in the order of the capture."""
        for generator, state in zip(generators, self.generators, strict=False):
            generator.set_state(_to_tensor(state))

    def restore(self) -> None:
        """Set the states of the global generators."""
        if self.torch is not None:
            torch.set_rng_state(_to_tensor(self.torch))
        if self.python is not None:
            words = array("I", self.python.words)
            random.setstate((self.python.version, tuple(words), self.python.gauss))
        if self.numpy is not None and (numpy := _numpy_random()):
            state = self.numpy
            words = sys.modules["numpy"].frombuffer(state.words, "uint32")
            numpy.set_state((state.name, words, state.offset, state.has_gauss, state.gauss))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the global generators that have a state, a subset of `KINDS`."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)

    def select(self, kinds: Sequence[str]) -> RandomStates:
        """Return the states of these global generators only."""
        return RandomStates(**{kind: getattr(self, kind) for kind in kinds})

    def select_generators(self) -> RandomStates:
        """Return the states of the loader's own generators only."""
        return RandomStates(generators=self.generators)

    def update(self, others: RandomStates) -> RandomStates:
        """Return these states, with those that `others` has in their place."""
        present = {kind: getattr(others, kind) for kind in others.kinds}
        return replace(self, **present, generators=others.generators or self.generators)

    @property
    def fingerprint(self) -> int:
        """Return a 64-bit hash of the states."""
        return _hash(self)


def _hash(states: object) -> int:
    digest = hashlib.blake2b(encode_text(repr(states)), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _capture_python() -> PythonState:
    version, words, gauss = random.getstate()
    return PythonState(version, array("I", words).tobytes(), gauss)


def _capture_numpy(module: Any) -> NumPyState:
    name, words, offset, has_gauss, gauss = module.get_state()
    return NumPyState(str(name), words.tobytes(), int(offset), int(has_gauss), float(gauss))


def _numpy_random() -> Any:
    """Return NumPy's random module if NumPy is loaded; it is never imported here."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def broadcast_from_first(states: RandomStates, backend: Backend) -> RandomStates:
    """Return the first rank's states; they are sent only if fingerprints differ.

    If all ranks have the same, the very object that was passed is returned on every rank, otherwise another one.
    """
    if backend.topology.world_size == 1:
        return states
    fingerprints = backend.all_gather_numbers([states.fingerprint], "random states")
    if len(set(fingerprints)) == 1:
        return states
    first: RandomStates = backend.broadcast_object(states, "random states")
    return copy.copy(first)


class IsolatedRNG:
    """Random states that are set inside `with`, and continue where the last `with` ended.

    Args:
        states: The states; by default the current ones. A loader's own generators are ignored.
        current: The current states. A generator that is in its state already is then not isolated, so that it is drawn from
            as without accel.
    """

    def __init__(self, states: RandomStates | None = None, current: RandomStates | None = None) -> None:
        if states is None:
            states = RandomStates.capture()
        kinds = states.kinds
        if current is not None:
            kinds = tuple(kind for kind in kinds if getattr(states, kind) != getattr(current, kind))
        self._kinds = kinds
        self._states = states.select(kinds)
        self._inside = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Set these states, and restore the others at the end; nested contexts change nothing."""
        if self._inside or not self._kinds:
            yield
            return
        previous = RandomStates.capture(kinds=self._kinds)
        self.take_over()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._states = RandomStates.capture(kinds=self._kinds)
            previous.restore()

    def take_over(self) -> None:
        """Set these states permanently."""
        self._states.restore()


def hash_text(text: str) -> int:
    """Return a 63-bit hash of a text, which generators and JSON readers accept as a seed."""
    return int.from_bytes(hashlib.blake2b(encode_text(text), digest_size=8).digest(), "little") >> 1


_Kind = Annotated[str, ValueRule("the name of a generator", lambda kind: kind.isidentifier())]


@dataclass(frozen=True)
class ProcessRandomStates:
    """States of all generators of a process, or seeds to start them with after a change of the number of processes."""

    states: RandomStates
    device: Mapping[_Kind, bytes] = field(default_factory=dict)
    """State of the generator of the device, by the type of the device; empty on the CPU."""
    seeds: Mapping[_Kind, Count] = field(default_factory=dict)
    """Seeds of generators that start anew, by kind: `torch`, `python`, `numpy`, or a type of device."""

    @property
    def fingerprint(self) -> int:
        """Return a 64-bit hash of the states."""
        return _hash(self)

    @classmethod
    def capture(cls, device: torch.device, module: Any = None) -> ProcessRandomStates:
        """Return the states of this process; `module` has the device's generator, as the device modules of torch do."""
        states = RandomStates.capture()
        if device.type == "cpu":
            return cls(states)
        module = module or torch.get_device_module(device)
        state = module.get_rng_state(*_device_argument(device))
        return cls(states, {device.type: state.cpu().numpy().tobytes()})

    def restore(self, device: torch.device, module: Any = None) -> None:
        """Set the states; generators without one keep theirs.

        If the generator of this type of device was not saved, it is seeded from the state of torch's CPU generator.
        """
        has_numpy = self.states.numpy is not None or "numpy" in self.seeds
        if has_numpy and importlib.util.find_spec("numpy") is not None:
            importlib.import_module("numpy.random")  # a later import would start a new stream
        self.states.restore()
        for kind in KINDS:
            if kind in self.seeds:
                _seed_global(kind, self.seeds[kind])
        if device.type == "cpu":
            return
        module = module or torch.get_device_module(device)
        if device.type in self.device:
            module.set_rng_state(_to_tensor(self.device[device.type]), *_device_argument(device))
            return
        fingerprint = self.states.select(("torch",)).fingerprint
        module.manual_seed(self.seeds.get(device.type, hash_text(repr((device.type, fingerprint)))))


def derive_random_states(
    saved: Sequence[ProcessRandomStates], rank: int, world_size: int
) -> ProcessRandomStates:
    """Return the states of a rank of another world size, from those of the old ranks in order.

    The first rank keeps its streams, from which the orders of the next epochs are drawn. A stream that was equal on several ranks
    is kept on all. Any other is seeded anew on each rank, from all the old states, the rank and the world size.
    """
    kept: dict[str, Any] = {}
    device: dict[str, bytes] = {}
    seeds: dict[str, int] = {}
    kinds = dict.fromkeys(kind for each in saved for kind in (*each.states.kinds, *each.device))
    for kind in kinds:
        states: list[Any] = [each.device.get(kind, getattr(each.states, kind, None)) for each in saved]
        is_first = rank == 0 and states[0] is not None
        if is_first or (len(states) > 1 and len(set(states)) == 1):
            (device if kind in saved[0].device else kept)[kind] = states[0]
        else:
            seeds[kind] = hash_text(repr((kind, _hash(states), rank, world_size)))
    return ProcessRandomStates(RandomStates(**kept), device, seeds)


def _seed_global(kind: str, seed: int) -> None:
    if kind == "python":
        random.seed(seed)
    elif kind == "torch":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices too
    elif importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return the device as an argument; the functions of mps take none."""
    return () if device.type == "mps" else (device,)
