"""How bytes get from rank to rank on one machine: a Unix socket between every two, without a thread in between."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shutil
import socket
import stat
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
from accel_runtime.env import TRUST_NETWORK, read_switch
from accel_runtime.exchange.agreement import SLOT, Wire
from accel_runtime.exchange.raw import memory

__all__ = ["SocketWire", "connected"]

_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")
"""The process, user and group that Linux names for SO_PEERCRED, see unix(7)."""
_LONGEST_FOLDER = 90
"""Bytes of a folder's path: the path of a Unix socket has 104 on macOS and 108 on Linux, a rank's number included."""
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
    """Connect a socket to every other rank of a group whose ranks share a machine.

    All ranks call this together, and all get sockets or none does. They meet in a folder that only this user may enter.
    Every other user of the machine can write into the store, so each rank checks the owner of the folder and of the
    process behind every connection: the ranks exchange pickled objects, which run code when they are loaded.

    Args:
        group: A gloo group, also one that `torch.distributed` does not know.
        store: Of this group alone.
        timeout: How long to wait for the others.

    Returns:
        The sockets by rank; None where they cannot be connected and `ACCEL_TRUST_NETWORK=1` allows TCP.

    Raises:
        RuntimeError: They cannot be connected. Raised on every rank.
    """
    folder, problem = None, ""
    if group.rank() == 0:
        try:
            folder = _make_folder()
        except OSError as error:
            problem = str(error)
        store.set("sockets", os.fsencode(folder) if folder else b"")
    place = Path(os.fsdecode(store.get("sockets") or b"(rank 0 can make no folder)"))
    peers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            problem = problem or _attempt(lambda: _listen(listener, place, group.rank()))
            if _all(group, done=not problem):
                problem = _attempt(lambda: _connect(group, listener, place, peers, deadline))
                if _all(group, done=not problem):
                    return peers
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    for peer in peers.values():
        peer.close()
    if read_switch(TRUST_NETWORK, os.environ.get(TRUST_NETWORK, "")):
        return None
    raise RuntimeError(
        f"cannot connect the processes of this machine: {problem or 'another process could not, and says why'}. Set "
        f"TMPDIR to a folder that all of them can write, or {TRUST_NETWORK}=1 to exchange objects over TCP, which other "
        "users of this machine could redirect."
    )


def _make_folder() -> Path:
    """Make a folder that only this user may enter, with a path short enough for sockets in it.

    Raises:
        OSError: There is no such place.
    """
    problem: OSError | None = None
    for parent in (None, "/tmp"):  # noqa: S108 - mkdtemp makes a private folder in it
        folder = Path(tempfile.mkdtemp(prefix="accel-", dir=parent))
        try:
            _check_folder(folder)
        except OSError as error:
            problem = error
            folder.rmdir()
        else:
            return folder
    assert problem
    raise problem


def _check_folder(folder: Path) -> None:
    """Raise unless only this user may enter a folder, and its path is short enough.

    Raises:
        OSError: It is no folder, belongs to another user, others may enter it, or its path is too long.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM, f"not a folder of user {os.geteuid()} that no other user may enter", str(folder)
        )
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise OSError(errno.ENAMETOOLONG, "too long for Unix sockets", str(folder))


def _listen(listener: socket.socket, folder: Path, rank: int) -> None:
    _check_folder(folder)
    listener.bind(str(folder / str(rank)))
    listener.listen(_BACKLOG)


def _connect(
    group: Any, listener: socket.socket, folder: Path, peers: dict[int, socket.socket], deadline: float
) -> None:
    """Connect to the ranks before this one, and accept connections of those after it."""
    rank, size = group.rank(), group.size()
    for other in range(rank):
        peers[other] = socket.socket(socket.AF_UNIX)
        peers[other].connect(str(folder / str(other)))
        _check_peer(peers[other])
        peers[other].sendall(_RANK.pack(rank), _QUIET)
    while len(peers) < size - 1:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        peer, _address = listener.accept()
        _check_peer(peer)
        peer.settimeout(max(deadline - time.monotonic(), 0.001))
        said = memoryview(bytearray(_RANK.size))
        _receive(peer, said)
        peers[_RANK.unpack(said)[0]] = peer


def _check_peer(peer: socket.socket) -> None:
    """Raise if the process behind a connection belongs to another user, where the system tells.

    Raises:
        OSError: It does.
    """
    if hasattr(socket, "SO_PEERCRED"):
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if (user := _CREDENTIALS.unpack(raw)[1]) != os.geteuid():
            raise PermissionError(errno.EPERM, f"a process of user {user} answers for a rank")


def _attempt(step: Callable[[], None]) -> str:
    """Run a step, and return why it failed; empty if it did not."""
    try:
        step()
    except OSError as error:
        return str(error)
    return ""


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
