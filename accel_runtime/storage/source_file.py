"""A file that is read in ranges: on disk, or an object of an object store. Imports no torch."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from typing_extensions import override

from accel_runtime.environment.locations import is_url, normalize_location
from accel_runtime.extensions.object_stores.client import ObjectClient, RangeRequest, absent_error
from accel_runtime.extensions.object_stores.client_process import share_client
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import hash_file
from accel_runtime.storage.schema import MAX_BYTES, read_regular_file
from accel_runtime.storage.store import split_key

__all__ = ["SourceFile", "locate_file"]

ReadRange = Callable[[memoryview, int], None]
"""Fills a buffer from an offset; raises `CheckpointError` if the file ends before."""
_HASHED_BYTES = 1 << 26


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


def locate_file(location: str | os.PathLike[str]) -> SourceFile:
    """Return the file or directory at a path or URL."""
    if not is_url(location):
        return DiskFile(Path(location))
    try:
        return ObjectFile(normalize_location(location), share_client())
    except ValueError as error:
        raise CheckpointError(str(error)) from None


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


@dataclass(frozen=True)
class ObjectFile(SourceFile):
    """An object of an object store."""

    url: str
    client: ObjectClient = field(compare=False)

    @property
    @override
    def name(self) -> str:
        return split_key(self.url)[1]

    @override
    def child(self, name: str) -> ObjectFile:
        return ObjectFile(f"{self.url}/{name}", self.client)

    @override
    def sibling(self, name: str) -> ObjectFile:
        return ObjectFile(f"{split_key(self.url)[0]}/{name}", self.client)

    @override
    def exists(self) -> bool:
        return self.client.find_size(self.url) is not None

    @override
    @contextmanager
    def open(self) -> Iterator[ReadRange]:
        yield self._read

    def _read(self, buffer: memoryview, offset: int) -> None:
        self.client.read_ranges([RangeRequest(self.url, offset, buffer)])

    @override
    def read_size(self) -> int:
        size = self.client.find_size(self.url)
        if size is None:
            raise absent_error(self.url)
        return size

    @override
    def read_text(self) -> str:
        if (size := self.read_size()) > MAX_BYTES:
            raise CheckpointError(f"{self.url} is damaged: it has {size} bytes, and can have {MAX_BYTES}")
        try:
            return self.client.get(self.url)[0].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.url} is damaged: it is not text") from error

    @override
    def hash(self) -> str:
        checksum, size = xxhash.xxh3_64(), self.read_size()
        for start in range(0, size, _HASHED_BYTES):
            block = memoryview(bytearray(min(_HASHED_BYTES, size - start)))
            self._read(block, start)
            checksum.update(block)
        return checksum.hexdigest()

    def __str__(self) -> str:
        return self.url
