"""Verify the bytes of a checkpoint against its checksums. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from accel_runtime.checkpoint.directory import Checkpoint
from accel_runtime.checkpoint.filesystem import parallel_map
from accel_runtime.checkpoint.manifest import Chunk, FileEntry

__all__ = ["BLOCK", "find_damage", "read_blocks", "select_rank_files", "verify_all_files"]

BLOCK = 1 << 22
"""Bytes that are read and hashed at a time."""
_Chunks = Sequence[tuple[str, Chunk]]


def find_damage(checkpoint: Checkpoint, chunks: Iterable[tuple[str, Chunk]]) -> list[str]:
    """Return a sentence for each damaged chunk, with file and tensor."""
    problems = parallel_map(lambda file: _find_file_damage(checkpoint, *file), _group_by_file(chunks).items())
    return [sentence for sentences in problems for sentence in sentences]


def select_rank_files(
    checkpoint: Checkpoint, items: Iterable[str], rank: int, world_size: int
) -> list[tuple[str, Chunk]]:
    """Return the named chunks of items that this rank verifies; all ranks get about the same number of bytes."""
    chunks = checkpoint.manifest.parts(items)
    loads = [0] * world_size
    selected = []
    for name, chunk in sorted(
        chunks, key=lambda part: (-part[1].bytes, part[0], part[1].file, part[1].start)
    ):
        least = loads.index(min(loads))
        loads[least] += chunk.bytes
        if least == rank:
            selected.append((name, chunk))
    return selected


def verify_all_files(checkpoint: Checkpoint, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Return a sentence for each damaged tensor and file; `progress` receives byte counts, from several threads."""
    tensors = checkpoint.manifest.tensors
    parts = _group_by_file((name, chunk) for name, stored in tensors.items() for chunk in stored.chunks)
    files = checkpoint.manifest.files
    other_chunks = [
        (name, chunk) for name, sentences in parts.items() if name not in files for name, chunk in sentences
    ]
    problems = parallel_map(lambda name: _verify_file(checkpoint, name, parts.get(name, []), progress), files)
    return [
        *find_damage(checkpoint, other_chunks),
        *(sentence for sentences in problems for sentence in sentences),
    ]


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


def _find_file_damage(checkpoint: Checkpoint, name: str, chunks: _Chunks) -> list[str]:
    path, buffer = checkpoint.path / name, memoryview(bytearray(BLOCK))
    try:
        with path.open("rb", buffering=0) as opened:
            return [
                _describe_damage(checkpoint, path, tensor)
                for tensor, chunk in sorted(chunks, key=lambda part: part[1].start)
                if _hash_range(opened.fileno(), chunk.start, chunk.bytes, buffer) != chunk.checksum
            ]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def _verify_file(
    checkpoint: Checkpoint, name: str, chunks: _Chunks, progress: Callable[[int], None]
) -> list[str]:
    """Return the problems of a file and of the chunks in it, which is read once."""
    path, entry = checkpoint.path / name, checkpoint.manifest.files[name]
    try:
        with path.open("rb", buffering=0) as opened:
            checksum, tensors = _hash_file_and_chunks(opened.fileno(), entry, chunks, progress)
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    problems = [_describe_damage(checkpoint, path, tensor) for tensor in tensors]
    if checksum != entry.checksum and not problems:
        problems.append(f"{path} is damaged: its checksum is {checksum} and should be {entry.checksum}")
    return problems


def _hash_file_and_chunks(
    file: int, entry: FileEntry, chunks: _Chunks, progress: Callable[[int], None]
) -> tuple[str, list[str]]:
    """Return the checksum of a file, and the tensors in it whose checksum is wrong."""
    file_checksum, buffer, offset, damaged = xxhash.xxh3_64(), memoryview(bytearray(BLOCK)), 0, []
    for name, chunk in sorted(chunks, key=lambda part: (part[1].start, part[1].bytes)):
        if chunk.start < offset:
            # accel writes no overlapping chunks, but a manifest with such chunks must not hide a byte.
            damaged += [name] if _hash_range(file, chunk.start, chunk.bytes, buffer) != chunk.checksum else []
            continue
        checksum = xxhash.xxh3_64()
        for start, length, chunk_checksum in (
            (offset, chunk.start - offset, None),
            (chunk.start, chunk.bytes, checksum),
        ):
            for block in read_blocks(file, start, length, buffer):
                file_checksum.update(block)
                if chunk_checksum:
                    chunk_checksum.update(block)
                progress(len(block))
        offset = chunk.start + chunk.bytes
        damaged += [name] if checksum.hexdigest() != chunk.checksum else []
    for block in read_blocks(file, offset, max(0, entry.bytes - offset), buffer):
        file_checksum.update(block)
        progress(len(block))
    return file_checksum.hexdigest(), damaged


def _hash_range(file: int, start: int, length: int, buffer: memoryview) -> str:
    checksum = xxhash.xxh3_64()
    for block in read_blocks(file, start, length, buffer):
        checksum.update(block)
    return checksum.hexdigest()


def _group_by_file(chunks: Iterable[tuple[str, Chunk]]) -> dict[str, list[tuple[str, Chunk]]]:
    files: dict[str, list[tuple[str, Chunk]]] = {}
    for name, chunk in chunks:
        files.setdefault(chunk.file, []).append((name, chunk))
    return files


def _describe_damage(checkpoint: Checkpoint, path: Path, tensor: str) -> str:
    return f"{path} is damaged: {tensor} does not have its checksum{_hint_other_save(path, checkpoint)}"


def _hint_other_save(path: Path, checkpoint: Checkpoint) -> str:
    """Return a hint if the file belongs to another save."""
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            save = json.loads(opened.read(min(length, 1 << 26)))["__metadata__"]["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "" if save == checkpoint.manifest.save else "; the file is of another save"
