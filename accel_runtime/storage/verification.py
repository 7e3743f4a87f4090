"""Verify the files of a checkpoint: read their bytes and compare checksums. Imports no torch."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from accel_runtime.storage.file_system import parallel_map
from accel_runtime.storage.manifest import Checkpoint, Chunk
from accel_runtime.storage.schema import parse_strict_json

__all__ = ["BLOCK", "Progress", "find_damage", "read_blocks", "select_rank_files"]

BLOCK = 1 << 22
"""Bytes that are read and hashed at a time."""
Progress = Callable[[int], None]
"""Receives numbers of bytes that were read."""


def find_damage(
    checkpoint: Checkpoint, chunks: Iterable[tuple[str, Chunk]], progress: Progress = lambda _: None
) -> list[str]:
    """Return a sentence for each damaged chunk, with file and tensor; `progress` receives byte counts."""
    files: dict[str, list[tuple[str, Chunk]]] = {}
    for name, chunk in chunks:
        files.setdefault(chunk.file, []).append((name, chunk))
    problems = parallel_map(lambda file: _find_file_damage(checkpoint, *file, progress), files.items())
    return [sentence for sentences in problems for sentence in sentences]


def select_rank_files(
    checkpoint: Checkpoint, items: Iterable[str], rank: int, world_size: int
) -> list[tuple[str, Chunk]]:
    """Return the named chunks of items that this rank verifies; all ranks get about the same number of bytes."""
    chunks = checkpoint.manifest.parts(items)
    loads = [(0, rank) for rank in range(world_size)]
    selected = []
    for name, chunk in sorted(
        chunks, key=lambda part: (-part[1].bytes, part[0], part[1].file, part[1].start)
    ):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + chunk.bytes, least))
        if least == rank:
            selected.append((name, chunk))
    return selected


def read_blocks(file: int, start: int, length: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a range of a file in the given buffer; fewer if the file ends before."""
    while length:
        filled = 0
        # A network file system may return less than requested, and elements must not be cut.
        while filled < min(length, len(buffer)):
            count = os.preadv(file, [buffer[filled:length]], start + filled)
            if not count:
                break
            filled += count
        if not filled:
            return
        yield buffer[:filled]
        start, length = start + filled, length - filled


def _find_file_damage(
    checkpoint: Checkpoint, name: str, chunks: Sequence[tuple[str, Chunk]], progress: Progress
) -> list[str]:
    largest = max(chunk.bytes for _, chunk in chunks)
    path, buffer = checkpoint.path / name, memoryview(bytearray(max(1, min(BLOCK, largest))))
    try:
        with checkpoint.open(name) as opened:
            return [
                _describe_damage(checkpoint, name, tensor)
                for tensor, chunk in sorted(chunks, key=lambda part: part[1].start)
                if _hash_range(opened.fileno(), chunk, buffer, progress) != chunk.checksum
            ]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def _hash_range(file: int, chunk: Chunk, buffer: memoryview, progress: Progress) -> str:
    checksum = xxhash.xxh3_64()
    for block in read_blocks(file, chunk.start, chunk.bytes, buffer):
        checksum.update(block)
        progress(len(block))
    return checksum.hexdigest()


def _describe_damage(checkpoint: Checkpoint, name: str, tensor: str) -> str:
    """Describe a damaged tensor, and whether its file belongs to another save."""
    try:
        with checkpoint.open(name) as opened:
            length = int.from_bytes(opened.read(8), "little")
            save = parse_strict_json(opened.read(min(length, 1 << 26)))["__metadata__"]["save"]
    except (OSError, ValueError, KeyError, TypeError):
        save = checkpoint.manifest.save
    hint = "" if save == checkpoint.manifest.save else "; the file is of another save"
    return f"{checkpoint.path / name} is damaged: {tensor} does not have its checksum{hint}"
