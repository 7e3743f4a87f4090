"""Scan a directory or the prefix of an object store for checkpoints, and choose one of them. Imports no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.environment.locations import is_url, normalize_location
from accel_runtime.storage.directory import exists
from accel_runtime.storage.errors import AbsentError, CheckpointError, RequestError, convert_store_errors
from accel_runtime.storage.file_store import FileStore, identify_candidates, retry_while_changing
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.formats import FORMATS, find_format
from accel_runtime.storage.manifest import NAME, UNFINISHED, Checkpoint, checkpoint_name, parse_number
from accel_runtime.storage.store import Store, child_key, parallel_map, split_key

__all__ = [
    "CheckpointEntry",
    "explain_leftover",
    "find_complete_checkpoint",
    "find_newest_checkpoint",
    "scan_location",
]

_LEFTOVER = re.compile(r"\.(.+)\.(saving-|replaced-|removing).*")
_LATER = " an hour after its last write, and a restart of its run at once"
"""When an unfinished save in an object store is taken for crashed: `LEFTOVER_AGE_S`."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint, complete or not."""

    location: str
    """Its path or URL: the final name, even if a crash left it beside that name."""
    checkpoint: Checkpoint | None
    """The checkpoint, if manifest and file sizes are right."""
    error: CheckpointError | None = None
    """Error of an incomplete or damaged checkpoint."""
    writer: str = ""
    """Name of its format, if another program wrote it."""

    @property
    def problem(self) -> str:
        """Text of the error; empty without one."""
        return "" if self.error is None else str(self.error)

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`."""
        return parse_number(split_key(self.location)[1])

    @property
    def age(self) -> tuple[int, str, str]:
        """Return what sorts checkpoints, the oldest first: the number, else the time."""
        saved_at = self.checkpoint.manifest.saved_at if self.checkpoint else ""
        # The name too, for a stable order of two checkpoints of the same second.
        return (-1 if self.number is None else self.number), saved_at, split_key(self.location)[1]


@dataclass(frozen=True)
class CheckpointScan:
    """Checkpoints and leftovers in a directory, or below a URL."""

    parent: str
    entries: list[CheckpointEntry]
    """Checkpoints, the oldest first."""
    leftovers: list[str]
    """Locations of saves that are running or were interrupted."""


def explain_leftover(location: str) -> str:
    """Return where a leftover comes from, and when `accel checkpoint prune` and saves remove it, as the end of a sentence."""
    name = checkpoint_name(Path(location))
    if parse_number(name) is None:
        removal = f"the next save to {name!r} removes it" + (_LATER if is_url(location) else "")
    else:
        removal = f"prune and later saves remove it{_LATER if is_url(location) else ' once a newer checkpoint is complete'}"
    return f"was left by a crash, or belongs to a running save: {removal}"


def scan_location(location: str, store: Store) -> CheckpointScan:
    """Scan a project directory, a directory of checkpoints, or a single checkpoint; or a URL of one of them.

    Checkpoints that another process removes meanwhile are left out.

    Raises:
        RequestError: If there is nothing at a path, or no checkpoint at a URL.
        CheckpointError: If the store fails.
    """
    try:
        if not is_url(location):
            return _scan_directory(Path(location))
        url = normalize_location(location)
    except ValueError as error:
        raise RequestError(str(error)) from None
    with convert_store_errors():
        return _scan_objects(url, store)


def _scan_objects(url: str, store: Store) -> CheckpointScan:
    own = _read_object_entry(url, store)
    if own.checkpoint is not None or not isinstance(own.error, AbsentError):
        return CheckpointScan(split_key(url)[0], [own], [])
    parent = child_key(url, "checkpoints")
    keys = store.list(parent)
    if not keys:
        parent, keys = url, store.list(url)
    found = parallel_map(lambda key: _read_object_entry(key, store), keys, waits_for_network=True)
    entries = [entry for entry in found if not isinstance(entry.error, AbsentError)]
    leftovers = [entry.location for entry in found if isinstance(entry.error, AbsentError)]
    return CheckpointScan(parent, sorted(entries, key=lambda entry: entry.age), leftovers)


def _read_object_entry(key: str, store: Store) -> CheckpointEntry:
    try:
        return CheckpointEntry(key, store.find(key))
    except RequestError:  # not of the checkpoint: the client is not installed
        raise
    except CheckpointError as error:
        return CheckpointEntry(key, None, error)


def _scan_directory(directory: Path) -> CheckpointScan:
    disk = FileSystem()
    return retry_while_changing(
        lambda: _scan(directory, disk),
        lambda: [
            identify_candidates(directory),
            *map(disk.list_names, (directory, directory / "checkpoints")),
        ],
    )


def _scan(directory: Path, disk: FileSystem) -> CheckpointScan:
    if not directory.is_dir():
        entry = _read_entry(directory)
        if entry.checkpoint is None:
            raise RequestError(
                f"{'Not a directory' if directory.exists() else 'Directory not found'}: {directory}. Give a checkpoint, or a "
                "directory that contains checkpoints."
            )
        return CheckpointScan(os.fspath(directory.parent), [entry], [])
    if _is_checkpoint_directory(directory):
        return CheckpointScan(os.fspath(directory.parent), [_read_entry(directory)], [])
    subdirectory = directory / "checkpoints"
    directory = subdirectory if subdirectory.is_dir() else directory
    listed = disk.list_names(directory)
    inside = [directory / name for name in listed if (directory / name).is_dir()]
    leftovers = [path for path in inside if _LEFTOVER.fullmatch(path.name)]
    names = {path for path in inside if path not in leftovers and _is_checkpoint_directory(path)}
    names |= {
        directory / match[1]
        for path in leftovers
        if (match := _LEFTOVER.fullmatch(path.name))
        and (path / NAME).is_file()
        and not (path / UNFINISHED).exists()
    }
    found = sorted(map(_read_entry, names), key=lambda entry: entry.age)
    entries = [entry for entry in found if entry.checkpoint or exists(Path(entry.location))]
    newest_removed = bool(found) and found[-1] not in entries
    changed = not entries and (disk.list_names(directory) != listed or _is_checkpoint_directory(directory))
    if newest_removed or changed:
        raise RequestError(f"{directory} was changed while it was read. Try again.")
    return CheckpointScan(os.fspath(directory), entries, list(map(os.fspath, leftovers)))


def find_complete_checkpoint(location: str, store: Store) -> Checkpoint:
    """Return this checkpoint, or the newest complete one in the directory or below the URL."""
    entries = _list_entries(location, store)
    if len(entries) == 1 and entries[0].checkpoint is None:
        raise (RequestError if entries[0].writer else CheckpointError)(entries[0].problem)
    complete = [entry.checkpoint for entry in entries if entry.checkpoint is not None]
    if not complete:
        problems = "".join(f"\n  {entry.problem}" for entry in entries)
        raise CheckpointError(f"No complete checkpoint in {location}:{problems}")
    return complete[-1]


def find_newest_checkpoint(location: str, store: Store) -> CheckpointEntry:
    """Return this checkpoint, or the newest in the directory or below the URL, complete or not."""
    entries = _list_entries(location, store)
    if entries[-1].writer:
        raise RequestError(entries[-1].problem)
    return entries[-1]


def _list_entries(location: str, store: Store) -> list[CheckpointEntry]:
    scan = scan_location(location, store)
    if not scan.entries and (other := find_format(Path(location), loads=False)):
        raise RequestError(FORMATS[other].explain(Path(location)))
    if not scan.entries:
        raise RequestError(
            f"No checkpoint found in {scan.parent!r}. Give the directory that save_state wrote, or its URL."
        )
    return scan.entries


def _read_entry(path: Path) -> CheckpointEntry:
    location = os.fspath(path)
    if writer := find_format(path, loads=True):
        return CheckpointEntry(location, None, CheckpointError(FORMATS[writer].explain(path)), writer)
    try:
        return CheckpointEntry(location, FileStore().find(location))
    except CheckpointError as error:
        return CheckpointEntry(location, None, error)


def _is_checkpoint_directory(path: Path) -> bool:
    return (
        (path / NAME).is_file() or parse_number(path.name) is not None or bool(find_format(path, loads=True))
    )
