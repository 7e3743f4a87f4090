"""The system calls a checkpoint is written with, one method each, so that a test can make any of them fail."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Disk", "about", "write_text"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP}


class Disk:
    """A file system, as far as a checkpoint needs it.

    Raises:
        OSError: From any method, as the operating system says it, with the path in it.
    """

    def make(self, folder: Path) -> None:
        """Make a directory, and those above it; one that is there already is fine."""
        folder.mkdir(parents=True, exist_ok=True)

    def sees(self, folder: Path) -> bool:
        """Whether a directory that another process has made is there for this one too."""
        return folder.is_dir()

    def create(self, path: Path) -> int:
        """A new file, open for writing; one that is there already is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, data: memoryview) -> None:
        """Write all of it."""
        while data:
            data = data[os.write(file, data) :]

    def sync(self, file: int) -> None:
        """Wait until the file's bytes are on the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close it; a network file system may say only now that there was no room."""
        os.close(file)

    def sync_directory(self, folder: Path) -> None:
        """Wait until the names in a directory are on the disk, where the file system has a way to say so."""
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with about(folder):
                os.fsync(opened)
        except OSError as error:
            if error.errno not in _NOT_FOR_DIRECTORIES:
                raise
        finally:
            os.close(opened)

    def rename(self, old: Path, new: Path) -> None:
        """Rename, replacing a file or an empty directory."""
        old.rename(new)

    def exchange(self, one: Path, other: Path) -> None:
        """Let two names of one file system change places in one step (`renameat2` of Linux 3.15).

        Raises:
            OSError: Also where the operating or the file system cannot do it, with `ENOSYS` or `EINVAL`.
        """
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), os.fspath(one))
        names = os.fsencode(one), os.fsencode(other)
        if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_tree(self, folder: Path) -> None:
        """Remove a directory with all it holds; what is gone already is fine."""
        shutil.rmtree(folder, onerror=_unless_gone)

    def room(self, folder: Path) -> int:
        """How many bytes an ordinary user can still write there."""
        found = os.statvfs(folder)
        # Some that are reached over a network say that they have no size at all.
        return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize

    def lock(self, folder: Path, *, shared: bool = False) -> int | None:
        """Say that a living process works in a directory, until `unlock`; None where somebody else says so.

        A file system that knows no locks says yes to everybody.

        Args:
            folder: The directory.
            shared: Let others say the same, but nobody that it is theirs alone.
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
        """Give a lock back, also those copies of it that processes forked since have inherited."""
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Put the path into an error of a call that knew only an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_text(path: Path, text: str, disk: Disk) -> None:
    """A new file, on the disk when this returns.

    Raises:
        OSError: It cannot be written.
    """
    opened = disk.create(path)
    with about(path):
        try:
            disk.write(opened, memoryview(text.encode()))
            disk.sync(opened)
        finally:
            disk.close(opened)


def _unless_gone(_call: object, _path: str, problem: tuple[type, BaseException, object]) -> None:
    if not isinstance(problem[1], FileNotFoundError):
        raise problem[1]
