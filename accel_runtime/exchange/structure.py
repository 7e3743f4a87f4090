"""What nested data look like: containers, keys, dtypes and shapes as one tuple that can be hashed and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Box", "Spec", "Survey", "described", "places", "survey"]


class Spec(NamedTuple):
    """All of a tensor but its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    def freed(self, what: str) -> Spec:
        """With -1 for the sizes that may differ: of the `first` dimension, or all `sizes`."""
        free = len(self.shape) if what == "sizes" else 1
        return self._replace(shape=(-1,) * min(free, len(self.shape)) + tuple(self.shape[free:]))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


class Box(NamedTuple):
    """A container."""

    kind: str
    keys_: int | tuple[Any, ...]
    """A mapping's keys; how many items another has."""

    def __repr__(self) -> str:
        keys = self.keys_ if isinstance(self.keys_, int) else ", ".join(map(_named, self.keys_))
        return f"{self.kind}({keys})"


class Survey(NamedTuple):
    """Nested data, taken apart."""

    structure: tuple[Any, ...]
    """Boxes, each followed by what it holds; specs of tensors; names of the types of other leaves."""
    tensors: list[torch.Tensor]
    """In the order `tree.map_leaves` visits them."""
    specs: tuple[Spec, ...]
    """Theirs."""
    stranger: str | None
    """A leaf that is no tensor we can send, by its type."""


def survey(data: Any) -> Survey:
    """Take data apart."""
    found: list[Any] = []
    tensors: list[torch.Tensor] = []
    strangers: list[str] = []
    _walk(data, found, tensors, strangers)
    specs = tuple(item for item in found if type(item) is Spec)
    return Survey(tuple(found), tensors, specs, strangers[0] if strangers else None)


def _walk(data: Any, found: list[Any], tensors: list[torch.Tensor], strangers: list[str]) -> None:
    if (
        isinstance(data, torch.Tensor)
        and data.layout is torch.strided
        and not (data.is_quantized or data.is_nested)
    ):
        found.append(Spec(data.dtype, data.shape, data.device.type))
        tensors.append(data)
    elif isinstance(data, (list, tuple)):
        found.append(Box(type(data).__name__, len(data)))
        for item in data:
            _walk(item, found, tensors, strangers)
    elif isinstance(data, Mapping):
        # Its keys by name: a mapping may iterate over something else, as a TensorDict does over rows.
        found.append(Box(type(data).__name__, tuple(data.keys())))
        for value in data.values():
            _walk(value, found, tensors, strangers)
    else:
        # Other layouts, such as sparse, are not rows of numbers.
        if not isinstance(data, torch.Tensor):
            found.append(type(data).__name__)
        elif data.is_nested and data.layout is torch.strided:
            found.append("nested tensor")
        else:
            found.append(f"{str(data.layout).removeprefix('torch.')} tensor")
        strangers.append(found[-1])


def described(structure: tuple[Any, ...]) -> str:
    """A structure as a person reads it: every leaf with its place, `['x'][0]: float32[3] on cpu`."""
    return ", ".join(f"{place}: {leaf}" if place else str(leaf) for place, leaf in places(structure))


def places(structure: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Every leaf with its place, written as Python would."""
    return list(_places(iter(structure), "")) if structure else []


def _places(items: Iterator[Any], place: str) -> Iterator[tuple[str, Any]]:
    item = next(items)
    if not isinstance(item, Box):
        yield place, item
        return
    if not item.keys_:
        yield place, f"empty {item.kind}"
    for key in range(item.keys_) if isinstance(item.keys_, int) else item.keys_:
        yield from _places(items, f"{place}[{_named(key)}]")


def _named(key: Any) -> str:
    """A key as text that is the same in every process."""
    return repr(key) if isinstance(key, (str, int, float, tuple, bytes)) else type(key).__name__
