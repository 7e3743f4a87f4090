"""Functions on nested batches: the tensors of any mix of dicts, lists and tuples, in a fixed order."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = [
    "ContainerSpec",
    "FlattenedData",
    "TensorSpec",
    "build_device_check",
    "describe_structure",
    "find_special_kind",
    "flatten_data",
    "has_dtensor",
    "leaves",
    "list_locations",
    "map_leaves",
    "map_movable",
    "map_tensors",
    "rebuild",
    "send_to",
]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to everything that is not a dict, list or tuple.

    Containers keep their types: named tuples, subclasses of `dict`, and any other mapping that can be built from a
    dict.
    """
    if isinstance(tree, (list, tuple)):
        return rebuild(tree, [map_leaves(function, item) for item in tree])
    if isinstance(tree, Mapping):
        return rebuild(tree, {key: map_leaves(function, value) for key, value in tree.items()})
    return function(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to its tensors."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaves(tree: Any) -> list[Any]:
    """Return everything in `tree` that is not a dict, list or tuple, in the order of `map_leaves`."""
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def send_to(tree: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return `tree` with its tensors on `device`; tensors already there are not copied."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device)

    return map_movable(move, tree)


def map_movable(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to its tensors and to objects with a method `to`.

    Such an object may be a container: a `TensorDict`, a `PackedSequence` and a `BatchEncoding` hold more than their items.
    """
    if isinstance(tree, torch.Tensor) or callable(getattr(tree, "to", None)):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return rebuild(tree, [map_movable(function, item) for item in tree])
    if isinstance(tree, Mapping):
        return rebuild(tree, {key: map_movable(function, value) for key, value in tree.items()})
    return tree


def build_device_check(device: torch.device) -> Callable[[Any], bool]:
    """Return a function that checks if a batch is a plain list, tuple or dict of plain tensors on the device."""
    plain = torch.Tensor
    # On the CPU it can be asked without an object for the device of every tensor.
    cpu = device.type == "cpu"

    def is_on_device(tree: Any) -> bool:
        kind = type(tree)
        if kind is not list and kind is not tuple and kind is not dict:
            return False
        for leaf in tree.values() if kind is dict else tree:
            if type(leaf) is not plain or not (leaf.is_cpu if cpu else leaf.device == device):
                return False
        return True

    return is_on_device


def rebuild(original: Any, items: Any) -> Any:
    """Return a container of `original`'s type with `items`: a list for lists and tuples, otherwise a dict."""
    if isinstance(original, tuple) and hasattr(original, "_fields"):
        return type(original)(*items)
    if isinstance(original, defaultdict):
        return type(original)(original.default_factory, items)
    if type(original) is type(items):
        return items
    rebuilt = type(original)(items)
    if hasattr(rebuilt, "auto_batch_size_"):  # a TensorDict is made without batch dimensions
        rebuilt.auto_batch_size_(batch_dims=original.batch_dims)
    return rebuilt


def has_dtensor(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of the tensors is a DTensor."""
    # Not imported here: it takes seconds, and there is no DTensor before it is loaded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


class TensorSpec(NamedTuple):
    """Dtype, shape and device type of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    def with_free_dimensions(self, free: str) -> TensorSpec:
        """Return the spec with -1 for dimensions that may differ: the `first`, or all `sizes`."""
        count = len(self.shape) if free == "sizes" else 1
        return self._replace(shape=(-1,) * min(count, len(self.shape)) + tuple(self.shape[count:]))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


class ContainerSpec(NamedTuple):
    """Type and keys of a container."""

    kind: str
    keys_: int | tuple[Any, ...]
    """The keys of a mapping, or the length of a sequence."""

    def __repr__(self) -> str:
        keys = self.keys_ if isinstance(self.keys_, int) else ", ".join(map(_format_key, self.keys_))
        return f"{self.kind}({keys})"


class FlattenedData(NamedTuple):
    """Nested data, flattened."""

    structure: tuple[Any, ...]
    """Containers, each followed by its items; specs of tensors; type names of other leaves."""
    tensors: list[torch.Tensor]
    """The tensors in the order of `nested.map_leaves`."""
    specs: tuple[TensorSpec, ...]
    """The specs of the tensors."""
    unsupported: str | None
    """The type of the first leaf that is not a dense tensor."""


def flatten_data(data: Any) -> FlattenedData:
    """Flatten nested data."""
    structure: list[Any] = []
    tensors: list[torch.Tensor] = []
    unsupported: list[str] = []
    _flatten_into(data, structure, tensors, unsupported)
    specs = tuple(item for item in structure if type(item) is TensorSpec)
    return FlattenedData(tuple(structure), tensors, specs, unsupported[0] if unsupported else None)


def _flatten_into(
    data: Any, structure: list[Any], tensors: list[torch.Tensor], unsupported: list[str]
) -> None:
    if isinstance(data, torch.Tensor):
        if (kind := find_special_kind(data)) is not None:
            structure.append(kind)
            unsupported.append(kind)
            return
        structure.append(TensorSpec(data.dtype, data.shape, data.device.type))
        tensors.append(data)
    elif isinstance(data, (list, tuple)):
        structure.append(ContainerSpec(type(data).__name__, len(data)))
        for item in data:
            _flatten_into(item, structure, tensors, unsupported)
    elif isinstance(data, Mapping):
        # `keys()`, since a mapping may iterate over something else: a TensorDict iterates over rows.
        structure.append(ContainerSpec(type(data).__name__, tuple(data.keys())))
        for value in data.values():
            _flatten_into(value, structure, tensors, unsupported)
    else:
        structure.append(type(data).__name__)
        unsupported.append(structure[-1])


_PACKED = frozenset(
    dtype
    for sign in ("", "u")
    for bits in range(1, 8)
    if (dtype := getattr(torch, f"{sign}int{bits}", None)) is not None
)
"""Integers of less than a byte, which torch cannot copy."""


def find_special_kind(tensor: torch.Tensor) -> str | None:
    """Return the kind of a tensor that cannot be packed into bytes and rebuilt from its shape, or None for a dense one."""
    if tensor.is_nested:
        return "nested tensor"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.').removeprefix('_')} tensor"
    if tensor.is_quantized:
        per_tensor = tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}
        return "quantized tensor" if per_tensor else "per-channel quantized tensor"
    if tensor.dtype in _PACKED:
        return f"{str(tensor.dtype).removeprefix('torch.')} tensor"
    return "distributed tensor" if has_dtensor((tensor,)) else None


def describe_structure(structure: tuple[Any, ...]) -> str:
    """Return a structure as text, such as `['x'][0]: float32[3] on cpu`."""
    return ", ".join(
        f"{location}: {leaf}" if location else str(leaf) for location, leaf in list_locations(structure)
    )


def list_locations(structure: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return every leaf with its location in Python syntax."""
    return list(_iterate_locations(iter(structure), "")) if structure else []


def _iterate_locations(items: Iterator[Any], location: str) -> Iterator[tuple[str, Any]]:
    item = next(items)
    if not isinstance(item, ContainerSpec):
        yield location, item
        return
    if not item.keys_:
        yield location, f"empty {item.kind}"
    for key in range(item.keys_) if isinstance(item.keys_, int) else item.keys_:
        yield from _iterate_locations(items, f"{location}[{_format_key(key)}]")


def _format_key(key: Any) -> str:
    """Return the repr of a key if it is the same in every process, else its type."""
    return repr(key) if isinstance(key, (str, int, float, tuple, bytes)) else type(key).__name__
