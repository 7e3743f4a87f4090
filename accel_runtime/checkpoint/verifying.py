"""Whether the bytes of a checkpoint are those that were written. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.manifest import Chunk, File
from accel_runtime.checkpoint.spread import spread

__all__ = ["BLOCK", "blocks", "damage", "every_byte", "own_share"]

BLOCK = 1 << 22
"""Bytes that are read and hashed at a time."""
_Chunks = Sequence[tuple[str, Chunk]]


def damage(found: Found, chunks: Iterable[tuple[str, Chunk]]) -> list[str]:
    """What is wrong with these chunks; a sentence each that names file and tensor."""
    wrong = spread(lambda file: _damage(found, *file), _by_file(chunks).items())
    return [sentence for some in wrong for sentence in some]


def own_share(found: Found, items: Iterable[str], rank: int, world_size: int) -> list[tuple[str, Chunk]]:
    """Of the parts of files that make up these items those this rank verifies, by what they are."""
    chunks = found.manifest.parts(items)
    loads = [0] * world_size
    mine = []
    for name, chunk in sorted(chunks, key=lambda one: (-one[1].bytes, one[0], one[1].file, one[1].start)):
        least = loads.index(min(loads))
        loads[least] += chunk.bytes
        if least == rank:
            mine.append((name, chunk))
    return mine


def every_byte(found: Found, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """What is wrong with any file of a checkpoint: tensors, headers, and what hooks wrote.

    Args:
        found: The checkpoint.
        progress: Called with the number of bytes that were read since; from several threads.

    Returns:
        A sentence for every damaged file and tensor, the tensors first.
    """
    tensors = found.manifest.tensors
    parts = _by_file((name, chunk) for name, stored in tensors.items() for chunk in stored.chunks)
    files = found.manifest.files
    own = [(name, chunk) for name, some in parts.items() if name not in files for name, chunk in some]
    wrong = spread(lambda name: _whole(found, name, parts.get(name, []), progress), files)
    return [*damage(found, own), *(sentence for some in wrong for sentence in some)]


def blocks(file: int, start: int, length: int, room: memoryview) -> Iterator[memoryview]:
    """The bytes of a part of a file, in the memory given; fewer where the file ends before.

    Raises:
        OSError: It cannot be read.
    """
    while length:
        filled = 0
        # A network file system may give less than is asked for, and half a number is none.
        while filled < min(length, len(room)):
            count = os.preadv(file, [room[filled:length]], start + filled)
            if not count:
                break
            filled += count
        if not filled:
            return
        yield room[:filled]
        start, length = start + filled, length - filled


def _damage(found: Found, name: str, chunks: _Chunks) -> list[str]:
    path, room = found.path / name, memoryview(bytearray(BLOCK))
    try:
        with path.open("rb", buffering=0) as opened:
            return [
                _said(found, path, tensor)
                for tensor, chunk in sorted(chunks, key=lambda one: one[1].start)
                if _hash(opened.fileno(), chunk.start, chunk.bytes, room) != chunk.checksum
            ]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def _whole(found: Found, name: str, chunks: _Chunks, progress: Callable[[int], None]) -> list[str]:
    """What is wrong with a file and the parts of tensors in it, read once."""
    path, told = found.path / name, found.manifest.files[name]
    try:
        with path.open("rb", buffering=0) as opened:
            checksum, tensors = _walk(opened.fileno(), told, chunks, progress)
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    wrong = [_said(found, path, tensor) for tensor in tensors]
    if checksum != told.checksum and not wrong:
        wrong.append(f"{path} is damaged: its checksum is {checksum} and should be {told.checksum}")
    return wrong


def _walk(file: int, told: File, chunks: _Chunks, progress: Callable[[int], None]) -> tuple[str, list[str]]:
    """The checksum of a file, and the tensors in it that do not have theirs."""
    whole, room, at, wrong = xxhash.xxh3_64(), memoryview(bytearray(BLOCK)), 0, []
    for name, chunk in sorted(chunks, key=lambda one: (one[1].start, one[1].bytes)):
        if chunk.start < at:
            # No writer of ours overlaps them; a manifest that says so is not to hide a byte.
            wrong += [name] if _hash(file, chunk.start, chunk.bytes, room) != chunk.checksum else []
            continue
        own = xxhash.xxh3_64()
        for start, length, also in ((at, chunk.start - at, None), (chunk.start, chunk.bytes, own)):
            for block in blocks(file, start, length, room):
                whole.update(block)
                if also:
                    also.update(block)
                progress(len(block))
        at = chunk.start + chunk.bytes
        wrong += [name] if own.hexdigest() != chunk.checksum else []
    for block in blocks(file, at, max(0, told.bytes - at), room):
        whole.update(block)
        progress(len(block))
    return whole.hexdigest(), wrong


def _hash(file: int, start: int, length: int, room: memoryview) -> str:
    found = xxhash.xxh3_64()
    for block in blocks(file, start, length, room):
        found.update(block)
    return found.hexdigest()


def _by_file(chunks: Iterable[tuple[str, Chunk]]) -> dict[str, list[tuple[str, Chunk]]]:
    files: dict[str, list[tuple[str, Chunk]]] = {}
    for name, chunk in chunks:
        files.setdefault(chunk.file, []).append((name, chunk))
    return files


def _said(found: Found, path: Path, tensor: str) -> str:
    return f"{path} is damaged: {tensor} does not have its checksum{_other(path, found)}"


def _other(path: Path, found: Found) -> str:
    """Says so where the file belongs to another save."""
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            save = json.loads(opened.read(min(length, 1 << 26)))["__metadata__"]["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "" if save == found.manifest.save else "; the file is of another save"
