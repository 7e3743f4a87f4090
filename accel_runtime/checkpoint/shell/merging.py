"""A checkpoint's tensors as plain safetensors files: streamed from file to file, verified on the way, in bounded memory.

Torch is needed only where numbers are converted.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from accel_runtime.checkpoint.dtypes import NAMES, SIZES
from accel_runtime.checkpoint.errors import CheckpointError, RequestError
from accel_runtime.checkpoint.files import Disk, write_text
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.layout import Entry, file_name, header
from accel_runtime.checkpoint.manifest import NAME, Chunk, Stored
from accel_runtime.checkpoint.shell.contents import contents
from accel_runtime.checkpoint.sizes import shown
from accel_runtime.checkpoint.verifying import BLOCK, blocks

__all__ = ["Merged", "Wish", "merge"]

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""What is converted where another number format is asked for."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Wish:
    """What is to be in the file."""

    item: str = "model"
    rank: int = 0
    """Whose, where the processes had different ones."""
    dtype: str | None = None
    """What floating-point numbers become, as torch calls it; None leaves them."""
    most: int | None = None
    """Bytes of one file; a single tensor may be larger. None is one file."""


@dataclass(frozen=True)
class Merged:
    """What was written."""

    files: list[str]
    tensors: int
    bytes: int
    ties: dict[str, str]
    others: list[str]


@dataclass(frozen=True)
class _Entry:
    """A tensor on its way."""

    name: str
    stored: Stored
    dtype: str
    """What it becomes, as torch calls it."""

    @property
    def size(self) -> int:
        """Of an element, in the new file."""
        return SIZES.get(self.dtype, 1)

    @property
    def bytes(self) -> int:
        """In the new file."""
        return math.prod(self.stored.shape) * self.size


def merge(found: Found, target: Path, wish: Wish, progress: Progress = lambda _: None) -> Merged:
    """Write the tensors of an item into a file, or several with an index as Hugging Face's libraries read them.

    Every byte that is read is verified; the files have their names only when all of them are whole.

    Args:
        found: The checkpoint.
        target: The file, `model.safetensors`.
        wish: What is to be in it.
        progress: Called with the number of bytes that were read since.

    Raises:
        RequestError: There is no such item, or the file cannot be there.
        CheckpointError: It is damaged, or there is no room.
        OSError: It cannot be read or written.
    """
    known = contents(found, wish.item, wish.rank)
    if not known.tensors:
        raise RequestError(f"{wish.item} of {found.path} has no tensors")
    entries = [_entry(found, name, tensor, wish.dtype) for name, tensor in known.tensors.items()]
    shards = _shards(entries, wish.most)
    names = _names(target, len(shards))
    written = sum(entry.bytes for entry in entries)
    _check(target, written, several=len(shards) > 1)
    _write_all(found, [target.with_name(name) for name in names], shards, known.ties, progress)
    if len(shards) > 1:
        _write_index(target, names, shards, written)
        names.append(f"{target.name}.index.json")
    files = [str(target.with_name(name)) for name in names]
    # Values that are no tensors are what an optimizer has too; of a model they are something special.
    others = known.others if wish.item.startswith("model") else []
    return Merged(files, len(entries), written, known.ties, others)


def _check(target: Path, size: int, *, several: bool) -> None:
    if not target.parent.is_dir():
        raise RequestError(f"{target.parent} is no directory")
    if target.is_dir():
        raise RequestError(
            f"{target} is a directory; the name of a file is needed, such as model.safetensors"
        )
    if (target.parent / NAME).exists():
        raise RequestError(f"{target.parent} is a checkpoint; a file that is added would be no part of it")
    if several and target.exists():
        raise RequestError(f"{target} is there already, and would be read in place of the several files")
    room = Disk().room(target.parent)
    if size > room:
        raise CheckpointError(f"{target.parent} has room for {shown(room)}, and {shown(size)} are needed")


def _entry(found: Found, name: str, tensor: str, dtype: str | None) -> _Entry:
    stored = found.manifest.tensors[tensor]
    becomes = dtype if dtype and stored.dtype in _FLOATS else stored.dtype
    if becomes not in NAMES:
        raise RequestError(f"{name} is {stored.dtype}, which the safetensors format has no word for")
    size = SIZES.get(stored.dtype, 1)
    parts = all(chunk.bytes == math.prod(chunk.sizes) * size for chunk in stored.chunks)
    if not parts or stored.bytes != math.prod(stored.shape) * size:
        raise CheckpointError(f"{found.path} is damaged: the parts of {tensor} are not the whole of it")
    return _Entry(name, stored, becomes)


def _shards(entries: Sequence[_Entry], most: int | None) -> list[list[_Entry]]:
    """Entries divided into files, in their order."""
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if most and shards[-1] and filled + entry.bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.bytes
    # The larger elements first, so that each is at a multiple of its size.
    return [sorted(shard, key=lambda entry: -entry.size) for shard in shards]


def _names(target: Path, count: int) -> list[str]:
    return [file_name(target.stem, number, count, target.suffix) for number in range(1, count + 1)]


def _write_all(
    found: Found,
    targets: Sequence[Path],
    shards: Sequence[Sequence[_Entry]],
    ties: dict[str, str],
    progress: Progress,
) -> None:
    disk, mark = Disk(), uuid.uuid4().hex[:8]
    with ExitStack() as undo:
        beside = []
        for target, shard in zip(targets, shards, strict=True):
            path = target.with_name(f".{target.name}.{mark}")
            beside.append(path)
            undo.callback(_forget, path)
            there = {entry.name for entry in shard}
            own = {name: kept for name, kept in ties.items() if kept in there}
            _write(found, path, shard, own, progress)
        for path, target in zip(beside, targets, strict=True):
            disk.rename(path, target)
        disk.sync_directory(targets[0].parent)


def _forget(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _write(
    found: Found, path: Path, entries: Sequence[_Entry], ties: dict[str, str], progress: Progress
) -> None:
    """One file, waited for until it is on the disk."""
    disk = Disk()
    # Ties are told as safetensors' own `save_model` tells them.
    told = (Entry(entry.name, NAMES[entry.dtype], entry.stored.shape, entry.bytes) for entry in entries)
    head = header(told, {"format": "pt"} | ties)
    opened = disk.create(path)
    try:
        disk.write(opened, memoryview(head))
        start = len(head)
        for entry in entries:
            for chunk in sorted(entry.stored.chunks, key=lambda chunk: chunk.offsets):
                _copy(found, entry, chunk, (opened, start), progress)
            start += entry.bytes
        os.ftruncate(opened, start)
        disk.sync(opened)
    finally:
        disk.close(opened)


def _copy(found: Found, entry: _Entry, chunk: Chunk, to: tuple[int, int], progress: Progress) -> None:
    """Copy a part of a tensor to where its rows belong in the whole of it.

    Args:
        found: The checkpoint.
        entry: The tensor.
        chunk: The part.
        to: The new file, and where the tensor begins in it.
        progress: As for `merge`.
    """
    room, told = memoryview(bytearray(BLOCK)), xxhash.xxh3_64()
    convert = _converter(entry)
    runs, left, place = _runs(entry, chunk), 0, 0
    path = found.path / chunk.file
    with path.open("rb", buffering=0) as source:
        for block in blocks(source.fileno(), chunk.start, chunk.bytes, room):
            told.update(block)
            progress(len(block))
            data = convert(block)
            while data:
                if not left:
                    place, left = next(runs)
                piece = data[:left]
                _write_at(to[0], piece, to[1] + place)
                data, place, left = data[len(piece) :], place + len(piece), left - len(piece)
    if told.hexdigest() != chunk.checksum:
        raise CheckpointError(f"{path} is damaged: {entry.name} does not have its checksum")


def _runs(entry: _Entry, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """The rows of a part in its order: where each begins in the new tensor, and how long it is, in bytes."""
    shape, sizes, offsets = entry.stored.shape, chunk.sizes, chunk.offsets
    # The last dimensions that are there in full, and the one before, lie together.
    together = len(shape)
    while together and sizes[together - 1] == shape[together - 1]:
        together -= 1
    together = max(0, together - 1)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    length = math.prod(sizes[together:]) * entry.size
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number in range(math.prod(sizes[:together])):
        place, rest = begin, number
        for dimension in reversed(range(together)):
            rest, index = divmod(rest, sizes[dimension])
            place += index * strides[dimension]
        yield place * entry.size, length


def _converter(entry: _Entry) -> Callable[[memoryview], memoryview]:
    """What makes numbers of one format those of another, block by block."""
    if entry.dtype == entry.stored.dtype:
        return lambda block: block
    # Torch takes seconds to load, and most exports leave the numbers as they are.
    import torch  # noqa: PLC0415

    from accel_runtime.checkpoint.datafile import bytes_of  # noqa: PLC0415

    before, after = getattr(torch, entry.stored.dtype), getattr(torch, entry.dtype)

    def convert(block: memoryview) -> memoryview:
        return bytes_of(torch.frombuffer(block, dtype=before).to(after))

    return convert


def _write_at(file: int, data: memoryview, place: int) -> None:
    while data:
        count = os.pwrite(file, data, place)
        data, place = data[count:], place + count


def _write_index(target: Path, names: Sequence[str], shards: Sequence[Sequence[_Entry]], total: int) -> None:
    """The file that says which tensor is in which file."""
    where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    told = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    disk, path = Disk(), target.with_name(f"{target.name}.index.json")
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    write_text(beside, json.dumps(told, indent=2) + "\n", disk)
    disk.rename(beside, path)
    disk.sync_directory(path.parent)
