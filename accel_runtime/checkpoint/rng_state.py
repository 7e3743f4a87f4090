"""The item `random`: states of the random generators of a script, also for another world size."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Sequence
from typing import Any

import torch

from accel_runtime.rng import KINDS, capture_states, fingerprint_states, hash_text, restore_states

__all__ = ["capture_rng_state", "derive_rng_state", "restore_rng_state"]

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
        states[device.type] = _capture_device(device, module or _device_module(device))
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
    for kind, seed in seeds.items():
        _seed(kind, seed, device, module)
    if device.type != "cpu" and device.type not in seeds:
        _restore_device(states.get(device.type), tree, device, module)


def derive_rng_state(trees: Sequence[Tree], rank: int, world_size: int) -> Tree:
    """Return the states of a rank of another world size, from those of the old ranks in order.

    A stream that was equal on several ranks is kept on all. Any other is seeded anew on each rank, from all the old
    states, the
    rank and the world size.
    """
    kinds = dict.fromkeys(kind for tree in trees for kind in tree)
    return {
        kind: _derive_stream(kind, [tree.get(kind) for tree in trees], rank, world_size) for kind in kinds
    }


def _derive_stream(kind: str, states: list[Any], rank: int, world_size: int) -> Any:
    fingerprints = [None if state is None else fingerprint_states({kind: state}) for state in states]
    if len(fingerprints) > 1 and len(set(fingerprints)) == 1:
        return states[0]
    return {"seed": _hash_parts(kind, fingerprints, rank, world_size)}


def _hash_parts(*parts: Any) -> int:
    """Return a seed that depends on all parts."""
    return hash_text(repr(parts))


def _seed(kind: str, seed: int, device: torch.device, module: Any) -> None:
    """Seed a generator."""
    if kind == "python":
        random.seed(seed)
    elif kind == "torch":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices too
    elif kind == "numpy":
        numpy = importlib.import_module("numpy")
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    elif kind == device.type:
        (module or _device_module(device)).manual_seed(seed)


def _capture_device(device: torch.device, module: Any) -> torch.Tensor:
    state: torch.Tensor = module.get_rng_state(*_device_argument(device))
    return state


def _restore_device(state: torch.Tensor | None, tree: Tree, device: torch.device, module: Any) -> None:
    if state is None:
        _seed(
            device.type,
            _hash_parts(device.type, fingerprint_states({"torch": tree.get("torch")})),
            device,
            module,
        )
    else:
        (module or _device_module(device)).set_rng_state(state, *_device_argument(device))


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return the device as an argument; the functions of mps take none."""
    return () if device.type == "mps" else (device,)
