"""Merge the tensors of a checkpoint into plain safetensors files, streamed and verified in bounded memory.

Imports torch only to convert numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from accel_runtime.checkpoint.errors import CheckpointError, RequestError
from accel_runtime.checkpoint.filesystem import FileSystem, format_size, open_atomically
from accel_runtime.checkpoint.manifest import (
    BLOCK,
    NAME,
    Checkpoint,
    Chunk,
    TensorEntry,
    rank_tensor_name,
    read_blocks,
)
from accel_runtime.checkpoint.safetensors_file import (
    NUMBER_FORMATS,
    HeaderEntry,
    build_header,
    iterate_runs,
    shard_file_name,
    tensor_bytes,
)

__all__ = ["MergeRequest", "list_item_contents", "merge_tensors"]

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Number formats that are converted if another one is requested."""
Progress = Callable[[int], None]


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


@dataclass(frozen=True)
class MergeResult:
    """Files that were written."""

    files: list[str]
    tensors: int
    bytes: int
    ties: dict[str, str]
    others: list[str]


@dataclass(frozen=True)
class _OutputTensor:
    """A tensor to be written."""

    name: str
    stored: TensorEntry
    dtype: str
    """torch name of the output format."""

    @property
    def size(self) -> int:
        """Size of an output element, in bytes."""
        return NUMBER_FORMATS[self.dtype].size

    @property
    def bytes(self) -> int:
        """Size of the output, in bytes."""
        return math.prod(self.stored.shape) * self.size


def merge_tensors(
    checkpoint: Checkpoint, target: Path, request: MergeRequest, progress: Progress = lambda _: None
) -> MergeResult:
    """Write the tensors of an item into a file, or several with an index in the layout of Hugging Face.

    Every byte is verified, and files get their names only when all are complete. `progress` receives byte counts.
    """
    contents = list_item_contents(checkpoint, request.item, request.rank)
    if not contents.tensors:
        raise RequestError(f"{request.item} of {checkpoint.path} has no tensors")
    entries = [
        _build_output(checkpoint, name, tensor, request.dtype) for name, tensor in contents.tensors.items()
    ]
    shards = _split_into_shards(entries, request.max_shard_bytes)
    names = _name_shards(target, len(shards))
    size = sum(entry.bytes for entry in entries)
    _check_target(target, size, several=len(shards) > 1)
    _write_all(checkpoint, [target.with_name(name) for name in names], shards, contents.ties, progress)
    if len(shards) > 1:
        _write_index(target, names, shards, size)
        names.append(f"{target.name}.index.json")
    files = [str(target.with_name(name)) for name in names]
    # Only for models: an optimizer has values that are not tensors anyway.
    others = contents.others if request.item.startswith("model") else []
    return MergeResult(files, len(entries), size, contents.ties, others)


def _check_target(target: Path, size: int, *, several: bool) -> None:
    if not target.parent.is_dir():
        raise RequestError(f"Not a directory: {target.parent}")
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


def _build_output(checkpoint: Checkpoint, name: str, tensor: str, dtype: str | None) -> _OutputTensor:
    stored = checkpoint.manifest.tensors[tensor]
    output_dtype = dtype if dtype and stored.dtype in _FLOATS else stored.dtype
    if output_dtype not in NUMBER_FORMATS:
        raise RequestError(f"Cannot export {name}: safetensors does not support {stored.dtype}.")
    size = NUMBER_FORMATS[stored.dtype].size
    chunks_fit = all(chunk.bytes == math.prod(chunk.sizes) * size for chunk in stored.chunks)
    if not chunks_fit or stored.bytes != math.prod(stored.shape) * size:
        raise CheckpointError(f"{checkpoint.path} is damaged: the chunks of {tensor} do not cover it")
    return _OutputTensor(name, stored, output_dtype)


def _split_into_shards(entries: Sequence[_OutputTensor], limit: int | None) -> list[list[_OutputTensor]]:
    """Distribute entries over files, in order."""
    shards: list[list[_OutputTensor]] = [[]]
    filled = 0
    for entry in entries:
        if limit and shards[-1] and filled + entry.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.bytes
    # Larger elements first, so that each is at a multiple of its size.
    return [sorted(shard, key=lambda entry: -entry.size) for shard in shards]


def _name_shards(target: Path, count: int) -> list[str]:
    return [shard_file_name(target.stem, number, count, target.suffix) for number in range(1, count + 1)]


def _write_all(
    checkpoint: Checkpoint,
    targets: Sequence[Path],
    shards: Sequence[Sequence[_OutputTensor]],
    ties: dict[str, str],
    progress: Progress,
) -> None:
    with ExitStack() as renames:
        for target, shard in zip(targets, shards, strict=True):
            scratch = renames.enter_context(open_atomically(target))
            names = {entry.name for entry in shard}
            shard_ties = {name: kept for name, kept in ties.items() if kept in names}
            _write(checkpoint, scratch, shard, shard_ties, progress)


def _write(
    checkpoint: Checkpoint,
    path: Path,
    entries: Sequence[_OutputTensor],
    ties: dict[str, str],
    progress: Progress,
) -> None:
    """Write one file."""
    disk = FileSystem()
    # Ties are metadata as in `safetensors.torch.save_model`.
    header_entries = (
        HeaderEntry(entry.name, NUMBER_FORMATS[entry.dtype].code, entry.stored.shape, entry.bytes)
        for entry in entries
    )
    header = build_header(header_entries, {"format": "pt"} | ties)
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        disk.write(file, memoryview(header))
        start = len(header)
        for entry in entries:
            for chunk in sorted(entry.stored.chunks, key=lambda chunk: chunk.offsets):
                _copy_chunk(checkpoint, entry, chunk, file, start, progress)
            start += entry.bytes
        os.ftruncate(file, start)
    finally:
        disk.close(file)


def _copy_chunk(  # noqa: PLR0913, PLR0917 - one call
    checkpoint: Checkpoint, tensor: _OutputTensor, chunk: Chunk, file: int, start: int, progress: Progress
) -> None:
    """Copy a chunk to its rows in the output tensor, which starts at `start` of the file."""
    buffer, checksum = memoryview(bytearray(BLOCK)), xxhash.xxh3_64()
    convert = _build_converter(tensor)
    runs, remaining, position = (
        iterate_runs(tensor.stored.shape, chunk.offsets, chunk.sizes, tensor.size),
        0,
        0,
    )
    path = checkpoint.path / chunk.file
    with path.open("rb", buffering=0) as source:
        for block in read_blocks(source.fileno(), chunk.start, chunk.bytes, buffer):
            checksum.update(block)
            progress(len(block))
            data = convert(block)
            while data:
                if not remaining:
                    position, remaining = next(runs)
                piece = data[:remaining]
                _write_at(file, piece, start + position)
                data, position, remaining = data[len(piece) :], position + len(piece), remaining - len(piece)
    if checksum.hexdigest() != chunk.checksum:
        raise CheckpointError(f"{path} is damaged: {tensor.name} does not have its checksum")


def _build_converter(tensor: _OutputTensor) -> Callable[[memoryview], memoryview]:
    """Return a function that converts a block to the output format."""
    if tensor.dtype == tensor.stored.dtype:
        return lambda block: block
    # Importing torch takes seconds, and most exports keep the format.
    import torch  # noqa: PLC0415

    source, target = getattr(torch, tensor.stored.dtype), getattr(torch, tensor.dtype)

    def convert(block: memoryview) -> memoryview:
        return tensor_bytes(torch.frombuffer(block, dtype=source).to(target))

    return convert


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _write_index(
    target: Path, names: Sequence[str], shards: Sequence[Sequence[_OutputTensor]], total: int
) -> None:
    """Write the index of tensors and files."""
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with open_atomically(target.with_name(f"{target.name}.index.json")) as scratch:
        scratch.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


_MAPPINGS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
_SEQUENCES = frozenset({"tuple", "set", "frozenset", "deque", "size"})


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
        raise RequestError(f"{checkpoint.path} has no {item}; it has {', '.join(manifest.items)}")
    if not 0 <= rank < manifest.world_size:
        raise RequestError(
            f"{checkpoint.path} has no rank {rank}: {manifest.world_size} process(es) wrote it. Ranks count from 0."
        )
    tree = manifest.own[item][rank] if item in manifest.own else manifest.values[item]
    contents = ItemContents({}, {}, [])
    first: dict[str, str] = {}
    for name, tensor in _iterate_leaves(tree, ""):
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
    kind = tree.get("$") if isinstance(tree, dict) else None
    if kind == "tensor":
        yield path, tree["name"]
    elif kind == "ndarray":
        yield path, tree["tensor"]["name"]
    else:
        pairs = _get_children(tree, kind)
        if pairs is None:
            yield path, None
        for key, value in pairs or ():
            yield from _iterate_leaves(value, f"{path}.{key}" if path else str(key))


def _get_children(tree: Any, kind: str | None) -> Any:
    """Return the children of a node by key; None for a leaf."""
    if kind in _MAPPINGS:
        return tree["items"]
    if isinstance(tree, list) or kind in _SEQUENCES:
        return enumerate(tree if kind is None else tree["items"])
    return tree.items() if isinstance(tree, dict) and kind is None else None
