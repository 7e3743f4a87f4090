"""Functions on nested data: the tensors of any mix of dicts, lists, tuples and data objects, in a fixed order.

A data object is an instance of a dataclass, of a class of attrs or of `SimpleNamespace`, or any object that has only data:
tensors, numbers, text, functions, and containers of them. An object with modules or other state is a leaf, as a copy of it
would not be what the script has.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
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
    "iterate_hidden_tensors",
    "leaves",
    "list_attributes",
    "list_locations",
    "list_tensors",
    "map_leaves",
    "map_movable",
    "map_tensors",
    "pack_tensors",
    "rebuild",
    "send_to",
    "unpack_tensors",
]


def map_leaves(function: Callable[[Any], Any], tree: Any, *, objects: bool = True) -> Any:
    """Return `tree` with `function` applied to everything that is not a dict, list, tuple or data object.

    Containers keep their types: named tuples, subclasses of `dict`, and any other mapping that can be built from a
    dict. A data object is copied if one of its values changes. With `objects=False` it is a leaf.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple, deque)):
        return rebuild(tree, [map_leaves(function, item, objects=objects) for item in tree])
    if isinstance(tree, Mapping):
        return rebuild(
            tree, {key: map_leaves(function, value, objects=objects) for key, value in tree.items()}
        )
    if objects and (attributes := list_attributes(tree)):
        return _map_attributes(lambda value: map_leaves(function, value), tree, attributes)
    return function(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to its tensors."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaves(tree: Any, *, objects: bool = True) -> list[Any]:
    """Return everything in `tree` that `map_leaves` changes, in its order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value, objects=objects)]
    if isinstance(tree, (list, tuple, deque)):
        return [leaf for item in tree for leaf in leaves(item, objects=objects)]
    if objects and (attributes := list_attributes(tree)):
        return [leaf for value in attributes.values() for leaf in leaves(value)]
    return [tree]


_CONTAINERS, _PLAIN = frozenset({list, tuple, dict}), frozenset({torch.Tensor})


def list_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in `tree`, in the order of `map_leaves`."""
    if type(tree) in _CONTAINERS:
        items = tree.values() if type(tree) is dict else tree
        if _PLAIN.issuperset(map(type, items)):  # as in most batches
            return list(items)
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


_SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
"""Types of frequent leaves."""
_MAX_DEPTH = 16
"""Number of objects and containers around a data object; deeper ones are lists of linked objects, not outputs."""
_SEQUENCES = (list, tuple, deque, set, frozenset)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)


def list_attributes(tree: Any) -> dict[str, Any] | None:
    """Return the values of a data object by name; None for any other object."""
    if type(tree) in _SIMPLE or not _may_be_data(tree) or not _is_finite(tree, ()):
        return None
    attributes = _read_attributes(tree)
    kind = type(tree)
    is_declared = (
        dataclasses.is_dataclass(kind)
        or hasattr(kind, "__attrs_attrs__")
        or isinstance(tree, SimpleNamespace)
    )
    if not is_declared and not all(map(_is_data, attributes.values())):
        return None
    # An object of C, such as an image, has none.
    return attributes or None


# torch.compile traces these functions: it cannot compare identities, but objects by `is`.


def _may_be_data(tree: Any) -> bool:
    """Return whether an object can be made without arguments, its attributes set then, and its type is not one with state."""
    kind = type(tree)
    if not _has_default_constructor(kind):
        return False
    # Modules and functions, optimizers and loaders, iterators.
    if callable(tree) or hasattr(kind, "state_dict") or hasattr(kind, "__next__"):
        return False
    return not _is_cache(kind)


def _has_default_constructor(kind: type) -> bool:
    constructor: Any = kind.__new__
    return constructor is object.__new__ or constructor is SimpleNamespace.__new__


def _is_cache(kind: type) -> bool:
    """Return whether a class is a cache of keys and values of transformers, which the next forward pass changes."""
    return any(
        base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in kind.__mro__
    )


def _is_finite(value: Any, above: tuple[Any, ...]) -> bool:
    """Return whether no value inside of an object is one of those around it, `above`, and few are around each."""
    if type(value) in _SIMPLE or isinstance(value, torch.Tensor):
        return True
    if len(above) > _MAX_DEPTH or any(item is value for item in above):
        return False
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, _SEQUENCES):
        items = value
    elif _may_be_data(value):
        items = _read_attributes(value).values()
    above = (*above, value)
    return all(_is_finite(item, above) for item in items)


def _is_data(value: Any) -> bool:
    """Return whether a value in an object of any class is data."""
    if type(value) in _SIMPLE or isinstance(value, (torch.Tensor, *_FUNCTIONS)):
        return True
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    if isinstance(value, _SEQUENCES):
        return all(map(_is_data, value))
    if _has_default_constructor(type(value)):
        return list_attributes(value) is not None
    # Arrays, dates, paths, members of enumerations.
    return not (callable(value) or hasattr(value, "__next__"))


def _read_attributes(tree: Any) -> dict[str, Any]:
    """Return what an object has in its slots and its `__dict__`."""
    attributes = {}
    for base in reversed(type(tree).__mro__):
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in {"__dict__", "__weakref__"} and hasattr(tree, name):
                attributes[name] = getattr(tree, name)
    return attributes | getattr(tree, "__dict__", {})


def _map_attributes(function: Callable[[Any], Any], tree: Any, attributes: Mapping[str, Any]) -> Any:
    """Return a data object with other values; itself if none changes."""
    mapped = {name: function(value) for name, value in attributes.items()}
    if all(mapped[name] is value for name, value in attributes.items()):
        return tree
    return _build_object(tree, mapped)


def _build_object(original: Any, attributes: Mapping[str, Any]) -> Any:
    kind: Any = type(original)
    rebuilt = kind.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(rebuilt, name, value)  # a class may be frozen
    return rebuilt


_MAX_VISITED = 1000
"""Number of objects among which hidden tensors are searched."""


def iterate_hidden_tensors(leaf: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a leaf of `map_leaves` that is not a tensor: in an object that is not only data.

    Modules are left out, as their parameters are not data, and caches of transformers.
    """
    pending, visited = [leaf], {id(leaf)}
    while pending and len(visited) < _MAX_VISITED:
        current = pending.pop()
        if isinstance(current, torch.Tensor):
            yield current
            continue
        if isinstance(current, _SEQUENCES):
            found = list(current)
        elif isinstance(current, Mapping):
            found = list(current.values())
        elif (
            type(current) in _SIMPLE
            or isinstance(current, (type, torch.nn.Module))
            or _is_cache(type(current))
        ):
            continue
        else:
            found = list(_read_attributes(current).values())
        new = [value for value in found if id(value) not in visited]
        visited.update(map(id, new))
        pending += new


class _Packed:
    """The data of which a list has the tensors."""

    def __init__(self, data: Any) -> None:
        self.data = data


_KNOWN_TO_TORCH = (list, tuple, dict, OrderedDict)


def pack_tensors(tree: Any) -> Any:
    """Return a list of the tensors of nested data and of the data themselves, if torch does not find tensors in them.

    DDP and `fully_shard` search the outputs of a forward pass for tensors, in fewer types than `map_leaves`.
    """
    if _is_known_to_torch(tree):
        return tree
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [*tensors, _Packed(tree)] if tensors else tree


def unpack_tensors(packed: Any) -> Any:
    """Return the data of `pack_tensors`, with the tensors that are in the list now."""
    if type(packed) is not list or not packed or type(packed[-1]) is not _Packed:
        return packed
    following = iter(packed)
    return map_tensors(lambda _: next(following), packed[-1].data)


def _is_known_to_torch(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor) or type(tree) in _SIMPLE:
        return True
    if type(tree) in _KNOWN_TO_TORCH or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        return all(map(_is_known_to_torch, tree.values() if isinstance(tree, dict) else tree))
    return False


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
    if isinstance(tree, (list, tuple, deque)):
        return rebuild(tree, [map_movable(function, item) for item in tree])
    if isinstance(tree, Mapping):
        return rebuild(tree, {key: map_movable(function, value) for key, value in tree.items()})
    if attributes := list_attributes(tree):
        return _map_attributes(lambda value: map_movable(function, value), tree, attributes)
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
    """Return a container of `original`'s type with `items`: a list for lists and tuples, otherwise a dict.

    The items of a data object are its attributes.
    """
    if isinstance(original, tuple) and hasattr(original, "_fields"):
        return type(original)(*items)
    if isinstance(original, defaultdict):
        return type(original)(original.default_factory, items)
    if isinstance(original, deque):
        return type(original)(items, original.maxlen)
    if type(original) is type(items):
        return items
    kind: Any = type(original)
    if not issubclass(kind, (list, tuple, Mapping)):
        return _build_object(original, items)
    rebuilt = kind(items)
    if hasattr(rebuilt, "auto_batch_size_"):  # a TensorDict is made without batch dimensions
        rebuilt.auto_batch_size_(batch_dims=original.batch_dims)
    return rebuilt


def has_dtensor(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of the tensors is a DTensor."""
    # Not imported here: it takes seconds, and there is no DTensor before it is loaded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


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
    """The keys of a mapping, the attributes of a data object, or the length of a sequence."""
    is_object: bool = False
    """True if the keys are attributes."""

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
    elif isinstance(data, (list, tuple, deque)):
        structure.append(ContainerSpec(type(data).__name__, len(data)))
        for item in data:
            _flatten_into(item, structure, tensors, unsupported)
    elif isinstance(data, Mapping):
        # `keys()`, since a mapping may iterate over something else: a TensorDict iterates over rows.
        structure.append(ContainerSpec(type(data).__name__, tuple(data.keys())))
        for value in data.values():
            _flatten_into(value, structure, tensors, unsupported)
    elif not isinstance(data, torch.Tensor) and (attributes := list_attributes(data)):
        structure.append(ContainerSpec(type(data).__name__, tuple(attributes), is_object=True))
        for value in attributes.values():
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
        step = f".{key}" if item.is_object else f"[{_format_key(key)}]"
        yield from _iterate_locations(items, location + step)


def _format_key(key: Any) -> str:
    """Return the repr of a key if it is the same in every process, else its type."""
    return repr(key) if isinstance(key, (str, int, float, tuple, bytes)) else type(key).__name__


def is_strided_tensor(leaf: Any) -> bool:
    """Return whether a leaf is copied in the background; other tensors are copied later."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
