"""A client of object stores whose calls run in a process of their own. Imports no torch.

The native threads of the client do not survive a fork, and training processes are forked from: by loaders for their workers, and
by scripts. So nothing of the client is in a training process, workers may use it for their data, and an upload in the
background does not compete with training for the interpreter lock.

Each call has a connection to the process while it runs. On it go, pickled, the name of the call and its arguments, then the
bytes of an upload; and back the result or the error, then the bytes of a read. Both sides know the number of bytes.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Remove the working folder, which `python -m` puts first: modules must not be imported from it.
    del sys.path[0]

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, TypeVar, overload

from accel_runtime.environment.settings import Settings
from accel_runtime.environment.text import print_note
from accel_runtime.extensions.object_stores.client import (
    ClientEndedError,
    ConditionError,
    Level,
    ObjectClient,
    RangeRequest,
    StoredObject,
    Upload,
    absent_error,
)
from accel_runtime.extensions.object_stores.obstore_client import ObstoreClient, explain_missing_client
from accel_runtime.storage.errors import CheckpointError, RequestError, StoreError
from accel_runtime.storage.store import RepeatableStream

__all__ = ["ProcessClient", "share_client"]

_CONNECTIONS = 8
"""Uploads and reads of a process that run at the same time."""
_BLOCK_BYTES = 1 << 22
"""Bytes of a block of a stream."""
_READ_BYTES = 1 << 23
"""Most bytes of a range that are requested at a time."""
_PARENT_POLL_S = 1.0
_STARTS = 3
"""Processes that a call is made in, if each one is killed: the system takes the memory of a large one first."""
_END_S = 10.0
"""Seconds until a process whose connections are closed has ended."""
_T = TypeVar("_T")


class ProcessClient(ObjectClient):
    """Runs calls of `ObstoreClient` in a child process, which is started by the first call and ends with this process.

    A call whose child was killed is made again in a new one, as `ObstoreClient` repeats a request without an answer.

    Args:
        retry_s: Seconds for which a call that fails is repeated.
        connections: Number of uploads and reads that run at the same time.
    """

    def __init__(self, retry_s: float, connections: int = _CONNECTIONS) -> None:
        if problem := explain_missing_client():
            raise RequestError(problem)
        self._retry_s, self._connections = retry_s, connections
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def start_put(self, key: str, size: int, *, wait: bool = True) -> Upload | None:
        """Begin an upload on a free connection."""

        def start(child: _Child) -> Upload | None:
            call = child.open_call(key, wait=wait)
            if call is None:
                return None
            call.send("upload", key, size)
            return _ProcessUpload(call)

        return self._run(key, start)

    def put(self, key: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """Write a small object; `ObjectClient.put` has the errors."""
        etag: str = self._call("put", key, data, if_match, if_absent)
        return etag

    def get(self, key: str) -> tuple[bytes, str]:
        """Read a small object."""
        result: tuple[bytes, str] = self._call("get", key)
        return result

    def find_size(self, key: str) -> int | None:
        """Return the size of an object."""
        size: int | None = self._call("find_size", key)
        return size

    def put_stream(self, key: str, blocks: Iterable[memoryview], size: int) -> None:
        """Send the bytes of an object while they are uploaded."""

        def send(child: _Child) -> None:
            call = child.open_call(key)
            call.send("put_stream", key, size)
            upload = _ProcessUpload(call)
            try:
                for block in blocks:
                    upload.write(block)
            except StoreError:
                raise
            except BaseException:
                call.abort()
                raise
            upload.finish()

        self._run(key, send, is_repeatable=isinstance(blocks, RepeatableStream))

    def read_ranges(self, requests: Sequence[RangeRequest]) -> None:
        """Read on as many connections as are free, at least on one."""
        if requests:
            self._run(requests[0].key, lambda child: _read_ranges(child, requests))

    def list(self, prefix: str) -> list[StoredObject]:
        """List objects."""
        found: list[StoredObject] = self._call("list", prefix)
        return found

    def list_level(self, prefix: str) -> Level:
        """List what is directly below a prefix."""
        level: Level = self._call("list_level", prefix)
        return level

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        if names := list(keys):
            self._call("delete", names)

    def _call(self, name: str, *arguments: Any) -> Any:
        first = arguments[0]
        key = first if isinstance(first, str) else first[0]

        def call_once(child: _Child) -> Any:
            call = child.open_call(key)
            call.send(name, *arguments)
            result = call.receive()
            call.release()
            return result

        return self._run(key, call_once)

    def _run(self, key: str, call: Callable[[_Child], _T], *, is_repeatable: bool = True) -> _T:
        """Return the result of a call, which is made again in a new process if that of the client was killed.

        The killed process may have sent the request: all writes are of bytes that do not change under their key, or conditional,
        and their callers look if the first attempt has had its effect.
        """
        for number in range(1, _STARTS + 1):
            child = self._get_child()
            try:
                return call(child)
            except ClientEndedError:
                if not is_repeatable or not child.wait_for_end():
                    raise
                if number == _STARTS:
                    reason = "the process that runs the calls to the store has ended, also when it was started again"
                    raise ClientEndedError(
                        key, reason, "Check the memory of this machine, and try again."
                    ) from None
        raise AssertionError

    def close(self) -> None:
        """End the child process; without this call, it ends with this process."""
        with self._lock:
            if self._child is not None:
                self._child.close()
            self._child = None

    def _get_child(self) -> _Child:
        with self._lock:
            # A forked process starts its own; so does one whose child was killed.
            if self._child is not None and not self._child.is_usable:
                self._child.disconnect()
                self._child = None
            if self._child is None:
                self._child = _Child(self._retry_s, self._connections)
            return self._child


@cache
def share_client(retry_s: float | None = None) -> ProcessClient:
    """Return the client that all stores of this process use; None is the time in the settings of the run."""
    return ProcessClient(Settings.from_env(os.environ).store_timeout if retry_s is None else retry_s)


class _Connection:
    """A connection on which objects are pickled, and bytes are sent without a copy."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._messages = connected, Connection(os.dup(connected.fileno()))

    def send(self, value: Any) -> None:
        self._messages.send(value)

    def receive(self) -> Any:
        """Return an object; raise EOFError if the other side has ended."""
        return self._messages.recv()

    def send_bytes(self, data: memoryview) -> None:
        self._socket.sendall(data)

    def receive_bytes(self, buffer: memoryview) -> None:
        """Fill a buffer; raise EOFError if the other side has ended."""
        while buffer:
            count = self._socket.recv_into(buffer)
            if not count:
                raise EOFError
            buffer = buffer[count:]

    def close(self) -> None:
        self._messages.close()
        self._socket.close()


class _Child:
    """The child process, and connections to it."""

    def __init__(self, retry_s: float, connections: int) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._free = threading.Semaphore(connections)
        self._control, remote = socket.socketpair()
        with remote:
            arguments = [str(remote.fileno()), str(retry_s), str(self._pid)]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name if __spec__ else __name__, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
            )

    @property
    def is_usable(self) -> bool:
        """Return whether this process has started the child, and it runs."""
        return self._pid == os.getpid() and self._process.poll() is None

    def wait_for_end(self) -> bool:
        """Return whether the child has ended, a moment after a connection to it was closed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return not self.is_usable

    @overload
    def open_call(self, key: str) -> _Call: ...
    @overload
    def open_call(self, key: str, *, wait: bool) -> _Call | None: ...
    def open_call(self, key: str, *, wait: bool = True) -> _Call | None:
        """Return a call on a connection that no other one uses; None if there is none and `wait` is not set."""
        if not self._free.acquire(blocking=wait):
            return None
        try:
            with self._lock:
                return _Call(self, self._idle.pop() if self._idle else self._connect(), key)
        except BaseException as error:
            self._free.release()
            if isinstance(error, ConnectionError) or (isinstance(error, OSError) and not self.is_usable):
                raise _ended_error(key) from None
            raise

    def _connect(self) -> _Connection:
        local, remote = socket.socketpair()
        try:
            with remote:
                socket.send_fds(self._control, [b"c"], [remote.fileno()])
        except BaseException:
            local.close()
            raise
        return _Connection(local)

    def release(self, connection: _Connection, *, is_reusable: bool) -> None:
        """Make room for another call."""
        with self._lock:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        self._free.release()

    def disconnect(self) -> None:
        """Close the sockets of this process."""
        self._control.close()
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """End the child, unless it is that of the process that has forked this one."""
        self.disconnect()
        if self._pid == os.getpid():
            self._process.wait()


class _Call:
    """A call on a connection of its own."""

    def __init__(self, child: _Child, connection: _Connection, key: str) -> None:
        self._child, self._connection, self._key = child, connection, key

    def send(self, name: str, *arguments: Any) -> None:
        with self._connection_errors():
            self._connection.send((name, arguments))

    def send_bytes(self, block: memoryview) -> None:
        with self._connection_errors():
            self._connection.send_bytes(block)

    def receive(self) -> Any:
        """Return the result, or raise the error of the call; then the connection is free again."""
        with self._connection_errors():
            error, result = self._connection.receive()
        if error is None:
            return result
        self.release()
        kind, arguments = error
        raise _ERRORS[kind](*arguments)

    def receive_bytes(self, buffer: memoryview) -> None:
        with self._connection_errors():
            self._connection.receive_bytes(buffer)

    def release(self) -> None:
        self._child.release(self._connection, is_reusable=True)

    def abort(self) -> None:
        """Close the connection: the result is not needed."""
        self._child.release(self._connection, is_reusable=False)

    def wait_for_end(self) -> None:
        """Wait until the killed process has ended, so that the next call starts a new one."""
        self._child.wait_for_end()

    def _connection_errors(self) -> _ConnectionErrors:
        return _ConnectionErrors(self, self._key)


def _ended_error(key: str) -> ClientEndedError:
    """Return the error of a call whose process has ended."""
    return ClientEndedError(key, "the process that runs the calls to the store has ended", "Try again.")


class _ConnectionErrors:
    """Converts an error of a connection: the child process has ended."""

    def __init__(self, call: _Call, key: str) -> None:
        self._call, self._key = call, key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            return
        self._call.abort()
        if isinstance(error, (EOFError, OSError)):
            self._call.wait_for_end()
            raise _ended_error(self._key) from None


class _ProcessUpload(Upload):
    def __init__(self, call: _Call) -> None:
        self._call = call

    def write(self, piece: memoryview) -> None:
        self._call.send_bytes(piece)

    def finish(self) -> str:
        etag: str = self._call.receive()
        self._call.release()
        return etag


def _split_requests(requests: Iterable[RangeRequest]) -> Iterator[RangeRequest]:
    """Yield requests of at most `_READ_BYTES`, so that a large range is read on several connections."""
    for request in requests:
        for at in range(0, len(request.buffer), _READ_BYTES):
            yield RangeRequest(request.key, request.start + at, request.buffer[at : at + _READ_BYTES])


def _read_ranges(child: _Child, requests: Sequence[RangeRequest]) -> None:
    pending = deque[tuple[_Call, RangeRequest]]()
    try:
        for request in _split_requests(requests):
            while (call := child.open_call(request.key, wait=not pending)) is None:
                _receive_range(*pending.popleft())
            call.send("read", request.key, request.start, len(request.buffer))
            pending.append((call, request))
        while pending:
            _receive_range(*pending.popleft())
    finally:
        for call, _ in pending:  # after an error
            call.abort()


def _receive_range(call: _Call, request: RangeRequest) -> None:
    call.receive()
    call.receive_bytes(request.buffer)
    call.release()


_ERRORS: dict[str, Any] = {
    "condition": ConditionError,
    "absent": absent_error,
    "object": StoreError,
    "checkpoint": CheckpointError,
}


def _describe(error: Exception, key: str) -> tuple[str, tuple[str, ...]]:
    if isinstance(error, ConditionError):
        return "condition", (str(error),)
    if isinstance(error, FileNotFoundError):
        return "absent", (error.filename or key,)
    if isinstance(error, StoreError):
        return "object", (error.filename, error.strerror or "", error.cure)
    if isinstance(error, CheckpointError):
        return "checkpoint", (str(error),)
    return "object", (key, f"{type(error).__name__}: {error}", "Report this error.")


def _serve_connection(connection: _Connection, client: ObstoreClient) -> None:
    with suppress(EOFError, OSError), closing(connection):
        while True:
            name, arguments = connection.receive()
            error, result, data = None, None, memoryview(b"")
            try:
                if name == "upload":
                    key, size = arguments
                    buffer = memoryview(bytearray(size))
                    connection.receive_bytes(buffer)
                    result = client.put(key, buffer)
                elif name == "put_stream":
                    key, size = arguments
                    blocks = _iterate_blocks(connection, size)
                    try:
                        client.put_stream(key, blocks, size)
                    finally:
                        deque(blocks, maxlen=0)  # after an error too, the other process sends the rest
                elif name == "read":
                    data = client.read_range(*arguments)
                elif name == "put":
                    key, body, if_match, if_absent = arguments
                    result = client.put(key, body, if_match=if_match, if_absent=if_absent)
                else:
                    result = getattr(client, name)(*arguments)
            except (EOFError, ConnectionError):
                raise
            except Exception as raised:  # noqa: BLE001 - raised by the caller
                error, data = _describe(raised, str(arguments[0])), memoryview(b"")
            connection.send((error, result))
            connection.send_bytes(data)


def _iterate_blocks(connection: _Connection, size: int) -> Iterator[memoryview]:
    for start in range(0, size, _BLOCK_BYTES):
        block = memoryview(bytearray(min(_BLOCK_BYTES, size - start)))
        connection.receive_bytes(block)
        yield block


def _serve(control: int, retry_s: float, parent: int) -> None:
    """Serve connections until the parent process closes the control socket, or ends."""
    # An interrupt goes to the whole group of processes, and the parent may save before it ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    client = ObstoreClient(retry_s, report=print_note)
    listener = socket.socket(fileno=control)
    while True:
        data, descriptors, _, _ = socket.recv_fds(listener, 1, 1)
        if not data:
            # Threads of the client may still wait for the network.
            os._exit(0)
        connection = _Connection(socket.socket(fileno=descriptors[0]))
        threading.Thread(target=_serve_connection, args=(connection, client), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended, so that it completes no write of a killed process.

    The control socket does not show this: processes that the parent has forked hold it open.
    """
    with suppress(AttributeError, OSError):  # not on this platform, or the parent has ended already
        process = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([process], [], [])
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(0)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
