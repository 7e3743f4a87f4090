"""State trees as JSON and tensors: everything comes back with the type it had, and nothing runs when it does."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from accel_runtime.checkpoint.errors import CheckpointError

__all__ = ["packed", "unpacked"]

_KEY = "$"
"""The key of a JSON object that stands for something JSON has no word for."""
_NUMPY = re.compile(r"[<>|=][biufc]\d{1,2}")
_MOST_BITS = 1 << 12
"""Python does not read or write whole numbers of many more in decimal."""
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


def packed(tree: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tree as JSON and the tensors it refers to.

    Args:
        tree: Numbers, text, bytes, None, tensors, NumPy arrays and numbers, torch's dtypes, devices and sizes, paths;
            lists, tuples, sets, dicts, and the dicts of `collections`, of such.
        name: What the tree is; tensors are named `name/path`.

    Raises:
        CheckpointError: Something else is in it; the message says where.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _Packer(tensors).pack(tree, name), tensors


def unpacked(text: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `packed` was given.

    Args:
        text: Its JSON.
        tensors: Its tensors by the names they have in there.

    Raises:
        CheckpointError: It is something that `packed` does not give.
    """
    try:
        return _unpacked(text, tensors)
    except KeyError as error:
        raise CheckpointError(f"there is no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error


def _unpacked(text: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(text, list):
        return [_unpacked(item, tensors) for item in text]
    if not isinstance(text, dict):
        return text
    if _KEY not in text:
        return {key: _unpacked(value, tensors) for key, value in text.items()}
    return _special(text, tensors)


class _Packer:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._within: set[int] = set()
        self._seen: dict[Any, str] = {}

    def pack(self, item: Any, path: str) -> Any:
        if item is None or type(item) in {bool, str} or (type(item) is float and math.isfinite(item)):
            return item
        if type(item) is int:
            return item if item.bit_length() < _MOST_BITS else {_KEY: "int", "hex": hex(item)}
        if isinstance(item, torch.Tensor):
            return self._tensor(item, path)
        if (plain := _plain(item)) is not None:
            return plain
        if id(item) in self._within:
            raise CheckpointError(f"{path} cannot be saved: it contains itself")
        self._within.add(id(item))
        try:
            return self._nested(item, path)
        finally:
            self._within.remove(id(item))

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, str]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(f"{path} cannot be saved: it is a tensor without plain memory ({kind})")
        known = self._seen.get(_memory(tensor))
        if known is None:
            # A `#` sets the rank apart in the names of tensors that differ from rank to rank.
            known = path.replace("#", "%23")
            while known in self._tensors:
                known += "'"
            self._tensors[known] = tensor.detach()
            self._seen[_memory(tensor)] = known
        return {_KEY: "tensor", "name": known}

    def _nested(self, item: Any, path: str) -> Any:
        kind = type(item)
        if kind in {list, dict}:
            return self._dict(item, path) if kind is dict else self._list(item, path)
        for word, sequence in _SEQUENCES.items():
            if kind is sequence:
                ordered = sorted(item, key=repr) if word.endswith("set") else item
                return {_KEY: word, "items": self._list(ordered, path)}
        if kind in {Counter, OrderedDict}:
            return {_KEY: kind.__name__, "items": self._pairs(item, path)}
        if kind is deque:
            return {_KEY: "deque", "items": self._list(item, path), "maxlen": item.maxlen}
        return self._rare(item, path)

    def _rare(self, item: Any, path: str) -> Any:
        kind = type(item)
        if kind is defaultdict:
            return self._defaultdict(item, path)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and item.dtype.kind in "biufc":
            return {_KEY: "ndarray", "tensor": self._tensor(_of_numpy(item, path), path)}
        raise CheckpointError(
            f"{path} cannot be saved: it is a {kind.__module__}.{kind.__qualname__}. A checkpoint holds numbers, text, "
            "tensors, and lists and dicts of such, so that loading it runs no code: leave it out of the state, or give "
            "it as one of these"
        )

    def _list(self, items: Iterable[Any], path: str) -> list[Any]:
        return [self.pack(value, f"{path}{_step(path)}{index}") for index, value in enumerate(items)]

    def _dict(self, item: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and key != _KEY for key in item):
            return {key: self.pack(value, f"{path}{_step(path)}{key}") for key, value in item.items()}
        return {_KEY: "dict", "items": self._pairs(item, path)}

    def _pairs(self, item: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [self.pack(key, path), self.pack(value, f"{path}{_step(path)}{key}")]
            for key, value in item.items()
        ]

    def _defaultdict(self, item: defaultdict[Any, Any], path: str) -> Any:
        factory = next((word for word, made in _FACTORIES.items() if item.default_factory is made), None)
        if factory is None and item.default_factory is not None:
            raise CheckpointError(
                f"{path} cannot be saved: it is a defaultdict of {item.default_factory!r}; "
                f"{', '.join(_FACTORIES)} can be saved, and a dict"
            )
        return {_KEY: "defaultdict", "items": self._pairs(item, path), "factory": factory}


def _memory(tensor: torch.Tensor) -> Any:
    """What tied tensors have in common, and nobody else."""
    if hasattr(tensor, "device_mesh"):
        # A rank may have an empty part, and all must find the same: not the address, but the storage itself.
        own: Any = tensor
        part = own._local_tensor  # noqa: SLF001
        return part.untyped_storage()._cdata, part.storage_offset(), tuple(tensor.shape), own.placements  # noqa: SLF001
    if not tensor.numel() or not tensor.data_ptr():
        return id(tensor)
    same = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return *same, tensor.is_conj(), tensor.is_neg()


def _of_numpy(array: Any, path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be saved: it is an array of {array.dtype}, {error}") from error


def _step(path: str) -> str:
    return "." if "/" in path else "/"


def _plain(item: Any) -> dict[str, Any] | None:
    """What needs no recursion and is no tensor."""
    if type(item) in {bytes, bytearray}:
        return {_KEY: type(item).__name__, "base64": base64.b64encode(item).decode()}
    if isinstance(item, (torch.dtype, torch.device)):
        return {_KEY: type(item).__name__, "value": str(item).removeprefix("torch.")}
    if type(item) in {complex, float}:
        return {_KEY: type(item).__name__, "value": repr(item)}
    if isinstance(item, PurePath):
        return {_KEY: "path", "value": str(item)}
    kind = type(item)
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(item, "shape", None) == ():
        # Its own bytes: through a Python number a float32 would come back as another.
        raw = base64.b64encode(item.tobytes()).decode()
        return {_KEY: "numpy", "dtype": item.dtype.str, "base64": raw} if item.dtype.kind in "biufc" else None
    return None


def _special(text: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    kind = text[_KEY]
    if kind == "tensor":
        return tensors[text["name"]]
    if kind == "ndarray":
        return _unpacked(text["tensor"], tensors).numpy()
    if kind in _SCALARS:
        return _SCALARS[kind](text)
    return _CONTAINERS[kind](_unpacked(text["items"], tensors), text)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


def _numpy(text: dict[str, Any]) -> Any:
    import numpy as np  # noqa: PLC0415 - torch works without NumPy, so we do

    if not _NUMPY.fullmatch(text["dtype"]):
        raise CheckpointError(f"{text['dtype']!r} is no dtype of a number")
    return np.frombuffer(base64.b64decode(text["base64"]), np.dtype(text["dtype"]))[0]


_SCALARS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda text: int(text["hex"], 16),
    "float": lambda text: float(text["value"]),
    "complex": lambda text: complex(text["value"]),
    "bytes": lambda text: base64.b64decode(text["base64"]),
    "bytearray": lambda text: bytearray(base64.b64decode(text["base64"])),
    "dtype": lambda text: _dtype(text["value"]),
    "device": lambda text: torch.device(text["value"]),
    "path": lambda text: Path(text["value"]),
    "numpy": _numpy,
}
_CONTAINERS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    **{word: lambda items, _, made=made: made(items) for word, made in _SEQUENCES.items()},  # type: ignore[misc]
    "dict": lambda items, _: dict(items),
    "OrderedDict": lambda items, _: OrderedDict(items),
    "Counter": lambda items, _: Counter(dict(items)),
    "deque": lambda items, text: deque(items, text["maxlen"]),
    "defaultdict": lambda items, text: defaultdict(text["factory"] and _FACTORIES[text["factory"]], items),
}
