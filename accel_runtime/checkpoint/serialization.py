"""Serialize state trees to JSON and tensors, and hash tensors: types are restored exactly, and loading runs no code."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from accel_runtime.backends.quantized_tensors import is_composed
from accel_runtime.foundation.tensor_bytes import memory_key
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.state_tree import KEY, MAX_LEVELS

__all__ = ["deserialize", "serialize"]

_NUMPY = re.compile(r"[<>|=][biufc]\d{1,2}")
_MAX_SHOWN = 60
"""Characters of a deep path in a message."""
_MAX_BITS = 1 << 12
"""Python limits the decimal conversion of longer integers."""
_FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}


def serialize(tree: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a state tree as JSON, and the tensors that it refers to, named `name/path`.

    A tree consists of numbers, text, bytes, None, tensors, NumPy arrays and numbers, torch dtypes, devices and
    sizes, paths; and lists, tuples, sets, dicts and the dicts of `collections`. `CheckpointError` names the
    place of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _Serializer(tensors).pack(tree, name), tensors


def deserialize(encoded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree for JSON and tensors by name; raise `CheckpointError` if the JSON is not valid."""
    try:
        return _build(encoded, tensors)
    except KeyError as error:
        raise CheckpointError(f"{error.args[0]!r} is missing") from error
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error


def _build(encoded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_build(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if KEY not in encoded:
        return {key: _build(value, tensors) for key, value in encoded.items()}
    return _build_special(encoded, tensors)


class _Serializer:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._open_ids: set[int] = set()
        self._names_by_memory: dict[Any, str] = {}

    def pack(self, item: Any, path: str) -> Any:
        if item is None or type(item) in {bool, str} or (type(item) is float and math.isfinite(item)):
            return item
        if type(item) is int:
            return item if item.bit_length() < _MAX_BITS else {KEY: "int", "hex": hex(item)}
        if isinstance(item, torch.Tensor):
            return self._tensor(item, path)
        if (plain := _serialize_scalar(item)) is not None:
            return plain
        if id(item) in self._open_ids:
            raise CheckpointError(f"{path} cannot be saved: it contains itself")
        if len(self._open_ids) == MAX_LEVELS:
            raise CheckpointError(
                f"{path[:_MAX_SHOWN]}... cannot be saved: more than {MAX_LEVELS} lists or dicts are inside each other"
            )
        self._open_ids.add(id(item))
        try:
            return self._nested(item, path)
        finally:
            self._open_ids.remove(id(item))

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, str]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(f"{path} cannot be saved: it is a tensor without plain memory ({kind})")
        if is_composed(tensor):
            raise CheckpointError(
                f"{path} cannot be saved: it is a tensor without plain memory ({type(tensor).__name__}). Write the trained parameters "
                "alone, as accelerator.save() of their part of accelerator.get_state_dict(model)."
            )
        name = self._names_by_memory.get(memory_key(tensor))
        if name is None:
            # `#` separates the rank in names of rank-specific tensors.
            name = path.replace("#", "%23")
            while name in self._tensors:
                name += "'"
            self._tensors[name] = tensor.detach()
            self._names_by_memory[memory_key(tensor)] = name
        return {KEY: "tensor", "name": name}

    def _nested(self, item: Any, path: str) -> Any:
        kind = type(item)
        if kind in {list, dict}:
            return self._dict(item, path) if kind is dict else self._list(item, path)
        for name, sequence in _SEQUENCES.items():
            if kind is sequence:
                ordered = sorted(item, key=repr) if name.endswith("set") else item
                return {KEY: name, "items": self._list(ordered, path)}
        if kind in {Counter, OrderedDict}:
            return {KEY: kind.__name__, "items": self._pairs(item, path)}
        if kind is deque:
            return {KEY: "deque", "items": self._list(item, path), "maxlen": item.maxlen}
        if kind is defaultdict:
            return self._defaultdict(item, path)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and item.dtype.kind in "biufc":
            try:
                tensor = torch.from_numpy(item.copy())
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path} cannot be saved: it is an array of {item.dtype}, {error}"
                ) from error
            return {KEY: "ndarray", "tensor": self._tensor(tensor, path)}
        raise CheckpointError(
            f"{path} cannot be saved: it is a {kind.__module__}.{kind.__qualname__}. A checkpoint contains numbers, text, "
            "tensors, and lists and dicts of them, so that loading runs no code. Convert it, or leave it out of the state."
        )

    def _list(self, items: Iterable[Any], path: str) -> list[Any]:
        return [self.pack(value, f"{path}{_separator(path)}{index}") for index, value in enumerate(items)]

    def _dict(self, item: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and key != KEY for key in item):
            return {key: self.pack(value, f"{path}{_separator(path)}{key}") for key, value in item.items()}
        return {KEY: "dict", "items": self._pairs(item, path)}

    def _pairs(self, item: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [self.pack(key, path), self.pack(value, f"{path}{_separator(path)}{key}")]
            for key, value in item.items()
        ]

    def _defaultdict(self, item: defaultdict[Any, Any], path: str) -> Any:
        factory = next(
            (name for name, factory_type in _FACTORIES.items() if item.default_factory is factory_type), None
        )
        if factory is None and item.default_factory is not None:
            raise CheckpointError(
                f"{path} cannot be saved: it is a defaultdict of {item.default_factory!r}; "
                f"{', '.join(_FACTORIES)} can be saved, and a dict"
            )
        return {KEY: "defaultdict", "items": self._pairs(item, path), "factory": factory}


def _separator(path: str) -> str:
    return "." if "/" in path else "/"


def _serialize_scalar(item: Any) -> dict[str, Any] | None:
    """Serialize a value that has no children and is not a tensor; None for others."""
    if type(item) in {bytes, bytearray}:
        return {KEY: type(item).__name__, "base64": base64.b64encode(item).decode()}
    if isinstance(item, (torch.dtype, torch.device)):
        return {KEY: type(item).__name__, "value": str(item).removeprefix("torch.")}
    if type(item) in {complex, float}:
        return {KEY: type(item).__name__, "value": repr(item)}
    if isinstance(item, PurePath):
        return {KEY: "path", "value": str(item)}
    kind = type(item)
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(item, "shape", None) == ():
        # Its bytes: a float32 would change on the way through a Python number.
        raw = base64.b64encode(item.tobytes()).decode()
        return {KEY: "numpy", "dtype": item.dtype.str, "base64": raw} if item.dtype.kind in "biufc" else None
    return None


def _build_special(encoded: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    kind = encoded[KEY]
    if kind == "tensor":
        return tensors[encoded["name"]]
    if kind == "ndarray":
        return _build(encoded["tensor"], tensors).numpy()
    if kind in _SCALARS:
        return _SCALARS[kind](encoded)
    return _CONTAINERS[kind](_build(encoded["items"], tensors), encoded)


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def _parse_numpy(encoded: dict[str, Any]) -> Any:
    import numpy as np  # noqa: PLC0415 - NumPy is optional, as in torch

    if not _NUMPY.fullmatch(encoded["dtype"]):
        raise CheckpointError(f"{encoded['dtype']!r} is not a numeric dtype")
    return np.frombuffer(base64.b64decode(encoded["base64"]), np.dtype(encoded["dtype"]))[0]


_SCALARS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda encoded: int(encoded["hex"], 16),
    "float": lambda encoded: float(encoded["value"]),
    "complex": lambda encoded: complex(encoded["value"]),
    "bytes": lambda encoded: base64.b64decode(encoded["base64"]),
    "bytearray": lambda encoded: bytearray(base64.b64decode(encoded["base64"])),
    "dtype": lambda encoded: _parse_dtype(encoded["value"]),
    "device": lambda encoded: torch.device(encoded["value"]),
    "path": lambda encoded: Path(encoded["value"]),
    "numpy": _parse_numpy,
}
_CONTAINERS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    **{word: lambda items, _, made=made: made(items) for word, made in _SEQUENCES.items()},  # type: ignore[misc]
    "dict": lambda items, _: dict(items),
    "OrderedDict": lambda items, _: OrderedDict(items),
    "Counter": lambda items, _: Counter(dict(items)),
    "deque": lambda items, encoded: deque(items, encoded["maxlen"]),
    "defaultdict": lambda items, encoded: defaultdict(
        encoded["factory"] and _FACTORIES[encoded["factory"]], items
    ),
}
