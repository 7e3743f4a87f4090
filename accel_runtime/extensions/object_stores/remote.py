"""Object stores as a `RemoteStore`: checkpoints, files that are read in ranges, and exports. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash
from typing_extensions import override

from accel_runtime.extensions.object_stores.client import ObjectClient, RangeRequest, absent_error
from accel_runtime.extensions.object_stores.client_process import share_client
from accel_runtime.extensions.object_stores.store import ObjectStore
from accel_runtime.storage.any_store import RemoteStore
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.schema import MAX_BYTES
from accel_runtime.storage.source_file import ReadRange, SourceFile
from accel_runtime.storage.store import split_key

__all__ = ["OBJECTS", "ObjectFile"]

_HASHED_BYTES = 1 << 26


class _ObjectService(RemoteStore):
    @override
    def open_store(self, run: Mapping[str, str] | None, retry_s: float | None) -> ObjectStore:
        return ObjectStore(share_client(retry_s), run)

    @override
    def locate_file(self, url: str) -> ObjectFile:
        return ObjectFile(url, share_client())

    @override
    def list_names(self, url: str) -> Sequence[str]:
        return share_client().list_level(f"{url}/").objects

    @override
    def put_stream(self, url: str, blocks: Iterable[memoryview], size: int) -> None:
        share_client().put_stream(url, blocks, size)

    @override
    def delete(self, urls: Iterable[str]) -> None:
        share_client().delete(urls)


OBJECTS = _ObjectService()
"""S3, Google Cloud Storage and Azure Blob Storage."""


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
