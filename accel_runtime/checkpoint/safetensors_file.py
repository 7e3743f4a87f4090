"""Write safetensors files and hash them on the way. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from accel_runtime.checkpoint.filesystem import FileSystem, add_path_to_error
from accel_runtime.checkpoint.manifest import FileEntry, hash_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "NUMBER_FORMATS",
    "HeaderEntry",
    "TensorPart",
    "build_header",
    "iterate_runs",
    "shard_file_name",
    "tensor_bytes",
    "write_safetensors",
]


class NumberFormat(NamedTuple):
    """Number format of safetensors."""

    code: str
    size: int
    """Bytes of an element."""


NUMBER_FORMATS = {
    "float64": NumberFormat("F64", 8),
    "float32": NumberFormat("F32", 4),
    "float16": NumberFormat("F16", 2),
    "bfloat16": NumberFormat("BF16", 2),
    "float8_e4m3fn": NumberFormat("F8_E4M3", 1),
    "float8_e5m2": NumberFormat("F8_E5M2", 1),
    "int64": NumberFormat("I64", 8),
    "int32": NumberFormat("I32", 4),
    "int16": NumberFormat("I16", 2),
    "int8": NumberFormat("I8", 1),
    "uint64": NumberFormat("U64", 8),
    "uint32": NumberFormat("U32", 4),
    "uint16": NumberFormat("U16", 2),
    "uint8": NumberFormat("U8", 1),
    "bool": NumberFormat("BOOL", 1),
    "complex64": NumberFormat("C64", 8),
}
"""Formats that safetensors supports, by the name of the torch dtype."""


class HeaderEntry(NamedTuple):
    """Header entry of a tensor."""

    name: str
    dtype: str
    """Name of the number format in the file format."""
    shape: Sequence[int]
    bytes: int


def build_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file (https://github.com/huggingface/safetensors#format) for tensors in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for entry in entries:
        end = start + entry.bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def iterate_runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int
) -> Iterator[tuple[int, int]]:
    """Yield offset and length, in bytes, of the contiguous parts of a box in a row-major tensor."""
    # The last dimensions that are complete, and the one before them, are contiguous.
    outer = len(shape)
    while outer and sizes[outer - 1] == shape[outer - 1]:
        outer -= 1
    outer = max(0, outer - 1)
    strides = [math.prod(shape[dimension + 1 :]) * itemsize for dimension in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    length = math.prod(sizes[outer:]) * itemsize
    for index in product(*map(range, sizes[:outer])):
        yield first + sum(position * stride for position, stride in zip(index, strides, strict=False)), length


def shard_file_name(stem: str, number: int, count: int, suffix: str = ".safetensors") -> str:
    """Return the name of a shard, counted from 1: `model.safetensors` or `model-00001-of-00003.safetensors`."""
    return f"{stem}{suffix}" if count == 1 else f"{stem}-{number:05}-of-{count:05}{suffix}"


_SLICE = 1 << 22
"""Bytes that are hashed and written at a time, while they are in the cache."""


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor to be written into a file."""

    name: str
    """Name in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """Offset in the full tensor; None if this is the full tensor."""
    read: Callable[[], torch.Tensor]
    """Return the data, contiguous on the CPU; called at the time of writing, since it may allocate memory."""

    @property
    def bytes(self) -> int:
        """Size of the part."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class FileResult:
    """Result of writing a file."""

    file: FileEntry
    locations: tuple[tuple[int, str], ...]
    """Offset in the file and checksum of each part, in the given order."""


def write_safetensors(
    path: Path, parts: Sequence[TensorPart], metadata: Mapping[str, str], disk: FileSystem
) -> FileResult:
    """Write a new file and flush it to the disk."""
    # By decreasing alignment, like the writer of the safetensors library.
    order = sorted(range(len(parts)), key=lambda index: (-parts[index].dtype.itemsize, parts[index].name))
    header = _build_parts_header([parts[index] for index in order], metadata)
    file_checksum, start = xxhash.xxh3_64(header), len(header)
    locations: dict[int, tuple[int, str]] = {}
    file = disk.create(path)
    with add_path_to_error(path):
        try:
            disk.write(file, memoryview(header))
            for index in order:
                locations[index] = (start, _write_part(file, parts[index], file_checksum, disk))
                start += parts[index].bytes
            disk.sync(file)
        finally:
            disk.close(file)
    entry = FileEntry(start, file_checksum.hexdigest(), len(header), hash_bytes(header))
    return FileResult(entry, tuple(locations[index] for index in range(len(parts))))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    from accel_runtime.collectives.transport import memory_of  # noqa: PLC0415 - it imports torch

    return memory_of(tensor) if tensor.nbytes else memoryview(b"")


def _write_part(file: int, part: TensorPart, file_checksum: xxhash.xxh3_64, disk: FileSystem) -> str:
    checksum = xxhash.xxh3_64()
    data = tensor_bytes(part.read())
    assert len(data) == part.bytes, part.name
    for start in range(0, len(data), _SLICE):
        piece = data[start : start + _SLICE]
        checksum.update(piece)
        file_checksum.update(piece)
        disk.write(file, piece)
    return checksum.hexdigest()


def _build_parts_header(parts: Sequence[TensorPart], metadata: Mapping[str, str]) -> bytes:
    metadata = dict(metadata)
    if any(part.offsets is not None for part in parts):
        # Read by torch.distributed.checkpoint.HuggingFaceStorageReader.
        offsets = {part.name: {"saved_offsets": part.offsets or [0] * len(part.shape)} for part in parts}
        metadata["DCP_SHARDING_INFO"] = json.dumps(offsets)
    entries = []
    for part in parts:
        # Formats that safetensors does not know are written as bytes.
        known = NUMBER_FORMATS.get(str(part.dtype).removeprefix("torch."))
        code, shape = (known.code, part.shape) if known else ("U8", (part.bytes,))
        entries.append(HeaderEntry(part.name, code, shape, part.bytes))
    return build_header(entries, metadata)
