"""A client of an object store that keeps objects in a folder, so that several processes reach them, and fails on request."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

from support.runs.file_system import Fault

from accel_runtime.extensions.object_stores.client import (
    ConditionError,
    Level,
    ObjectClient,
    StoredObject,
    Upload,
    absent_error,
)

PIECE_BYTES = 1 << 16
"""Most bytes of an object in tests."""
_SCHEME_END = ":@/"
"""Stands for `://` in paths, which have no empty names."""


class Bucket(ObjectClient):
    """Objects by their keys. An object file has its ETag before its bytes."""

    def __init__(self, folder, fault=None):
        self._folder, self._fault = Path(folder), fault or Fault()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock, self._free = threading.Lock(), threading.Semaphore(4)
        self.calls = []
        self.seconds = 0.0
        """Seconds by which the clock is ahead."""

    def start_put(self, key, size, *, wait=True):  # noqa: ARG002 - the interface
        return _BufferedUpload(self, key) if self._free.acquire(blocking=wait) else None

    def put(self, key, data, *, if_match=None, if_absent=False):
        with self._call("put", key), self._exclusive():
            etag = self._read_etag(key)
            if (if_absent and etag is not None) or (if_match is not None and etag != if_match):
                raise ConditionError(key)
            return self._write(key, data)

    def get(self, key):
        with self._call("get", key), _absent_errors(key):
            data = self._locate(key).read_bytes()
            return data[32:], data[:32].decode()

    def find_size(self, key):
        with self._call("head", key):
            path = self._locate(key)
            return path.stat().st_size - 32 if path.is_file() else None

    def put_stream(self, key, blocks, size):
        data = b"".join(map(bytes, blocks))
        assert len(data) == size
        self.put(key, data)

    def read_ranges(self, requests):
        for request in requests:
            with (
                self._call("read", request.key),
                _absent_errors(request.key),
                self._locate(request.key).open("rb") as file,
            ):
                file.seek(32 + request.start)
                assert file.readinto(request.buffer) == len(request.buffer)

    def list(self, prefix):
        with self._call("list", prefix):
            return self._list(prefix)

    def list_level(self, prefix):
        with self._call("list", prefix):
            names = [stored.key.removeprefix(prefix) for stored in self._list(prefix)]
            folders = {name.partition("/")[0] for name in names if "/" in name}
            return Level(tuple(sorted(folders)), tuple(name for name in names if "/" not in name))

    def delete(self, keys):
        for key in keys:
            with self._call("delete", key):
                self._locate(key).unlink(missing_ok=True)

    def before_call(self, number):
        """Run before each call, counted from 1."""

    def now(self):
        """Return the time of the service."""
        return time.time() + self.seconds

    def _list(self, prefix):
        assert prefix.endswith("/")
        found = []
        for path in self._folder.glob("objects/**/*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            key = path.relative_to(self._folder / "objects").as_posix().replace(_SCHEME_END, "://")
            if path.is_file() and f"/{key}".startswith(f"/{prefix.lstrip('/')}"):
                found.append(
                    StoredObject(
                        prefix[: len(prefix) - len(prefix.lstrip("/"))] + key,
                        status.st_size - 32,
                        status.st_mtime,
                    )
                )
        return sorted(found, key=lambda stored: stored.key)

    def _locate(self, key):
        return self._folder / "objects" / key.lstrip("/").replace("://", _SCHEME_END)

    def _read_etag(self, key):
        try:
            with self._locate(key).open("rb") as file:
                return file.read(32).decode()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _write(self, key, data):
        path, etag, new = self._locate(key), uuid.uuid4().hex, self._folder / uuid.uuid4().hex
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(etag.encode() + data)
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
            number = len(self.calls)
        self.before_call(number)
        is_hit = self._fault.hits(number)
        if is_hit and not self._fault.is_late:
            self._fault.strike(key)
        yield
        if is_hit:
            self._fault.strike(key)


class _BufferedUpload(Upload):
    def __init__(self, bucket, key):
        self._bucket, self._key, self._data = bucket, key, bytearray()

    def write(self, piece):
        self._data += piece

    def finish(self):
        try:
            return self._bucket.put(self._key, bytes(self._data))
        finally:
            self._bucket._free.release()


@contextmanager
def _absent_errors(key):
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise absent_error(key) from None
