"""Child process of `accel checkpoint`: runs one command and prints lines of JSON.

The last line contains a `result`, or an `error` with an exit code; lines before it report progress.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_runtime.checkpoint.directory import (
    DirectoryEntry,
    find_complete_checkpoint,
    find_newest_checkpoint,
    list_untracked_files,
    remove_checkpoint,
    remove_leftovers,
    scan_directory,
)
from accel_runtime.checkpoint.errors import CheckpointError, RequestError
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.manifest import Checkpoint, Manifest, TensorEntry, verify_all_files
from accel_runtime.checkpoint.merge import MergeRequest, merge_tensors

__all__ = ["main"]

_PROGRESS_S = 0.1
_FAILED, _USAGE = 1, 2


def main(request: Mapping[str, Any]) -> int:
    """Run the command of a request and print its result; return 1 for damage, 2 for a wrong request."""
    options = dict(request)
    command, directory = _COMMANDS[options.pop("command")], Path(options.pop("directory"))
    try:
        _print({"result": command(directory, **options)})
    except RequestError as error:
        return _print_error(str(error), _USAGE)
    except CheckpointError as error:
        return _print_error(str(error), _FAILED)
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        return _print_error(f"{path}{error.strerror or error}", _FAILED)
    return 0


def list_(directory: Path) -> dict[str, Any]:
    """List all checkpoints, the oldest first."""
    scan = scan_directory(directory)
    return {
        "directory": str(scan.directory),
        "checkpoints": [_describe_entry(entry) for entry in scan.entries],
        "leftovers": [str(path) for path in scan.leftovers],
    }


def verify(directory: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint; if it is damaged, also of earlier ones until one is complete."""
    entry = find_newest_checkpoint(directory)
    problems = _find_problems(entry)
    checkpoint = entry.checkpoint
    return {
        **_describe_entry(entry),
        "whole": not problems,
        "problems": problems,
        "strangers": _list_untracked(checkpoint) if checkpoint else [],
        "before": _find_earlier(entry) if problems else None,
    }


def show(directory: Path, *, tensors: bool = False) -> dict[str, Any]:
    """Describe the contents of a checkpoint from its manifest."""
    checkpoint = find_complete_checkpoint(directory)
    manifest = checkpoint.manifest
    description: dict[str, Any] = {
        "path": str(checkpoint.path),
        "passed_over": _list_newer_problems(directory, checkpoint),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "bytes": manifest.bytes,
        "items": [_describe_item(manifest, item) for item in manifest.items],
        "files": {name: file.bytes for name, file in manifest.files.items()},
        "strangers": _list_untracked(checkpoint),
    }
    if tensors:
        description["tensors"] = {name: _describe_tensor(stored) for name, stored in manifest.tensors.items()}
    return description


def export(directory: Path, *, output: str, **options: Any) -> dict[str, Any]:
    """Merge the tensors of an item into safetensors files."""
    checkpoint = find_complete_checkpoint(directory)
    result = merge_tensors(
        checkpoint, Path(output), MergeRequest(**options), _ByteProgress(checkpoint.path, 0)
    )
    head = {"path": str(checkpoint.path), "step": checkpoint.manifest.step}
    return {**head, "passed_over": _list_newer_problems(directory, checkpoint), **asdict(result)}


def prune(directory: Path, *, keep: int, now: bool) -> dict[str, Any]:
    """Remove all but the newest numbered checkpoints, or list them without `now`.

    Nothing is removed until one of the checkpoints to keep has been verified completely.
    """
    scan = scan_directory(directory)
    numbered = [entry for entry in scan.entries if entry.number is not None]
    complete = [entry for entry in numbered if entry.checkpoint is not None]
    kept, removed = complete[-keep:], complete[:-keep]
    next_number = 1 + max((entry.number for entry in complete if entry.number is not None), default=-1)
    result = {
        "removes": [_describe_entry(entry) for entry in removed],
        "keeps": [_describe_entry(entry) for entry in kept],
        "damaged": [entry.problem for entry in numbered if entry.checkpoint is None],
        "leftovers": [str(path) for path in scan.leftovers],
    }
    if now:
        if removed:
            _require_one_undamaged(kept)
        for entry in removed:
            assert entry.checkpoint is not None
            if not remove_checkpoint(entry.checkpoint.path, FileSystem()):
                raise CheckpointError(
                    f"Cannot remove {entry.checkpoint.path}: another process is reading it."
                )
        remove_leftovers(scan.directory, next_number, FileSystem())
        result["leftovers"] = [str(path) for path in scan.leftovers if not path.exists()]
    return result


def _require_one_undamaged(entries: list[DirectoryEntry]) -> None:
    all_problems: list[str] = []
    for entry in reversed(entries):
        problems = _find_problems(entry)
        if not problems:
            return
        all_problems += problems
    raise CheckpointError(
        "\n".join([*all_problems, "Nothing was removed: none of the checkpoints to keep is undamaged."])
    )


def _find_problems(entry: DirectoryEntry) -> list[str]:
    if entry.checkpoint is None:
        return [entry.problem]
    manifest = entry.checkpoint.manifest
    return verify_all_files(entry.checkpoint, _ByteProgress(entry.path, manifest.bytes))


def _find_earlier(entry: DirectoryEntry) -> dict[str, Any] | None:
    """Return the newest earlier checkpoint that is complete and undamaged."""
    if entry.number is None:
        return None
    for other in reversed(scan_directory(entry.path.parent).entries):
        older = other.number is not None and other.number < entry.number
        if older and other.checkpoint and not _find_problems(other):
            return _describe_entry(other)
    return None


def _describe_entry(entry: DirectoryEntry) -> dict[str, Any]:
    description: dict[str, Any] = {"path": str(entry.path), "number": entry.number, "problem": entry.problem}
    description["written_by"] = "accelerate" if entry.foreign else "accel"
    if entry.checkpoint is None:
        return description | dict.fromkeys(("step", "saved_at", "world_size", "bytes"))
    manifest = entry.checkpoint.manifest
    if entry.checkpoint.path != entry.path:
        description["lies_in"] = str(entry.checkpoint.path)
    return description | {
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "bytes": manifest.bytes,
    }


def _list_newer_problems(directory: Path, checkpoint: Checkpoint) -> list[str]:
    """Return the problems of checkpoints newer than the selected one."""
    entries = scan_directory(directory).entries
    index = next(
        (index for index, entry in enumerate(entries) if entry.checkpoint == checkpoint), len(entries)
    )
    return [entry.problem for entry in entries[index + 1 :]]


def _describe_item(manifest: Manifest, item: str) -> dict[str, Any]:
    tensors = {name: manifest.tensors[name] for name in manifest.tensors_of(item)}
    dtypes: dict[str, int] = {}
    for stored in tensors.values():
        dtypes[stored.dtype] = dtypes.get(stored.dtype, 0) + stored.bytes
    return {
        "name": item,
        "class": manifest.about.get(item, ""),
        "tensors": len(tensors),
        "bytes": sum(dtypes.values()),
        "dtypes": dtypes,
        "files": sorted({chunk.file for stored in tensors.values() for chunk in stored.chunks}),
        "differs_between_ranks": item in manifest.own or any("#" in name for name in tensors),
    }


def _describe_tensor(stored: TensorEntry) -> dict[str, Any]:
    chunks = [
        {
            "file": chunk.file,
            "start": chunk.start,
            "bytes": chunk.bytes,
            "offsets": chunk.offsets,
            "sizes": chunk.sizes,
        }
        for chunk in stored.chunks
    ]
    return {"dtype": stored.dtype, "shape": stored.shape, "bytes": stored.bytes, "chunks": chunks}


def _list_untracked(checkpoint: Checkpoint) -> list[str]:
    return [str(path.relative_to(checkpoint.path)) for path in list_untracked_files(checkpoint)]


class _ByteProgress:
    """Prints the number of bytes read of a checkpoint from time to time; `total` is 0 if unknown."""

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total, self._done, self._last_print = path, total, 0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() - self._last_print >= _PROGRESS_S:
                self._last_print = time.monotonic()
                _print({"reads": str(self._path), "done": self._done, "of": self._total})


def _print_error(text: str, code: int) -> int:
    _print({"error": text, "code": code})
    return code


def _print(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


_COMMANDS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "list": list_,
    "verify": verify,
    "show": show,
    "export": export,
    "prune": prune,
}


if __name__ == "__main__":
    # Clean up after Ctrl-C; the parent process prints the message.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stdout = None
        sys.exit(128 + signal.SIGINT)
