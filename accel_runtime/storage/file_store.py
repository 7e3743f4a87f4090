"""The store of checkpoints in a file system: a checkpoint is a directory, and the commit is a rename. Imports no torch."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from accel_runtime.environment.settings import variable_name
from accel_runtime.storage.directory import (
    commit_directory,
    create_scratch,
    discard_scratch,
    exists,
    list_complete_siblings,
    list_siblings,
    open_folder,
    read_open_checkpoint,
    remove_checkpoint,
    remove_leftovers,
)
from accel_runtime.storage.errors import AllGatherObjects, CheckpointError, describe_error, format_names
from accel_runtime.storage.file_system import FileSystem, add_path_to_error
from accel_runtime.storage.manifest import (
    NAME,
    SIBLING,
    UNFINISHED,
    Checkpoint,
    FileEntry,
    Manifest,
    hash_file,
    parse_number,
)
from accel_runtime.storage.store import Draft, DraftAddress, Snapshot, Store, child_key

__all__ = ["FileStore", "explain_separate_nodes", "identify_candidates", "retry_while_changing"]


_T = TypeVar("_T")
_LOCK_S, _LOCK_RETRY_S = 30.0, 0.02
"""Seconds of waiting for a lock: workers of a killed process hold its locks for some seconds more."""
_CHANGES = 100
"""Number of changes by other processes after which a reader gives up: each is a save or a removal."""
_MAX_OPEN = 64
"""Number of files of a snapshot that are kept open."""


@dataclass(frozen=True)
class FileStore(Store):
    """Checkpoints in directories; a key is a path."""

    disk: FileSystem = field(default_factory=FileSystem)
    """The system calls of saves and removals."""

    def begin(self, key: str, save: str, *, new: bool = False) -> FileDraft:
        """Create and lock the scratch directory; `Store.begin` has the arguments and errors."""
        target = Path(key).absolute()
        if target.is_symlink() or ".." in target.parts:
            # Replace the directory that a link leads to, not the link.
            target = target.resolve()
        scratch, lock = create_scratch(target, save, self.disk, new=new)
        return FileDraft(DraftAddress(os.fspath(target), save, os.fspath(scratch)), self.disk, lock)

    def attach(self, address: DraftAddress) -> FileDraft:
        """Return the draft on another process, which may be on a node that does not see the scratch directory."""
        is_shared = self.disk.sees(Path(address.location))
        return FileDraft(address, self.disk, None, is_first=False, is_shared=is_shared)

    def open(self, key: str) -> FileSnapshot:
        """Open the checkpoint of this name, or a complete one that a crash left beside it, locked against removal.

        A checkpoint that another process renames, replaces or removes is searched again, as long as that makes a difference.
        """
        target = Path(key)
        return retry_while_changing(lambda: _open_complete(target), lambda: identify_candidates(target))

    def list(self, parent: str) -> list[str]:
        """Return the keys in a directory, also of checkpoints that exist only beside their name."""
        folder, names = Path(parent), set()
        for name in FileSystem().list_names(folder):
            sibling = SIBLING.fullmatch(name)
            if sibling is None:
                is_checkpoint = parse_number(name) is not None or (folder / name / NAME).is_file()
            else:
                is_checkpoint = sibling[2] != "removing"
            if is_checkpoint and (folder / name).is_dir():
                names.add(sibling[1] if sibling else name)
        return [child_key(parent, name) for name in sorted(names)]

    def exists(self, key: str) -> bool:
        """Return whether a file or directory of this name, or a scratch directory beside it, exists."""
        return exists(Path(key))

    def delete(self, key: str) -> bool:
        """Rename a directory and remove it; return False if another process has locked it."""
        return remove_checkpoint(Path(key), self.disk)

    def remove_leftovers(self, parent: str, below: int) -> None:
        """Recover or remove scratch directories that no process has locked."""
        remove_leftovers(Path(parent), below, self.disk)

    def explain_separate_nodes(
        self, parent: str | None, all_gather: AllGatherObjects, node: str | None, *, sharded: bool
    ) -> str:
        """Create a directory on rank 0 and look for it on all nodes; `Store.explain_separate_nodes` has the arguments."""
        directory = None if parent is None else Path(parent)
        return explain_separate_nodes(directory, all_gather, node, self.disk, sharded=sharded)


class FileDraft(Draft):
    """A scratch directory beside the target, which the process that has created it has locked."""

    def __init__(
        self,
        address: DraftAddress,
        disk: FileSystem,
        lock: int | None,
        *,
        is_first: bool = True,
        is_shared: bool = True,
    ) -> None:
        self.address, self.is_shared = address, is_shared
        self._scratch = Path(address.location)
        self._disk, self._lock, self._is_first = disk, lock, is_first

    def directory(self) -> Path:
        """Return the scratch directory; a node that does not see it gets a local one of the same name."""
        if not self.is_shared:
            self._disk.make(self._scratch)
        return self._scratch

    def put(self, name: str, data: Iterable[memoryview], size: int) -> None:
        """Write a file and sync it."""
        path = self._scratch / name
        if path.parent != self._scratch:
            self._disk.make(path.parent)
        self._disk.put(path, data, size)

    def put_hook_files(self, names: Collection[str]) -> dict[str, FileEntry]:
        """Sync and hash the files that hooks have written; raise if they did so in a directory that is not shared."""
        if not self.is_shared:
            self._require_no_files()
        return self._sync_hook_files(names) if self._is_first else {}

    def _require_no_files(self) -> None:
        if self._disk.sees(self._scratch) and (lost := next(self._scratch.iterdir(), None)):
            raise CheckpointError(
                f"A save hook wrote {lost.name} on a node that does not see the checkpoint: only files of the first "
                "node are kept. Write them there (if accelerator.is_main_process)."
            )

    def _sync_hook_files(self, names: Collection[str]) -> dict[str, FileEntry]:
        entries = {}
        for path in sorted(self._scratch.rglob("*")):
            name = path.relative_to(self._scratch).as_posix()
            if path.is_symlink():
                raise CheckpointError(
                    f"Cannot save {path}: it is a link that a hook has made, and a checkpoint contains its files. Copy the "
                    "file instead."
                )
            if path.is_file() and name not in names and name not in {NAME, UNFINISHED}:
                with path.open("rb") as file, add_path_to_error(path):
                    checksum = hash_file(file)
                    self._disk.sync(file.fileno())
                    entries[name] = FileEntry(file.tell(), checksum)
        return entries

    def free_space(self) -> int:
        """Return the free space of the file system for an ordinary user."""
        return self._disk.free_space(self._scratch)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, sync all directories, and rename the scratch directory to the target, or exchange them.

        The lock is released before the replaced checkpoint is removed, which may take long: readers wait for it.
        """
        text = manifest.text().encode()
        self._disk.put(self._scratch / NAME, [memoryview(text)], len(text))
        commit_directory(self._scratch, Path(self.address.key), self._disk, self._unlock)

    def discard(self) -> None:
        """Remove the scratch directory, and that of a node that has one of its own."""
        if self._is_first or not self.is_shared:
            discard_scratch(self._scratch, self._disk)
        self._unlock()

    def close(self) -> None:
        """Release the lock, and remove the directory of a node that does not share the target."""
        if not self.is_shared:
            discard_scratch(self._scratch, self._disk)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            # The operating system drops the lock in any case: a complete save must not fail by it.
            with suppress(OSError):
                self._disk.unlock(self._lock)
            self._lock = None


class FileSnapshot(Snapshot):
    """A directory that is open and locked against removal; its files are opened relative to it, wherever it is renamed to.

    Args:
        checkpoint: The checkpoint in the directory.
        folder: Descriptor of the directory, which `close` closes.
    """

    def __init__(self, checkpoint: Checkpoint, folder: int) -> None:
        self.checkpoint, self._path = checkpoint, Path(checkpoint.key)
        self._folder, self._disk = folder, FileSystem()
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get_range(self, name: str, start: int, buffer: memoryview) -> int:
        """Read from a file, which stays open for further reads: the chunks of a tensor are read in turn."""
        with add_path_to_error(self._path / name):
            file, filled = self._open(name), 0
            # A network file system may return less than requested.
            while filled < len(buffer) and (
                count := os.preadv(file.descriptor, [buffer[filled:]], start + filled)
            ):
                filled += count
            return filled

    def _open(self, name: str) -> _OpenFile:
        with self._lock:
            if name not in self._files:
                path = self._path / name
                self._files[name] = _OpenFile(self._disk.open_file(path, self._folder, name))
                if len(self._files) > _MAX_OPEN:
                    self._files.popitem(last=False)  # closed when no other thread reads it
            self._files.move_to_end(name)
            return self._files[name]

    def is_current(self) -> bool:
        """Return whether the path still leads to the open directory."""
        return _leads_to(self._path, self._folder, self._disk)

    def directory(self) -> Path:
        """Return the directory of the checkpoint."""
        return self._path

    def list_untracked(self) -> list[str]:
        """Return the files in the directory that are not part of the checkpoint."""
        tracked, untracked = {NAME, *self.checkpoint.manifest.files}, []
        with suppress(OSError):  # another process removes the checkpoint
            for directory, folders, files, _ in os.fwalk(Path(), dir_fd=self._folder):
                links = [name for name in folders if (self._path / directory / name).is_symlink()]
                untracked += [(Path(directory) / name).as_posix() for name in (*files, *links)]
        return sorted(name for name in untracked if name not in tracked)

    def close(self) -> None:
        """Close all files, and release the lock."""
        self._files.clear()
        self._disk.unlock(self._folder)


class _OpenFile:
    """A descriptor that is closed with the last reference to it, so that no thread reads from a closed one."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def retry_while_changing(read: Callable[[], _T], identify: Callable[[], object]) -> _T:
    """Call `read`, and call it again after a `CheckpointError` if the result of `identify` has changed meanwhile."""
    for _ in range(_CHANGES):
        before = identify()
        try:
            return read()
        except CheckpointError:
            if identify() == before:
                raise
    return read()


def identify_candidates(target: Path) -> object:
    """Return the identities of all directories that may be the checkpoint of this name."""
    disk = FileSystem()
    manifest = disk.identify(target / NAME)
    paths = [target] if manifest else [target, *list_siblings(target)]
    return manifest, [(path, disk.identify(path)) for path in paths]


def _open_complete(target: Path) -> FileSnapshot:
    """Open the checkpoint of this name, or the newest complete one beside it."""
    disk = FileSystem()
    if disk.identify(target / NAME) is None:
        complete = list_complete_siblings(list_siblings(target))
        if complete:
            target = Path(complete[-1].key)
    folder = open_folder(target, disk)
    try:
        _lock_for_reading(target, folder, disk)
        checkpoint = read_open_checkpoint(target, folder)
        _require_current(target, folder, disk)
        return FileSnapshot(checkpoint, folder)
    except BaseException:
        disk.unlock(folder)
        raise


def _lock_for_reading(target: Path, folder: int, disk: FileSystem) -> None:
    """Lock an open checkpoint against removal; a process that publishes or removes it has locked it, for a moment."""
    deadline = time.monotonic() + _LOCK_S
    while not disk.try_lock_shared(folder):
        _require_current(target, folder, disk)
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{target} cannot be read: another process has locked it for more than {_LOCK_S:g} s, to save or remove it. "
                "Wait for that process or end it, and load again."
            )
        time.sleep(_LOCK_RETRY_S)


def _require_current(target: Path, folder: int, disk: FileSystem) -> None:
    """Raise `CheckpointError` if the path does not lead to the open directory any more."""
    if not _leads_to(target, folder, disk):
        raise CheckpointError(f"{target} was replaced while it was opened. Load it again.")


def _leads_to(path: Path, folder: int, disk: FileSystem) -> bool:
    status = os.fstat(folder)
    return disk.identify(path) == (status.st_dev, status.st_ino)


_WAIT_S = 1.0
"""Seconds for a new directory to appear on the other nodes: their caches may have the absence of its parent."""
_POLL_S = 0.05


def explain_separate_nodes(
    directory: Path | None, all_gather: AllGatherObjects, node: str | None, disk: FileSystem, *, sharded: bool
) -> str:
    """Return why not all nodes can save into the directory of rank 0, with the cure; empty if they can.

    Every rank calls it and gets the same text. Nothing stays in the directory.

    Args:
        directory: The directory of checkpoints on rank 0; None on the other ranks, and if it is not known.
        all_gather: The collective call.
        node: The name of this node on one rank of each, which looks; None on its other ranks.
        disk: The file system of this node.
        sharded: Whether models are sharded, so that the first node alone cannot save them.
    """
    created: list[Path] = []
    probe = problem = None
    try:
        if directory is not None:
            probe = directory.absolute() / f".probe-{uuid.uuid4().hex}"
            created = [path for path in (probe, *probe.parents) if not path.exists()]
            try:
                disk.make(probe)
            except OSError as error:
                problem = describe_error(error)
        probe, problem = all_gather((probe, problem))[0]
        if probe is None:
            return ""
        found = all_gather((node, node is None or bool(problem) or _is_seen(probe, disk)))
    finally:
        for path in created:
            with suppress(OSError):  # another process has put something into it
                path.rmdir()
    what, first = f"Checkpoints cannot be saved in {probe.parent}", f"{found[0][0]} (rank 0)"
    if problem:
        return f"{what}: node {first}: {problem}"
    blind = [f"{name} (rank {rank})" for rank, (name, seen) in enumerate(found) if not seen]
    return (
        f"{what}: {_format_nodes(blind)} not see what node {first} creates there. {_get_cure(sharded=sharded)}"
        if blind
        else ""
    )


def _is_seen(probe: Path, disk: FileSystem) -> bool:
    """Return whether this node sees the probe, after a while at the latest."""
    deadline = time.monotonic() + _WAIT_S
    while not (seen := disk.sees(probe)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return seen


def _format_nodes(names: Sequence[str]) -> str:
    return f"node {names[0]} does" if len(names) == 1 else f"nodes {format_names(names)} do"


def _get_cure(*, sharded: bool) -> str:
    if sharded:
        return "Use a directory that all nodes share: sharded models need one."
    variable = variable_name("shared_files")
    return f"Use a directory that all nodes share, or set shared_files: false ({variable}=0): the first node then saves."
