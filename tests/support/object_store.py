"""A store of checkpoints with the operations of an object store: unconditional and conditional writes, no rename, no locks.

`Bucket` keeps objects in a folder, so that several processes reach them, and fails on request. `ObjectStore` uses nothing of it
but what S3 and others have: put, multipart upload, ranged get, head, list by prefix, delete, and a put on the condition that
an object does not exist or has a given ETag.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from accel_runtime.storage.errors import AbsentError, CheckpointError
from accel_runtime.storage.manifest import NAME, Checkpoint, FileEntry, Manifest, parse_number
from accel_runtime.storage.store import Draft, DraftAddress, KeyExistsError, Snapshot, Store

PART_BYTES = 1 << 16
"""Bytes of a part of a multipart upload, and thus the memory that a file of any size takes; 5 MiB or more in a service."""


class PreconditionError(Exception):
    """The condition of a write does not hold."""


@dataclass(frozen=True)
class Head:
    """Metadata of an object."""

    size: int
    etag: str
    modified: float


@dataclass(frozen=True)
class Outage:
    """Calls that fail.

    Attributes:
        call: Number of the first one, counted from 1; 0 is none.
        how: "fails" before it has an effect; "answer lost": it has its effect and fails; "ends": the process is killed before it.
        count: Number of calls that fail.
    """

    call: int = 0
    how: str = "fails"
    count: int = 1


class Bucket:
    """Objects of a service by their keys, in a folder. An object file has its ETag before its bytes."""

    def __init__(self, folder, outage=None):
        self._folder, self._outage = Path(folder), outage or Outage()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self.calls = []
        self.seconds = 0.0
        """Seconds by which the clock is ahead."""

    def put(self, key, data, *, if_match=None, if_absent=False):
        """Write an object, and return its ETag; raise `PreconditionError` if it exists or has another ETag."""
        with self._call("put", key), self._exclusive():
            self._require(key, if_match, if_absent)
            return self._write(key, [io.BytesIO(data)])

    def start_upload(self, key):
        """Begin a multipart upload and return its id."""
        with self._call("start_upload", key):
            upload = uuid.uuid4().hex
            self._locate_upload(upload).mkdir(parents=True)
            return upload

    def upload_part(self, key, upload, number, data):
        """Write a part of an upload, which no one sees."""
        with self._call("upload_part", key):
            (self._locate_upload(upload) / f"{number:05}").write_bytes(data)

    def complete_upload(self, key, upload):
        """Make the object of an upload visible."""
        folder = self._locate_upload(upload)
        with self._call("complete_upload", key), self._exclusive():
            with ExitStack() as stack:
                self._write(key, [stack.enter_context(path.open("rb")) for path in sorted(folder.iterdir())])
            shutil.rmtree(folder)

    def get(self, key, start=0, length=sys.maxsize):
        """Return bytes of an object."""
        with self._call("get", key), _key_errors(key), self._locate(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size - 32
            file.seek(32 + start)
            return file.read(max(0, min(length, size - start)))

    def head(self, key):
        """Return the metadata of an object; None if it does not exist."""
        with self._call("head", key):
            return self._head(key)

    def list(self, prefix):
        """Return the keys with a prefix, in order."""
        with self._call("list", prefix):
            paths = (path for path in self._folder.glob("objects/**/*") if path.is_file())
            keys = ("/" + path.relative_to(self._folder / "objects").as_posix() for path in paths)
            return sorted(key for key in keys if key.startswith(_absolute(prefix)))

    def delete(self, key):
        """Remove an object, which may be missing."""
        with self._call("delete", key):
            self._locate(key).unlink(missing_ok=True)

    def before_call(self):
        """Run before each call."""

    def now(self):
        """Return the time of the service."""
        return time.time() + self.seconds

    def _locate(self, key):
        return self._folder / "objects" / _absolute(key)[1:]

    def _locate_upload(self, upload):
        return self._folder / "uploads" / upload

    def _head(self, key):
        path = self._locate(key)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                return Head(status.st_size - 32, file.read(32).decode(), status.st_mtime)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _require(self, key, if_match, if_absent):
        head = self._head(key)
        if (if_absent and head) or (if_match and (head is None or head.etag != if_match)):
            raise PreconditionError

    def _write(self, key, parts):
        path, etag, new = self._locate(key), uuid.uuid4().hex, self._folder / uuid.uuid4().hex
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            file.write(etag.encode())
            for part in parts:
                shutil.copyfileobj(part, file)
        os.utime(new, (self.now(), self.now()))
        new.replace(path)
        return etag

    @contextmanager
    def _exclusive(self):
        """Make a write atomic among processes, as a service does."""
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _call(self, name, key):
        with self._lock:
            self.calls.append(name)
            number, outage = len(self.calls), self._outage
        self.before_call()
        is_hit = 0 < outage.call <= number < outage.call + outage.count
        if is_hit and outage.how == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # another thread may be faster than the signal
        if is_hit and outage.how == "fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO), key)
        yield
        if is_hit:
            raise OSError(errno.EIO, os.strerror(errno.EIO), key)


def _absolute(key):
    return "/" + key.lstrip("/")


@contextmanager
def _key_errors(key):
    try:
        yield
    except OSError as error:
        error.filename = key
        raise


class ObjectStore(Store):
    """Checkpoints as objects: `KEY/checkpoint.json` is the commit, `KEY/parts/SAVE/NAME` are the parts.

    `KEY/claim` reserves a number, `KEY/removed/SAVE` says since when parts are not needed any more. Nobody can see if a save or
    a reader has ended: parts of others are removed when they have not been needed for `grace_s` seconds.
    """

    def __init__(self, bucket, grace_s=3600.0):
        self.bucket, self._grace_s = bucket, grace_s

    def begin(self, key, save, *, new=False):
        self._sweep(key)
        if new:
            self._claim(key, save)
        head = self.bucket.head(f"{key}/{NAME}")
        if new and head is not None:
            self.bucket.delete(f"{key}/claim")
            raise KeyExistsError(f"{key} was just created by another process. Save again.")
        return ObjectDraft(self, DraftAddress(key, save, f"{key}/parts/{save}"), head and head.etag)

    def _claim(self, key, save):
        try:
            self.bucket.put(f"{key}/claim", save.encode(), if_absent=True)
        except PreconditionError:
            raise KeyExistsError(f"{key} was just created by another process. Save again.") from None

    def join(self, address):
        return ObjectDraft(self, address, None)

    def open(self, key):
        manifest, etag = self.read_manifest(key)
        if manifest is None:
            raise AbsentError(f"{key} is not a checkpoint: it has no {NAME}")
        for name, file in manifest.files.items():
            head = self.bucket.head(f"{key}/parts/{manifest.save}/{name}")
            if head is None or head.size != file.bytes:
                raise CheckpointError(f"{key}/{name} is missing from the checkpoint, or has another size")
        return ObjectSnapshot(self, Checkpoint(key, manifest), etag)

    def read_manifest(self, key):
        """Return the manifest of a key and its ETag; None if there is none."""
        name = f"{key}/{NAME}"
        while (head := self.bucket.head(name)) is not None:
            with suppress(FileNotFoundError):
                text = self.bucket.get(name).decode()
                if self.bucket.head(name) == head:  # a service returns both in one answer
                    return Manifest.parse(text, name), head.etag
        return None, None

    def find_save(self, key):
        """Return the committed save of a key; None if there is none, or its manifest is damaged."""
        with suppress(CheckpointError):
            manifest, _ = self.read_manifest(key)
            return manifest and manifest.save
        return None

    def list(self, parent):
        start, keys = f"{parent.rstrip('/')}/", set()
        for name in self.bucket.list(start):
            below, _, rest = name.removeprefix(_absolute(start)).partition("/")
            if rest in {NAME, "claim"}:
                keys.add(f"{start}{below}")
        return sorted(keys)

    def delete(self, key):
        save = self.find_save(key)
        self.bucket.delete(f"{key}/{NAME}")
        self.bucket.delete(f"{key}/claim")
        if save is not None:
            self.bucket.put(f"{key}/removed/{save}", b"")
        return True

    def remove_leftovers(self, parent, below):
        start = f"{parent.rstrip('/')}/"
        names = {name.removeprefix(_absolute(start)).partition("/")[0] for name in self.bucket.list(start)}
        for name in sorted(names):
            number = parse_number(name)
            if number is not None and number < below:
                self._sweep(f"{start}{name}")

    def _sweep(self, key):
        """Remove the parts of crashed saves, and those that were replaced or removed, after the grace time."""
        start = f"{key}/"
        objects = [name.removeprefix(_absolute(start)) for name in self.bucket.list(start)]
        committed = self.find_save(key)
        removed = {name.split("/")[1] for name in objects if name.startswith("removed/")}
        for name in objects:
            kind, _, rest = name.partition("/")
            save = rest.partition("/")[0]
            if committed is not None and (kind not in {"parts", "removed"} or save == committed):
                continue
            marker = f"removed/{save}" if kind == "parts" and save in removed else name
            head = self.bucket.head(start + marker)
            if kind != NAME and (head is None or self.bucket.now() - head.modified > self._grace_s):
                self.bucket.delete(start + name)


class ObjectDraft(Draft):
    """Parts under a prefix that no manifest names yet."""

    def __init__(self, store, address, replaces):
        self.address = address
        self._store, self._bucket, self._replaces = store, store.bucket, replaces
        self._folder = None

    def directory(self):
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="accel-hooks-"))
        return self._folder

    def put(self, name, data, size):
        key, buffer = f"{self.address.location}/{name}", bytearray()
        upload, number, sent = self._bucket.start_upload(key), 0, 0
        for piece in data:
            sent += len(piece)
            for start in range(0, len(piece), PART_BYTES):
                buffer += piece[start : start + PART_BYTES]
                if len(buffer) >= PART_BYTES:
                    self._bucket.upload_part(key, upload, number, bytes(buffer))
                    buffer.clear()
                    number += 1
        assert sent == size, name
        self._bucket.upload_part(key, upload, number, bytes(buffer))
        self._bucket.complete_upload(key, upload)

    def put_hook_files(self, names):  # noqa: ARG002 - other parts are not in the folder
        entries = {}
        for path in sorted(self._folder.rglob("*")) if self._folder is not None else ():
            name = path.relative_to(self._folder).as_posix()
            if path.is_symlink():
                raise CheckpointError(
                    f"Cannot save {path}: it is a link that a hook has made. Copy the file instead."
                )
            if path.is_file():
                entries |= self._put_hook_file(name, path.read_bytes())
        return entries

    def _put_hook_file(self, name, data):
        key = f"{self.address.location}/{name}"
        try:
            self._bucket.put(key, data, if_absent=True)
        except PreconditionError:
            if self._bucket.get(key) != data:
                raise CheckpointError(
                    f"Cannot save {name}: hooks wrote different files of this name on two processes. Write it on one."
                ) from None
        return {name: FileEntry(len(data), xxhash.xxh3_64_hexdigest(data))}

    def free_space(self):
        return sys.maxsize

    def commit(self, manifest):
        key = self.address.key
        replaced = self._store.find_save(key)
        name, data = f"{key}/{NAME}", manifest.text().encode()
        try:
            self._bucket.put(name, data, if_match=self._replaces, if_absent=self._replaces is None)
        except (OSError, PreconditionError) as error:
            # The answer may be lost, and the client may have tried again.
            if self._store.find_save(self.address.key) == self.address.save:
                pass
            elif isinstance(error, PreconditionError):
                raise CheckpointError(
                    f"Cannot save {key}: another process has saved it meanwhile. Choose another name."
                ) from None
            else:
                raise
        with suppress(OSError):
            if replaced is not None:
                self._bucket.put(f"{key}/removed/{replaced}", b"")

    def discard(self):
        with suppress(OSError):
            if self._store.find_save(self.address.key) == self.address.save:
                return  # the answer to the commit was lost
            for name in self._bucket.list(f"{self.address.location}/"):
                self._bucket.delete(name)
            claim = f"{self.address.key}/claim"
            if self._bucket.head(claim) and self._bucket.get(claim).decode() == self.address.save:
                self._bucket.delete(claim)

    def close(self):
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


class ObjectSnapshot(Snapshot):
    """A manifest, whose parts are not removed for a while."""

    def __init__(self, store, checkpoint, etag):
        self.checkpoint = checkpoint
        self._bucket, self._etag = store.bucket, etag
        self._folder = None

    def get_range(self, name, start, buffer):
        location = f"{self.checkpoint.key}/parts/{self.checkpoint.manifest.save}/{name}"
        data = self._bucket.get(location, start, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def is_current(self):
        head = self._bucket.head(f"{self.checkpoint.key}/{NAME}")
        return head is not None and head.etag == self._etag

    def directory(self):
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="accel-hooks-"))
            for name, file in self.checkpoint.manifest.files.items():
                if not file.header:
                    data = memoryview(bytearray(file.bytes))
                    self.get_range(name, 0, data)
                    (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (self._folder / name).write_bytes(data)
        return self._folder

    def close(self):
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None
