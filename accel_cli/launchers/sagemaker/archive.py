"""Files in a tar archive whose bytes follow from the files alone, not from when or by whom it is made."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from typing_extensions import Buffer, override

from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.sagemaker.files import Chosen, File, shown

__all__ = ["Archive", "write"]

_EXECUTABLE, _PLAIN = 0o755, 0o644


@dataclass(frozen=True)
class Archive:
    """An archive that was written."""

    path: Path
    sha256: str
    """Of what is in it, before it is compressed: the same wherever it is made, whatever compresses there."""
    size: int
    """Bytes of the archive."""
    files: int
    """How many files and links are in it."""


def write(chosen: Chosen, into: Path) -> Archive:
    """Pack files, each as it is at one moment: one that is written to meanwhile is packed anew, once.

    Args:
        chosen: The files.
        into: The archive, a .tar.gz; there is none if this fails.

    Raises:
        UsageError: A file changes all the time, cannot be read, or is gone.
        AccelError: The archive cannot be written.
    """
    try:
        try:
            return _written(chosen, into)
        except _ChangedError:
            return _written(chosen, into)
    except BaseException as error:
        into.unlink(missing_ok=True)
        if isinstance(error, _ChangedError):
            raise UsageError(
                f"{shown(error.name)} in {chosen.source} is written to while it is packed. Wait until that is done, or "
                "name it in launcher.exclude"
            ) from None
        if isinstance(error, OSError):
            raise AccelError(f"{into} cannot be written: {error.strerror or error}") from None
        raise


class _ChangedError(Exception):
    """A file changed while it was read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Content:
    """The content of a file, as the archive reads it."""

    def __init__(self, source: Path, name: str) -> None:
        self._path, self._name = source / name, name
        try:
            # What became a pipe since it was chosen must not be waited for.
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise UsageError(f"{shown(str(self._path))} cannot be read: {error.strerror}") from None
        self._file = os.fdopen(handle, "rb")

    def status(self) -> os.stat_result:
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise _ChangedError(self._name)
        return found

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise UsageError(f"{shown(str(self._path))} cannot be read: {error.strerror}") from None
        if len(data) < size:
            raise _ChangedError(self._name)
        return data

    def close(self) -> None:
        self._file.close()


class _Hashing(gzip.GzipFile):
    """A compressed file that knows the digest of what went in."""

    def __init__(self, file: BinaryIO) -> None:
        # No name and no time in its head.
        super().__init__(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
        self.digest = hashlib.sha256()

    @override
    def write(self, data: Buffer) -> int:
        self.digest.update(data)
        return super().write(data)


def _written(chosen: Chosen, into: Path) -> Archive:
    with (
        into.open("wb") as file,
        _Hashing(file) as packed,
        tarfile.open(
            fileobj=packed,
            mode="w",
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
        ) as tar,
    ):
        for member in chosen.files:
            _add(tar, chosen.source, member)
    return Archive(into, packed.digest.hexdigest(), into.stat().st_size, len(chosen.files))


def _add(tar: tarfile.TarFile, source: Path, member: File) -> None:
    """Add one file.

    Raises:
        _ChangedError: It changed while it was read.
        UsageError: It cannot be read, or is gone.
    """
    if member.link:
        head = _head(member.name, _PLAIN)
        head.type, head.linkname = tarfile.SYMTYPE, member.link
        tar.addfile(head)
        return
    content = _Content(source, member.name)
    try:
        before = content.status()
        head = _head(member.name, _EXECUTABLE if before.st_mode & stat.S_IXUSR else _PLAIN)
        head.size = before.st_size
        tar.addfile(head, content)
        after = content.status()
    finally:
        content.close()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _ChangedError(member.name)


def _head(name: str, mode: int) -> tarfile.TarInfo:
    """What the archive says of a file; owner and time are nobody's and never."""
    head = tarfile.TarInfo(name)
    head.mode = mode
    return head
