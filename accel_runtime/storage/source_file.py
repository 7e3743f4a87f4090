"""A file that is read in ranges, on disk or elsewhere. Imports no torch."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import hash_file
from accel_runtime.storage.schema import read_regular_file

__all__ = ["DiskFile", "ReadRange", "SourceFile"]

ReadRange = Callable[[memoryview, int], None]
"""Fills a buffer from an offset; raises `CheckpointError` if the file ends before."""


class SourceFile(ABC):
    """A file, which may be missing; its text is its path or URL."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Last part of the path or URL."""

    @abstractmethod
    def child(self, name: str) -> SourceFile:
        """Return the file of a name in this directory."""

    @abstractmethod
    def sibling(self, name: str) -> SourceFile:
        """Return the file of a name in the directory of this file."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether this is a file."""

    @abstractmethod
    def open(self) -> AbstractContextManager[ReadRange]:
        """Yield a function that reads a range."""

    @abstractmethod
    def read_size(self) -> int:
        """Return the number of bytes; raise OSError if the file is missing."""

    @abstractmethod
    def read_text(self) -> str:
        """Return the text of a small file; raise `CheckpointError` if it is large or not text."""

    @abstractmethod
    def hash(self) -> str:
        """Read the file and return its checksum."""


@dataclass(frozen=True)
class DiskFile(SourceFile):
    """A file on disk."""

    path: Path

    @property
    @override
    def name(self) -> str:
        return self.path.name

    @override
    def child(self, name: str) -> DiskFile:
        return DiskFile(self.path / name)

    @override
    def sibling(self, name: str) -> DiskFile:
        return DiskFile(self.path.parent / name)

    @override
    def exists(self) -> bool:
        return self.path.is_file()

    @override
    @contextmanager
    def open(self) -> Iterator[ReadRange]:
        disk = FileSystem()
        descriptor = disk.open_file(self.path, None, self.path.name)
        try:
            yield lambda buffer, offset: self._read(descriptor, buffer, offset)
        finally:
            disk.close(descriptor)

    def _read(self, descriptor: int, buffer: memoryview, offset: int) -> None:
        while buffer:
            # A network file system may return less than requested.
            count = os.preadv(descriptor, [buffer], offset)
            if not count:
                raise CheckpointError(f"{self.path} was truncated while it was read")
            buffer, offset = buffer[count:], offset + count

    @override
    def read_size(self) -> int:
        status = self.path.stat()
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    @override
    def read_text(self) -> str:
        return read_regular_file(FileSystem().open_file(self.path, None, self.path.name), self.path)

    @override
    def hash(self) -> str:
        with self.path.open("rb") as file:
            return hash_file(file)

    def __str__(self) -> str:
        return str(self.path)
