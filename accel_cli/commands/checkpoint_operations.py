"""List, verify, describe, export and prune checkpoints, for `accel checkpoint`; torch is not imported."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.profile.layers import list_unused_files, read_layers
from accel_cli.profile.store import ProfileStore
from accel_runtime.environment.locations import is_url, normalize_location
from accel_runtime.storage.any_store import open_store
from accel_runtime.storage.checkpoint_copy import convert_checkpoint, copy_checkpoint
from accel_runtime.storage.errors import (
    CheckpointError,
    DamageError,
    RequestError,
    StoreError,
    describe_error,
)
from accel_runtime.storage.file_system import create_folder_atomically, require_new_folder
from accel_runtime.storage.formats import FORMATS, find_format
from accel_runtime.storage.manifest import Checkpoint, Manifest
from accel_runtime.storage.scan import (
    CheckpointEntry,
    find_complete_checkpoint,
    find_newest_checkpoint,
    scan_location,
)
from accel_runtime.storage.store import Snapshot, split_key, use_checkpoint
from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors
from accel_runtime.storage.verification import verify_files

__all__ = [
    "PRETRAINED",
    "SAFETENSORS",
    "ExportFormat",
    "command_errors",
    "copy_snapshot",
    "copy_to_location",
    "export_checkpoint",
    "export_pretrained",
    "list_checkpoints",
    "prune_checkpoints",
    "require_path",
    "show_checkpoint",
    "verify_checkpoint",
    "write_export",
]

_T = TypeVar("_T")
Progress = Callable[[str, int, int], None]
"""Receives the path of a checkpoint, the number of bytes read of it, and its size (0 if unknown)."""
_PROGRESS_S = 0.1
_WEIGHTS = "model.safetensors"
_MAX_SHARD_BYTES = 50 * 1000**3
"""Default of `save_pretrained` (transformers 5)."""
_RETRY_S = 30.0
"""Seconds for which a failing call to an object store is repeated: someone waits for the command."""


def _set_profile_variables() -> None:
    """Set the variables of the profile that are not set, such as credentials, as a launch does."""
    profiles = ProfileStore.from_env(os.environ, Path.cwd())
    console.print_notes(list_unused_files(profiles, os.environ))
    layers = read_layers(profiles, os.environ, None)
    for layer in reversed(layers):
        for key, value in layer.values.items():
            if key.startswith("env."):
                os.environ.setdefault(key.removeprefix("env."), str(value))


_STORE = open_store(retry_s=_RETRY_S, before_first_url=_set_profile_variables)


@contextmanager
def command_errors() -> Iterator[None]:
    """Convert errors of the runtime: an invalid request to `UsageError`, a damaged checkpoint to `AccelError`."""
    try:
        yield
    except RequestError as error:
        raise UsageError(str(error)) from error
    except CheckpointError as error:
        raise AccelError(str(error)) from error
    except StoreError as error:
        raise AccelError(describe_error(error)) from error


@command_errors()
def list_checkpoints(directory: str) -> dict[str, Any]:
    """List all checkpoints, the oldest first."""
    scan = scan_location(directory, _STORE)
    return {
        "directory": scan.parent,
        "checkpoints": [_describe_entry(entry) for entry in scan.entries],
        "leftovers": scan.leftovers,
    }


@command_errors()
def verify_checkpoint(directory: str, progress: Progress) -> dict[str, Any]:
    """Read every byte of a checkpoint; if it is damaged, also of earlier ones until one is undamaged."""
    found: list[CheckpointEntry] = []

    def find() -> str:
        found.append(find_newest_checkpoint(directory, _STORE))
        if found[-1].checkpoint is None:
            raise DamageError([found[-1].problem])
        return found[-1].location

    problems: list[str] = []
    try:
        checkpoint = verify_files(_STORE, find, _count_bytes(progress))
        entry = replace(found[-1], checkpoint=checkpoint)
    except DamageError as error:
        entry, problems = found[-1], error.problems
    return {
        **_describe_entry(entry),
        "complete": not problems,
        "problems": problems,
        "untracked": _list_untracked(entry.checkpoint) if entry.checkpoint else [],
        "earlier": _find_earlier(entry, progress) if problems else None,
    }


@command_errors()
def show_checkpoint(directory: str, *, tensors: bool) -> dict[str, Any]:
    """Describe the contents of a checkpoint from its manifest."""
    checkpoint, untracked = _use(directory, lambda snapshot: (snapshot.checkpoint, snapshot.list_untracked()))
    manifest = checkpoint.manifest
    description: dict[str, Any] = {
        "path": checkpoint.key,
        "skipped": _list_newer_problems(directory, checkpoint),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "part_of_ranks": list(manifest.ranks),
        "versions": dict(manifest.versions),
        "bytes": manifest.bytes,
        "items": [_describe_item(manifest, item) for item in manifest.items],
        "files": {name: file.bytes for name, file in manifest.files.items()},
        "untracked": untracked,
    }
    if tensors:
        description["tensors"] = {
            name: {**asdict(tensor), "bytes": tensor.bytes} for name, tensor in manifest.tensors.items()
        }
    return description


def export_checkpoint(
    directory: str, output: str, request: MergeRequest, progress: Progress
) -> dict[str, Any]:
    """Merge the tensors of an item into safetensors files."""
    require_path(output, "write")

    def write(snapshot: Snapshot, counter: Callable[[int], None]) -> dict[str, Any]:
        return asdict(merge_tensors(snapshot, Path(output), request, counter))

    return write_export(directory, write, progress)


def export_pretrained(
    directory: str, output: str, request: MergeRequest, progress: Progress
) -> dict[str, Any]:
    """Write the weights of a model into a folder, as `save_pretrained` of Hugging Face does."""
    if not request.item.startswith("model"):
        raise UsageError(
            f"Cannot write {request.item} with --format hf: it has models only. Choose a model with --item."
        )
    require_path(output, "write")
    folder = Path(output)
    request = replace(request, max_shard_bytes=request.max_shard_bytes or _MAX_SHARD_BYTES, lists_ties=False)

    def write(snapshot: Snapshot, counter: Callable[[int], None]) -> dict[str, Any]:
        if folder.is_dir():  # with the configuration of the model
            weights = [
                path.name for path in folder.iterdir() if re.fullmatch(r"model.*\.safetensors.*", path.name)
            ]
            if weights:
                raise RequestError(
                    f"{folder} has {min(weights)} already. Remove it, or choose another folder."
                )
            result = merge_tensors(snapshot, folder / _WEIGHTS, request, counter)
        else:
            require_new_folder(folder)
            with create_folder_atomically(folder) as scratch:
                result = merge_tensors(snapshot, scratch / _WEIGHTS, request, counter)
        return {**asdict(result), "files": [str(folder / Path(file).name) for file in result.files]}

    return write_export(directory, write, progress)


@command_errors()
def write_export(
    directory: str, write: Callable[[Snapshot, Callable[[int], None]], dict[str, Any]], progress: Progress
) -> dict[str, Any]:
    """Write this checkpoint, or the newest complete one, in another format; `write` receives it and a function of byte counts."""

    def export(snapshot: Snapshot) -> tuple[Checkpoint, dict[str, Any]]:
        checkpoint = snapshot.checkpoint
        return checkpoint, write(snapshot, _ByteProgress(progress, checkpoint.key, 0))

    checkpoint, result = _use(directory, export)
    head = {"path": checkpoint.key, "step": checkpoint.manifest.step}
    return {**head, "skipped": _list_newer_problems(directory, checkpoint), **result}


@dataclass(frozen=True)
class ExportFormat:
    """A format in which `accel checkpoint export` writes."""

    write: Callable[..., dict[str, Any]]
    """Write a checkpoint: `write(directory, output, request, progress)`, with `layout=...` if one is chosen."""
    options: frozenset[str]
    """Options that only some formats take, and this one does."""
    lacks: str = "they are not tensors"
    """Why items are not exported."""


_OF_TENSORS = frozenset({"--item", "--dtype", "--max-shard-size"})
SAFETENSORS = ExportFormat(export_checkpoint, _OF_TENSORS)
PRETRAINED = ExportFormat(export_pretrained, _OF_TENSORS)


@command_errors()
def copy_snapshot(snapshot: Snapshot, target: str, progress: Progress) -> Manifest:
    """Write a checkpoint of another program as one of accel, under a free name."""
    counter = _ByteProgress(progress, snapshot.checkpoint.key, snapshot.checkpoint.manifest.bytes)
    return convert_checkpoint(snapshot, _STORE, _normalize_target(target), counter)


@command_errors()
def copy_to_location(directory: str, target: str, progress: Progress) -> dict[str, Any]:
    """Copy this checkpoint, or the newest complete one, to a path or URL where there is nothing."""
    if writer := find_format(Path(directory), loads=True):
        raise RequestError(f"{directory} was written by {FORMATS[writer].title}. Copy the folder with cp.")
    key = _normalize_target(target)

    def copy(snapshot: Snapshot) -> Checkpoint:
        counter = _ByteProgress(progress, snapshot.checkpoint.key, snapshot.checkpoint.manifest.bytes)
        copy_checkpoint(snapshot, _STORE, key, counter)
        return snapshot.checkpoint

    checkpoint = _use(directory, copy)
    manifest = checkpoint.manifest
    return {
        "path": target,
        "from": checkpoint.key,
        "skipped": _list_newer_problems(directory, checkpoint),
        "step": manifest.step,
        "bytes": manifest.bytes,
    }


def _normalize_target(target: str) -> str:
    """Return the key of a path or URL."""
    try:
        return normalize_location(target)
    except ValueError as error:
        raise RequestError(str(error)) from None


def require_path(location: str, action: str) -> None:
    """Raise an error if an output or input of another format is a URL."""
    if is_url(_normalize_target(location)):
        raise UsageError(f"Cannot {action} {location}: files of other formats are on disk. Give a path.")


@command_errors()
def prune_checkpoints(directory: str, keep: int, progress: Progress | None = None) -> dict[str, Any]:
    """Remove all but the newest numbered checkpoints; without `progress`, only list them.

    Nothing is removed until one of the checkpoints to keep has been verified completely.
    """
    scan = scan_location(directory, _STORE)
    numbered = [entry for entry in scan.entries if entry.number is not None]
    complete = [entry for entry in numbered if entry.checkpoint is not None]
    kept, removed = complete[-keep:], complete[:-keep]
    result = {
        "removed": [_describe_entry(entry) for entry in removed],
        "kept": [_describe_entry(entry) for entry in kept],
        "damaged": [entry.problem for entry in numbered if entry.checkpoint is None],
        "leftovers": scan.leftovers,
    }
    if progress is None:
        return result
    if removed:
        _require_one_undamaged(kept, progress)
    for entry in removed:
        assert entry.checkpoint is not None
        if not _STORE.delete(entry.checkpoint.key):
            raise CheckpointError(f"Cannot remove {entry.checkpoint.key}: another process is reading it.")
    # A file system may have no locks, so that a save of a greater number may be running. An object store has the times of writes.
    newest = max((entry.number for entry in complete if entry.number is not None), default=-1)
    _STORE.remove_leftovers(scan.parent, sys.maxsize if is_url(scan.parent) else newest + 1)
    return result | {"leftovers": scan_location(directory, _STORE).leftovers}


def _use(directory: str, use: Callable[[Snapshot], _T]) -> _T:
    """Return the result of `use` for this checkpoint, or the newest complete one in the directory."""
    if writer := find_format(Path(directory), loads=True):
        with FORMATS[writer].open(Path(directory)) as snapshot:
            return use(snapshot)
    return use_checkpoint(_STORE, lambda: find_complete_checkpoint(directory, _STORE).key, use)


def _require_one_undamaged(entries: list[CheckpointEntry], progress: Progress) -> None:
    all_problems: list[str] = []
    for entry in reversed(entries):
        problems = _find_problems(entry, progress)
        if not problems:
            return
        all_problems += problems
    raise CheckpointError(
        "\n".join([*all_problems, "Nothing was removed: every checkpoint to keep is damaged."])
    )


def _find_problems(entry: CheckpointEntry, progress: Progress) -> list[str]:
    try:
        verify_files(_STORE, lambda: entry.location, _count_bytes(progress))
    except DamageError as error:
        return error.problems
    except CheckpointError as error:
        return [str(error)]
    return []


def _count_bytes(progress: Progress) -> Callable[[Checkpoint], Callable[[int], None]]:
    return lambda checkpoint: _ByteProgress(progress, checkpoint.key, checkpoint.manifest.bytes)


def _find_earlier(entry: CheckpointEntry, progress: Progress) -> dict[str, Any] | None:
    """Return the newest earlier checkpoint that is complete and undamaged."""
    if entry.number is None:
        return None
    for other in reversed(scan_location(split_key(entry.location)[0], _STORE).entries):
        older = other.number is not None and other.number < entry.number
        if older and other.checkpoint and not _find_problems(other, progress):
            return _describe_entry(other)
    return None


def _describe_entry(entry: CheckpointEntry) -> dict[str, Any]:
    description: dict[str, Any] = {"path": entry.location, "number": entry.number, "problem": entry.problem}
    description["written_by"] = entry.writer or "accel"
    if entry.checkpoint is None:
        return description | dict.fromkeys(("step", "saved_at", "world_size", "part_of_ranks", "bytes"))
    manifest = entry.checkpoint.manifest
    if entry.checkpoint.key != entry.location:
        description["location"] = entry.checkpoint.key
    return description | {
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "part_of_ranks": list(manifest.ranks),
        "bytes": manifest.bytes,
    }


def _list_newer_problems(directory: str, checkpoint: Checkpoint) -> list[str]:
    """Return the problems of checkpoints newer than the selected one."""
    problems: list[str] = []
    if find_format(Path(directory), loads=True):
        return problems
    for entry in reversed(scan_location(directory, _STORE).entries):
        if entry.checkpoint == checkpoint:
            break
        if entry.problem:
            problems.insert(0, entry.problem)
    return problems


def _describe_item(manifest: Manifest, item: str) -> dict[str, Any]:
    tensors = {name: manifest.tensors[name] for name in manifest.tensors_of(item)}
    dtypes: dict[str, int] = {}
    for stored in tensors.values():
        dtypes[stored.dtype] = dtypes.get(stored.dtype, 0) + stored.bytes
    return {
        "name": item,
        "class": manifest.class_names.get(item, ""),
        "tensors": len(tensors),
        "bytes": sum(dtypes.values()),
        "dtypes": dtypes,
        "files": sorted({chunk.file for stored in tensors.values() for chunk in stored.chunks}),
        "differs_between_ranks": item in manifest.values_by_rank or any("#" in name for name in tensors),
    }


def _list_untracked(checkpoint: Checkpoint) -> list[str]:
    with suppress(CheckpointError), _STORE.open(checkpoint.key) as snapshot:
        return snapshot.list_untracked()
    return []  # another process removes the checkpoint


class _ByteProgress:
    """Counts the bytes that threads read of a checkpoint, and reports the count every `_PROGRESS_S` seconds."""

    def __init__(self, progress: Progress, path: str, total: int) -> None:
        self._progress, self._path, self._total = progress, path, total
        self._done, self._last_report = 0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() - self._last_report >= _PROGRESS_S:
                self._last_report = time.monotonic()
                self._progress(self._path, self._done, self._total)
