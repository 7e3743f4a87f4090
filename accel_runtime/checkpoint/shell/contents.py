"""What an item consists of, as a file for other programs has it: names, tied names, and what is no tensor. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accel_runtime.checkpoint.errors import RequestError
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.manifest import own_name

__all__ = ["Contents", "contents"]

_MAPPINGS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
_SEQUENCES = frozenset({"tuple", "set", "frozenset", "deque", "size"})


@dataclass(frozen=True)
class Contents:
    """An item's tensors as a file has them."""

    tensors: dict[str, str]
    """What they are called in the file, and in the manifest; each once."""
    ties: dict[str, str]
    """Names that mean the same tensor as another one."""
    others: list[str]
    """What is no tensor, and has no place in the file."""


def contents(found: Found, item: str, rank: int = 0) -> Contents:
    """Which tensors an item has, and what they are called there.

    Args:
        found: The checkpoint.
        item: `model`, `model_1`, `optimizer`, ...
        rank: Whose, where the processes had different ones.

    Raises:
        RequestError: There is no such item, or rank.
    """
    manifest = found.manifest
    if item not in manifest.items:
        raise RequestError(f"{found.path} has no {item}; it has {', '.join(manifest.items)}")
    if not 0 <= rank < manifest.world_size:
        raise RequestError(
            f"{found.path} has no rank {rank}: {manifest.world_size} process(es) wrote it, counted from 0"
        )
    tree = manifest.own[item][rank] if item in manifest.own else manifest.values[item]
    known = Contents({}, {}, [])
    first: dict[str, str] = {}
    for name, tensor in _leaves(tree, ""):
        if tensor is None:
            known.others.append(name)
        elif tensor in first:
            known.ties[name] = first[tensor]
        else:
            own = own_name(tensor, rank)
            first[tensor] = name
            known.tensors[name] = own if own in manifest.tensors else tensor
    return known


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str | None]]:
    """The values of a tree as `values.packed` gives it, with their paths: the name of a tensor, else None."""
    kind = tree.get("$") if isinstance(tree, dict) else None
    if kind == "tensor":
        yield path, tree["name"]
    elif kind == "ndarray":
        yield path, tree["tensor"]["name"]
    else:
        pairs = _pairs(tree, kind)
        if pairs is None:
            yield path, None
        for key, value in pairs or ():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _pairs(tree: Any, kind: str | None) -> Any:
    """What a part of a tree holds, by key; None where it holds nothing."""
    if kind in _MAPPINGS:
        return tree["items"]
    if isinstance(tree, list) or kind in _SEQUENCES:
        return enumerate(tree if kind is None else tree["items"])
    return tree.items() if isinstance(tree, dict) and kind is None else None
