"""One data file: parts of tensors in the safetensors format, written and hashed in one go.

The format: https://github.com/huggingface/safetensors#format. The package writes files whole from memory, and neither
hashes nor syncs; here they are streamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from accel_runtime.checkpoint.dtypes import NAMES
from accel_runtime.checkpoint.files import Disk, about
from accel_runtime.checkpoint.layout import Entry, header
from accel_runtime.checkpoint.manifest import File, checksum
from accel_runtime.exchange.raw import memory

__all__ = ["Part", "Written", "bytes_of", "write"]

_SLICE = 1 << 22
"""Bytes that are hashed and written at a time: they are still in the cache when they are written."""
_NAMES = {getattr(torch, ours): theirs for ours, theirs in NAMES.items()}
"""What the format calls a dtype; others are written as bytes, and only the manifest knows what they are."""


@dataclass(frozen=True)
class Part:
    """A part of a tensor that goes into a file."""

    name: str
    """Its name in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """Where it begins in its tensor; None for the whole of one."""
    read: Callable[[], torch.Tensor]
    """Gives it, on the CPU and contiguous; called when it is written, so that it may cost memory."""

    @property
    def bytes(self) -> int:
        """What it takes."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Written:
    """What became of a file."""

    file: File
    places: tuple[tuple[int, str], ...]
    """For every part, in the order they were given, where it begins in the file, and its checksum."""


def write(path: Path, parts: Sequence[Part], said: Mapping[str, str], disk: Disk) -> Written:
    """Write a new file and wait until it is on the disk.

    Args:
        path: Its name.
        parts: What it holds.
        said: Texts that stand in its header.
        disk: Does it.

    Raises:
        OSError: It cannot be written.
    """
    # In falling order of their alignment, as the format's own writer has it.
    order = sorted(range(len(parts)), key=lambda index: (-parts[index].dtype.itemsize, parts[index].name))
    head = _header([parts[index] for index in order], said)
    whole, start = xxhash.xxh3_64(head), len(head)
    places: dict[int, tuple[int, str]] = {}
    opened = disk.create(path)
    with about(path):
        try:
            disk.write(opened, memoryview(head))
            for index in order:
                places[index] = (start, _stream(opened, parts[index], whole, disk))
                start += parts[index].bytes
            disk.sync(opened)
        finally:
            disk.close(opened)
    file = File(start, whole.hexdigest(), len(head), checksum(head))
    return Written(file, tuple(places[index] for index in range(len(parts))))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return memory(tensor) if tensor.nbytes else memoryview(b"")


def _stream(opened: int, part: Part, whole: xxhash.xxh3_64, disk: Disk) -> str:
    own = xxhash.xxh3_64()
    data = bytes_of(part.read())
    assert len(data) == part.bytes, part.name
    for start in range(0, len(data), _SLICE):
        piece = data[start : start + _SLICE]
        own.update(piece)
        whole.update(piece)
        disk.write(opened, piece)
    return own.hexdigest()


def _header(parts: Sequence[Part], texts: Mapping[str, str]) -> bytes:
    said = dict(texts)
    if any(part.offsets is not None for part in parts):
        # What torch.distributed.checkpoint.HuggingFaceStorageReader looks for in files with parts of tensors.
        offsets = {part.name: {"saved_offsets": part.offsets or [0] * len(part.shape)} for part in parts}
        said["DCP_SHARDING_INFO"] = json.dumps(offsets)
    known = [_NAMES.get(part.dtype) for part in parts]
    return header(
        (
            Entry(part.name, name or "U8", part.shape if name else [part.bytes], part.bytes)
            for part, name in zip(parts, known, strict=True)
        ),
        said,
    )
