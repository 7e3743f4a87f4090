"""The store of every location: a directory, or an object store by its URL. Imports no torch."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Mapping, Sequence

from accel_runtime.environment.locations import is_url
from accel_runtime.storage.errors import AllGatherObjects, CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.storage.store import Draft, DraftAddress, Snapshot, Store

__all__ = ["AnyStore", "open_store"]


def open_store(
    run: Mapping[str, str] | None = None,
    retry_s: float | None = None,
    before_first_url: Callable[[], None] = lambda: None,
) -> AnyStore:
    """Return the store of directories and of object stores.

    Args:
        run: Identity of this run; see `ObjectStore`.
        retry_s: Seconds for which a failing call to an object store is repeated; None is the time in the settings of the run.
        before_first_url: Called before the client of object stores is built.
    """

    def build() -> Store:
        from accel_runtime.extensions.object_stores.client_process import share_client  # noqa: PLC0415 - most runs have no URL
        from accel_runtime.extensions.object_stores.store import ObjectStore  # noqa: PLC0415

        before_first_url()
        return ObjectStore(share_client(retry_s), run)

    return AnyStore(FileStore(), build)


class AnyStore(Store):
    """Chooses the store of a key.

    Args:
        directories: The store of paths.
        build_objects: Build the store of URLs, at the first one.
    """

    def __init__(self, directories: Store, build_objects: Callable[[], Store]) -> None:
        self._directories, self._build_objects = directories, build_objects
        self._objects: Store | None = None
        self._lock = threading.Lock()

    def choose(self, key: str) -> Store:
        """Return the store of a key; raise `CheckpointError` if a package for it is not installed."""
        if not is_url(key):
            return self._directories
        with self._lock:
            if self._objects is None:
                self._objects = self._build_objects()
            return self._objects

    def begin(self, key: str, save: str, *, new: bool = False) -> Draft:
        """Begin a save."""
        return self.choose(key).begin(key, save, new=new)

    def join(self, address: DraftAddress) -> Draft:
        """Return the draft of another process."""
        return self.choose(address.key).join(address)

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
