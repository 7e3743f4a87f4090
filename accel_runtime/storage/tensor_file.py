"""Write safetensors files, and merge the tensors of a checkpoint into them, streamed and verified in bounded memory.

Imports torch only to convert numbers.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product, repeat
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from accel_runtime.environment.settings import format_size
from accel_runtime.storage.errors import CheckpointError, RequestError
from accel_runtime.storage.file_system import FileSystem, open_atomically
from accel_runtime.storage.manifest import (
    BLOCK_BYTES,
    NAME,
    Checkpoint,
    Chunk,
    FileEntry,
    TensorEntry,
    hash_bytes,
    rank_tensor_name,
)
from accel_runtime.storage.state_tree import KEY, get_children
from accel_runtime.storage.store import RepeatableStream, Snapshot
from accel_runtime.storage.verification import BLOCK, Progress, read_blocks

if TYPE_CHECKING:
    import torch

__all__ = [
    "NUMBER_FORMATS",
    "MergeRequest",
    "TensorPart",
    "iterate_runs",
    "list_item_contents",
    "merge_tensors",
    "read_chunk",
    "shard_file_name",
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
    """Yield offset and length, in bytes, of the contiguous parts of a region in a row-major tensor."""
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
        from accel_runtime.foundation.tensor_bytes import copy_to_host  # noqa: PLC0415 - imports torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), tensor.nbytes, lambda: [copy_to_host(tensor)], offsets)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.bytes // max(1, math.prod(self.shape))


class PartResult(NamedTuple):
    """Result of writing a part."""

    start: int
    """Offset in the file, in bytes."""
    checksum: str
    blocks: tuple[str, ...]
    """Checksums of the blocks of a large part; see `Chunk.blocks`."""


@dataclass(frozen=True)
class FileResult:
    """Result of writing a file."""

    file: FileEntry
    parts: tuple[PartResult, ...]
    """The parts, in the given order."""


Put = Callable[[Iterable[memoryview], int], None]
"""Writes the pieces of one file of so many bytes: `Draft.put` or `FileSystem.put` for a name. A piece is valid until the next one."""


def write_safetensors(put: Put, parts: Sequence[TensorPart], metadata: Mapping[str, str]) -> FileResult:
    """Write a new file (https://github.com/huggingface/safetensors#format), hashed while it is written."""
    # By decreasing alignment, like the writer of the safetensors library.
    order = sorted(range(len(parts)), key=lambda index: (-parts[index].itemsize, parts[index].name))
    header = _build_header([parts[index] for index in order], metadata)
    file_checksum, start = xxhash.xxh3_64(), 0
    written: dict[int, PartResult] = {}

    def encode() -> Iterator[memoryview]:
        nonlocal file_checksum, start
        file_checksum, start = xxhash.xxh3_64(header), len(header)
        yield memoryview(header)
        for index in order:
            checksum, end = xxhash.xxh3_64(), start
            blocks = _BlockHasher(parts[index].bytes)
            for piece in _iterate_slices(parts[index]):
                checksum.update(piece)
                blocks.update(piece)
                file_checksum.update(piece)
                yield piece
                end += len(piece)
            assert end - start == parts[index].bytes, parts[index].name
            written[index] = PartResult(start, checksum.hexdigest(), blocks.finish())
            start = end

    put(RepeatableStream(encode), len(header) + sum(part.bytes for part in parts))
    entry = FileEntry(start, file_checksum.hexdigest(), len(header), hash_bytes(header))
    return FileResult(entry, tuple(written[index] for index in range(len(parts))))


class _BlockHasher:
    """Computes the checksums of the blocks of a part that is larger than one."""

    def __init__(self, size: int) -> None:
        self._is_needed = size > BLOCK_BYTES
        self._checksums: list[str] = []
        self._current, self._missing = xxhash.xxh3_64(), BLOCK_BYTES

    def update(self, piece: memoryview) -> None:
        while self._is_needed and piece:
            block, piece = piece[: self._missing], piece[self._missing :]
            self._current.update(block)
            self._missing -= len(block)
            if not self._missing:
                self._finish_block()

    def finish(self) -> tuple[str, ...]:
        if self._is_needed and self._missing < BLOCK_BYTES:
            self._finish_block()
        return tuple(self._checksums)

    def _finish_block(self) -> None:
        self._checksums.append(self._current.hexdigest())
        self._current, self._missing = xxhash.xxh3_64(), BLOCK_BYTES


def _iterate_slices(part: TensorPart) -> Iterator[memoryview]:
    """Yield the data of a part in slices that fit into the cache of a processor."""
    for block in part.read():
        for offset in range(0, len(block), _SLICE):
            yield block[offset : offset + _SLICE]


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
    put: Put,
    shards: Mapping[str, Sequence[TensorPart]],
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write the index of several files, as Hugging Face's libraries read it."""
    weight_map = {part.name: name for name, parts in shards.items() for part in parts}
    total = sum(part.bytes for parts in shards.values() for part in parts)
    index = {
        "metadata": {"total_size": total, **(metadata or {})},
        "weight_map": dict(sorted(weight_map.items())),
    }
    text = (json.dumps(index, indent=2) + "\n").encode()
    put([memoryview(text)], len(text))


_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Number formats that are converted if another one is requested."""


@dataclass(frozen=True)
class MergeRequest:
    """Contents of the output files."""

    item: str = "model"
    rank: int = 0
    """Rank to export if states differ between ranks."""
    dtype: str | None = None
    """torch name of the output format of floating-point numbers; None keeps them."""
    max_shard_bytes: int | None = None
    """Largest size of a file in bytes, except for a single tensor; None is one file."""
    lists_ties: bool = True
    """Whether the headers list the aliases of tied weights, as `safetensors.torch.save_model` does."""


@dataclass(frozen=True)
class MergeResult:
    """Files that were written."""

    files: list[str]
    tensors: int
    bytes: int
    ties: dict[str, str]
    others: list[str]


def merge_tensors(
    snapshot: Snapshot, target: Path, request: MergeRequest, progress: Progress = lambda _: None
) -> MergeResult:
    """Write the tensors of an item into a file, or several with an index in the layout of Hugging Face.

    Every byte is verified, and files get their names only when all are complete. `progress` receives byte counts.
    """
    checkpoint = snapshot.checkpoint
    contents = list_item_contents(checkpoint, request.item, request.rank)
    if not contents.tensors:
        raise RequestError(f"{request.item} of {checkpoint.key} has no tensors")
    if missing := checkpoint.manifest.find_incomplete(request.item):
        raise RequestError(
            f"Cannot export {request.item} of {checkpoint.key}: it is the part of one node, and other nodes have the rest of "
            f"{missing}. Export a checkpoint of the project directory."
        )
    parts = [
        _build_part(snapshot, name, checkpoint.manifest.tensors[stored], request.dtype, progress)
        for name, stored in contents.tensors.items()
    ]
    groups = _split_into_shards(parts, request.max_shard_bytes)
    shards = {
        shard_file_name(target.stem, number, len(groups), target.suffix): group
        for number, group in enumerate(groups, start=1)
    }
    size = sum(part.bytes for part in parts)
    _check_target(target, size, several=len(shards) > 1)
    disk, names = FileSystem(), list(shards)
    if len(shards) > 1:
        names.append(f"{target.name}.index.json")
    with ExitStack() as renames:
        # Renamed in the opposite order, so the index is entered first.
        scratch = {
            name: renames.enter_context(open_atomically(target.with_name(name).resolve()))
            for name in names[::-1]
        }
        for file, group in shards.items():
            kept = {part.name for part in group} if request.lists_ties else ()
            ties = {alias: name for alias, name in contents.ties.items() if name in kept}
            write_safetensors(partial(disk.put, scratch[file]), group, {"format": "pt"} | ties)
        if len(shards) > 1:
            write_index(partial(disk.put, scratch[names[-1]]), shards)
    # Only for models: an optimizer has values that are not tensors anyway.
    others = contents.others if request.item.startswith("model") else []
    return MergeResult(
        [str(target.with_name(name)) for name in names], len(parts), size, contents.ties, others
    )


def _check_target(target: Path, size: int, *, several: bool) -> None:
    if not target.parent.is_dir():
        raise RequestError(f"Not a directory: {target.parent}. Create it first.")
    if target.is_dir():
        raise RequestError(f"{target} is a directory. Name a file, such as model.safetensors.")
    if (target.parent / NAME).exists():
        raise RequestError(
            f"{target.parent} is a checkpoint: an added file would not be part of it. Choose another directory."
        )
    if several and target.exists():
        raise RequestError(
            f"{target} exists and would be read in place of the shards. Remove it or choose another name."
        )
    free = FileSystem().free_space(target.parent)
    if size > free:
        raise CheckpointError(
            f"Not enough space in {target.parent}: {format_size(size)} are needed, {format_size(free)} are free."
        )


def _build_part(
    snapshot: Snapshot, name: str, stored: TensorEntry, dtype: str | None, progress: Progress
) -> TensorPart:
    output_dtype = dtype if dtype and stored.dtype in _FLOATS else stored.dtype
    if output_dtype not in NUMBER_FORMATS:
        raise RequestError(f"Cannot export {name}: safetensors does not support {stored.dtype}.")
    size = math.prod(stored.shape) * NUMBER_FORMATS[output_dtype].size

    def read() -> Iterator[memoryview]:
        return _read_tensor(snapshot, name, stored, output_dtype, progress)

    return TensorPart(name, output_dtype, stored.shape, size, read)


def _split_into_shards(parts: Sequence[TensorPart], limit: int | None) -> list[list[TensorPart]]:
    """Distribute tensors over files, in order."""
    shards: list[list[TensorPart]] = [[]]
    filled = 0
    for part in parts:
        if limit and shards[-1] and filled + part.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += part.bytes
    return shards


_MIN_BLOCK = 1 << 12
"""Fewest bytes of a chunk that are read at a time."""


def _read_tensor(
    snapshot: Snapshot, name: str, stored: TensorEntry, dtype: str, progress: Progress
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order; rows are taken from several chunks in turn.

    The chunks share the memory of one block, and element sizes divide the memory of each.
    """
    block_bytes = max(_MIN_BLOCK, BLOCK // max(1, len(stored.chunks)) // 16 * 16)
    convert = _build_converter(stored.dtype, dtype)
    itemsize = NUMBER_FORMATS[dtype].size
    rows = []
    for chunk in stored.chunks:
        blocks = read_chunk(snapshot, name, chunk, min(block_bytes, chunk.bytes), progress)
        reader = _RowReader(map(convert, blocks), math.prod(chunk.sizes) * itemsize)
        rows.append(zip(iterate_runs(stored.shape, chunk.offsets, chunk.sizes, itemsize), repeat(reader)))
    for (_, length), reader in heapq.merge(*rows, key=itemgetter(0)):
        yield from reader.read(length)


def read_chunk(
    snapshot: Snapshot, name: str, chunk: Chunk, block_bytes: int, progress: Progress
) -> Iterator[memoryview]:
    """Yield the blocks of a chunk, which are valid until the next one, and verify its checksum at the end."""
    checksum, buffer, remaining = xxhash.xxh3_64(), memoryview(bytearray(block_bytes)), chunk.bytes
    location = snapshot.checkpoint.locate(chunk.file)
    try:
        for block in read_blocks(snapshot, chunk, buffer):
            checksum.update(block)
            progress(len(block))
            remaining -= len(block)
            yield block
    except OSError as error:
        raise CheckpointError(f"{location} cannot be read: {error.strerror}") from error
    if remaining:
        raise CheckpointError(f"{location} was truncated while it was read")
    # A checkpoint of another program has none.
    if chunk.checksum and checksum.hexdigest() != chunk.checksum:
        raise CheckpointError(f"{location} is damaged: {name} does not have its checksum")


class _RowReader:
    """Reads rows of any length from the blocks of a chunk, and ends the blocks after the last row."""

    def __init__(self, blocks: Iterator[memoryview], size: int) -> None:
        self._blocks, self._remaining, self._block = blocks, size, memoryview(b"")

    def read(self, length: int) -> Iterator[memoryview]:
        self._remaining -= length
        while length:
            self._block = self._block or next(self._blocks)
            piece, self._block = self._block[:length], self._block[length:]
            length -= len(piece)
            yield piece
        if not self._remaining:
            list(self._blocks)


def _build_converter(source: str, target: str) -> Callable[[memoryview], memoryview]:
    """Return a function that converts a block between number formats."""
    if source == target:
        return lambda block: block
    # Importing torch takes seconds, and most exports keep the format.
    import torch  # noqa: PLC0415

    from accel_runtime.foundation.tensor_bytes import tensor_bytes  # noqa: PLC0415

    from_dtype, to_dtype = getattr(torch, source), getattr(torch, target)
    return lambda block: tensor_bytes(torch.frombuffer(block, dtype=from_dtype).to(to_dtype))


_MAX_NAMES = 1 << 28
"""Largest number of characters of all names."""


@dataclass(frozen=True)
class ItemContents:
    """Contents of an item."""

    tensors: dict[str, str]
    """Names in the manifest by names in the file."""
    ties: dict[str, str]
    """Aliases: other names of the same tensor."""
    others: list[str]
    """Names of values that are not tensors, and are not exported."""


def list_item_contents(checkpoint: Checkpoint, item: str, rank: int = 0) -> ItemContents:
    """List the tensors of an item, such as `model` or `optimizer_1`, as a rank had them."""
    manifest = checkpoint.manifest
    if item not in manifest.items:
        raise RequestError(f"{checkpoint.key} has no {item}; it has {', '.join(manifest.items)}")
    if not 0 <= rank < manifest.world_size:
        raise RequestError(
            f"{checkpoint.key} has no rank {rank}: {manifest.world_size} process(es) wrote it. Ranks count from 0."
        )
    tree = manifest.values_by_rank[item][rank] if item in manifest.values_by_rank else manifest.values[item]
    contents = ItemContents({}, {}, [])
    first: dict[str, str] = {}
    length = 0
    for name, tensor in _iterate_leaves(tree, ""):
        length += len(name)
        if length > _MAX_NAMES:  # a long name of a dict is part of the name of each value in it
            raise CheckpointError(
                f"Cannot export {item} of {checkpoint.key}: the names of its values are too long."
            )
        if tensor is None:
            contents.others.append(name)
        elif tensor in first:
            contents.ties[name] = first[tensor]
        else:
            rank_name = rank_tensor_name(tensor, rank)
            first[tensor] = name
            contents.tensors[name] = rank_name if rank_name in manifest.tensors else tensor
    return contents


def _iterate_leaves(tree: Any, path: str) -> Iterator[tuple[str, str | None]]:
    """Yield the path of each value in a serialized tree, with the name of its tensor or None."""
    kind = tree.get(KEY) if isinstance(tree, dict) else None
    if kind == "tensor":
        yield path, tree["name"]
    elif kind == "ndarray":
        yield path, tree["tensor"]["name"]
    else:
        children = get_children(tree)
        if children is None:
            yield path, None
        for key, value in children or ():
            yield from _iterate_leaves(value, f"{path}.{key}" if path else str(key))
