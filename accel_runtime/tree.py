"""Walking nested batches: the tensors of any mix of dicts, lists and tuples, in a fixed order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["leaves", "map_leaves", "map_tensors", "paths", "presence", "rebuilt", "send"]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` applied to everything in it that is not a dict, list or tuple.

    Containers keep their own type: named tuples, subclasses of `dict`, and any other mapping that can
    be built from a dict.
    """
    if isinstance(tree, (list, tuple)):
        return rebuilt(tree, [map_leaves(function, item) for item in tree])
    if isinstance(tree, Mapping):
        return rebuilt(tree, {key: map_leaves(function, value) for key, value in tree.items()})
    return function(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with `function` applied to its tensors; everything else stays as it is."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def paths(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its place, written as Python would (`['x'][0]`), in the order `map_leaves` visits."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from paths(value, f"{place}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from paths(item, f"{place}[{index}]")
    else:
        yield place, tree


def leaves(tree: Any) -> list[Any]:
    """Everything in `tree` that is not a dict, list or tuple."""
    return [leaf for _, leaf in paths(tree)]


def send(tree: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """`tree` with its tensors on `device`; tensors already there are not copied.

    Objects that are no tensor but can move themselves (`.to(device)`) do, containers among them: a `TensorDict`, a
    `PackedSequence` and a `BatchEncoding` hold more than their items.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
        if callable(getattr(leaf, "to", None)):
            return leaf.to(device)
        if isinstance(leaf, (list, tuple)):
            return rebuilt(leaf, [move(item) for item in leaf])
        if isinstance(leaf, Mapping):
            return rebuilt(leaf, {key: move(value) for key, value in leaf.items()})
        return leaf

    return move(tree)


def presence(device: torch.device) -> Callable[[Any], bool]:
    """Tells whether something is a plain list, tuple or dict of plain tensors on the device, as most batches are."""
    plain = torch.Tensor
    # On the CPU it can be asked without an object for the device of every tensor.
    cpu = device.type == "cpu"

    def is_there(tree: Any) -> bool:
        kind = type(tree)
        if kind is not list and kind is not tuple and kind is not dict:
            return False
        for leaf in tree.values() if kind is dict else tree:
            if type(leaf) is not plain or not (leaf.is_cpu if cpu else leaf.device == device):
                return False
        return True

    return is_there


def rebuilt(original: Any, items: Any) -> Any:
    """A container of `original`'s type that holds `items`: a list for lists and tuples, else a dict."""
    if isinstance(original, tuple) and hasattr(original, "_fields"):
        return type(original)(*items)
    if isinstance(original, defaultdict):
        return type(original)(original.default_factory, items)
    if type(original) is type(items):
        return items
    made = type(original)(items)
    if hasattr(made, "auto_batch_size_"):  # a TensorDict is made without batch dimensions
        made.auto_batch_size_(batch_dims=original.batch_dims)
    return made
