"""Find checkpoints: under their final names, or beside them after a crash. Imports no torch."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.checkpoint.errors import CheckpointError, RequestError
from accel_runtime.checkpoint.manifest import NAME, UNFINISHED, Manifest

__all__ = [
    "Checkpoint",
    "DirectoryEntry",
    "checkpoint_name",
    "find_checkpoint",
    "find_complete_checkpoint",
    "find_newest_checkpoint",
    "find_previous_checkpoint",
    "is_replaced",
    "list_complete_siblings",
    "list_numbered",
    "list_siblings",
    "list_untracked_files",
    "next_number",
    "numbered_directory",
    "parse_number",
    "read_checkpoint",
    "read_manifest",
    "scan_directory",
]

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_SIBLING = re.compile(r"\.(.+)\.(saving|replaced|removing)(?:-([0-9a-f]+))?")
"""Names of directories on the way to or from a checkpoint's name: the name, the state, and the save."""


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    manifest: Manifest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, step={self.manifest.step})"

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`; None for other names."""
        return parse_number(checkpoint_name(self.path))


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint, also for a scratch directory of it."""
    match = _SIBLING.fullmatch(path.name)
    return match[1] if match else path.name


def numbered_directory(number: int) -> str:
    """Return `checkpoint_N`."""
    return f"checkpoint_{number}"


def parse_number(name: str) -> int | None:
    """Return N of `checkpoint_N`; None for other names."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a directory; raise `CheckpointError` if its manifest or the size of a file is wrong."""
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        try:
            status = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(
                f"{folder / name} is missing from the checkpoint: {error.strerror}"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{folder / name} is damaged: it is not a regular file")
        if status.st_size != file.bytes:
            raise CheckpointError(
                f"{folder / name} is damaged: it has {status.st_size} bytes and should have {file.bytes}"
            )
    return Checkpoint(folder, manifest)


def _describe_missing_manifest(folder: Path) -> str:
    if not folder.exists():
        return "it does not exist"
    return f"it has no {NAME}" if folder.is_dir() else "it is a file, and a checkpoint is a directory"


def find_checkpoint(target: Path) -> Checkpoint:
    """Return the checkpoint of this name, or a complete one that a crash left beside it."""
    if (target / NAME).exists():
        return read_checkpoint(target)
    complete = list_complete_siblings(list_siblings(target))
    return complete[-1] if complete else read_checkpoint(target)


def find_previous_checkpoint(path: Path) -> Checkpoint | None:
    """Return the newest numbered checkpoint before this one."""
    number = parse_number(checkpoint_name(path))
    if number is None:
        return None
    earlier = [
        each for each in list_numbered(path.parent)[0] if each.number is not None and each.number < number
    ]
    return earlier[-1] if earlier else None


def list_numbered(folder: Path) -> tuple[list[Checkpoint], list[CheckpointError]]:
    """Return the complete checkpoints `checkpoint_N` of a directory, the newest last, and the errors of the others."""
    checkpoints, errors = [], []
    for path in sorted(_iterate_numbered(folder), key=lambda path: int(path.name.split("_")[1])):
        try:
            checkpoints.append(find_checkpoint(path))
        except CheckpointError as error:
            errors.append(error)
    return checkpoints, errors


def next_number(folder: Path) -> int:
    """Return a number greater than that of any `checkpoint_N`, complete or not."""
    return 1 + max((int(path.name.split("_")[1]) for path in _iterate_numbered(folder)), default=-1)


def list_untracked_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files in the directory of a checkpoint that are not part of it."""
    tracked = {checkpoint.path / name for name in (NAME, *checkpoint.manifest.files)}
    return sorted(
        path
        for path in checkpoint.path.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and path not in tracked
    )


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest in a directory; other files are not checked."""
    path = folder / NAME
    try:
        return Manifest.parse(_read_text(path), path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is not a checkpoint: {_describe_missing_manifest(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: it is not text") from error


def _read_text(path: Path) -> str:
    """Return the text of an ordinary file, without blocking on a named pipe."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise CheckpointError(f"{path} is damaged: it is not a regular file")
        return opened.read().decode()


def _iterate_numbered(folder: Path) -> Iterator[Path]:
    """Yield the paths `checkpoint_N`, also of checkpoints that exist only beside the name."""
    if not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    others = (match for name in names if (match := _SIBLING.fullmatch(name)) and match[2] != "removing")
    names |= {match[1] for match in others}
    yield from (folder / name for name in names if _NUMBERED.fullmatch(name))


def list_siblings(target: Path) -> list[Path]:
    """Return the scratch directories that crashes may have left beside a checkpoint."""
    if not target.parent.is_dir():
        return []
    paths = ((path, _SIBLING.fullmatch(path.name)) for path in target.parent.iterdir())
    return [path for path, match in paths if match and match[1] == target.name]


def list_complete_siblings(paths: list[Path]) -> list[Checkpoint]:
    """Return the complete checkpoints among directories, the newest last."""
    complete = []
    for path in paths:
        with suppress(CheckpointError):
            if ".removing" not in path.name and not (path / UNFINISHED).exists():
                complete.append(read_checkpoint(path))
    # A replaced checkpoint is older than its replacement, whatever the clock shows.
    return sorted(complete, key=lambda each: (not is_replaced(each.path), each.manifest.saved_at, each.path))


def is_replaced(path: Path) -> bool:
    """Return whether a sibling is a replaced checkpoint rather than an unfinished one."""
    match = _SIBLING.fullmatch(path.name)
    if match is None or match[2] != "saving":
        return True
    try:
        if (path / UNFINISHED).exists() or not any(path.iterdir()):
            return False
    except FileNotFoundError:  # another process has renamed or removed it
        return False
    try:
        return read_manifest(path).save != match[3]
    except CheckpointError:
        return True


_LEFTOVER = re.compile(r"\.(.+)\.(saving-|replaced-|removing).*")
_ACCELERATE = ("random_states_*.pkl", "optimizer.bin", "scheduler.bin", "sampler.bin", "pytorch_model.bin")
"""Files that only Accelerate's `save_state` writes."""


@dataclass(frozen=True)
class DirectoryEntry:
    """A directory that is or should be a checkpoint."""

    path: Path
    """Its final name, even if a crash left it beside that name."""
    checkpoint: Checkpoint | None
    """The checkpoint, if manifest and file sizes are right."""
    problem: str = ""
    """Error of an incomplete or damaged checkpoint."""
    foreign: bool = False
    """Whether Accelerate wrote it."""

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`."""
        match = _NUMBERED.fullmatch(self.path.name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class DirectoryScan:
    """Checkpoints and leftovers in a directory."""

    directory: Path
    entries: list[DirectoryEntry]
    """Checkpoints, the oldest first."""
    leftovers: list[Path]
    """Directories of saves that are running or were interrupted."""


def scan_directory(directory: Path) -> DirectoryScan:
    """Scan a project directory, a directory of checkpoints, or a single checkpoint."""
    if not directory.is_dir():
        entry = _read_entry(directory)
        if entry.checkpoint is None:
            raise RequestError(
                f"Not a directory: {directory}" if directory.exists() else f"Directory not found: {directory}"
            )
        return DirectoryScan(directory.parent, [entry], [])
    if _is_checkpoint_directory(directory):
        return DirectoryScan(directory.parent, [_read_entry(directory)], [])
    subdirectory = directory / "checkpoints"
    directory = subdirectory if subdirectory.is_dir() else directory
    inside = sorted(path for path in directory.iterdir() if path.is_dir())
    leftovers = [path for path in inside if _LEFTOVER.fullmatch(path.name)]
    names = {path for path in inside if path not in leftovers and _is_checkpoint_directory(path)}
    names |= {
        directory / match[1]
        for path in leftovers
        if (match := _LEFTOVER.fullmatch(path.name))
        and (path / NAME).is_file()
        and not (path / UNFINISHED).exists()
    }
    return DirectoryScan(directory, sorted(map(_read_entry, names), key=_age_key), leftovers)


def find_complete_checkpoint(directory: Path) -> Checkpoint:
    """Return this checkpoint, or the newest complete one in the directory."""
    entries = _list_entries(directory)
    if len(entries) == 1 and entries[0].checkpoint is None:
        raise (RequestError if entries[0].foreign else CheckpointError)(entries[0].problem)
    complete = [entry.checkpoint for entry in entries if entry.checkpoint is not None]
    if not complete:
        problems = "".join(f"\n  {entry.problem}" for entry in entries)
        raise CheckpointError(f"No complete checkpoint in {directory}:{problems}")
    return complete[-1]


def find_newest_checkpoint(directory: Path) -> DirectoryEntry:
    """Return this checkpoint, or the newest in the directory, complete or not."""
    entries = _list_entries(directory)
    if entries[-1].foreign:
        raise RequestError(entries[-1].problem)
    return entries[-1]


def _list_entries(directory: Path) -> list[DirectoryEntry]:
    scan = scan_directory(directory)
    if not scan.entries:
        raise RequestError(f"No checkpoint found in {scan.directory}")
    return scan.entries


def _read_entry(path: Path) -> DirectoryEntry:
    if _is_from_accelerate(path):
        problem = f"{path} was written by Accelerate, without checksums: accelerator.load_state() loads it"
        return DirectoryEntry(path, None, problem, foreign=True)
    try:
        return DirectoryEntry(path, find_checkpoint(path))
    except CheckpointError as error:
        return DirectoryEntry(path, None, str(error))


def _age_key(entry: DirectoryEntry) -> tuple[int, str, str]:
    saved_at = entry.checkpoint.manifest.saved_at if entry.checkpoint else ""
    # The name too, for a stable order of two checkpoints of the same second.
    return (-1 if entry.number is None else entry.number), saved_at, entry.path.name


def _is_checkpoint_directory(path: Path) -> bool:
    return (path / NAME).is_file() or _NUMBERED.fullmatch(path.name) is not None or _is_from_accelerate(path)


def _is_from_accelerate(path: Path) -> bool:
    return not (path / NAME).exists() and any(next(path.glob(name), None) for name in _ACCELERATE)
