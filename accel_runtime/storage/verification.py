"""Verify the files of a checkpoint: read their bytes and compare checksums. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from accel_runtime.storage.errors import DamageError
from accel_runtime.storage.manifest import Checkpoint, Chunk, Manifest
from accel_runtime.storage.schema import parse_strict_json
from accel_runtime.storage.store import Snapshot, Store, parallel_map, use_checkpoint

__all__ = ["BLOCK", "Progress", "find_damage", "read_blocks", "select_rank_files", "verify_files"]

BLOCK = 1 << 22
"""Bytes that are read and hashed at a time."""
_MAX_HEADER = 1 << 26
"""Most bytes of a header that are read to describe damage."""
Progress = Callable[[int], None]
"""Receives numbers of bytes that were read."""


def verify_files(
    store: Store,
    find: Callable[[], str],
    report: Callable[[Checkpoint], Progress] = lambda _: lambda _: None,
) -> Checkpoint:
    """Read every byte of a checkpoint and return it; raise `DamageError` if it is damaged, and was not replaced meanwhile.

    `report` returns the function that receives the numbers of bytes that were read of a checkpoint.
    """

    def verify(snapshot: Snapshot) -> Checkpoint:
        checkpoint = snapshot.checkpoint
        parts = checkpoint.manifest.parts(checkpoint.manifest.items)
        if problems := find_damage(snapshot, parts, report(checkpoint)):
            raise DamageError(problems)
        return checkpoint

    return use_checkpoint(store, find, verify)


def find_damage(
    snapshot: Snapshot, chunks: Iterable[tuple[str, Chunk]], progress: Progress = lambda _: None
) -> list[str]:
    """Return a sentence for each damaged chunk, with file and tensor; `progress` receives byte counts."""
    files: dict[str, list[tuple[str, Chunk]]] = {}
    for name, chunk in chunks:
        files.setdefault(chunk.file, []).append((name, chunk))
    problems = parallel_map(lambda file: _find_file_damage(snapshot, *file, progress), files.items())
    return [sentence for sentences in problems for sentence in sentences]


def select_rank_files(
    manifest: Manifest, items: Iterable[str], rank: int, world_size: int
) -> list[tuple[str, Chunk]]:
    """Return the named chunks of items that this rank verifies; all ranks get about the same number of bytes."""
    chunks = manifest.parts(items)
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


def read_blocks(snapshot: Snapshot, chunk: Chunk, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a chunk in the given buffer; fewer if its file ends before."""
    start, end = chunk.start, chunk.start + chunk.bytes
    while start < end and (count := snapshot.get_range(chunk.file, start, buffer[: end - start])):
        yield buffer[:count]
        start += count


def _find_file_damage(
    snapshot: Snapshot, name: str, chunks: Sequence[tuple[str, Chunk]], progress: Progress
) -> list[str]:
    largest = max(chunk.bytes for _, chunk in chunks)
    buffer = memoryview(bytearray(max(1, min(BLOCK, largest))))
    try:
        return [
            _describe_damage(snapshot, name, tensor)
            for tensor, chunk in sorted(chunks, key=lambda part: part[1].start)
            if _hash_chunk(snapshot, chunk, buffer, progress) != chunk.checksum
        ]
    except OSError as error:
        return [f"{snapshot.checkpoint.locate(name)} cannot be read: {error.strerror}"]


def _hash_chunk(snapshot: Snapshot, chunk: Chunk, buffer: memoryview, progress: Progress) -> str:
    checksum = xxhash.xxh3_64()
    for block in read_blocks(snapshot, chunk, buffer):
        checksum.update(block)
        progress(len(block))
    return checksum.hexdigest()


def _describe_damage(snapshot: Snapshot, name: str, tensor: str) -> str:
    """Describe a damaged tensor, and whether its file belongs to another save."""
    checkpoint = snapshot.checkpoint
    try:
        size = memoryview(bytearray(8))
        snapshot.get_range(name, 0, size)
        length = min(int.from_bytes(size, "little"), checkpoint.manifest.files[name].bytes, _MAX_HEADER)
        header = memoryview(bytearray(length))
        header = header[: snapshot.get_range(name, len(size), header)]
        save = parse_strict_json(bytes(header))["__metadata__"]["save"]
    except (OSError, ValueError, KeyError, TypeError):
        save = checkpoint.manifest.save
    hint = "" if save == checkpoint.manifest.save else "; the file is of another save"
    return f"{checkpoint.locate(name)} is damaged: {tensor} does not have its checksum{hint}"
