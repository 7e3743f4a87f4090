"""System calls that write and read a checkpoint, one method each so that tests can make any of them fail."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_runtime.storage.errors import RequestError

__all__ = [
    "FileSystem",
    "add_path_to_error",
    "create_folder_atomically",
    "is_process_running",
    "list_leftovers",
    "open_atomically",
    "parse_size",
    "require_new_folder",
]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SYNC_FILE_RANGE_WRITE = 2
_WRITEBACK = 1 << 23
"""Bytes after which the system is asked to write them to the disk, while the next ones are prepared."""
_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP}


class FileSystem:
    """File system of a checkpoint; every method raises `OSError` with the path in it."""

    def make(self, folder: Path) -> None:
        """Create a directory and its parents; it may exist."""
        folder.mkdir(parents=True, exist_ok=True)

    def sees(self, folder: Path) -> bool:
        """Return whether this node sees a directory that another process has created."""
        return folder.is_dir()

    def create(self, path: Path) -> int:
        """Create a new file for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, data: memoryview) -> None:
        """Write all data."""
        while data:
            data = data[os.write(file, data) :]

    def start_writeback(self, file: int, offset: int, length: int) -> None:
        """Start to write a range of a file to the disk, so that `sync` has less to wait for (Linux)."""
        call = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if call is not None:
            # An error is reported by `sync`.
            call(file, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)

    def sync(self, file: int) -> None:
        """Flush a file to the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a file; a network file system may report a full disk only here."""
        os.close(file)

    def put(self, path: Path, data: Iterable[memoryview], size: int) -> None:
        """Write the pieces of a new file, start their writeback meanwhile, and flush the file to the disk.

        `size` is the number of bytes of all pieces.
        """
        written = flushed = 0
        file = self.create(path)
        with add_path_to_error(path):
            try:
                for piece in data:
                    self.write(file, piece)
                    written += len(piece)
                    if written - flushed >= _WRITEBACK:
                        self.start_writeback(file, flushed, written - flushed)
                        flushed = written
                assert written == size, path
                self.sync(file)
            finally:
                self.close(file)

    def sync_directory(self, folder: Path) -> None:
        """Flush the names in a directory to the disk, if the file system supports it."""
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with add_path_to_error(folder):
                os.fsync(opened)
        except OSError as error:
            if error.errno not in _NOT_FOR_DIRECTORIES:
                raise
        finally:
            os.close(opened)

    def rename(self, old: Path, new: Path) -> None:
        """Rename, replacing a file or an empty directory."""
        old.rename(new)

    def exchange(self, first: Path, second: Path) -> None:
        """Exchange two names atomically (`renameat2`, Linux 3.15); `ENOSYS` or `EINVAL` if unsupported."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), os.fspath(first))
        names = os.fsencode(first), os.fsencode(second)
        if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(first), None, os.fspath(second))

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_tree(self, folder: Path) -> None:
        """Remove a directory with its contents; it may be missing."""
        shutil.rmtree(folder, onerror=_ignore_missing)

    def free_space(self, folder: Path) -> int:
        """Return the free space for an ordinary user, in bytes."""
        status = os.statvfs(folder)
        # Some network file systems report no size at all.
        return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize

    def open_folder(self, path: Path) -> int:
        """Open a directory, so that it can be read whatever happens to its name."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_file(self, path: Path, folder: int | None, name: str) -> int:
        """Open a file for reading, without blocking on a pipe: `name` in the open directory, or `path` if `folder` is None."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(path if folder is None else name, flags, dir_fd=folder)
        except OSError as error:
            error.filename = os.fspath(path)
            raise

    def read_status(self, path: Path, folder: int, name: str) -> os.stat_result:
        """Return the status of `name` in an open directory."""
        try:
            return os.stat(name, dir_fd=folder)
        except OSError as error:
            error.filename = os.fspath(path)
            raise

    def identify(self, path: Path) -> tuple[int, int] | None:
        """Return the device and inode of a directory or file; None if it does not exist."""
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def list_names(self, folder: Path) -> list[str]:
        """Return the names in a directory; empty if it does not exist."""
        try:
            return sorted(path.name for path in folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def try_lock_shared(self, opened: int) -> bool:
        """Lock an open directory against removal until it is closed; return False if another process writes or removes it."""
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        return True

    def lock(self, folder: Path, *, shared: bool = False) -> int | None:
        """Lock a directory until `unlock`; return None if another process holds a conflicting lock.

        A file system without locks grants every lock. With `shared`, other processes may hold shared locks too.
        """
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            return None
        except OSError:
            pass
        return opened

    def unlock(self, opened: int) -> None:
        """Release a lock, including copies that forked processes have inherited."""
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


@contextmanager
def add_path_to_error(path: Path) -> Iterator[None]:
    """Add the path to an `OSError` of a call that knows only a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def open_atomically(path: Path, disk: FileSystem | None = None) -> Iterator[Path]:
    """Yield a scratch path to write to; sync it and rename it to `path` at the end, remove it after an error.

    Its name has node and process, so that several writers of a path do not disturb each other.
    """
    disk = disk or FileSystem()
    for name, leftover in list_leftovers(path.parent):
        if name == path.name:
            leftover.unlink(missing_ok=True)
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.unfinished")
    scratch.unlink(missing_ok=True)
    try:
        yield scratch
        file = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
        try:
            disk.sync(file)
        finally:
            disk.close(file)
        disk.rename(scratch, path)
        disk.sync_directory(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def create_folder_atomically(path: Path, disk: FileSystem | None = None) -> Iterator[Path]:
    """Yield a scratch directory to write into; rename it to `path`, which must not exist, at the end; remove it after an error.

    Its files are synced by their writer. Scratch directories that killed processes of this node left are removed.
    """
    disk = disk or FileSystem()
    for name, leftover in list_leftovers(path.parent):
        if name == path.name:
            disk.remove_tree(leftover)
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.unfinished")
    disk.remove_tree(scratch)
    disk.make(scratch)
    try:
        yield scratch
        disk.sync_directory(scratch)
        disk.rename(scratch, path)
        disk.sync_directory(path.parent)
    finally:
        disk.remove_tree(scratch)


def require_new_folder(path: Path) -> None:
    """Raise `RequestError` if a folder cannot be created: something has its name, or its parent does not exist."""
    if path.exists() or path.is_symlink():
        raise RequestError(f"{path} exists. Remove it, or choose another name.")
    if not path.parent.is_dir():
        raise RequestError(f"Not a directory: {path.parent}. Create it first.")


def list_leftovers(folder: Path) -> list[tuple[str, Path]]:
    """Return the scratch files that killed processes of this node left in a directory, each with the name it was for."""
    scratch = re.compile(rf"\.(.+)\.{re.escape(socket.gethostname())}-(\d+)\.unfinished")
    matches = [(scratch.fullmatch(path.name), path) for path in folder.iterdir()]
    return [(match[1], path) for match, path in matches if match and not is_process_running(int(match[2]))]


def is_process_running(pid: int) -> bool:
    """Return True if a process of this id exists on this node; works without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _ignore_missing(_call: object, _path: str, error: tuple[type, BaseException, object]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


_UNITS = {"B": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for ending, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(value: int | str, what: str) -> int:
    """Return the number of bytes of a size such as `10GB`, `2GiB` or 512; `what` names the argument in the error."""
    text = value if isinstance(value, str) else ""
    match = _SIZE.fullmatch(text)
    size = int(value) if type(value) is int or text.isdecimal() else 0
    if match and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        # Libraries disagree: to some a small b means bits, to others bytes.
        is_bits = text.strip().endswith("b")
        raise ValueError(
            f"Invalid {what} {value!r}: expected a number of bytes, at least 1, or a number and a unit such as '500MB', "
            f"'10GB' or '2GiB' ({', '.join(_UNITS)}){'; a small b may mean bits: write B' if is_bits else ''}"
        )
    return size
