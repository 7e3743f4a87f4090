"""Parts of tensors out of safetensors files, read straight into where they belong: no file is ever whole in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from accel_runtime.checkpoint.datafile import bytes_of
from accel_runtime.checkpoint.dtypes import NAMES
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.parallel.boxes import Box

__all__ = ["Slice", "alike", "fill", "headers"]

_BLOCK = 1 << 23
"""Bytes that are read at a time, and all the memory that reading takes."""
_SHORT = 1 << 9
"""Rows of fewer bytes are not worth a call each: what lies between them is read too."""
_MOST_HEADER = 100_000_000
"""What the format's own reader takes for the longest header there is."""
_DTYPES = {theirs: getattr(torch, ours) for ours, theirs in NAMES.items()}


@dataclass(frozen=True)
class Slice:
    """A tensor in a file, before it is read."""

    file: Path
    start: int
    """Where it begins in the file, in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def headers(path: Path) -> tuple[dict[str, Slice], dict[str, str]]:
    """The tensors of a safetensors file by name, and the texts in its header.

    Args:
        path: The file; only its beginning is read.

    Raises:
        CheckpointError: It is not there, is no such file, is cut short, or holds numbers that this torch has not.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            said = json.loads(file.read(min(length, _MOST_HEADER, size)))
        about = {str(key): str(value) for key, value in (said.pop("__metadata__", None) or {}).items()}
        found = {str(name): _slice(path, 8 + length, told) for name, told in said.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: it is no safetensors file, or damaged: {error}"
        ) from error
    if any(one.start + one.nbytes > size for one in found.values()):
        raise CheckpointError(f"{path} cannot be read: it is cut short")
    return found, about


def fill(target: torch.Tensor, found: Slice, box: Box) -> None:
    """Read a part of a tensor into live memory, in the format that has.

    Args:
        target: The memory; its shape is that of the box.
        found: The tensor in the file.
        box: Which part of it.

    Raises:
        CheckpointError: The file cannot be read to its end.
    """
    if not target.numel():
        return
    try:
        opened = os.open(found.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at, sizes in _blocks(found, box):
                place = tuple(slice(begin, begin + length) for begin, length in zip(at, sizes, strict=True))
                offsets = tuple(one + other for one, other in zip(box.offsets, at, strict=True))
                target[place].copy_(_read(opened, found, Box(offsets, sizes)))
        finally:
            os.close(opened)
    except OSError as error:
        raise CheckpointError(f"{found.file} cannot be read: {error}") from error


def alike(one: Slice, other: Slice) -> bool:
    """Whether two tensors in files have the same shape and numbers; nan is like nan."""
    if one.shape != other.shape:
        return False
    whole = Box((0,) * len(one.shape), one.shape)
    wider = one if one.dtype.itemsize >= other.dtype.itemsize else other
    for at, sizes in _blocks(wider, whole):
        left, right = (_opened(some, Box(at, sizes)) for some in (one, other))
        if not (torch.equal(left, right) or torch.allclose(left, right.to(left.dtype), 0, 0, equal_nan=True)):
            return False
    return True


def _slice(path: Path, body: int, told: Any) -> Slice:
    begin, end = told["data_offsets"]
    if told["dtype"] not in _DTYPES:
        raise ValueError(f"{told['dtype']!r} is no dtype of torch {torch.__version__}")
    found = Slice(path, body + int(begin), _DTYPES[told["dtype"]], tuple(int(size) for size in told["shape"]))
    if begin < 0 or any(size < 0 for size in found.shape) or end - begin != found.nbytes:
        raise ValueError(f"a tensor of shape {list(found.shape)} has {end - begin} bytes")
    return found


def _blocks(found: Slice, box: Box) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box in parts of `_BLOCK` bytes: where each begins in the box, and its sizes."""
    sizes, count, dimension = box.sizes, found.dtype.itemsize, len(box.sizes)
    while dimension and count * sizes[dimension - 1] <= _BLOCK:
        dimension -= 1
        count *= sizes[dimension]
    if not dimension:
        yield (0,) * len(sizes), sizes
        return
    step = max(1, _BLOCK // count)
    before, length, after = sizes[: dimension - 1], sizes[dimension - 1], sizes[dimension:]
    for index in product(*map(range, before)):
        for begin in range(0, length, step):
            yield (
                (*index, begin, *(0 for _ in after)),
                (*(1 for _ in before), min(step, length - begin), *after),
            )


def _opened(found: Slice, box: Box) -> torch.Tensor:
    opened = os.open(found.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(opened, found, box)
    finally:
        os.close(opened)


def _read(file: int, found: Slice, box: Box) -> torch.Tensor:
    wide = _widened(found, box)
    room = torch.empty(wide.sizes, dtype=found.dtype)
    left = bytes_of(room)
    for start, length in _runs(found, wide):
        _exactly(file, left[:length], found.start + start, found.file)
        left = left[length:]
    for dimension, (begin, length) in enumerate(zip(*box, strict=True)):
        room = room.narrow(dimension, begin - wide.offsets[dimension], length)
    return room


def _widened(found: Slice, box: Box) -> Box:
    """The box itself; or with all of the last dimension, where its own rows are short and the whole ones few bytes."""
    if not box.sizes or box.sizes[-1] == found.shape[-1]:
        return box
    short = box.sizes[-1] * found.dtype.itemsize < _SHORT
    wide = Box((*box.offsets[:-1], 0), (*box.sizes[:-1], found.shape[-1]))
    return wide if short and math.prod(wide.sizes) * found.dtype.itemsize <= 2 * _BLOCK else box


def _runs(found: Slice, box: Box) -> Iterator[tuple[int, int]]:
    """The pieces of a box that lie together in the file, in its order: where each begins, and how long it is, in bytes."""
    shape, (offsets, sizes), width = found.shape, box, found.dtype.itemsize
    together = len(shape)
    while together and sizes[together - 1] == shape[together - 1]:
        together -= 1
    together = max(0, together - 1)
    strides = [math.prod(shape[dimension + 1 :]) * width for dimension in range(len(shape))]
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    length = math.prod(sizes[together:]) * width
    for index in product(*map(range, sizes[:together])):
        yield begin + sum(one * stride for one, stride in zip(index, strides, strict=False)), length


def _exactly(file: int, room: memoryview, start: int, path: Path) -> None:
    while room:
        count = os.preadv(file, [room], start)
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read")
        room, start = room[count:], start + count
