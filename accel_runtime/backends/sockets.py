"""How bytes get from rank to rank on one machine: a Unix socket between every two, without a thread in between."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from accel_runtime.backends.dissemination import in_rank_order, rounds
from accel_runtime.backends.news import News
from accel_runtime.exchange.agreement import SLOT, Wire
from accel_runtime.exchange.raw import memory

__all__ = ["SocketWire", "connected"]

_RANK = struct.Struct("<q")
_FITS = 32 * 1024
"""Bytes that a socket takes at once whoever reads at the other end: half of the smallest buffer in use."""
_BACKLOG = 4096
_LOOKS = 50
"""How often to look for an answer before one sleeps: waking a sleeping process takes longer than most exchanges."""
_QUIET = getattr(socket, "MSG_NOSIGNAL", 0)

Room = memoryview


class SocketWire(Wire):
    """Exchanges of bytes over sockets that block in the caller: a tenth of the time of gloo's.

    Args:
        peers: A connected socket to every other rank.
        rank: Of this process.
        news: What is left for the others when one is lost.
        timeout: How long to wait for the others.
    """

    def __init__(self, peers: Mapping[int, socket.socket], rank: int, news: News, timeout: timedelta) -> None:
        self._peers, self._rank, self._size, self._news = dict(peers), rank, len(peers) + 1, news
        self._timeout = timeout.total_seconds()
        for peer in self._peers.values():
            peer.settimeout(self._timeout)
        # Whoever looks keeps a core busy, which the others need if there are not enough.
        self._looks = _LOOKS if self._size <= len(os.sched_getaffinity(0)) else 0
        # Row i holds the slot of the i-th rank after this one.
        self._bytes = memoryview(bytearray(self._size * SLOT))
        self._rounds = [
            (
                self._peers[to],
                self._bytes[: count * SLOT],
                self._peers[source],
                self._bytes[have * SLOT : (have + count) * SLOT],
            )
            for to, source, have, count in rounds(rank, self._size)
        ]
        _forget_in_children(self)

    @override
    def swap(self, slot: memoryview, where: Callable[[], str]) -> bytearray:
        self._news.check()
        self._bytes[:SLOT] = slot
        try:
            for to, sent, source, room in self._rounds:
                if len(sent) > _FITS:
                    self._pump({to: sent}, {source: room})
                else:
                    to.sendall(sent, _QUIET)
                    _receive(source, room, self._looks)
        except OSError as error:
            raise self._lost(error, where()) from error
        except BaseException:
            # Half of a message is on its way: what comes next would be taken for the rest of it.
            self._close()
            raise
        return in_rank_order(self._bytes, self._rank)

    @override
    def transfer(
        self,
        outgoing: Mapping[int, torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        where: Callable[[], str],
    ) -> None:
        self._news.check()
        try:
            self._pump(
                {self._peers[rank]: memory(data) for rank, data in outgoing.items() if len(data)},
                {self._peers[rank]: memory(room) for rank, room in incoming.items() if len(room)},
            )
        except OSError as error:
            raise self._lost(error, where()) from error
        except BaseException:
            self._close()
            raise

    def _pump(self, outgoing: Mapping[socket.socket, Room], incoming: Mapping[socket.socket, Room]) -> None:
        """Send and receive at once, as each socket is ready: two that only send would wait for each other."""
        out, in_ = dict(outgoing), dict(incoming)
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as ready:
            for one in out.keys() | in_.keys():
                ready.register(one, _wanted(one, out, in_))
            while out or in_:
                found = ready.select(deadline - time.monotonic())
                if not found:
                    raise TimeoutError("timed out")
                for key, events in found:
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    if events & selectors.EVENT_WRITE:
                        _advance(out, peer, peer.send(out[peer], _QUIET))
                    if events & selectors.EVENT_READ:
                        _advance(in_, peer, _some(peer.recv_into(in_[peer])))
                    if wanted := _wanted(peer, out, in_):
                        ready.modify(peer, wanted)
                    else:
                        ready.unregister(peer)

    def _lost(self, error: OSError, where: str) -> Exception:
        return self._news.lost(where, self._close, timed_out=isinstance(error, TimeoutError))

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def connected(group: Any, store: Any, timeout: timedelta) -> dict[int, socket.socket] | None:
    """A socket to every other rank of a group whose ranks share a machine; None if one cannot be reached so.

    All ranks call this together, and all get sockets or none does. They meet in a folder that nobody else may
    enter, so no other user of the machine can take the place of a rank.

    Args:
        group: A gloo group, also one that `torch.distributed` does not know.
        store: Of this group alone.
        timeout: How long to wait for the others.
    """
    rank = group.rank()
    folder = None
    if rank == 0:
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="accel-")
        store.set("sockets", folder or "")
    place = store.get("sockets").decode()
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            peers = _meet(group, listener, Path(place), timeout) if place else None
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    return peers


def _meet(
    group: Any, listener: socket.socket, place: Path, timeout: timedelta
) -> dict[int, socket.socket] | None:
    listens = _done(lambda: _listen(listener, place / str(group.rank()), timeout))
    if not _all(group, done=listens):
        return None
    peers: dict[int, socket.socket] = {}
    met = _done(lambda: _connect(group, listener, place, peers))
    if _all(group, done=met):
        return peers
    for peer in peers.values():
        peer.close()
    return None


def _listen(listener: socket.socket, path: Path, timeout: timedelta) -> None:
    listener.settimeout(timeout.total_seconds())
    listener.bind(str(path))
    listener.listen(_BACKLOG)


def _connect(group: Any, listener: socket.socket, place: Path, peers: dict[int, socket.socket]) -> None:
    """Call those before this rank, and hear those after it."""
    rank, size = group.rank(), group.size()
    for other in range(rank):
        peers[other] = socket.socket(socket.AF_UNIX)
        peers[other].connect(str(place / str(other)))
        peers[other].sendall(_RANK.pack(rank), _QUIET)
    for _ in range(rank + 1, size):
        peer, _address = listener.accept()
        peer.settimeout(listener.gettimeout())
        said = memoryview(bytearray(_RANK.size))
        _receive(peer, said)
        peers[_RANK.unpack(said)[0]] = peer


def _done(step: Callable[[], None]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def _all(group: Any, *, done: bool) -> bool:
    votes = torch.tensor([int(done)], device="cpu")
    group.allreduce([votes], dist.ReduceOp.MIN).wait()
    return bool(votes.item())


def _receive(source: socket.socket, room: Room, looks: int = 0) -> None:
    got = _soon(source, room, looks)
    while got < len(room):
        got += _some(source.recv_into(room[got:]))


def _soon(source: socket.socket, room: Room, looks: int) -> int:
    """How many bytes came while one looked; a socket with a timeout never blocks when it is read as a file."""
    for _ in range(looks):
        with contextlib.suppress(BlockingIOError):
            return _some(os.readv(source.fileno(), [room]))
        os.sched_yield()
    return 0


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError("closed by the other rank")
    return count


def _advance(rooms: dict[socket.socket, Room], peer: socket.socket, count: int) -> None:
    rest = rooms[peer][count:]
    if len(rest):
        rooms[peer] = rest
    else:
        del rooms[peer]


def _wanted(peer: socket.socket, out: Mapping[socket.socket, Room], in_: Mapping[socket.socket, Room]) -> int:
    return (selectors.EVENT_WRITE if peer in out else 0) | (selectors.EVENT_READ if peer in in_ else 0)


def _forget_in_children(wire: SocketWire) -> None:
    """A data-loader worker must not hold the connections of a rank that has died."""
    known = weakref.ref(wire)

    def forget() -> None:
        if (here := known()) is not None:
            here._close()  # noqa: SLF001 - it is the wire's own

    os.register_at_fork(after_in_child=forget)
