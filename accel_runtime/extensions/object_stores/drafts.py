"""The objects of a checkpoint in an object store: its manifest, its parts and their pieces. Imports no torch.

`store` has the names of all objects.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accel_runtime.extensions.object_stores.client import (
    ClientEndedError,
    ConditionError,
    ObjectClient,
    RangeRequest,
    Upload,
)
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import NAME, Checkpoint, FileEntry, Manifest, hash_file
from accel_runtime.storage.store import (
    Draft,
    DraftAddress,
    RepeatableStream,
    Snapshot,
    parallel_map,
)
from accel_runtime.storage.tensor_file import read_chunk

__all__ = [
    "DRAFTS",
    "HOOKS",
    "PARTS",
    "PIECE_BYTES",
    "Committed",
    "ObjectDraft",
    "ObjectSnapshot",
    "fence_manifest",
    "find_missing_part",
    "find_pieces",
    "find_save",
    "list_save",
    "read_manifest",
    "release_key",
    "reserve_key",
]

PIECE_BYTES = 1 << 25
"""Largest object that is written: several are sent at a time, and one that fails is sent again."""
DRAFTS, PARTS, HOOKS = ".drafts", "parts", ".hooks"
_RESERVED = b'{"reserved":'
_ATTEMPTS = 3
"""Number of times that the bytes of a part are sent, if the process of the client is killed each time."""


@dataclass(frozen=True)
class Committed:
    """The manifest object of a key: a manifest, or a text that reserves the key for the first save.

    A save is committed by replacing this object, on the condition that it is unchanged.
    """

    etag: str
    text: bytes

    @property
    def is_reserved(self) -> bool:
        """Return whether it only reserves the key."""
        return self.text.startswith(_RESERVED)

    def parse(self, name: str) -> Manifest:
        """Return the manifest; raise `CheckpointError` if it is damaged."""
        return Manifest.parse(self.text.decode(errors="replace").rstrip("\n") + "\n", name)

    @property
    def save(self) -> str | None:
        """Return the save of the manifest; None if it is damaged, or only reserves the key."""
        with suppress(CheckpointError):
            return self.parse("").save
        return None


def read_manifest(client: ObjectClient, key: str) -> Committed | None:
    """Return the manifest object of a key; None if there is none."""
    try:
        text, etag = client.get(f"{key}/{NAME}")
    except FileNotFoundError:
        return None
    return Committed(etag, text)


def reserve_key(client: ObjectClient, key: str, save: str) -> str | None:
    """Write an object that reserves a free key, and return its ETag; None if the key has a manifest or is reserved."""
    text = _build_reservation(save)
    try:
        return client.put(f"{key}/{NAME}", text, if_absent=True)
    except ConditionError:
        committed = read_manifest(client, key)
        # The answer to the first attempt may be lost.
        return committed.etag if committed is not None and committed.text == text else None


def release_key(client: ObjectClient, key: str, save: str) -> None:
    """Remove the object by which a save has reserved a key, if it has."""
    committed = read_manifest(client, key)
    if committed is not None and committed.text == _build_reservation(save):
        client.delete([f"{key}/{NAME}"])


def _build_reservation(save: str) -> bytes:
    return _RESERVED + json.dumps(save).encode() + b"}\n"


def fence_manifest(client: ObjectClient, key: str, committed: Committed) -> Committed | None:
    """Change the ETag of a manifest object, so that no save that has begun before can be committed; None if one just was."""
    text = committed.text + b"\n"
    try:
        etag = client.put(f"{key}/{NAME}", text, if_match=committed.etag)
    except ConditionError:
        current = read_manifest(client, key)
        return current if current is not None and current.text == text else None
    return Committed(etag, text)


def find_save(client: ObjectClient, key: str) -> str | None:
    """Return the committed save of a key; None if there is none, or its manifest is damaged."""
    committed = read_manifest(client, key)
    return None if committed is None else committed.save


def locate_hook_claims(key: str, save: str) -> str:
    """Return the prefix of objects with the checksums of files of hooks, by which two processes find that theirs differ."""
    return f"{key}/{DRAFTS}/{save}{HOOKS}/"


def list_save(client: ObjectClient, key: str, save: str) -> list[str]:
    """Return the parts of a save, and what its hooks have claimed."""
    folders = f"{key}/{PARTS}/{save}/", locate_hook_claims(key, save)
    return [
        each.key for found in parallel_map(client.list, folders, waits_for_network=True) for each in found
    ]


@dataclass(frozen=True)
class Piece:
    """An object with bytes of a part."""

    key: str
    start: int
    """Offset of its first byte in the part."""
    size: int


_DIGITS = 5
"""Digits of the number of a piece."""


def find_pieces(client: ObjectClient, location: str, names: Iterable[str]) -> dict[str, list[Piece]]:
    """Return the objects of the named parts of a save, in order; those that are missing are left out."""
    sizes = {each.key.removeprefix(f"{location}/"): each.size for each in client.list(f"{location}/")}
    folders: dict[str, list[str]] = {}
    for object_name in sorted(sizes):
        folders.setdefault(object_name.rpartition("/")[0], []).append(object_name)
    found: dict[str, list[Piece]] = {}
    for name in names:
        start = 0
        for object_name in [name] if name in sizes else folders.get(name, ()):
            found.setdefault(name, []).append(Piece(f"{location}/{object_name}", start, sizes[object_name]))
            start += sizes[object_name]
    return found


def find_missing_part(
    key: str, manifest: Manifest, pieces: Mapping[str, list[Piece]]
) -> CheckpointError | None:
    """Return an error that names a part that is missing or has another size; None if all are there."""
    for name, file in manifest.files.items():
        if name not in pieces:
            return CheckpointError(f"{key}/{name} is missing from the checkpoint: no such object")
        size = pieces[name][-1].start + pieces[name][-1].size
        if size != file.bytes:
            return CheckpointError(
                f"{key}/{name} is damaged: it has {size} bytes and should have {file.bytes}"
            )
    return None


class ObjectDraft(Draft):
    """Parts under a prefix that no manifest names yet.

    Args:
        client: The calls to the service.
        address: Names of the draft.
        piece_bytes: Most bytes of an object.
        marker: The object that says that the save is running; None on the other processes.
        replaces: ETag of the manifest object that the commit replaces; empty on the other processes.
    """

    is_remote = True

    def __init__(
        self,
        client: ObjectClient,
        address: DraftAddress,
        piece_bytes: int,
        marker: str | None,
        replaces: str,
    ) -> None:
        self.address = address
        self._client, self._piece_bytes = client, piece_bytes
        self._marker, self._replaces = marker, replaces
        self._folder: Path | None = None
        self._written: list[str] = []

    def directory(self) -> Path:
        """Return a temporary directory, whose files `put_hook_files` uploads."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="accel-hooks-"))
        return self._folder

    def put(self, name: str, data: Iterable[memoryview], size: int) -> None:
        """Write a part as one object, or as several, which are sent at the same time; again if the client was killed."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._put(name, data, size)
            except ClientEndedError:
                if not isinstance(data, RepeatableStream) or attempt == _ATTEMPTS:
                    raise
            else:
                return

    def _put(self, name: str, data: Iterable[memoryview], size: int) -> None:
        pending: deque[Upload] = deque()
        pieces = iter(_split(data, self._name_pieces(name, size)))
        try:
            for key, count, blocks in pieces:
                self._written.append(key)
                while (upload := self._client.start_put(key, count, wait=not pending)) is None:
                    pending.popleft().finish()
                pending.append(upload)
                for block in blocks:
                    upload.write(block)
            while pending:
                pending.popleft().finish()
        finally:
            for upload in pending:  # after an error: nothing may arrive after the parts were removed
                with suppress(OSError):
                    upload.finish()

    def _name_pieces(self, name: str, size: int) -> list[tuple[str, int]]:
        """Return key and size of each object of a part."""
        location = f"{self.address.location}/{name}"
        if size <= self._piece_bytes:
            return [(location, size)]
        starts = range(0, size, self._piece_bytes)
        return [
            (f"{location}/{number:0{_DIGITS}}", min(self._piece_bytes, size - start))
            for number, start in enumerate(starts)
        ]

    def put_hook_files(self, names: Collection[str]) -> dict[str, FileEntry]:
        """Upload the files in the temporary directory; raise if another process has uploaded a different one."""
        entries = {}
        for path in sorted(self._folder.rglob("*")) if self._folder is not None else ():
            name = path.relative_to(self._folder or path).as_posix()
            if path.is_symlink():
                raise CheckpointError(
                    f"Cannot save {path}: it is a link that a hook has made, and a checkpoint contains its files. Copy the "
                    "file instead."
                )
            if path.is_file():
                if name in names:
                    raise CheckpointError(
                        f"Cannot save {name}: a save hook wrote a file with the name of a file of the checkpoint. Choose "
                        "another name."
                    )
                entries[name] = self._put_hook_file(name, path)
        return entries

    def _put_hook_file(self, name: str, path: Path) -> FileEntry:
        with path.open("rb") as file:
            checksum = hash_file(file)
            entry = FileEntry(file.tell(), checksum)
        claim = locate_hook_claims(self.address.key, self.address.save) + name
        try:
            self._client.put(claim, checksum.encode(), if_absent=True)
        except ConditionError:
            if self._client.get(claim)[0] != checksum.encode():
                raise CheckpointError(
                    f"Cannot save {name}: hooks wrote different files of this name on two processes. Write it on one."
                ) from None
        self.put(name, RepeatableStream(partial(_read_file, path)), entry.bytes)
        return entry

    def free_space(self) -> int:
        """Return no limit."""
        return sys.maxsize

    def commit(self, manifest: Manifest) -> None:
        """Replace the manifest object, on the condition that it is that of the beginning, once all parts are seen."""
        assert self._marker is not None
        key = self.address.key
        pieces = find_pieces(self._client, self.address.location, manifest.files)
        if find_missing_part(key, manifest, pieces) is not None:
            raise CheckpointError(f"Cannot save {key}: another process has removed parts of it. Save again.")
        try:
            self._client.put(f"{key}/{NAME}", manifest.text().encode(), if_match=self._replaces)
        except (OSError, ConditionError) as error:
            # The answer may be lost, and the client may have tried again.
            if find_save(self._client, key) == self.address.save:
                pass
            elif isinstance(error, ConditionError):
                raise CheckpointError(
                    f"Cannot save {key}: another process has saved it meanwhile. Choose another name."
                ) from None
            else:
                raise
        folder = locate_hook_claims(key, self.address.save)
        claims = [f"{folder}{name}" for name, file in manifest.files.items() if not file.header]
        with suppress(OSError):  # the next save removes them
            self._client.delete([*claims, self._marker])

    def discard(self) -> None:
        """Remove the objects of all processes, on the one that has begun the draft.

        The others keep theirs while a commit is possible: if that process was killed, its commit may still be on its way.
        The next saves remove them.
        """
        key = self.address.key
        if self._marker is None:
            with suppress(OSError):
                if read_manifest(self._client, key) is None:
                    self._client.delete(self._written)
            return
        with suppress(OSError):
            committed = read_manifest(self._client, key)
            if committed is not None and committed.etag == self._replaces:
                # So that a commit whose answer was given up does not arrive later.
                committed = fence_manifest(self._client, key, committed) or read_manifest(self._client, key)
            if committed is not None and committed.save == self.address.save:
                return  # the answer to the commit was lost
            self._client.delete(list_save(self._client, key, self.address.save))
            if committed is not None and committed.is_reserved:
                self._client.delete([f"{key}/{NAME}"])
            self._client.delete([self._marker])

    def close(self) -> None:
        """Remove the temporary directory."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _split(
    data: Iterable[memoryview], pieces: Iterable[tuple[str, int]]
) -> Iterator[tuple[str, int, Iterator[memoryview]]]:
    """Divide a stream of bytes among objects; the blocks of one must be read before the next one is requested."""
    blocks, rest = iter(data), memoryview(b"")

    def take(count: int) -> Iterator[memoryview]:
        nonlocal rest
        while count:
            rest = rest or next(blocks)
            block, rest = rest[:count], rest[count:]
            count -= len(block)
            yield block

    for key, size in pieces:
        yield key, size, take(size)
    assert not rest
    assert all(not block for block in blocks)


def _read_file(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            yield memoryview(block)


class ObjectSnapshot(Snapshot):
    """A manifest and the objects of its parts.

    Another process may remove or replace the checkpoint. The parts of a replaced one stay until its key is saved again.
    """

    is_remote = True

    def __init__(
        self, client: ObjectClient, checkpoint: Checkpoint, pieces: Mapping[str, list[Piece]]
    ) -> None:
        self.checkpoint = checkpoint
        self._client, self._pieces = client, pieces
        self._folder: Path | None = None

    def get_range(self, name: str, start: int, buffer: memoryview) -> int:
        """Read a range from the objects of a part."""
        end = start + len(buffer)
        requests = []
        for piece in self._pieces.get(name) or [Piece(f"{self._location}/{name}", 0, len(buffer) + start)]:
            first, last = max(start, piece.start), min(end, piece.start + piece.size)
            if first < last:
                target = buffer[first - start : last - start]
                requests.append(RangeRequest(piece.key, first - piece.start, target))
        if requests:
            self._client.read_ranges(requests)
        return sum(len(request.buffer) for request in requests)

    @property
    def _location(self) -> str:
        return f"{self.checkpoint.key}/{PARTS}/{self.checkpoint.manifest.save}"

    def is_current(self) -> bool:
        """Return whether the key still has the manifest of this save."""
        return find_save(self._client, self.checkpoint.key) == self.checkpoint.manifest.save

    def directory(self) -> Path:
        """Download the files of hooks into a temporary directory, and compare their checksums."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="accel-hooks-"))
            for name, file in self.checkpoint.manifest.files.items():
                if not file.header:
                    (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                    self._download(name, self._folder / name)
        return self._folder

    def _download(self, name: str, path: Path) -> None:
        chunk = self.checkpoint.manifest.get_file_chunk(name)
        with path.open("wb") as output:
            for block in read_chunk(self, "the file", chunk, min(chunk.bytes, PIECE_BYTES), lambda _: None):
                output.write(block)

    def close(self) -> None:
        """Remove the temporary directory."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
