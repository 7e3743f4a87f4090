"""Copy a checkpoint from store to store, also one of another program, which gets checksums. Imports no torch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from accel_runtime.environment.settings import __version__, format_size
from accel_runtime.storage.errors import CheckpointError, RequestError, describe_error
from accel_runtime.storage.manifest import Chunk, FileEntry, Manifest, TensorEntry, item_of_tensor
from accel_runtime.storage.store import Draft, KeyExistsError, Snapshot, Store, parallel_map
from accel_runtime.storage.tensor_file import TensorPart, read_chunk, shard_file_name, write_safetensors
from accel_runtime.storage.verification import BLOCK, Progress

__all__ = ["convert_checkpoint", "copy_checkpoint"]

_FILE_BYTES = 1 << 28
"""Size at which a file is full: files of this size are read and verified in parallel."""
_COPY_BYTES = 1 << 26
"""Bytes of a file that are in memory while it is copied."""
_Part = tuple[str, Chunk]
"""A chunk with the name of its tensor."""


def convert_checkpoint(
    snapshot: Snapshot, store: Store, key: str, progress: Progress = lambda _: None
) -> Manifest:
    """Write a checkpoint of another program under a free key, with checksums; `copy_checkpoint` has the errors."""
    return _write_free_key(
        store, key, uuid.uuid4().hex[:12], lambda draft: _convert(snapshot, draft, progress)
    )


def copy_checkpoint(
    snapshot: Snapshot, store: Store, key: str, progress: Progress = lambda _: None
) -> Manifest:
    """Write the same files under a free key, complete or not at all, in bounded memory; `progress` receives byte counts.

    Raises:
        RequestError: If the key is taken.
        CheckpointError: If the source is damaged, or the store fails.
    """
    save = snapshot.checkpoint.manifest.save
    return _write_free_key(store, key, save, lambda draft: _copy(snapshot, draft, progress))


def _write_free_key(store: Store, key: str, save: str, write: Callable[[Draft], Manifest]) -> Manifest:
    if store.exists(key):
        raise RequestError(f"{key} exists. Remove it, or choose another name.")
    try:
        draft = store.begin(key, save, new=True)
    except KeyExistsError as error:
        raise RequestError(f"{key} exists. Remove it, or choose another name.") from error
    except OSError as error:
        raise CheckpointError(f"Cannot write {key}: {describe_error(error)}") from error
    try:
        manifest = write(draft)
    except BaseException as error:
        draft.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"Cannot write {key}: {describe_error(error)}") from error
        raise
    finally:
        draft.close()
    return manifest


def _copy(snapshot: Snapshot, draft: Draft, progress: Progress) -> Manifest:
    manifest = snapshot.checkpoint.manifest
    _require_space(draft, manifest.bytes)

    def copy(name: str) -> None:
        chunk = manifest.get_file_chunk(name)
        blocks = read_chunk(snapshot, "the file", chunk, min(chunk.bytes, _COPY_BYTES), progress)
        draft.put(name, blocks, chunk.bytes)

    parallel_map(copy, manifest.files)
    draft.commit(manifest)
    return manifest


def _require_space(draft: Draft, needed: int) -> None:
    free = draft.free_space()
    if needed > free:
        raise CheckpointError(
            f"Not enough space for {draft.address.key}: {format_size(needed)} are needed, {format_size(free)} are free. Free "
            "space, or choose another directory."
        )


def _convert(snapshot: Snapshot, draft: Draft, progress: Progress) -> Manifest:
    source = snapshot.checkpoint.manifest
    _require_space(draft, sum(entry.bytes for entry in source.tensors.values()))
    files: dict[str, FileEntry] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in source.tensors}
    for name, parts in _plan_files(source):
        files[name], copied = _copy_file(snapshot, draft, name, parts, progress)
        for tensor, chunk in copied:
            chunks[tensor].append(chunk)
    manifest = replace(
        source,
        save=draft.address.save,
        saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions={"accel": __version__} | dict(source.versions),
        tensors={name: replace(entry, chunks=tuple(chunks[name])) for name, entry in source.tensors.items()},
        files=files,
    )
    # A reader would refuse what it finds here.
    manifest = Manifest.parse(manifest.text(), draft.address.key)
    draft.commit(manifest)
    return manifest


def _plan_files(manifest: Manifest) -> Iterator[tuple[str, list[_Part]]]:
    """Yield the names of files, and the chunks of each."""
    groups: dict[str, list[list[_Part]]] = {}
    filled: dict[str, int] = {}
    for name, entry in manifest.tensors.items():
        item = item_of_tensor(name)
        for chunk in entry.chunks or (_build_empty_chunk(entry),):
            if item not in groups or filled[item] + chunk.bytes > _FILE_BYTES:
                groups.setdefault(item, []).append([])
                filled[item] = 0
            groups[item][-1].append((name, chunk))
            filled[item] += chunk.bytes
    for item, files in groups.items():
        for number, parts in enumerate(files, start=1):
            yield shard_file_name(item, number, len(files)), parts


def _build_empty_chunk(entry: TensorEntry) -> Chunk:
    """Return the chunk of a tensor without elements."""
    return Chunk("", 0, 0, "", (0,) * len(entry.shape), entry.shape)


def _copy_file(
    snapshot: Snapshot, draft: Draft, name: str, parts: list[_Part], progress: Progress
) -> tuple[FileEntry, list[_Part]]:
    def build_part(tensor: str, chunk: Chunk, number: int) -> TensorPart:
        entry = snapshot.checkpoint.manifest.tensors[tensor]
        is_full = chunk.sizes == entry.shape
        # A file may have several chunks of a tensor.
        label = tensor.split("/", 1)[1] + ("" if is_full else f"[{number}]")
        return TensorPart(
            label,
            entry.dtype,
            chunk.sizes,
            chunk.bytes,
            lambda: (
                read_chunk(snapshot, tensor, chunk, max(1, min(BLOCK, chunk.bytes)), progress)
                if chunk.bytes
                else ()
            ),
            None if is_full else chunk.offsets,
        )

    built = [build_part(tensor, chunk, number) for number, (tensor, chunk) in enumerate(parts)]
    written = write_safetensors(partial(draft.put, name), built, {"format": "pt", "save": draft.address.save})
    copied = [
        (
            tensor,
            replace(chunk, file=name, start=result.start, checksum=result.checksum, blocks=result.blocks),
        )
        for (tensor, chunk), result in zip(parts, written.parts, strict=True)
    ]
    return written.file, copied
