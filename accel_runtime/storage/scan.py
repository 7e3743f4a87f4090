"""Scan a directory for checkpoints, complete or not, and choose one of them. Imports no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.storage.deepspeed_folder import is_deepspeed_checkpoint
from accel_runtime.storage.directory import exists
from accel_runtime.storage.errors import CheckpointError, RequestError
from accel_runtime.storage.file_store import FileStore, identify_candidates, retry_while_changing
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import NAME, UNFINISHED, Checkpoint, parse_number

__all__ = [
    "DirectoryEntry",
    "find_complete_checkpoint",
    "find_newest_checkpoint",
    "find_writer",
    "is_accelerate_checkpoint",
    "scan_directory",
]

_LEFTOVER = re.compile(r"\.(.+)\.(saving-|replaced-|removing).*")
_ACCELERATE = re.compile(
    r"random_states_\d+\.pkl|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl"
    r"|pytorch_model_fsdp.*"
)
"""File names that only Accelerate's `save_state` writes; weights alone may have another origin."""


@dataclass(frozen=True)
class DirectoryEntry:
    """A directory that is or should be a checkpoint."""

    path: Path
    """Its final name, even if a crash left it beside that name."""
    checkpoint: Checkpoint | None
    """The checkpoint, if manifest and file sizes are right."""
    problem: str = ""
    """Error of an incomplete or damaged checkpoint."""
    writer: str = ""
    """Name of the program that wrote it, if not accel."""

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`."""
        return parse_number(self.path.name)


@dataclass(frozen=True)
class DirectoryScan:
    """Checkpoints and leftovers in a directory."""

    directory: Path
    entries: list[DirectoryEntry]
    """Checkpoints, the oldest first."""
    leftovers: list[Path]
    """Directories of saves that are running or were interrupted."""


def scan_directory(directory: Path) -> DirectoryScan:
    """Scan a project directory, a directory of checkpoints, or a single checkpoint.

    Checkpoints that another process removes meanwhile are left out.
    """
    disk = FileSystem()
    return retry_while_changing(
        lambda: _scan(directory, disk),
        lambda: [
            identify_candidates(directory),
            *map(disk.list_names, (directory, directory / "checkpoints")),
        ],
    )


def _scan(directory: Path, disk: FileSystem) -> DirectoryScan:
    if not directory.is_dir():
        entry = _read_entry(directory)
        if entry.checkpoint is None:
            raise RequestError(
                f"{'Not a directory' if directory.exists() else 'Directory not found'}: {directory}. Give a checkpoint, or a "
                "directory that contains checkpoints."
            )
        return DirectoryScan(directory.parent, [entry], [])
    if _is_checkpoint_directory(directory):
        return DirectoryScan(directory.parent, [_read_entry(directory)], [])
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

    def age(entry: DirectoryEntry) -> tuple[int, str, str]:
        saved_at = entry.checkpoint.manifest.saved_at if entry.checkpoint else ""
        # The name too, for a stable order of two checkpoints of the same second.
        return (-1 if entry.number is None else entry.number), saved_at, entry.path.name

    found = sorted(map(_read_entry, names), key=age)
    entries = [entry for entry in found if entry.checkpoint or exists(entry.path)]
    newest_removed = bool(found) and found[-1] not in entries
    changed = not entries and (disk.list_names(directory) != listed or _is_checkpoint_directory(directory))
    if newest_removed or changed:
        raise RequestError(f"{directory} was changed while it was read. Try again.")
    return DirectoryScan(directory, entries, leftovers)


def find_complete_checkpoint(directory: Path) -> Checkpoint:
    """Return this checkpoint, or the newest complete one in the directory."""
    entries = _list_entries(directory)
    if len(entries) == 1 and entries[0].checkpoint is None:
        raise (RequestError if entries[0].writer else CheckpointError)(entries[0].problem)
    complete = [entry.checkpoint for entry in entries if entry.checkpoint is not None]
    if not complete:
        problems = "".join(f"\n  {entry.problem}" for entry in entries)
        raise CheckpointError(f"No complete checkpoint in {directory}:{problems}")
    return complete[-1]


def find_newest_checkpoint(directory: Path) -> DirectoryEntry:
    """Return this checkpoint, or the newest in the directory, complete or not."""
    entries = _list_entries(directory)
    if entries[-1].writer:
        raise RequestError(entries[-1].problem)
    return entries[-1]


def _list_entries(directory: Path) -> list[DirectoryEntry]:
    scan = scan_directory(directory)
    if not scan.entries:
        raise RequestError(
            f"No checkpoint found in {str(scan.directory)!r}. Give the directory that save_state wrote."
        )
    return scan.entries


def _read_entry(path: Path) -> DirectoryEntry:
    if writer := find_writer(path):
        problem = f"{path} was written by {writer}, without checksums: accelerator.load_state() loads it"
        return DirectoryEntry(path, None, problem, writer)
    try:
        return DirectoryEntry(path, FileStore().find(os.fspath(path)))
    except CheckpointError as error:
        return DirectoryEntry(path, None, str(error))


def _is_checkpoint_directory(path: Path) -> bool:
    return (path / NAME).is_file() or parse_number(path.name) is not None or bool(find_writer(path))


def find_writer(folder: Path) -> str:
    """Return the name of the program that wrote a checkpoint, if it is another one that accel reads; else an empty string."""
    if is_deepspeed_checkpoint(folder):
        return "DeepSpeed"
    return "Accelerate" if is_accelerate_checkpoint(folder) else ""


def is_accelerate_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint of Accelerate."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        return False
    return NAME not in names and any(map(_ACCELERATE.fullmatch, names))
