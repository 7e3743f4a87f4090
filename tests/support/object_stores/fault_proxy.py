"""An HTTP proxy in front of an S3 server, which injects faults and counts the requests and bytes of each client.

The proxy is a thread of the test process. A client has a port of its own, by which its requests are counted. Each request
of a client is forwarded on a new connection to the server, with its headers as they are, which the signature covers. Bodies are
streamed in both directions. Conditional puts are forwarded one after the other if the server does not decide them so.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote

__all__ = ["Answer", "BlackHole", "Fault", "FaultProxy", "Hook", "Request", "Reset", "Slow", "is_selected"]

_PIECE_BYTES = 1 << 18
_DEFAULT = "client"
_AUTHORIZATION = re.compile(r"Credential=([^/]+)/")


@dataclass(frozen=True)
class Fault:
    """A fault of requests."""


@dataclass(frozen=True)
class Reset(Fault):
    """Reset the connection.

    Attributes:
        when: "before" the server gets the request, "upload": after half of the request's body, "after" the server has answered,
            so that the answer is lost, or "download": after half of the answer's body.
    """

    when: str = "before"


@dataclass(frozen=True)
class Slow(Fault):
    """Send the bodies of request and answer with a number of bytes per second."""

    rate: float


@dataclass(frozen=True)
class Answer(Fault):
    """Answer with an error of S3 instead of the server; the bodies contain what those of AWS contain."""

    status: int = 503
    code: str = "SlowDown"
    message: str = "Please reduce your request rate."


@dataclass(frozen=True)
class BlackHole(Fault):
    """Read the request and never answer; the connection stays open until the proxy ends."""


@dataclass(frozen=True)
class Hook(Fault):
    """Call a function of the test with the request, in a thread, before it is forwarded or after the server has answered."""

    function: Callable[[Request], None]
    when: str = "before"


@dataclass
class Request:
    """A request and its answer, as far as they are known.

    Attributes:
        client: The name of the client.
        method: Such as "PUT".
        bucket: The first part of the path.
        key: The rest of the path, decoded; empty for requests to the bucket.
        query: The query, such as `list-type=2&prefix=a`.
        headers: The headers of the request, with names in lower case.
        sent: Bytes of the body that the client has sent.
        received: Bytes of the answer's body that the client has received.
        status: The status of the answer; 0 if there was none.
        faults: The faults that were injected.
    """

    client: str
    method: str
    bucket: str
    key: str
    query: str
    headers: dict[str, str]
    sent: int = 0
    received: int = 0
    status: int = 0
    faults: tuple[Fault, ...] = ()

    @property
    def is_conditional(self):
        """Whether it is a put on a condition."""
        return self.method == "PUT" and bool({"if-match", "if-none-match"} & self.headers.keys())


def is_selected(request, *, method=None, key="", client=None, select=None):
    """Return whether a request is selected.

    Args:
        request: The request.
        method: Its method; any by default.
        key: A regular expression that finds its key.
        client: The name of its client; any by default.
        select: A condition for the request.
    """
    return (
        method in {None, request.method}
        and client in {None, request.client}
        and re.search(key, request.key) is not None
        and (select is None or select(request))
    )


@dataclass
class _Rule:
    fault: Fault
    select: Callable[[Request], bool]
    every: int
    first: int
    count: float
    seen: int = 0
    injected: int = 0

    def applies(self, request):
        """Count a request, and return whether it has the fault."""
        if not self.select(request):
            return False
        self.seen += 1
        if self.injected >= self.count or self.seen < self.first or (self.seen - self.first) % self.every:
            return False
        self.injected += 1
        return True


@dataclass(frozen=True)
class _Head:
    """The first lines of a request or an answer."""

    first: str
    headers: list[tuple[str, str]]

    @classmethod
    async def read(cls, reader):
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.removesuffix("\r\n\r\n").split("\r\n")
        headers = [
            (name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)
        ]
        return cls(first, headers)

    def get(self, name, default=""):
        return next((value for key, value in self.headers if key == name), default)

    def to_bytes(self, without=(), **added):
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers if name not in without)]
        lines += [f"{name}: {value}" for name, value in added.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass
class FaultProxy:
    """A proxy of a server. It ends with `close` or its `with` block.

    Args:
        server: The `S3Server`.
    """

    server: object
    requests: list[Request] = field(default_factory=list)
    _rules: list[_Rule] = field(default_factory=list)
    _addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._servers, self._tasks = [], set()
        self._conditional_put = asyncio.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Close all connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self):
        for server in self._servers:
            server.close()
        await self._end_connections()

    async def _end_connections(self):
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def address(self, client=_DEFAULT):
        """Return the address for a client, by whose name its requests are counted."""
        if client not in self._addresses:
            listen = asyncio.run_coroutine_threadsafe(self._listen(client), self._loop)
            self._addresses[client] = f"http://127.0.0.1:{listen.result()}"
        return self._addresses[client]

    async def _listen(self, client):
        async def serve(reader, writer):
            task = asyncio.current_task()
            self._tasks.add(task)
            try:
                await self._serve(client, reader, writer)
            except asyncio.CancelledError:  # by `close`; asyncio reports it as an error otherwise
                pass
            finally:
                self._tasks.discard(task)
                _reset(writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=_PIECE_BYTES)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    def inject(self, fault, *, every=1, first=1, count=float("inf"), **selection):
        """Inject a fault from now on, until `clear`.

        Args:
            fault: The fault.
            every: Of the selected requests, every n-th has the fault.
            first: The number of the first one, counted from 1.
            count: The number of faults.
            **selection: Arguments of `is_selected`.
        """
        with self._lock:
            self._rules.append(_Rule(fault, partial(is_selected, **selection), every, first, count))

    def clear(self):
        """Remove all faults; connections that are delayed or are not answered stay so."""
        with self._lock:
            self._rules.clear()

    def reset(self):
        """Remove all faults and counted requests, and close all connections; addresses stay."""
        self.clear()
        asyncio.run_coroutine_threadsafe(self._end_connections(), self._loop).result()
        self.forget()

    @contextmanager
    def faults(self, fault, **options):
        """Inject a fault in a `with` block."""
        self.inject(fault, **options)
        try:
            yield
        finally:
            self.clear()

    def forget(self):
        """Remove the requests that were counted."""
        with self._lock:
            self.requests.clear()

    def select(self, **selection):
        """Return the requests that have arrived; arguments are those of `is_selected`."""
        with self._lock:
            return [each for each in self.requests if is_selected(each, **selection)]

    def count_faults(self):
        """Return the number of requests that have had a fault."""
        with self._lock:
            return sum(bool(request.faults) for request in self.requests)

    def bytes_read(self, client=None, key=""):
        """Return the bytes of objects that a client has received."""
        return sum(each.received for each in self.select(client=client, method="GET", key=key) if each.key)

    def bytes_written(self, client=None, key=""):
        """Return the bytes of objects that a client has sent."""
        return sum(each.sent for each in self.select(client=client, method="PUT", key=key) if each.key)

    async def _serve(self, client, reader, writer):
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
            while not reader.at_eof():
                head = await _Head.read(reader)
                request = self._register(client, head)
                if not await _Exchange(self, request, head, reader, writer).run():
                    return

    def lock_conditional_put(self, request):
        """Return a context in which no other conditional put is at the server, if it must have one after the other.

        Hooks are called outside of it: one that saves would wait for the put that it is called in.
        """
        needs_lock = request.is_conditional and not self.server.is_atomic
        return self._conditional_put if needs_lock else nullcontext()

    def _register(self, client, head):
        method, target, _ = head.first.split(" ", 2)
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        request = Request(client, method, bucket, key, unquote(query), dict(head.headers))
        with self._lock:
            self.requests.append(request)
            request.faults = tuple(rule.fault for rule in self._rules if rule.applies(request))
        return request


class _Exchange:
    """A request on its way to the server, and the answer on its way back."""

    def __init__(self, proxy, request, head, reader, writer):
        self._proxy, self._server = proxy, proxy.server
        self._request, self._head = request, head
        self._reader, self._writer = reader, writer
        self._rate = min((each.rate for each in request.faults if isinstance(each, Slow)), default=0)

    async def run(self):
        """Return whether the connection of the client can be used again."""
        if any(isinstance(each, BlackHole) for each in self._request.faults):
            await self._copy_request(None)
            await asyncio.Event().wait()
        await self._call_hooks("before")
        if self._has_reset("before"):
            return False
        for fault in self._request.faults:
            if isinstance(fault, Answer):
                await self._copy_request(None)
                await self._send_error(fault)
                return True
        host, port = self._server.address.removeprefix("http://").split(":")
        source, sink = await asyncio.open_connection(host, int(port), limit=_PIECE_BYTES)
        try:
            async with self._proxy.lock_conditional_put(self._request):
                sink.write(self._head.to_bytes({"connection", "expect"}, connection="close"))
                if not await self._copy_request(sink):
                    return False
                answer = await self._read_answer(source)
            return await self._copy_answer(answer, source)
        finally:
            sink.transport.abort()

    @staticmethod
    async def _read_answer(source):
        head = await _Head.read(source)
        while head.first.split()[1] == "100":
            head = await _Head.read(source)
        return head

    async def _copy_request(self, sink):
        """Copy the body of the request; return whether it is whole."""
        if self._head.get("expect"):
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        size = int(self._head.get("content-length", "0"))
        cut = size // 2 if self._has_reset("upload") else None

        def count(number):
            self._request.sent += number

        if self._head.get("transfer-encoding") == "chunked":
            return await _copy_chunks(self._reader, sink, count)
        return await self._copy(self._reader, sink, size, count, cut)

    async def _copy_answer(self, head, source):
        status = int(head.first.split()[1])
        await self._call_hooks("after")
        if self._has_reset("after"):
            await source.read()  # the server has done its work when its answer has ended
            return False
        self._request.status = status
        if self._server.removes_quotes:
            unquoted = [(name, value.strip('"') if name == "etag" else value) for name, value in head.headers]
            head = _Head(head.first, unquoted)

        def count(number):
            self._request.received += number

        has_body = self._request.method != "HEAD" and status not in {204, 304}
        size, cut = head.get("content-length"), None
        self._writer.write(head.to_bytes({"connection", "keep-alive"}))
        if not has_body:
            return True
        if head.get("transfer-encoding") == "chunked":
            return await _copy_chunks(source, self._writer, count)
        if not size:  # the answer ends with the connection
            await self._copy(source, self._writer, None, count)
            self._writer.close()
            await self._writer.wait_closed()
            return False
        if self._has_reset("download"):
            cut = int(size) // 2
        return await self._copy(source, self._writer, int(size), count, cut)

    async def _copy(self, source, sink, size, count, cut=None):
        """Copy a number of bytes, or all; return whether all were copied, and not only those before the cut."""
        copied, limit, start = 0, size if cut is None else cut, time.monotonic()
        while limit is None or copied < limit:
            wanted = _PIECE_BYTES if limit is None else min(_PIECE_BYTES, limit - copied)
            if self._rate:
                wanted = min(wanted, max(1, int(self._rate / 20)))
            piece = await source.read(wanted)
            if not piece:
                if limit is None:
                    return True
                raise ConnectionResetError
            copied += len(piece)
            count(len(piece))
            if sink is not None:
                sink.write(piece)
                await sink.drain()
            if self._rate:
                await asyncio.sleep(max(0, copied / self._rate - (time.monotonic() - start)))
        return cut is None

    def _has_reset(self, when):
        return Reset(when) in self._request.faults

    async def _call_hooks(self, when):
        for fault in self._request.faults:
            if isinstance(fault, Hook) and fault.when == when:
                await asyncio.to_thread(fault.function, self._request)

    async def _send_error(self, fault):
        """Send the answer of AWS: it repeats the access key and the token of the request."""
        self._request.status = fault.status
        access_key = _AUTHORIZATION.search(self._head.get("authorization"))
        details = f"<AWSAccessKeyId>{access_key[1]}</AWSAccessKeyId>" if access_key else ""
        if token := self._head.get("x-amz-security-token"):
            details += f"<Token-0>{token}</Token-0>"
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{fault.code}</Code><Message>{fault.message}</Message>'
            f"{details}<RequestId>0123456789ABCDEF</RequestId></Error>"
        )
        body = "" if self._request.method == "HEAD" else body
        self._request.received += len(body)
        lines = (f"HTTP/1.1 {fault.status} {fault.code}", "content-type: application/xml")
        length = f"content-length: {len(body)}"
        self._writer.write("\r\n".join([*lines, length, "", body]).encode())
        await self._writer.drain()


def _reset(writer):
    """Close a connection, if it is open, so that the other end gets an error instead of the end of the stream."""
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()


async def _copy_chunks(source, sink, count):
    """Copy a body in chunks, as they are."""
    while True:
        line = await source.readline()
        size = int(line.split(b";")[0], 16)
        data = await source.readexactly(size + 2) if size else b""
        count(size)
        if sink is not None:
            sink.write(line + data)
            await sink.drain()
        if not size:
            break
    while (line := await source.readline()) not in {b"\r\n", b""}:
        if sink is not None:
            sink.write(line)
    if sink is not None:
        sink.write(b"\r\n")
        await sink.drain()
    return True
