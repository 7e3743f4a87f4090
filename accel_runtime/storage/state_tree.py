"""States of items as JSON: the schema of their nodes, and their children. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from accel_runtime.storage.schema import Count, FieldError, ValueRule, read_value

__all__ = ["KEY", "MAX_LEVELS", "TensorNode", "get_children", "list_tensor_names"]

KEY = "$"
"""Key of a JSON object that represents a type unknown to JSON."""
MAX_LEVELS = 100
"""Largest number of containers inside each other."""
_MAX_DEPTH = 3 * MAX_LEVELS + 20
"""Largest depth of JSON: a dict with other keys than text is an object, a list, and a list for each pair."""

_Items = list[Any]
_Pairs = list[Annotated[list[Any], ValueRule("a pair of key and value", lambda pair: len(pair) == 2)]]  # noqa: PLR2004
_Name = Annotated[str, ValueRule("a name", lambda text: bool(re.fullmatch(r"[A-Za-z][\w:.]*", text)))]

_TensorKind = Annotated[str, ValueRule("'tensor'", lambda text: text == "tensor")]
_Hexadecimal = Annotated[
    str, ValueRule("a hexadecimal number", lambda text: bool(re.fullmatch("-?0x[0-9a-f]+", text)))
]


@dataclass(frozen=True)
class TensorNode:
    """A reference to a tensor of the manifest."""

    name: str
    kind: _TensorKind = field(metadata={"key": KEY})


@dataclass(frozen=True)
class _Array:
    tensor: TensorNode


@dataclass(frozen=True)
class _Integer:
    hex: _Hexadecimal


@dataclass(frozen=True)
class _Value:
    value: str


@dataclass(frozen=True)
class _TorchName:
    value: _Name


@dataclass(frozen=True)
class _Bytes:
    base64: str


@dataclass(frozen=True)
class _Number:
    dtype: str
    base64: str


@dataclass(frozen=True)
class _Sequence:
    items: _Items


@dataclass(frozen=True)
class _Deque:
    items: _Items
    maxlen: Count | None


@dataclass(frozen=True)
class _Mapping:
    items: _Pairs


@dataclass(frozen=True)
class _DefaultDict:
    items: _Pairs
    factory: _Name | None


_SEQUENCES: Mapping[str, Any] = dict.fromkeys(("tuple", "set", "frozenset", "size"), _Sequence) | {
    "deque": _Deque
}
_MAPPINGS: Mapping[str, Any] = dict.fromkeys(("dict", "OrderedDict", "Counter"), _Mapping) | {
    "defaultdict": _DefaultDict
}
_NODES: Mapping[str, Any] = {
    **_SEQUENCES,
    **_MAPPINGS,
    **dict.fromkeys(("float", "complex", "path"), _Value),
    **dict.fromkeys(("dtype", "device"), _TorchName),
    **dict.fromkeys(("bytes", "bytearray"), _Bytes),
    "tensor": TensorNode,
    "ndarray": _Array,
    "int": _Integer,
    "numpy": _Number,
}
"""Schema of a node, by its kind."""
_KIND = Annotated[
    str,
    ValueRule(f"one of {', '.join(sorted(_NODES))}", lambda kind: isinstance(kind, str) and kind in _NODES),
]


def get_children(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a node by key; None for a leaf."""
    if isinstance(tree, list):
        return enumerate(tree)
    if not isinstance(tree, dict):
        return None
    kind = tree.get(KEY)
    if kind is None:
        return tree.items()
    if kind in _SEQUENCES:
        return enumerate(tree["items"])
    pairs: list[tuple[Any, Any]] | None = tree["items"] if kind in _MAPPINGS else None
    return pairs


def list_tensor_names(tree: Any) -> list[str]:
    """Return the names of the tensors that a state refers to; raise `FieldError` if a node is not valid."""
    names: list[str] = []
    _check_node(tree, 0, names)
    return names


def _check_node(tree: Any, depth: int, names: list[str]) -> None:
    if depth > _MAX_DEPTH:
        raise FieldError("is nested too deep")
    if isinstance(tree, list):
        _check_children(enumerate(tree), depth, names)
    elif isinstance(tree, dict):
        if KEY not in tree:
            _check_children(tree.items(), depth, names)
            return
        try:
            kind = read_value(_KIND, tree[KEY])
        except FieldError as error:
            raise error.inside(KEY) from None
        node = read_value(_NODES[kind], tree)
        if isinstance(node, (TensorNode, _Array)):
            names.append(node.name if isinstance(node, TensorNode) else node.tensor.name)
        elif kind in _SEQUENCES or kind in _MAPPINGS:
            try:
                _check_node(tree["items"], depth + 1, names)
            except FieldError as error:
                raise error.inside("items") from None


def _check_children(children: Iterable[tuple[Any, Any]], depth: int, names: list[str]) -> None:
    for key, child in children:
        if isinstance(child, (dict, list)):
            try:
                _check_node(child, depth + 1, names)
            except FieldError as error:
                raise error.inside(key) from None
