"""Sharing out a sequence: each rank its own run of it, every item to exactly one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_runtime import tree

__all__ = ["bounds", "split"]


def bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Begin and end of one rank's items; the first `length % world_size` ranks have one more."""
    each, extra = divmod(length, world_size)
    begin = rank * each + min(rank, extra)
    return begin, begin + each + (rank < extra)


def split(inputs: Any, rank: int, world_size: int, *, pad: bool = False) -> Any:
    """One rank's items, in order; `inputs` is left as it is.

    Args:
        inputs: A list, a tuple, a tensor (split along its first dimension), something with `select`, as a
            dataset of `datasets` has; or a dict of such, also nested, all of one length.
        rank: Whose items.
        world_size: How many ranks share.
        pad: Repeat the last item, so that all ranks have as many as the first.

    Raises:
        TypeError: Something that cannot be split.
        ValueError: The values of a dict differ in length; or padding where there is no item to repeat.
    """
    length = _length(inputs)
    if pad and length == 0 and world_size > 1:
        raise ValueError("apply_padding repeats the last item, but there is none: the input is empty")
    begin, end = bounds(length, rank, world_size)
    missing = -(-length // world_size) - (end - begin) if pad else 0
    return _taken(inputs, begin, end, missing)


def _taken(inputs: Any, begin: int, end: int, missing: int) -> Any:
    """Items `begin` to `end`, and the last of all as often as are missing."""
    if isinstance(inputs, Mapping):
        return tree.rebuilt(inputs, {k: _taken(value, begin, end, missing) for k, value in inputs.items()})
    if isinstance(inputs, torch.Tensor):
        own = inputs[begin:end]
        return torch.cat([own, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else own
    if isinstance(inputs, (list, tuple)):
        items = [*inputs[begin:end], *inputs[-1:] * missing]
        # A named tuple is one item a field, and a part of it is none any more.
        return tuple(items) if hasattr(inputs, "_fields") else tree.rebuilt(inputs, items)
    return inputs.select([*range(begin, end), *[len(inputs) - 1] * missing])


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {str(key): _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{key}: {length}" for key, length in lengths.items())
            raise ValueError(f"the values of a dict must have one length to be split; they have {told}")
        return next(iter(lengths.values()), 0)
    sequence = isinstance(inputs, (list, tuple)) or callable(getattr(inputs, "select", None))
    # A tensor has a `select` too, another one, and may have no dimension to split.
    if inputs.dim() if isinstance(inputs, torch.Tensor) else sequence:
        return len(inputs)
    raise TypeError(
        "lists, tuples, tensors, dicts of them and datasets with `select` can be split between processes; "
        f"this is {type(inputs).__name__}"
    )
