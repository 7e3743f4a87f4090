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

from accel_runtime.checkpoint.filesystem import FileSystem, add_path_to_error, write_text
from accel_runtime.checkpoint.manifest import FileEntry, hash_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "NUMBER_FORMATS",
    "TensorPart",
    "copy_to_host",
    "iterate_runs",
    "shard_file_name",
    "tensor_bytes",
    "write_index",
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
    """A tensor, or a part of one, to be written into a file."""

    name: str
    """Name in the file."""
    dtype: str
    """Name of the torch dtype."""
    shape: tuple[int, ...]
    bytes: int
    read: Callable[[], Iterable[memoryview]]
    """Return the data in row-major order; called at the time of writing, since it may allocate memory."""
    offsets: tuple[int, ...] | None = None
    """Offset in the full tensor; None if this is the full tensor."""

    @classmethod
    def from_tensor(
        cls, name: str, tensor: torch.Tensor, offsets: tuple[int, ...] | None = None
    ) -> TensorPart:
        """Return the part for a tensor on any device."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), tensor.nbytes, lambda: [copy_to_host(tensor)], offsets)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.bytes // max(1, math.prod(self.shape))


@dataclass(frozen=True)
class FileResult:
    """Result of writing a file."""

    file: FileEntry
    locations: tuple[tuple[int, str], ...]
    """Offset in the file and checksum of each part, in the given order."""


def write_safetensors(
    path: Path, parts: Sequence[TensorPart], metadata: Mapping[str, str], disk: FileSystem
) -> FileResult:
    """Write a new file (https://github.com/huggingface/safetensors#format) and flush it to the disk."""
    # By decreasing alignment, like the writer of the safetensors library.
    order = sorted(range(len(parts)), key=lambda index: (-parts[index].itemsize, parts[index].name))
    header = _build_header([parts[index] for index in order], metadata)
    file_checksum, start = xxhash.xxh3_64(header), len(header)
    locations: dict[int, tuple[int, str]] = {}
    file = disk.create(path)
    with add_path_to_error(path):
        try:
            disk.write(file, memoryview(header))
            for index in order:
                checksum, end = xxhash.xxh3_64(), start
                for block in parts[index].read():
                    for offset in range(0, len(block), _SLICE):
                        piece = block[offset : offset + _SLICE]
                        checksum.update(piece)
                        file_checksum.update(piece)
                        disk.write(file, piece)
                    end += len(block)
                assert end - start == parts[index].bytes, parts[index].name
                locations[index] = (start, checksum.hexdigest())
                start = end
            disk.sync(file)
        finally:
            disk.close(file)
    entry = FileEntry(start, file_checksum.hexdigest(), len(header), hash_bytes(header))
    return FileResult(entry, tuple(locations[index] for index in range(len(parts))))


def _build_header(parts: Sequence[TensorPart], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file for tensors in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    if any(part.offsets is not None for part in parts):
        # Read by torch.distributed.checkpoint.HuggingFaceStorageReader.
        offsets = {part.name: {"saved_offsets": part.offsets or [0] * len(part.shape)} for part in parts}
        header["__metadata__"] = {**metadata, "DCP_SHARDING_INFO": json.dumps(offsets)}
    start = 0
    for part in parts:
        # Formats that safetensors does not know are written as bytes.
        known = NUMBER_FORMATS.get(part.dtype)
        dtype, shape = (known.code, part.shape) if known else ("U8", (part.bytes,))
        header[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + part.bytes]}
        start += part.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_index(
    path: Path,
    shards: Mapping[str, Sequence[TensorPart]],
    disk: FileSystem,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write the index of several files, as Hugging Face's libraries read it."""
    weight_map = {part.name: name for name, parts in shards.items() for part in parts}
    total = sum(part.bytes for parts in shards.values() for part in parts)
    index = {
        "metadata": {"total_size": total, **(metadata or {})},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_text(path, json.dumps(index, indent=2) + "\n", disk)


def copy_to_host(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, copied if it is on a device, or not contiguous."""
    return tensor_bytes(tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    from accel_runtime.collectives.transport import memory_of  # noqa: PLC0415 - it imports torch

    return memory_of(tensor) if tensor.nbytes else memoryview(b"")
