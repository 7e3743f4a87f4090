"""The item `random`: the states of the generators that a script draws from, and what other ranks make of them."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Sequence
from typing import Any

import torch

from accel_runtime.randomness import KINDS, capture, fingerprint, restore, seed_of

__all__ = ["captured", "derived", "restored"]

Tree = dict[str, Any]
"""By kind: `torch`, `python`, `numpy` and the type of the device. A state, or `{"seed": number}` to begin a stream."""


def captured(device: torch.device, module: Any = None) -> Tree:
    """The states in force in this process.

    Args:
        device: Its own generator is kept too, where it has one that is not the CPU's.
        module: What has that generator, as torch's modules of devices have; None is torch's.
    """
    states = capture()
    del states["generators"]
    version, words, spare = states["python"]
    states["python"] = [version, torch.tensor(words), spare]
    if device.type != "cpu":
        states[device.type] = _of_device(device, module or _module(device))
    return states


def restored(tree: Tree, device: torch.device, module: Any = None) -> None:
    """Put back what `captured` or `derived` gave; what is not in it is left alone.

    A device whose own generator was not kept, as the run was on another kind, begins a stream that follows
    from the state of torch's generator on the CPU.
    """
    seeds = {kind: state["seed"] for kind, state in tree.items() if isinstance(state, dict)}
    states = {kind: state for kind, state in tree.items() if kind not in seeds}
    if "numpy" in tree and importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random")  # whoever loads it later would draw from a new stream
    if "python" in states:
        version, words, spare = states["python"]
        states["python"] = [version, words.tolist(), spare]
    restore({kind: states[kind] for kind in KINDS if kind in states})
    for kind, seed in seeds.items():
        _seed(kind, seed, device, module)
    if device.type != "cpu" and device.type not in seeds:
        _restore_device(states.get(device.type), tree, device, module)


def derived(trees: Sequence[Tree], rank: int, world_size: int) -> Tree:
    """The states of a rank of another world size.

    A stream that was the same on several ranks is the same on all. One that was not, and that of a single rank, begins
    anew on every rank, from a seed that follows from all the old states, the rank and the world size.

    Args:
        trees: What `captured` gave on the old ranks, in their order.
        rank: The new one.
        world_size: The new one.
    """
    kinds = dict.fromkeys(kind for tree in trees for kind in tree)
    return {kind: _derived(kind, [tree.get(kind) for tree in trees], rank, world_size) for kind in kinds}


def _derived(kind: str, states: list[Any], rank: int, world_size: int) -> Any:
    prints = [None if state is None else fingerprint({kind: state}) for state in states]
    if len(prints) > 1 and len(set(prints)) == 1:
        return states[0]
    return {"seed": _hashed(kind, prints, rank, world_size)}


def _hashed(*parts: Any) -> int:
    """A seed that any change of the parts changes."""
    return seed_of(repr(parts))


def _seed(kind: str, seed: int, device: torch.device, module: Any) -> None:
    """Begin a stream."""
    if kind == "python":
        random.seed(seed)
    elif kind == "torch":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices too
    elif kind == "numpy":
        numpy = importlib.import_module("numpy")
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    elif kind == device.type:
        (module or _module(device)).manual_seed(seed)


def _of_device(device: torch.device, module: Any) -> torch.Tensor:
    state: torch.Tensor = module.get_rng_state(*_which(device))
    return state


def _restore_device(state: torch.Tensor | None, tree: Tree, device: torch.device, module: Any) -> None:
    if state is None:
        _seed(device.type, _hashed(device.type, fingerprint({"torch": tree.get("torch")})), device, module)
    else:
        (module or _module(device)).set_rng_state(state, *_which(device))


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """The device as an argument; there is but one mps, and its functions take none."""
    return () if device.type == "mps" else (device,)
