"""Random number generators: seeding, saving and restoring states, and sharing states between ranks."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel_runtime.backends import current_data_rank, seed_device
from accel_runtime.backends.base import Backend
from accel_runtime.environment.text import encode_text

__all__ = [
    "KINDS",
    "IsolatedRNG",
    "are_equal",
    "broadcast_from_first",
    "broadcast_rng_types",
    "capture_rng_state",
    "capture_states",
    "current_states",
    "derive_rng_state",
    "fingerprint_states",
    "hash_text",
    "restore_rng_state",
    "restore_states",
    "set_seed",
    "to_bytes",
    "to_serializable",
]


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
"""Global generators that samplers, datasets and transforms draw from."""

States = dict[str, Any]
"""States of generators by kind; those of a loader's own generators are a list under `generators`."""


def capture_states(generators: Sequence[torch.Generator] = (), kinds: Sequence[str] = KINDS) -> States:
    """Return the states of the global generators in `kinds`, and of `generators`, in a form that can be saved."""
    return {"generators": [generator.get_state() for generator in generators]} | to_serializable(
        current_states(kinds)
    )


def to_bytes(states: States) -> States:
    """Return the result of `current_states` without tensors, which another process would receive in shared memory."""
    return states | ({"torch": states["torch"].numpy().tobytes()} if "torch" in states else {})


def to_serializable(states: States) -> States:
    """Return the result of `current_states` or `to_bytes` in a form that can be saved."""
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


def restore_states(states: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Restore the result of `capture_states`; generators without a state in it do not change."""
    for generator, state in zip(generators, states.get("generators", ()), strict=False):
        generator.set_state(state)
    global_states = {kind: states[kind] for kind in KINDS if kind in states}
    if "python" in global_states:
        version, numbers, spare = global_states["python"]
        global_states["python"] = (version, tuple(numbers), spare)
    if "numpy" in global_states:
        name, keys, *rest = global_states["numpy"]
        global_states["numpy"] = (name, keys.numpy().astype("uint32"), *rest)
    _set_states(global_states)


def are_equal(states: States, others: States) -> bool:
    """Return whether two results of `current_states` are equal."""
    if states.keys() != others.keys() or states.get("python") != others.get("python"):
        return False
    pairs = zip(states.get("numpy", ()), others.get("numpy", ()), strict=True)
    numpys = all(
        bool((first == second).all()) if hasattr(first, "all") else first == second for first, second in pairs
    )
    return numpys and ("torch" not in states or torch.equal(states["torch"], others["torch"]))


def broadcast_from_first(states: States, backend: Backend) -> States:
    """Return the first rank's states; they are sent only if fingerprints differ.

    If all ranks have the same, the very dict that was passed is returned on every rank, otherwise another one.
    """
    if backend.topology.world_size == 1:
        return states
    fingerprints = backend.all_gather_numbers([fingerprint_states(states)], "random states")
    if len(set(fingerprints)) == 1:
        return states
    return dict(backend.broadcast_object(states, "random states"))


class IsolatedRNG:
    """Random states that are set inside `with`, and continue where the last `with` ended.

    Args:
        states: The result of `capture_states`; by default the current ones. A loader's own generators are ignored.
        current: The result of `capture_states` for the current states. A generator that is in its state already is then
            not isolated, so that it is drawn from as without accel.
    """

    def __init__(self, states: States | None = None, current: States | None = None) -> None:
        kinds = [kind for kind in KINDS if states is None or kind in states]
        if states is not None and current is not None:
            same = states is current
            kinds = [
                kind for kind in kinds if not same and _describe(states[kind]) != _describe(current.get(kind))
            ]
        previous = current_states(kinds)
        if states is not None:
            restore_states({kind: states[kind] for kind in kinds})
        self._kinds = kinds
        self._states = current_states(kinds)
        self._inside = False
        _set_states(previous)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Set these states, and restore the others at the end; nested contexts change nothing."""
        if self._inside or not self._kinds:
            yield
            return
        previous = current_states(self._kinds)
        self.take_over()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._states = current_states(self._kinds)
            _set_states(previous)

    def take_over(self) -> None:
        """Set these states permanently."""
        _set_states(self._states)


def current_states(kinds: Sequence[str] = KINDS) -> States:
    """Return the current states, quickly, in a form that cannot be saved."""
    states: States = {}
    if "torch" in kinds:
        states["torch"] = torch.get_rng_state()
    if "python" in kinds:
        states["python"] = random.getstate()
    if "numpy" in kinds and (numpy := _numpy_random()):
        states["numpy"] = numpy.get_state()
    return states


def _set_states(states: States) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and (numpy := _numpy_random()):
        numpy.set_state(states["numpy"])


def _numpy_random() -> Any:
    """Return NumPy's random module if NumPy is loaded; it is never imported here."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def fingerprint_states(states: States) -> int:
    """Return a 64-bit hash of states."""
    text = "".join(f"{kind}{_describe(states[kind])}" for kind in sorted(states))
    digest = hashlib.blake2b(encode_text(text), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_text(text: str) -> int:
    """Return a 63-bit hash of a text, which generators and JSON readers accept as a seed."""
    return int.from_bytes(hashlib.blake2b(encode_text(text), digest_size=8).digest(), "little") >> 1


def _describe(part: Any) -> str:
    """Return text that differs if states differ."""
    if isinstance(part, torch.Tensor):
        return hashlib.blake2b(ctypes.string_at(part.data_ptr(), part.nbytes)).hexdigest()
    return " ".join(map(_describe, part)) if isinstance(part, (list, tuple)) else repr(part)


Tree = dict[str, Any]
"""States by kind (`torch`, `python`, `numpy`, device type), or `{"seed": number}` to start a stream."""


def capture_rng_state(device: torch.device, module: Any = None) -> Tree:
    """Return the generator states of this process, including that of its device.

    `module` provides the device's generator like the device modules of torch.
    """
    states = capture_states()
    del states["generators"]
    version, words, spare = states["python"]
    states["python"] = [version, torch.tensor(words), spare]
    if device.type != "cpu":
        module = module or torch.get_device_module(device)
        states[device.type] = module.get_rng_state(*_device_argument(device))
    return states


def restore_rng_state(tree: Tree, device: torch.device, module: Any = None) -> None:
    """Restore states from `capture_rng_state` or `derive_rng_state`; missing kinds keep theirs.

    If the generator of this kind of device was not saved, it is seeded from the state of torch's CPU generator.
    """
    seeds = {kind: state["seed"] for kind, state in tree.items() if isinstance(state, dict)}
    states = {kind: state for kind, state in tree.items() if kind not in seeds}
    if "numpy" in tree and importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random")  # a later import would start a new stream
    if "python" in states:
        version, words, spare = states["python"]
        states["python"] = [version, words.tolist(), spare]
    restore_states({kind: states[kind] for kind in KINDS if kind in states})
    if device.type != "cpu":
        module = module or torch.get_device_module(device)
        if device.type in states:
            module.set_rng_state(states[device.type], *_device_argument(device))
        elif device.type not in seeds:
            fingerprint = fingerprint_states({"torch": tree.get("torch")})
            seeds[device.type] = hash_text(repr((device.type, fingerprint)))
    for kind, seed in seeds.items():
        if kind == device.type != "cpu":
            module.manual_seed(seed)
        elif kind in KINDS:
            _seed_global(kind, seed)


def derive_rng_state(trees: Sequence[Tree], rank: int, world_size: int) -> Tree:
    """Return the states of a rank of another world size, from those of the old ranks in order.

    A stream that was equal on several ranks is kept on all. Any other is seeded anew on each rank, from all the
    old states, the rank and the world size.
    """
    derived: Tree = {}
    for kind in dict.fromkeys(kind for tree in trees for kind in tree):
        states = [tree.get(kind) for tree in trees]
        fingerprints = [None if state is None else fingerprint_states({kind: state}) for state in states]
        is_equal = len(fingerprints) > 1 and len(set(fingerprints)) == 1
        seed = hash_text(repr((kind, fingerprints, rank, world_size)))
        derived[kind] = states[0] if is_equal else {"seed": seed}
    return derived


def _seed_global(kind: str, seed: int) -> None:
    if kind == "python":
        random.seed(seed)
    elif kind == "torch":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices too
    else:
        importlib.import_module("numpy").random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return the device as an argument; the functions of mps take none."""
    return () if device.type == "mps" else (device,)
