"""The interface of a client of an object store, and errors of its own. Imports no torch.

A key is the URL of an object, such as `s3://bucket/run/checkpoint.json`. `obstore_client` has the client of the services,
`client_process` the one that a training process uses: it sends each call to a process of its own.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accel_runtime.storage.errors import StoreError

__all__ = [
    "ClientEndedError",
    "ConditionError",
    "Level",
    "ObjectClient",
    "RangeRequest",
    "StoredObject",
    "Upload",
    "absent_error",
]


class ClientEndedError(StoreError):
    """The process of the client has ended, and the call was not made again."""


class ConditionError(Exception):
    """The condition of a write does not hold: the object exists, or has another ETag."""


def absent_error(key: str) -> FileNotFoundError:
    """Return the error of a read of an object that does not exist."""
    return FileNotFoundError(errno.ENOENT, "No such file or directory", key)


@dataclass(frozen=True)
class StoredObject:
    """An object in a list."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Seconds since the epoch at which it was written, by the clock of the service."""


@dataclass(frozen=True)
class Level:
    """Names directly below a prefix."""

    folders: tuple[str, ...]
    """Names below which there are objects."""
    objects: tuple[str, ...]
    """Names of objects."""


@dataclass(frozen=True)
class RangeRequest:
    """Bytes of an object to read."""

    key: str
    start: int
    """Offset of the first byte."""
    buffer: memoryview
    """Writable memory, which is filled."""


class Upload(ABC):
    """An object that is being written."""

    @abstractmethod
    def write(self, piece: memoryview) -> None:
        """Add bytes; the memory may be reused after the call."""

    @abstractmethod
    def finish(self) -> str:
        """Wait until the object is written, and return its ETag.

        Raises:
            ConditionError: If the condition does not hold.
            OSError: If the store fails.
        """


class ObjectClient(ABC):
    """Calls to object stores. Instances are used by several threads at the same time.

    A call that fails for a reason that may pass is repeated; an `StoreError` is the end of these retries. A write that was
    repeated may have had its effect at the first time, so that its condition does not hold at the second.

    A client in a process of its own makes a call again in a new process if that one was killed, at most twice. It cannot do so
    for an upload that has begun: its bytes are gone, and a `ClientEndedError` lets the caller send them again.
    """

    @abstractmethod
    def start_put(self, key: str, size: int, *, wait: bool = True) -> Upload | None:
        """Begin the upload of an object, which goes on while further ones begin.

        Args:
            key: URL of the object.
            size: Size of the object in bytes.
            wait: Wait for one of the uploads and reads of other threads to end if there are as many as the client runs. If
                not, return None then: a thread that has uploads of its own must finish one of them first.
        """

    @abstractmethod
    def put(self, key: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """Write a small object and return its ETag, on the condition that it has an ETag or does not exist.

        Raises:
            ConditionError: If the condition does not hold.
            OSError: If the store fails.
        """

    @abstractmethod
    def get(self, key: str) -> tuple[bytes, str]:
        """Return the bytes of a small object and its ETag.

        Raises:
            FileNotFoundError: If it does not exist.
            OSError: If the store fails.
        """

    @abstractmethod
    def find_size(self, key: str) -> int | None:
        """Return the number of bytes of an object; None if it does not exist."""

    @abstractmethod
    def put_stream(self, key: str, blocks: Iterable[memoryview], size: int) -> None:
        """Write one object of any size, in a multipart upload if it is large; the object is absent until it is complete.

        A process that is killed leaves an unfinished upload, which the rules of the bucket remove.

        Args:
            key: URL of the object.
            blocks: The bytes; a block is valid until the next one is requested. A `RepeatableStream` is sent again if the process
                of the client was killed.
            size: Number of all bytes.
        """

    @abstractmethod
    def read_ranges(self, requests: Sequence[RangeRequest]) -> None:
        """Fill the buffers of all requests, several at a time.

        Raises:
            FileNotFoundError: If an object does not exist.
            OSError: If the store fails, or an object has fewer bytes.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[StoredObject]:
        """Return the objects whose key begins with a prefix that ends in `/`, in order."""

    @abstractmethod
    def list_level(self, prefix: str) -> Level:
        """Return the names directly below a prefix that ends in `/`."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, which may be missing."""
