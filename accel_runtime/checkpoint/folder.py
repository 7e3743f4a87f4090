"""Where checkpoints lie: beside their final name until they are whole, then under it, and how they are found. No torch.

The steps are those of an atomic file replacement, with a directory in place of the file: everything is written and
synced under another name in the same directory, the manifest last, and one rename makes it the checkpoint.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk
from accel_runtime.checkpoint.manifest import NAME, Manifest

__all__ = [
    "UNFINISHED",
    "Found",
    "begin",
    "commit",
    "discard",
    "find",
    "next_number",
    "numbered",
    "read",
    "remove",
    "strangers",
    "sweep",
]

_NUMBERED = re.compile(r"checkpoint_(\d+)")
UNFINISHED = ".unfinished"
"""The file that is in a directory from the start until all the others are."""
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


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
        matched = _NUMBERED.fullmatch(self.path.name)
        return int(matched[1]) if matched else None


def read(folder: Path) -> Found:
    """The checkpoint in a directory, as far as its manifest and the sizes of its files tell.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = folder / NAME
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint: {_lacking(folder)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    manifest = Manifest.parsed(text, path)
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{folder / name} is missing from the checkpoint: {error.strerror}"
            ) from error
        if size != file.bytes:
            raise CheckpointError(
                f"{folder / name} is damaged: it has {size} bytes and should have {file.bytes}"
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
    whole = _whole(_beside(target))
    return whole[-1] if whole else read(target)


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


def begin(target: Path, save: str, disk: Disk) -> Path:
    """The directory to write into, which becomes `target` with `commit`; what crashes left there is put in order.

    Args:
        target: The checkpoint's name.
        save: A name that no other save has.
        disk: Does it.

    Raises:
        CheckpointError: Another process is writing this checkpoint.
        OSError: It cannot be made.
    """
    disk.make(target.parent)
    whole = [] if (target / NAME).exists() else _whole(_beside(target))
    for path in _beside(target):
        opened = disk.lock(path)
        if opened is None:
            raise CheckpointError(f"{target} is being written by another process, into {path}")
        disk.close(opened)
    if whole:
        _put_in_place(whole[-1].path, target, disk)
    for path in _beside(target):
        _settle(path, target, disk)
    scratch = target.with_name(f".{target.name}.saving-{save}")
    disk.make(scratch)
    disk.close(disk.create(scratch / UNFINISHED))
    return scratch


def commit(scratch: Path, target: Path, disk: Disk) -> None:
    """Make what lies in `scratch`, manifest and all, the checkpoint `target`.

    Files in a directory of that name which were no part of a checkpoint stay in it.

    Raises:
        OSError: It cannot be done; `target` is what it was.
    """
    for folder in sorted((path for path in scratch.rglob("*") if path.is_dir()), reverse=True):
        disk.sync_directory(folder)
    disk.remove(scratch / UNFINISHED)
    disk.sync_directory(scratch)
    _put_in_place(scratch, target, disk)


def discard(scratch: Path, disk: Disk) -> None:
    """Remove what was written of a checkpoint that came to nothing, as far as that can be done."""
    with suppress(OSError):
        disk.remove_tree(scratch)


def remove(path: Path, disk: Disk) -> None:
    """Remove a checkpoint: it is none any more before the first of its files goes.

    Raises:
        OSError: It cannot be removed.
    """
    going = path.with_name(f".{path.name}.removing")
    disk.remove_tree(going)
    disk.rename(path, going)
    disk.remove_tree(going)


def sweep(folder: Path, below: int, disk: Disk) -> None:
    """Remove what crashes left of checkpoints with lower numbers."""
    for path in list(folder.glob(".checkpoint_*.*")):
        matched = re.fullmatch(r"\.(checkpoint_(\d+))\.(saving|replaced|removing).*", path.name)
        if not matched or int(matched[2]) >= below:
            continue
        opened = disk.lock(path)
        if opened is None:
            continue
        disk.close(opened)
        target = folder / matched[1]
        if matched[3] == "removing" or (target / NAME).exists() or not _whole([path]):
            _settle(path, target, disk)


def strangers(found: Found) -> list[Path]:
    """Files in a checkpoint's directory that are no part of it."""
    return _strangers(found.path, found.manifest)


def _strangers(folder: Path, manifest: Manifest | None) -> list[Path]:
    known = {folder / name for name in (NAME, UNFINISHED, *(manifest.files if manifest else ()))}
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path not in known)


def _numbered(folder: Path) -> Iterator[Path]:
    """The names `checkpoint_N`, also of those that exist only beside it."""
    if not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    names |= {
        match[1]
        for name in names
        if (match := re.fullmatch(r"\.(checkpoint_\d+)\.(?:saving|replaced).*", name))
    }
    yield from (folder / name for name in names if _NUMBERED.fullmatch(name))


def _beside(target: Path) -> list[Path]:
    """What crashes may have left of a checkpoint."""
    prefix = f".{target.name}."
    if not target.parent.is_dir():
        return []
    return [
        path
        for path in target.parent.iterdir()
        if path.name.startswith((f"{prefix}saving-", f"{prefix}replaced-"))
    ]


def _whole(paths: list[Path]) -> list[Found]:
    """Those that are checkpoints, the newest last."""
    found = []
    for path in paths:
        with suppress(CheckpointError):
            found.append(read(path))
    return sorted(found, key=lambda one: one.manifest.saved_at)


def _put_in_place(new: Path, target: Path, disk: Disk) -> None:
    """Give a whole checkpoint its name; what had the name before goes, but for strangers."""
    old = new
    try:
        disk.rename(new, target)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        old = _replace(new, target, disk)
    disk.sync_directory(target.parent)
    if old.exists():
        _settle(old, target, disk)


def _replace(new: Path, target: Path, disk: Disk) -> Path:
    """Put a directory where another is; where that one is then."""
    try:
        disk.exchange(new, target)
    except OSError as error:
        if error.errno not in _CANNOT_EXCHANGE:
            raise
    else:
        return new
    # For a moment neither has the name: `find` looks beside it.
    old = target.with_name(new.name.replace(".saving-", ".replaced-"))
    disk.rename(target, old)
    disk.rename(new, target)
    return old


def _settle(leftover: Path, target: Path, disk: Disk) -> None:
    """Bring the strangers of a replaced directory to the new one, and remove it."""
    manifest = None
    with suppress(CheckpointError):
        manifest = read(leftover).manifest
    keep = [] if (leftover / UNFINISHED).exists() else _strangers(leftover, manifest)
    for path in keep:
        home = target / path.relative_to(leftover)
        if not home.exists():
            disk.make(home.parent)
            disk.rename(path, home)
    disk.remove_tree(leftover)
