"""The store and the files of every location: on disk, or of a table of remote stores by their URL. Imports no torch."""

from __future__ import annotations

import builtins
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from accel_runtime.environment.locations import URL_SCHEMES, is_url, normalize_location
from accel_runtime.environment.registry import Registry
from accel_runtime.storage.errors import AllGatherObjects, CheckpointError, RequestError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.storage.source_file import DiskFile, SourceFile
from accel_runtime.storage.store import Draft, DraftAddress, Snapshot, Store

__all__ = ["REMOTE_STORES", "AnyStore", "RemoteStore", "find_remote_store", "locate_file", "open_store"]


class RemoteStore(ABC):
    """A kind of service at URLs. Calls raise `RequestError` if a package for it is not installed, and `StoreError` if it fails."""

    @abstractmethod
    def open_store(self, run: Mapping[str, str] | None, retry_s: float | None) -> Store:
        """Return the store of checkpoints; the arguments are those of the function `open_store`."""

    @abstractmethod
    def locate_file(self, url: str) -> SourceFile:
        """Return the file or directory at a URL."""

    @abstractmethod
    def list_names(self, url: str) -> Sequence[str]:
        """Return the names of the files in a directory."""

    @abstractmethod
    def put_stream(self, url: str, blocks: Iterable[memoryview], size: int) -> None:
        """Write a file of `size` bytes, which is absent until it is complete; a block is valid until the next one is requested."""

    @abstractmethod
    def delete(self, urls: Iterable[str]) -> None:
        """Remove files, which may be missing."""


REMOTE_STORES: Registry[RemoteStore] = Registry(
    {
        "s3": "accel_runtime.extensions.object_stores.remote:OBJECTS",
        "gs": "accel_runtime.extensions.object_stores.remote:OBJECTS",
        "az": "accel_runtime.extensions.object_stores.remote:OBJECTS",
    },
    error=RequestError,
)
"""The stores of URLs by the kind of their service, one of `URL_SCHEMES`."""


def find_remote_store(url: str) -> RemoteStore:
    """Return the store of a URL; raise `RequestError` if there is none."""
    try:
        return REMOTE_STORES[_find_kind(url)]
    except KeyError:
        raise RequestError(
            f"Cannot use {url}: this installation of accel has no store of {url.partition(':')[0]}://. Use a directory."
        ) from None


def _find_kind(url: str) -> str:
    return URL_SCHEMES[url.partition(":")[0]]


def locate_file(location: str | os.PathLike[str]) -> SourceFile:
    """Return the file or directory at a path or URL."""
    try:
        if not is_url(location):
            return DiskFile(Path(location))
        url = normalize_location(location)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return find_remote_store(url).locate_file(url)


def open_store(
    run: Mapping[str, str] | None = None,
    retry_s: float | None = None,
    before_first_url: Callable[[], None] = lambda: None,
) -> AnyStore:
    """Return the store of all locations.

    Args:
        run: Identity of this run: unfinished saves of an earlier attempt of it are removed at once.
        retry_s: Seconds for which a failing call to a remote store is repeated; None is the time in the settings of the run.
        before_first_url: Called before a remote store is opened.
    """

    def build(url: str) -> Store:
        before_first_url()
        return find_remote_store(url).open_store(run, retry_s)

    return AnyStore(FileStore(), build)


class AnyStore(Store):
    """Chooses the store of a key.

    Args:
        directories: The store of paths.
        build_remote: Build the store of a URL, at the first one of its kind.
    """

    def __init__(self, directories: Store, build_remote: Callable[[str], Store]) -> None:
        self._directories, self._build_remote = directories, build_remote
        self._remote: dict[str, Store] = {}
        self._lock = threading.Lock()

    def choose(self, key: str) -> Store:
        """Return the store of a key; raise `CheckpointError` if a package for it is not installed."""
        if not is_url(key):
            return self._directories
        with self._lock:
            if (kind := _find_kind(key)) not in self._remote:
                self._remote[kind] = self._build_remote(key)
            return self._remote[kind]

    def begin(self, key: str, save: str, *, new: bool = False) -> Draft:
        """Begin a save."""
        return self.choose(key).begin(key, save, new=new)

    def attach(self, address: DraftAddress) -> Draft:
        """Return the draft of another process."""
        return self.choose(address.key).attach(address)

    def open(self, key: str) -> Snapshot:
        """Open a checkpoint."""
        return self.choose(key).open(key)

    def find_each(self, keys: Sequence[str]) -> builtins.list[Checkpoint | CheckpointError]:
        """Return the checkpoints of keys below one parent, or why they have none."""
        return self.choose(keys[0]).find_each(keys) if keys else []

    def list(self, parent: str) -> list[str]:
        """Return the keys below a parent."""
        return self.choose(parent).list(parent)

    def exists(self, key: str) -> bool:
        """Return whether a key is in use."""
        return self.choose(key).exists(key)

    def delete(self, key: str) -> bool:
        """Remove a checkpoint."""
        return self.choose(key).delete(key)

    def remove_leftovers(self, parent: str, below: int) -> None:
        """Recover or remove what crashed saves have left."""
        self.choose(parent).remove_leftovers(parent, below)

    def check_access(self, parent: str) -> None:
        """Raise an error if nothing can be saved below a parent."""
        self.choose(parent).check_access(parent)

    def explain_separate_nodes(
        self, parent: str | None, all_gather: AllGatherObjects, node: str | None, *, sharded: bool
    ) -> str:
        """Return why not all nodes can save in a directory; all nodes reach a URL."""
        return self._directories.explain_separate_nodes(parent, all_gather, node, sharded=sharded)
