"""The interface of a store of checkpoints, and what is the same for every store. Imports no torch.

A checkpoint is a manifest and named parts under a key, which is text such as `runs/1/checkpoint_3`. A save writes the parts
into a draft, which no reader sees. `Draft.commit` makes the checkpoint visible in one step, as the last one, so that it is
complete or absent. A file system renames a directory; an object store writes the manifest, on the condition that no one else
did. A reader opens a `Snapshot`, whose bytes are those of one save.
"""

from __future__ import annotations

import builtins
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from accel_runtime.environment.cgroup import count_cpus
from accel_runtime.storage.errors import AllGatherObjects, CheckpointError
from accel_runtime.storage.manifest import Checkpoint, FileEntry, Manifest, parse_number

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Draft",
    "DraftAddress",
    "KeyExistsError",
    "RepeatableStream",
    "Snapshot",
    "Store",
    "child_key",
    "find_previous_checkpoint",
    "list_numbered",
    "next_number",
    "numbered_key",
    "parallel_map",
    "split_key",
    "use_checkpoint",
]

_T = TypeVar("_T")
_R = TypeVar("_R")
_MAX_THREADS, _MAX_WAITING = 4, 8
_CHANGES = 100
"""Number of changes by other processes after which a reader gives up: each is a save or a removal."""


class KeyExistsError(CheckpointError):
    """Another process has taken a key that was free."""


@dataclass(frozen=True)
class RepeatableStream(Iterable[memoryview]):
    """Pieces of a part that a store can read again, if sending them has failed."""

    generate: Callable[[], Iterator[memoryview]]

    def __iter__(self) -> Iterator[memoryview]:
        return self.generate()


@dataclass(frozen=True)
class DraftAddress:
    """Names of a draft; processes send it to each other, to write parts of one checkpoint."""

    key: str
    """Key of the checkpoint, as the store writes it: of a file system the absolute path."""
    save: str
    """Unique name of the save."""
    location: str
    """Where the parts are until the commit, in the words of the store."""


class Draft(ABC):
    """A checkpoint that is being written, in one of the processes that write it.

    The process that has called `Store.begin` commits; all others get their draft from `Store.attach`. Each of them calls
    `close` at the end, after `commit` or `discard` too.
    """

    address: DraftAddress
    is_shared: bool = True
    """Whether parts that this process puts become parts of the checkpoint: the node of a process may not see the directory of
    another node. If not, the process may call `directory`, `discard` and `close` only."""
    is_remote: bool = False
    """Whether parts go over a network: then more of them are sent at the same time."""

    @abstractmethod
    def directory(self) -> Path:
        """Return a local directory for hooks of the script, which write files into it.

        A file system returns the directory of the draft. Other stores create a temporary directory on the first call.
        """

    @abstractmethod
    def put(self, name: str, data: Iterable[memoryview], size: int) -> None:
        """Write a part, and return when it cannot be lost any more.

        Several threads may put parts at the same time. An error leaves no part that a reader could see.

        Args:
            name: Name of the part, with `/` between directories; put once in a draft.
            data: The bytes, in pieces of any size. A piece is valid until the next one is requested, and the part may be
                larger than the memory: a store buffers what it must and no more. A `RepeatableStream` may be read again.
            size: Number of bytes of all pieces, by which a store of objects chooses how it sends them.

        Raises:
            OSError: If the store fails; `filename` is the location of the part.
        """

    @abstractmethod
    def put_hook_files(self, names: Collection[str]) -> dict[str, FileEntry]:
        """Make the files that hooks have written into `directory` parts, as `put` does, and return their entries.

        Every process calls it; together they return each file once.

        Args:
            names: Names that are not files of hooks: those of the parts that any process puts.

        Raises:
            CheckpointError: If a hook has made a link, or hooks of two processes different files of one name in a store where
                the processes do not share the directory.
            OSError: If the store fails.
        """

    @abstractmethod
    def free_space(self) -> int:
        """Return the free space in bytes; `sys.maxsize` if it is not limited."""

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint visible under its key; called once all processes have put their parts.

        It replaces a checkpoint of this key, and removes that one's parts, except those that are read; a store that cannot
        distinguish them leaves all to the next save under this key. After an error the key has the checkpoint that it had before; or the new one, if the store fails again where the commit is undone, or
        where it reads the manifest after a lost answer. Both are complete, and `discard` keeps the one that the key has.

        Raises:
            CheckpointError: If another process has committed a checkpoint under this key since `Store.begin`, in a store in
                which `begin` does not prevent that; or if the key cannot have a checkpoint.
            OSError: If the store fails.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove what this process has written, as far as possible, after a failed save; raise nothing.

        The draft of `Store.begin` removes all parts, whichever process has put them. The others call it too.
        """

    @abstractmethod
    def close(self) -> None:
        """Release locks and temporary files; raise nothing, since the checkpoint may be complete."""


class Snapshot(ABC):
    """An open checkpoint: it reads bytes of one save, whatever happens to the key meanwhile.

    A store with locks keeps the bytes until `close`. In another store a part may be missing after a while; then `get_range`
    raises an error and `is_current` returns False, so that the reader starts again with the next checkpoint.
    """

    checkpoint: Checkpoint
    is_remote: bool = False
    """Whether bytes come over a network: then each is read once, by the ranks that need it, and verified there."""

    @abstractmethod
    def get_range(self, name: str, start: int, buffer: memoryview) -> int:
        """Read bytes of a part into a buffer, and return their number: fewer than requested only at the end of the part.

        Several threads may read at the same time.

        Args:
            name: Name of the part.
            start: Offset of the first byte.
            buffer: Writable memory, such as that of a tensor.

        Raises:
            OSError: If the part cannot be read; `filename` is its location.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether the key still leads to this save; if not, another process has replaced or removed it."""

    @abstractmethod
    def directory(self) -> Path:
        """Return a local directory with the files of hooks, for hooks of the script that read them.

        A file system returns the directory of the checkpoint, whose other parts are in it too. Other stores copy the files
        of hooks into a temporary directory on the first call.
        """

    def list_untracked(self) -> list[str]:
        """Return the names of files beside the parts, which others have added and which are not read."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release the checkpoint, and remove temporary files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store(ABC):
    """A place for checkpoints. Instances are passed to threads, and used from several processes at the same time."""

    @abstractmethod
    def begin(self, key: str, save: str, *, new: bool = False) -> Draft:
        """Begin a save under a key, on the process that commits it.

        Leftovers of crashed saves under this key are recovered or removed first. A complete checkpoint stays until the
        commit.

        Args:
            key: Key of the checkpoint.
            save: Unique name of the save.
            new: Reserve the key, which must be free, so that no other process uses it.

        Raises:
            KeyExistsError: With `new`, if the key is taken.
            CheckpointError: If another process is writing under the key, or a checkpoint cannot have this key.
            OSError: If the store fails.
        """

    @abstractmethod
    def attach(self, address: DraftAddress) -> Draft:
        """Return the draft that another process has begun."""

    @abstractmethod
    def open(self, key: str) -> Snapshot:
        """Open the checkpoint of a key for reading, once its manifest and the sizes of all parts are checked.

        Raises:
            CheckpointError: If there is no checkpoint, or it is damaged or cannot be read.
        """

    @abstractmethod
    def list(self, parent: str) -> list[str]:
        """Return the keys directly below a parent that have a checkpoint, complete, damaged or unfinished, in order.

        A commit or removal that has returned is seen. The list is empty if nothing is below the parent.

        Args:
            parent: The part of keys before the last `/`.

        Raises:
            OSError: If the store fails.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a checkpoint, complete or not, so that it is absent at once; it may be missing.

        Returns:
            False if another process reads or writes it, and the store prevents removal meanwhile.

        Raises:
            OSError: If the store fails.
        """

    @abstractmethod
    def remove_leftovers(self, parent: str, below: int) -> None:
        """Recover or remove what crashed saves have left under `checkpoint_N` below a parent, for N less than `below`.

        Saves that are still running are kept, as far as the store can distinguish them: by locks, or by their age.

        Raises:
            OSError: If the store fails.
        """

    def check_access(self, parent: str) -> None:  # noqa: B027 - only a store with credentials has something to check
        """Write and remove something below a parent, before the first step of a run.

        Raises:
            OSError: If the store fails.
        """

    def explain_separate_nodes(
        self,
        parent: str | None,  # noqa: ARG002 - for stores that nodes may not share
        all_gather: AllGatherObjects,  # noqa: ARG002
        node: str | None,  # noqa: ARG002
        *,
        sharded: bool,  # noqa: ARG002
    ) -> str:
        """Return why not all nodes can save below the parent of rank 0, with the cure; empty if they can.

        Every rank calls it before the first step and gets the same text. A store that all nodes reach by its address has
        nothing to compare.

        Args:
            parent: The parent of keys on rank 0; None on the other ranks, and if it is not known.
            all_gather: The collective call.
            node: The name of this node on one rank of each; None on its other ranks.
            sharded: Whether models are sharded, so that the first node alone cannot save them.
        """
        return ""

    def find(self, key: str) -> Checkpoint:
        """Return the checkpoint of a key; errors are those of `open`."""
        with self.open(key) as snapshot:
            return snapshot.checkpoint

    def find_each(self, keys: Sequence[str]) -> builtins.list[Checkpoint | CheckpointError]:
        """Return the checkpoint of each key, or why it has none: the errors of `open`."""
        return [self._try_find(key) for key in keys]

    def _try_find(self, key: str) -> Checkpoint | CheckpointError:
        try:
            return self.find(key)
        except CheckpointError as error:
            return error

    def exists(self, key: str) -> bool:
        """Return whether a key has a checkpoint, complete or not."""
        return key in self.list(split_key(key)[0])


def child_key(parent: str, name: str) -> str:
    """Return the key of a name below a parent."""
    return f"{parent.rstrip('/')}/{name}" if parent else name


def split_key(key: str) -> tuple[str, str]:
    """Return the parent and the last name of a key."""
    parent, _, name = key.rpartition("/")
    return parent or ("/" if key.startswith("/") else ""), name


def numbered_key(parent: str, number: int) -> str:
    """Return the key of `checkpoint_N`."""
    return child_key(parent, f"checkpoint_{number}")


def next_number(store: Store, parent: str) -> int:
    """Return a number greater than that of any `checkpoint_N`, complete or not."""
    return 1 + max(_list_numbers(store, parent), default=-1)


def _list_numbers(store: Store, parent: str) -> Mapping[int, str]:
    """Return the keys `checkpoint_N` below a parent by their numbers, the greatest last."""
    named = [(key, parse_number(split_key(key)[1])) for key in store.list(parent)]
    numbered = [(key, number) for key, number in named if number is not None]
    return {number: key for key, number in sorted(numbered, key=itemgetter(1))}


def list_numbered(store: Store, parent: str) -> tuple[list[Checkpoint], dict[int, CheckpointError]]:
    """Return the complete checkpoints `checkpoint_N` below a parent, the newest last, and the errors of the others by number.

    Those that another process removes meanwhile are left out.
    """
    for _ in range(_CHANGES):
        numbers = _list_numbers(store, parent)
        found = dict(zip(numbers, store.find_each(list(numbers.values())), strict=True))
        checkpoints = [each for each in found.values() if isinstance(each, Checkpoint)]
        errors = {number: each for number, each in found.items() if isinstance(each, CheckpointError)}
        if not errors:
            return checkpoints, errors
        remaining = _list_numbers(store, parent)
        newest = checkpoints[-1].number if checkpoints else None
        # If one that was newer was removed, there is a newer one now.
        is_newer_removed = any(number not in remaining for number in errors if number > (newest or -1))
        if not is_newer_removed and (checkpoints or remaining == numbers):
            return checkpoints, {number: error for number, error in errors.items() if number in remaining}
    raise CheckpointError(f"{parent} was changed while it was read. Try again.")


def find_previous_checkpoint(store: Store, parent: str, number: int | None) -> Checkpoint | None:
    """Return the newest complete numbered checkpoint below a parent before this number."""
    if number is None:
        return None
    earlier = [
        each for each in list_numbered(store, parent)[0] if each.number is not None and each.number < number
    ]
    return earlier[-1] if earlier else None


def use_checkpoint(store: Store, find: Callable[[], str], use: Callable[[Snapshot], _T]) -> _T:
    """Return the result of `use` for the open checkpoint of the key that `find` returns.

    Both are called again if `use` fails and the checkpoint was replaced or removed meanwhile.
    """
    for _ in range(_CHANGES):
        key, changed = find(), False
        try:
            with store.open(key) as snapshot:
                try:
                    return use(snapshot)
                except CheckpointError:
                    changed = not snapshot.is_current()
                    raise
        except CheckpointError:
            if not changed and find() == key:
                raise
    with store.open(find()) as snapshot:
        return use(snapshot)


def parallel_map(
    function: Callable[[_T], _R], items: Iterable[_T], *, waits_for_network: bool = False
) -> list[_R]:
    """Call a function for every item in a few threads, and return the results in order.

    Calls that wait for the network do not need a CPU each.
    Reads and writes release the interpreter lock. The first error is raised when the calls under way have ended.
    The pools of `concurrent.futures` refuse work when the main thread ends, and a save in the background may
    still be running then.
    """
    pending = list(enumerate(items))[::-1]
    results: dict[int, _R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while pending and not errors:
            try:
                number, item = pending.pop()
            except IndexError:  # another thread took the last
                return
            try:
                results[number] = function(item)
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                errors.append(error)

    count = min(_MAX_WAITING if waits_for_network else min(_MAX_THREADS, count_cpus()), len(pending))
    threads = [threading.Thread(target=work, name="accel-checkpoint") for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
