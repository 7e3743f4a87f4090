"""Where checkpoints lie: beside their final name until they are whole, then under it, and how they are found. No torch."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.manifest import NAME, UNFINISHED, Manifest

__all__ = [
    "Found",
    "automatic",
    "beside",
    "find",
    "manifest_of",
    "name_of",
    "named",
    "next_number",
    "numbered",
    "read",
    "strangers",
    "was_in_place",
    "whole",
    "whole_before",
]

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_BESIDE = re.compile(r"\.(.+)\.(saving|replaced|removing)(?:-([0-9a-f]+))?")
"""Directories on their way to or from a name: the name, where they are, and the save."""


@dataclass(frozen=True, repr=False)
class Found:
    """A checkpoint on the disk."""

    path: Path
    """Its directory."""
    manifest: Manifest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, step={self.manifest.step})"

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`; None for other names."""
        return automatic(name_of(self.path))


def name_of(path: Path) -> str:
    """The name of a checkpoint, also of one that is on its way to or from it."""
    matched = _BESIDE.fullmatch(path.name)
    return matched[1] if matched else path.name


def named(number: int) -> str:
    """`checkpoint_N`."""
    return f"checkpoint_{number}"


def automatic(name: str) -> int | None:
    """N of `checkpoint_N`; None for other names."""
    matched = _NUMBERED.fullmatch(name)
    return int(matched[1]) if matched else None


def read(folder: Path) -> Found:
    """The checkpoint in a directory, as far as its manifest and the sizes of its files tell.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    manifest = manifest_of(folder)
    for name, file in manifest.files.items():
        try:
            told = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(
                f"{folder / name} is missing from the checkpoint: {error.strerror}"
            ) from error
        if not stat.S_ISREG(told.st_mode):
            raise CheckpointError(f"{folder / name} is damaged: it is no ordinary file")
        if told.st_size != file.bytes:
            raise CheckpointError(
                f"{folder / name} is damaged: it has {told.st_size} bytes and should have {file.bytes}"
            )
    return Found(folder, manifest)


def _lacking(folder: Path) -> str:
    if not folder.exists():
        return "it does not exist"
    return f"it has no {NAME}" if folder.is_dir() else "it is a file, and a checkpoint is a directory"


def find(target: Path) -> Found:
    """The checkpoint of this name; one that a crash left on its way to the name counts, it is whole.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if (target / NAME).exists():
        return read(target)
    found = whole(beside(target))
    return found[-1] if found else read(target)


def whole_before(path: Path) -> Found | None:
    """The newest checkpoint with an automatic name that comes before this one."""
    number = automatic(name_of(path))
    if number is None:
        return None
    before = [one for one in numbered(path.parent)[0] if one.number is not None and one.number < number]
    return before[-1] if before else None


def numbered(folder: Path) -> tuple[list[Found], list[CheckpointError]]:
    """The checkpoints `checkpoint_N` of a directory, the newest last, and what is wrong with others of such a name."""
    found, wrong = [], []
    for path in sorted(_numbered(folder), key=lambda path: int(path.name.split("_")[1])):
        try:
            found.append(find(path))
        except CheckpointError as error:
            wrong.append(error)
    return found, wrong


def next_number(folder: Path) -> int:
    """A number that is greater than those of all `checkpoint_N`, whole or not."""
    return 1 + max((int(path.name.split("_")[1]) for path in _numbered(folder)), default=-1)


def strangers(found: Found) -> list[Path]:
    """Files in a checkpoint's directory that are no part of it."""
    known = {found.path / name for name in (NAME, *found.manifest.files)}
    return sorted(
        path
        for path in found.path.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and path not in known
    )


def manifest_of(folder: Path) -> Manifest:
    """The manifest in a directory, whatever became of the other files.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = folder / NAME
    try:
        return Manifest.parsed(_read_text(path), path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint: {_lacking(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: it is no text") from error


def _read_text(path: Path) -> str:
    """Return the text of an ordinary file; whoever opens another kind, a named pipe, may wait for ever."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise CheckpointError(f"{path} is damaged: it is no ordinary file")
        return opened.read().decode()


def _numbered(folder: Path) -> Iterator[Path]:
    """The names `checkpoint_N`, also of those that exist only beside it."""
    if not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    others = (match for name in names if (match := _BESIDE.fullmatch(name)) and match[2] != "removing")
    names |= {match[1] for match in others}
    yield from (folder / name for name in names if _NUMBERED.fullmatch(name))


def beside(target: Path) -> list[Path]:
    """What crashes may have left of a checkpoint."""
    if not target.parent.is_dir():
        return []
    paths = ((path, _BESIDE.fullmatch(path.name)) for path in target.parent.iterdir())
    return [path for path, matched in paths if matched and matched[1] == target.name]


def whole(paths: list[Path]) -> list[Found]:
    """Those that are checkpoints, the newest last."""
    found = []
    for path in paths:
        with suppress(CheckpointError):
            if ".removing" not in path.name and not (path / UNFINISHED).exists():
                found.append(read(path))
    # One that was replaced is older than what replaced it, whatever the clock says.
    return sorted(found, key=lambda one: (not was_in_place(one.path), one.manifest.saved_at, one.path))


def was_in_place(path: Path) -> bool:
    """Whether a directory beside a name had the name before another took it."""
    matched = _BESIDE.fullmatch(path.name)
    if matched is None or matched[2] != "saving":
        return True
    try:
        if (path / UNFINISHED).exists() or not any(path.iterdir()):
            return False
    except FileNotFoundError:  # another process has given it its name, or has removed it
        return False
    try:
        return manifest_of(path).save != matched[3]
    except CheckpointError:
        return True
