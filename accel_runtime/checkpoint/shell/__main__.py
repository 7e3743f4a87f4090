"""Run by `accel checkpoint` as a child process: does one thing to checkpoints, and answers in lines of JSON.

The last line has a `result`, or an `error` with an exit code; those before it say how far it is.
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

from accel_runtime.checkpoint import folder, placing
from accel_runtime.checkpoint.errors import CheckpointError, RequestError
from accel_runtime.checkpoint.files import Disk
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.manifest import Manifest, Stored
from accel_runtime.checkpoint.shell import survey
from accel_runtime.checkpoint.shell.merging import Wish, merge
from accel_runtime.checkpoint.shell.survey import Entry
from accel_runtime.checkpoint.verifying import every_byte

__all__ = ["main"]

_PERIOD_S = 0.1
_FAILED, _USAGE = 1, 2


def main(request: Mapping[str, Any]) -> int:
    """Do what is asked, and print the answer.

    Args:
        request: `command`, `directory`, and what the command takes.

    Returns:
        The exit code: 1 for damage and what cannot be written, 2 where the request cannot be met.
    """
    asked = dict(request)
    command, directory = _COMMANDS[asked.pop("command")], Path(asked.pop("directory"))
    try:
        _print({"result": command(directory, **asked)})
    except RequestError as error:
        return _failed(str(error), _USAGE)
    except CheckpointError as error:
        return _failed(str(error), _FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _failed(f"{where}{error.strerror or error}", _FAILED)
    return 0


def list_(directory: Path) -> dict[str, Any]:
    """All checkpoints there, the oldest first."""
    found = survey.survey(directory)
    return {
        "directory": str(found.directory),
        "checkpoints": [_entry(entry) for entry in found.entries],
        "leftovers": [str(path) for path in found.leftovers],
    }


def verify(directory: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint; where it is damaged, also of those before it until one is whole."""
    entry = survey.newest(directory)
    problems = _problems(entry)
    found = entry.found
    return {
        **_entry(entry),
        "whole": not problems,
        "problems": problems,
        "strangers": _strangers(found) if found else [],
        "before": _before(entry) if problems else None,
    }


def show(directory: Path, *, tensors: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, as its manifest says."""
    found = survey.whole(directory)
    manifest = found.manifest
    told: dict[str, Any] = {
        "path": str(found.path),
        "passed_over": _passed_over(directory, found),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "bytes": manifest.bytes,
        "items": [_item(manifest, item) for item in manifest.items],
        "files": {name: file.bytes for name, file in manifest.files.items()},
        "strangers": _strangers(found),
    }
    if tensors:
        told["tensors"] = {name: _tensor(stored) for name, stored in manifest.tensors.items()}
    return told


def export(directory: Path, *, output: str, **wish: Any) -> dict[str, Any]:
    """Merge an item's tensors into a safetensors file."""
    found = survey.whole(directory)
    merged = merge(found, Path(output), Wish(**wish), _Progress(found.path, 0))
    head = {"path": str(found.path), "step": found.manifest.step}
    return {**head, "passed_over": _passed_over(directory, found), **asdict(merged)}


def prune(directory: Path, *, keep: int, now: bool) -> dict[str, Any]:
    """Remove all but the newest checkpoints with a number, or say which that would be.

    Nothing is removed before one of those that stay has been read to the last byte and is whole.
    """
    found = survey.survey(directory)
    numbered = [entry for entry in found.entries if entry.number is not None]
    fine = [entry for entry in numbered if entry.found is not None]
    kept, going = fine[-keep:], fine[:-keep]
    below = 1 + max((entry.number for entry in fine if entry.number is not None), default=-1)
    told = {
        "removes": [_entry(entry) for entry in going],
        "keeps": [_entry(entry) for entry in kept],
        "damaged": [entry.problem for entry in numbered if entry.found is None],
        "leftovers": [str(path) for path in found.leftovers],
    }
    if now:
        if going:
            _make_sure(kept)
        for entry in going:
            assert entry.found is not None
            if not placing.remove(entry.found.path, Disk()):
                raise CheckpointError(f"{entry.found.path} is being read by another process: it stays")
        placing.sweep(found.directory, below, Disk())
        told["leftovers"] = [str(path) for path in found.leftovers if not path.exists()]
    return told


def _make_sure(kept: list[Entry]) -> None:
    wrong: list[str] = []
    for entry in reversed(kept):
        problems = _problems(entry)
        if not problems:
            return
        wrong += problems
    raise CheckpointError("\n".join([*wrong, "Nothing was removed: none of those that would stay is whole."]))


def _problems(entry: Entry) -> list[str]:
    if entry.found is None:
        return [entry.problem]
    manifest = entry.found.manifest
    return every_byte(entry.found, _Progress(entry.path, manifest.bytes))


def _before(entry: Entry) -> dict[str, Any] | None:
    """The newest checkpoint before this one that is whole, to the last byte."""
    if entry.number is None:
        return None
    for other in reversed(survey.survey(entry.path.parent).entries):
        older = other.number is not None and other.number < entry.number
        if older and other.found and not _problems(other):
            return _entry(other)
    return None


def _entry(entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {"path": str(entry.path), "number": entry.number, "problem": entry.problem}
    told["written_by"] = "accelerate" if entry.foreign else "accel"
    if entry.found is None:
        return told | dict.fromkeys(("step", "saved_at", "world_size", "bytes"))
    manifest = entry.found.manifest
    if entry.found.path != entry.path:
        told["lies_in"] = str(entry.found.path)
    return told | {
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "bytes": manifest.bytes,
    }


def _passed_over(directory: Path, found: Found) -> list[str]:
    """What is wrong with checkpoints that are newer than the one that was taken."""
    entries = survey.survey(directory).entries
    place = next((index for index, entry in enumerate(entries) if entry.found == found), len(entries))
    return [entry.problem for entry in entries[place + 1 :]]


def _item(manifest: Manifest, item: str) -> dict[str, Any]:
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


def _tensor(stored: Stored) -> dict[str, Any]:
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


def _strangers(found: Found) -> list[str]:
    return [str(path.relative_to(found.path)) for path in folder.strangers(found)]


class _Progress:
    """Says now and then how many bytes of a checkpoint were read.

    Args:
        path: The checkpoint.
        total: How many there are; 0 where that is not known.
    """

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total, self._done, self._told = path, total, 0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() - self._told >= _PERIOD_S:
                self._told = time.monotonic()
                _print({"reads": str(self._path), "done": self._done, "of": self._total})


def _failed(text: str, code: int) -> int:
    _print({"error": text, "code": code})
    return code


def _print(said: Mapping[str, Any]) -> None:
    print(json.dumps(said), flush=True)


_COMMANDS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "list": list_,
    "verify": verify,
    "show": show,
    "export": export,
    "prune": prune,
}


if __name__ == "__main__":
    # Ctrl-C reaches this process too; what was begun is put in order, and the parent says what there is to say.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stdout = None
        sys.exit(128 + signal.SIGINT)
