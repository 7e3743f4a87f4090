"""How a checkpoint comes to its name, and goes: at no moment is there less than a whole one. No torch.

The steps are those of an atomic file replacement, with a directory in place of the file: everything is written and
synced under another name in the same directory, the manifest last, and one rename makes it the checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from accel_runtime.checkpoint import folder
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk, about
from accel_runtime.checkpoint.manifest import NAME, UNFINISHED

__all__ = ["begin", "commit", "discard", "remove", "sweep"]

_LOG = logging.getLogger("accel_runtime.checkpoint")
# Containers that forbid a system call they do not know may say EPERM.
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
_CANNOT_MOVE = {errno.EBUSY, errno.EXDEV}


def begin(target: Path, save: str, disk: Disk) -> tuple[Path, int | None]:
    """The directory to write into, which becomes `target` with `commit`; what crashes left there is put in order.

    Args:
        target: The checkpoint's name.
        save: A name that no other save has.
        disk: Does it.

    Returns:
        The directory, and the lock on it: nobody else takes it for something that a crash has left.

    Raises:
        CheckpointError: Another process is writing this checkpoint, or no checkpoint can have this name.
        OSError: It cannot be made.
    """
    _usable(target)
    _make(target.parent, disk)
    beside = folder.beside(target)
    for path in beside:
        if _is_locked(path, disk):
            raise CheckpointError(f"{target} is being written by another process, into {path}")
    _tidy(beside, target, disk)
    scratch, opened = target.with_name(f".{target.name}.saving-{save}"), None
    try:
        disk.make(scratch)
        opened = disk.lock(scratch)
        with about(scratch / UNFINISHED):
            disk.close(disk.create(scratch / UNFINISHED))
    except OSError:
        discard(scratch, disk)
        if opened is not None:
            disk.unlock(opened)
        raise
    return scratch, opened


def commit(scratch: Path, target: Path, disk: Disk) -> None:
    """Make what lies in `scratch`, manifest and all, the checkpoint `target`.

    Files in a directory of that name which were no part of a checkpoint stay in it.

    Raises:
        CheckpointError: `target` is something that cannot be replaced.
        OSError: It cannot be done; `target` is what it was.
    """
    for path in sorted((path for path in scratch.rglob("*") if path.is_dir()), reverse=True):
        disk.sync_directory(path)
    disk.remove(scratch / UNFINISHED)
    disk.sync_directory(scratch)
    _put_in_place(scratch, target, disk)


def discard(scratch: Path, disk: Disk) -> None:
    """Remove what was written of a checkpoint that came to nothing, as far as that can be done."""
    with suppress(OSError):
        # Where putting it in place could not be undone, this name may be that of what was there before.
        if not folder.was_in_place(scratch):
            _drop(scratch, disk)


def remove(path: Path, disk: Disk) -> bool:
    """Remove a checkpoint.

    Returns:
        False where somebody is reading it.

    Raises:
        OSError: It cannot be removed.
    """
    if _is_locked(path, disk):
        return False
    _drop(path, disk)
    return True


def sweep(directory: Path, below: int, disk: Disk) -> None:
    """Put in order what crashes left of checkpoints with lower numbers."""
    left: dict[str, list[Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        number = folder.automatic(folder.name_of(path))
        if number is not None and number < below and path.name.startswith(".") and not _is_locked(path, disk):
            left.setdefault(folder.name_of(path), []).append(path)
    for name, paths in left.items():
        _tidy(paths, directory / name, disk)


def _usable(target: Path) -> None:
    """Refuse names that a directory cannot take, before anything is written."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: a checkpoint is a directory")
    if target.is_mount():
        raise _immovable(target)
    if target.exists() and target.samefile(Path.cwd()):
        raise CheckpointError(
            f"{target} is where this process works, and a checkpoint takes the place of the whole directory: "
            f"save into one in it, as {target / 'checkpoint'}"
        )


def _immovable(target: Path) -> CheckpointError:
    return CheckpointError(
        f"{target} is where a file system is mounted, and a checkpoint takes the place of the whole directory: "
        f"save into one in it, as {target / 'checkpoint'}"
    )


def _make(directory: Path, disk: Disk) -> None:
    """Make a directory that is still there after a loss of power."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    disk.make(directory)
    for path in reversed(missing):
        disk.sync_directory(path.parent)


def _is_locked(path: Path, disk: Disk) -> bool:
    try:
        opened = disk.lock(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if opened is None:
        return True
    disk.unlock(opened)
    return False


def _tidy(beside: list[Path], target: Path, disk: Disk) -> None:
    """Put in order what crashes left of a checkpoint: one that is whole and has not got its name gets it."""
    try:
        if not (target / NAME).exists() and (path := _heir(beside, target)):
            _put_in_place(path, target, disk)
        for path in beside:
            if path.exists():
                _settle(path, target, disk)
    except OSError as error:
        _LOG.warning("what was left beside %s could not be put in order: %s", target, error)


def _heir(beside: list[Path], target: Path) -> Path | None:
    """Which of the directories beside a name should have it: the newest that is whole, else what had it."""
    if whole := folder.whole(beside):
        return whole[-1].path
    had = [path for path in beside if path != _going(path) and folder.was_in_place(path)]
    return None if target.exists() or not had else had[-1]


def _put_in_place(new: Path, target: Path, disk: Disk) -> None:
    """Give a whole checkpoint its name; what had the name before goes, but for strangers."""
    try:
        old, undo = _rename(new, target, disk)
    except OSError as error:
        if error.errno in _CANNOT_MOVE:
            raise _immovable(target) from error
        raise
    try:
        disk.sync_directory(target.parent)
    except OSError:
        with suppress(OSError):
            undo()
        raise
    try:
        if old is not None:
            _settle(old, target, disk)
    except OSError as error:
        _LOG.warning("what was in %s before could not be removed from %s: %s", target, old, error)


def _rename(new: Path, target: Path, disk: Disk) -> tuple[Path | None, Callable[[], None]]:
    """Put a directory where another may be; where that one is then, and how to undo it."""
    try:
        disk.rename(new, target)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
    else:
        return None, lambda: disk.rename(target, new)
    try:
        disk.exchange(new, target)
    except OSError as error:
        if error.errno not in _CANNOT_EXCHANGE:
            raise
    else:
        return new, lambda: disk.exchange(new, target)
    # For a moment neither has the name: `find` looks beside it.
    old = target.with_name(new.name.replace(".saving-", ".replaced-"))
    disk.rename(target, old)
    try:
        disk.rename(new, target)
    except OSError:
        with suppress(OSError):
            disk.rename(old, target)
        raise

    def undo() -> None:
        disk.rename(target, new)
        disk.rename(old, target)

    return old, undo


def _settle(leftover: Path, target: Path, disk: Disk) -> None:
    """Bring the strangers of a replaced directory to the new one, and remove it."""
    if leftover != _going(leftover) and folder.was_in_place(leftover):
        _bring_strangers(leftover, target, disk)
    _drop(leftover, disk)


def _drop(path: Path, disk: Disk) -> None:
    """Remove a directory: nothing in it is anybody's any more before the first of its files goes."""
    going = _going(path)
    if path != going:
        disk.remove_tree(going)
        disk.rename(path, going)
    disk.remove_tree(going)


def _going(path: Path) -> Path:
    return path.with_name(f".{folder.name_of(path)}.removing")


def _bring_strangers(leftover: Path, target: Path, disk: Disk) -> None:
    own = {NAME, UNFINISHED}
    with suppress(CheckpointError):
        own |= folder.manifest_of(leftover).files.keys()
    shared = {os.fspath(parent) for name in own for parent in Path(name).parents}

    def bring(directory: Path) -> None:
        for path in sorted(directory.iterdir()):
            name, home = path.relative_to(leftover), target / path.relative_to(leftover)
            is_folder = path.is_dir() and not path.is_symlink()
            if is_folder and (os.fspath(name) in shared or home.exists()):
                bring(path)
            elif os.fspath(name) not in own and not os.path.lexists(home):
                disk.make(home.parent)
                disk.rename(path, home)

    bring(leftover)
