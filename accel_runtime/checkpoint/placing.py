"""How a checkpoint comes to its name, and goes: at no moment is there less than a whole one. No torch.

The steps are those of an atomic file replacement, with a directory in place of the file: everything is written and
synced under another name in the same directory, the manifest last, and one rename makes it the checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accel_runtime.checkpoint import folder
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk, about
from accel_runtime.checkpoint.manifest import NAME, UNFINISHED

__all__ = ["TakenError", "begin", "commit", "discard", "remove", "sweep"]

_LOG = logging.getLogger("accel_runtime.checkpoint")
# Containers that forbid a system call they do not know may say EPERM.
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
_CANNOT_MOVE = {errno.EBUSY, errno.EXDEV}
_ATTEMPTS, _PAUSE_S = 20, 0.002


class TakenError(CheckpointError):
    """Another process has taken the name that was free a moment before."""


def begin(target: Path, save: str, disk: Disk, *, new: bool = False) -> tuple[Path, int | None]:
    """The directory to write into, which becomes `target` with `commit`; what crashes left there is put in order.

    Args:
        target: The checkpoint's name.
        save: A name that no other save has.
        disk: Does it.
        new: Refuse a name that anything has, or had.

    Returns:
        The directory, and the lock on it: nobody else takes it for something that a crash has left.

    Raises:
        TakenError: With `new`, there is something of that name.
        CheckpointError: Another process is writing this checkpoint, or no checkpoint can have this name.
        OSError: It cannot be made.
    """
    _usable(target)
    _make(target.parent, disk)
    beside = folder.beside(target)
    with ExitStack() as stack:
        for path in beside:
            if not stack.enter_context(_held(path, disk)):
                kind = TakenError if new else CheckpointError
                raise kind(f"{target} is being written by another process, into {path}")
        if not new:
            _tidy(beside, target, disk)
    scratch = target.with_name(f".{target.name}.saving-{save}")
    opened = _make_locked(scratch, disk)
    if new:
        try:
            _check_alone(scratch, target)
        except TakenError:
            discard(scratch, disk)
            if opened is not None:
                disk.unlock(opened)
            raise
    return scratch, opened


def _make_locked(scratch: Path, disk: Disk) -> int | None:
    """Make a directory that no other process removes; return the lock on it.

    Until it is locked, another process may take it for what a crash has left; then it is made again.
    """
    for attempt in range(_ATTEMPTS):
        opened = None
        try:
            disk.make(scratch)
            opened = disk.lock(scratch)
            if opened is not None:
                with about(scratch / UNFINISHED):
                    disk.close(disk.create(scratch / UNFINISHED))
                if os.path.samestat(os.fstat(opened), scratch.stat()):
                    return opened
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            if not gone or attempt == _ATTEMPTS - 1:
                discard(scratch, disk)
                if opened is not None:
                    disk.unlock(opened)
                raise
        if opened is not None:
            disk.unlock(opened)
        time.sleep(_PAUSE_S)
    raise TakenError(f"{scratch} cannot be locked: another process has locked it. Save again.")


def _check_alone(scratch: Path, target: Path) -> None:
    """Refuse a name that another process uses, once `scratch` shows to all that this one does.

    Of two processes that both look after they have shown themselves, at least one sees the other. The directories are
    looked at before the name: a save that ends in between moves from the one to the other.
    """
    others = [path for path in folder.beside(target) if path not in {scratch, _going(path)}]
    if others or os.path.lexists(target):
        raise TakenError(f"{target} was taken by another process a moment ago")


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
    with _held(path, disk) as held:
        if not held:
            return False
        try:
            _drop(path, disk)
        except OSError:
            # Another process may remove it too.
            if os.path.lexists(path):
                raise
    return True


def sweep(directory: Path, below: int, disk: Disk) -> None:
    """Put in order what crashes left of checkpoints with lower numbers."""
    left: dict[str, list[Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        number = folder.automatic(folder.name_of(path))
        if number is not None and number < below and path.name.startswith("."):
            left.setdefault(folder.name_of(path), []).append(path)
    for name, paths in left.items():
        with ExitStack() as stack:
            own = [path for path in paths if stack.enter_context(_held(path, disk))]
            _tidy(own, directory / name, disk)


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


@contextmanager
def _held(path: Path, disk: Disk) -> Iterator[bool]:
    """Inside, no other process locks a directory, nor takes it for what a crash has left; False if one has locked it."""
    try:
        opened = disk.lock(path)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    if opened is None:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            disk.unlock(opened)


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
