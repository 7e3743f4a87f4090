"""Read, publish and remove checkpoint directories so that a complete one exists at every moment. Imports no torch.

As in an atomic file replacement, everything is written and synced under another name in the same directory, the
manifest last, and one rename publishes it. A crash may leave complete checkpoints beside their final names.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accel_runtime.storage.errors import AbsentError, CheckpointError
from accel_runtime.storage.file_system import FileSystem, add_path_to_error
from accel_runtime.storage.formats import FORMATS, find_format
from accel_runtime.storage.manifest import (
    NAME,
    SIBLING,
    UNFINISHED,
    Checkpoint,
    Manifest,
    checkpoint_name,
    parse_number,
)
from accel_runtime.storage.schema import read_regular_file
from accel_runtime.storage.store import KeyExistsError

__all__ = [
    "commit_directory",
    "create_scratch",
    "discard_scratch",
    "exists",
    "list_complete_siblings",
    "list_siblings",
    "open_folder",
    "read_checkpoint",
    "read_manifest",
    "read_open_checkpoint",
    "remove_checkpoint",
    "remove_leftovers",
]


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory; raise `CheckpointError` if its manifest or the size of a file is wrong."""
    with _open_folder(path) as folder:
        return read_open_checkpoint(path, folder)


def read_open_checkpoint(path: Path, folder: int) -> Checkpoint:
    """Return the checkpoint in an open directory; `path` is its name in errors, which are those of `read_checkpoint`."""
    manifest, disk = _read_open_manifest(path, folder), FileSystem()
    for name, file in manifest.files.items():
        try:
            status = disk.read_status(path / name, folder, name)
        except OSError as error:
            raise CheckpointError(
                f"{path / name} is missing from the checkpoint: {error.strerror}"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path / name} is damaged: it is not a regular file")
        if status.st_size != file.bytes:
            raise CheckpointError(
                f"{path / name} is damaged: it has {status.st_size} bytes and should have {file.bytes}"
            )
    return Checkpoint(os.fspath(path), manifest)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a directory; other files are not checked."""
    with _open_folder(path) as folder:
        return _read_open_manifest(path, folder)


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    disk = FileSystem()
    folder = open_folder(path, disk)
    try:
        yield folder
    finally:
        disk.close(folder)


def open_folder(path: Path, disk: FileSystem) -> int:
    """Open the directory of a checkpoint; raise `CheckpointError` if it does not exist or cannot be read."""
    try:
        return disk.open_folder(path)
    except (FileNotFoundError, NotADirectoryError):
        if path.exists():
            reason = "it is a file, and a checkpoint is a directory"
            raise CheckpointError(f"{path} is not a checkpoint: {reason}") from None
        raise AbsentError(f"{path} is not a checkpoint: it does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _read_open_manifest(path: Path, folder: int) -> Manifest:
    name = path / NAME
    try:
        text = read_regular_file(FileSystem().open_file(name, folder, NAME), name)
    except FileNotFoundError:
        if other := find_format(path, loads=False):
            raise CheckpointError(FORMATS[other].explain(path)) from None
        raise CheckpointError(f"{path} is not a checkpoint: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    return Manifest.parse(text, name)


def exists(path: Path) -> bool:
    """Return whether a checkpoint, complete or not, or a directory beside it exists."""
    beside = [sibling for sibling in list_siblings(path) if sibling != _removal_path(path)]
    return FileSystem().identify(path) is not None or bool(beside)


def list_siblings(target: Path) -> list[Path]:
    """Return the scratch directories that crashes may have left beside a checkpoint."""
    matches = map(SIBLING.fullmatch, FileSystem().list_names(target.parent))
    return [target.with_name(match[0]) for match in matches if match and match[1] == target.name]


def list_complete_siblings(paths: list[Path]) -> list[Checkpoint]:
    """Return the complete checkpoints among directories, the newest last."""
    complete = []
    for path in paths:
        with suppress(CheckpointError):
            if ".removing" not in path.name and not (path / UNFINISHED).exists():
                complete.append(read_checkpoint(path))
    # A replaced checkpoint is older than its replacement, whatever the clock shows.
    return sorted(
        complete, key=lambda each: (not is_replaced(Path(each.key)), each.manifest.saved_at, each.key)
    )


def is_replaced(path: Path) -> bool:
    """Return whether a sibling is a replaced checkpoint rather than an unfinished one."""
    match = SIBLING.fullmatch(path.name)
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


_LOG = logging.getLogger("accel_runtime.checkpoint")
# Containers that forbid unknown system calls may return EPERM.
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
_CANNOT_MOVE = {errno.EBUSY, errno.EXDEV}
_CHANGED = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}
_ATTEMPTS, _RETRY_S = 20, 0.002


def create_scratch(
    target: Path, save: str, disk: FileSystem, *, new: bool = False
) -> tuple[Path, int | None]:
    """Return the directory to write into, and its lock; leftovers of crashes under this name are recovered first.

    With `new`, raise `KeyExistsError` if the name is or was in use.
    """
    _check_target(target)
    # Created so that it survives a loss of power.
    missing = [path for path in (target.parent, *target.parent.parents) if not path.exists()]
    disk.make(target.parent)
    for path in reversed(missing):
        disk.sync_directory(path.parent)
    siblings = list_siblings(target)
    with ExitStack() as stack:
        for path in list(siblings):
            if not stack.enter_context(_try_lock(path, disk)):
                if path == _removal_path(path) or (not new and is_only_read(path, disk)):
                    siblings.remove(path)  # under removal, or a replaced checkpoint; a later save removes it
                    continue
                error_type = KeyExistsError if new else CheckpointError
                raise error_type(
                    f"{target} is being written by another process (into {path}). Wait for it or choose another name."
                )
        if not new:
            _recover_siblings(siblings, target, disk)
    scratch = target.with_name(f".{target.name}.saving-{save}")
    lock = _create_locked(scratch, disk)
    if new:
        try:
            _check_alone(scratch, target)
        except KeyExistsError:
            discard_scratch(scratch, disk)
            _release_lock(lock, disk)
            raise
    return scratch, lock


def _create_locked(scratch: Path, disk: FileSystem) -> int | None:
    """Create a directory and return the lock on it.

    Until it is locked, another process may remove it as a leftover of a crash; then it is created again.
    """
    for attempt in range(_ATTEMPTS):
        lock = None
        try:
            disk.make(scratch)
            lock = disk.lock(scratch)
            if lock is not None:
                with add_path_to_error(scratch / UNFINISHED):
                    disk.close(disk.create(scratch / UNFINISHED))
                if os.path.samestat(os.fstat(lock), scratch.stat()):
                    return lock
        except OSError as error:
            removed = isinstance(error, FileNotFoundError)
            if not removed or attempt == _ATTEMPTS - 1:
                discard_scratch(scratch, disk)
                _release_lock(lock, disk)
                raise
        _release_lock(lock, disk)
        time.sleep(_RETRY_S)
    raise KeyExistsError(f"{scratch} cannot be locked: another process has locked it. Save again.")


def _check_alone(scratch: Path, target: Path) -> None:
    """Raise `KeyExistsError` if another process uses the name, after `scratch` has announced this one.

    Of two processes that both check after announcing, at least one sees the other. Siblings are checked before
    the name: a save that ends in between moves from the one to the other.
    """
    others = [path for path in list_siblings(target) if path not in {scratch, _removal_path(path)}]
    if others or os.path.lexists(target):
        raise KeyExistsError(f"{target} was just created by another process. Save again.")


def commit_directory(
    scratch: Path, target: Path, disk: FileSystem, unlock: Callable[[], None] = lambda: None
) -> None:
    """Publish `scratch` as the checkpoint `target`, and `unlock` it; untracked files of a replaced checkpoint are kept."""
    for path in sorted((path for path in scratch.rglob("*") if path.is_dir()), reverse=True):
        disk.sync_directory(path)
    disk.remove(scratch / UNFINISHED)
    disk.sync_directory(scratch)
    _publish(scratch, target, disk, unlock)


def discard_scratch(scratch: Path, disk: FileSystem) -> None:
    """Remove an unfinished checkpoint as far as possible."""
    with suppress(OSError):
        # If a failed publication could not be undone, this may be the previous checkpoint.
        if not is_replaced(scratch):
            _remove_directory(scratch, disk)


def remove_checkpoint(path: Path, disk: FileSystem) -> bool:
    """Remove a checkpoint; return False if another process is reading it."""
    with _try_lock(path, disk) as locked:
        if not locked:
            return False
        try:
            _remove_directory(path, disk)
        except OSError:
            # Another process may have removed it.
            if os.path.lexists(path):
                raise
    return True


def remove_leftovers(directory: Path, below: int, disk: FileSystem) -> None:
    """Recover or remove leftovers of crashed saves with lower numbers."""
    leftovers: dict[str, list[Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        number = parse_number(checkpoint_name(path))
        if number is not None and number < below and path.name.startswith("."):
            leftovers.setdefault(checkpoint_name(path), []).append(path)
    for name, paths in leftovers.items():
        with ExitStack() as stack:
            locked = [path for path in paths if stack.enter_context(_try_lock(path, disk))]
            _recover_siblings(locked, directory / name, disk)


def _check_target(target: Path) -> None:
    """Raise `CheckpointError` if a checkpoint cannot have this path."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: a checkpoint is a directory. Choose another name.")
    if target.is_mount():
        raise _mounted_error(target)
    if target.exists() and target.samefile(Path.cwd()):
        raise CheckpointError(
            f"Cannot save to {target}: it is the current directory, and saving replaces the whole directory. "
            f"Use a subdirectory such as {target / 'checkpoint'}."
        )


def _mounted_error(target: Path) -> CheckpointError:
    return CheckpointError(
        f"Cannot save to {target}: it is a mount point, and saving replaces the whole directory. "
        f"Use a subdirectory such as {target / 'checkpoint'}."
    )


@contextmanager
def _try_lock(path: Path, disk: FileSystem) -> Iterator[bool]:
    """Lock a directory; yield False if another process has locked it."""
    try:
        lock = disk.lock(path)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    if lock is None:
        yield False
        return
    try:
        yield True
    finally:
        _release_lock(lock, disk)


def is_only_read(path: Path, disk: FileSystem) -> bool:
    """Return whether the processes that have locked a directory read it, and do not write it."""
    try:
        lock = disk.lock(path, shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return True
    _release_lock(lock, disk)
    return lock is not None


def _release_lock(lock: int | None, disk: FileSystem) -> None:
    """Release a lock without raising: the error of the save is the one to report, and the lock ends with the process."""
    if lock is not None:
        with suppress(OSError):
            disk.unlock(lock)


def _recover_siblings(siblings: list[Path], target: Path, disk: FileSystem) -> None:
    """Recover or remove the leftovers of a checkpoint: a complete one is published."""
    try:
        if not (target / NAME).exists():
            replaced = [path for path in siblings if path != _removal_path(path) and is_replaced(path)]
            # The newest complete one, else the replaced one.
            if complete := list_complete_siblings(siblings):
                _publish(Path(complete[-1].key), target, disk)
            elif replaced and not target.exists():
                _publish(replaced[-1], target, disk)
        for path in siblings:
            if path.exists():
                _remove_replaced(path, target, disk)
    except OSError as error:
        _LOG.warning("leftovers of %s could not be removed: %s", target, error)


def _publish(new: Path, target: Path, disk: FileSystem, unlock: Callable[[], None] = lambda: None) -> None:
    """Publish a complete checkpoint, unlock it, and remove the one it replaces, except for untracked files."""
    try:
        old, undo = _replace(new, target, disk)
    except OSError as error:
        if error.errno in _CANNOT_MOVE:
            raise _mounted_error(target) from error
        raise
    try:
        disk.sync_directory(target.parent)
    except OSError:
        with suppress(OSError):
            undo()
        raise
    unlock()
    try:
        if old is not None:
            with _try_lock(old, disk) as locked:
                if locked:  # else another process is reading it, and a later save removes it
                    _remove_replaced(old, target, disk)
    except OSError as error:
        if old is None or not os.path.lexists(old):  # another save has removed it
            return
        _LOG.warning("the previous checkpoint %s could not be removed from %s: %s", target, old, error)


def _replace(new: Path, target: Path, disk: FileSystem) -> tuple[Path | None, Callable[[], None]]:
    """Rename a directory over another one; return the new path of the other, and a function that undoes it.

    Between two calls another process may remove the other directory, or publish it again.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _try_replace(new, target, disk)
        except OSError as error:
            if error.errno not in _CHANGED:
                raise
    return _try_replace(new, target, disk)


def _try_replace(new: Path, target: Path, disk: FileSystem) -> tuple[Path | None, Callable[[], None]]:
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
    # For a moment neither has the name: `FileStore.open` searches siblings too.
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


def _remove_replaced(leftover: Path, target: Path, disk: FileSystem) -> None:
    """Move the untracked files of a replaced checkpoint to the new one, and remove the rest."""
    if leftover != _removal_path(leftover) and is_replaced(leftover):
        _move_untracked_files(leftover, target, disk)
    _remove_directory(leftover, disk)


def _remove_directory(path: Path, disk: FileSystem) -> None:
    """Remove a directory, renamed first, so that readers never see a partial checkpoint."""
    removing = _removal_path(path)
    if path != removing:
        disk.remove_tree(removing)
        disk.rename(path, removing)
    disk.remove_tree(removing)


def _removal_path(path: Path) -> Path:
    return path.with_name(f".{checkpoint_name(path)}.removing")


def _move_untracked_files(leftover: Path, target: Path, disk: FileSystem) -> None:
    tracked = {NAME, UNFINISHED}
    with suppress(CheckpointError):
        tracked |= read_manifest(leftover).files.keys()
    tracked_directories = {os.fspath(parent) for name in tracked for parent in Path(name).parents}

    def move(directory: Path) -> None:
        for path in sorted(directory.iterdir()):
            name, destination = path.relative_to(leftover), target / path.relative_to(leftover)
            is_folder = path.is_dir() and not path.is_symlink()
            if is_folder and (os.fspath(name) in tracked_directories or destination.exists()):
                move(path)
            elif os.fspath(name) not in tracked and not os.path.lexists(destination):
                disk.make(destination.parent)
                disk.rename(path, destination)

    move(leftover)
