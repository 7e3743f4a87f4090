"""Exchange bytes between ranks in log2(n) rounds, over Unix sockets or gloo."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import shutil
import socket
import stat
import struct
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from accel_runtime.environment.cgroup import count_cpus
from accel_runtime.environment.settings import TRUST_NETWORK, read_switch
from accel_runtime.environment.text import decode_text, encode_text
from accel_runtime.environment.topology import build_refusal
from accel_runtime.foundation.tensor_bytes import tensor_bytes

__all__ = [
    "SLOT",
    "ConnectionLostError",
    "GlooTransport",
    "SocketTransport",
    "Transport",
    "connect_group",
    "connect_sockets",
    "connect_transport",
]


T = TypeVar("T")
SUMMARY_VALUES = 8
"""Integers in the summary of a handshake: four values of a rank and their negatives."""
SLOT = 4096
"""Bytes that every rank sends in a handshake; docs/design/handshake.md has the measurements."""
WATCH_INTERVAL_S = 2.0
"""Longest time in seconds for which a rank waits for another before it calls the function of `call_during_waits`."""
_PATIENCE_S = 2.0
"""Seconds to wait for the reports of other ranks after the connection is lost."""


class Transport(ABC):
    """Move bytes on the CPU between ranks.

    After an exchange has raised an error, this rank is out of step with the others, and `fail` must be called.
    """

    _on_wait: Callable[[], None] | None = None

    def call_during_waits(self, function: Callable[[], None]) -> None:
        """Call a function repeatedly during a long wait for other ranks; an error that it raises ends the exchange.

        Only sockets call it: a wait in gloo that times out closes the connection.
        """
        self._on_wait = function

    @abstractmethod
    def all_gather_slots(self, slot: memoryview) -> bytearray:
        """Return the slots of all ranks.

        Args:
            slot: `SLOT` bytes.

        Returns:
            `world_size * SLOT` bytes by rank, in new memory.
        """

    @abstractmethod
    def all_reduce_min(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the elementwise minimum over all ranks of `SUMMARY_VALUES` integers of 64 bits.

        It may count a rank twice, so each round sends to one rank and receives from one.
        """

    @abstractmethod
    def transfer(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send bytes to some ranks and receive from some, with sizes that all of them know.

        Args:
            outgoing: The bytes for each rank, `[n]`, contiguous.
            incoming: A buffer for the bytes of each rank, `[n]`, contiguous.
        """

    def fail(self, error: BaseException, doing: str) -> BaseException:  # noqa: ARG002 - one rank has no connection
        """Disconnect after an exchange raised `error`, and return the error to raise.

        That is ConnectionLostError if a rank did not join in time or ended, and `error` if something else interrupted the
        exchange. `doing` is reported to the other ranks.
        """
        return error


class ConnectionLostError(RuntimeError):
    """A transport lost the other ranks; `waiting` has what each rank waits for, of those that reported it."""

    def __init__(self, waiting: Mapping[int, str], *, timed_out: bool) -> None:
        super().__init__("the other ranks cannot be reached any more")
        self.waiting = waiting
        self.timed_out = timed_out


class _PeerTransport(Transport):
    """Transport that reports through a store what each rank was doing when it lost the others.

    Args:
        store: A store for this transport alone.
        rank: The rank of this process.
        size: The number of ranks.
        timeout: How long to wait for other ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._failure: RuntimeError | None = None
        """Raised by every exchange from now on."""
        # The connections and the store belong to the rank.
        _call_after_fork(self, _PeerTransport._refuse)

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connections, so that other ranks notice."""

    def _check(self) -> None:
        if self._failure:
            raise self._failure

    def _refuse(self) -> None:
        self._failure = build_refusal(f"this process was forked from rank {self._rank}")

    @override
    def fail(self, error: BaseException, doing: str) -> BaseException:
        if self._failure is not None:
            return self._failure
        if not isinstance(error, (OSError, RuntimeError)):
            # Half of a message was sent: the next one would be taken for the rest of it.
            self._disconnect()
            return error
        own = ("T" if "timed out" in str(error).lower() else "L") + doing
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._rank}", encode_text(own))
        with contextlib.suppress(RuntimeError, OSError):
            self._disconnect()
        texts = {self._rank: own}
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(RuntimeError):
            while len(texts) < self._size and time.monotonic() < deadline:
                for rank in range(self._size):
                    if rank not in texts and self._store.check([f"{rank}"]):
                        texts[rank] = decode_text(self._store.get(f"{rank}"))
                time.sleep(0.05)
        timed_out = any(text[0] == "T" for text in texts.values())
        waiting = {rank: text[1:] for rank, text in texts.items()}
        self._failure = ConnectionLostError(waiting, timed_out=timed_out)
        return self._failure


def _call_after_fork(owner: T, function: Callable[[T], None]) -> None:
    """Call a function of an object in forked processes, which must not keep the object alive."""
    reference = weakref.ref(owner)

    def call() -> None:
        if (inherited := reference()) is not None:
            function(inherited)

    os.register_at_fork(after_in_child=call)


class AllGatherRound(NamedTuple):
    """One round; row i is the slot of the i-th rank after this one, and all rows received so far are sent."""

    to: int
    """The rank that receives the first `rows` rows."""
    source: int
    """The rank that sends the rows from `have` on."""
    have: int
    """The number of rows that this rank has before the round."""
    rows: int
    """The number of rows sent each way."""


def allgather_schedule(rank: int, size: int) -> list[AllGatherRound]:
    """Return rounds in which each rank sends all it has and so doubles it."""
    rounds, have = [], 1
    while have < size:
        count = min(have, size - have)
        rounds.append(AllGatherRound((rank - have) % size, (rank + have) % size, have, count))
        have += count
    return rounds


def to_rank_order(rows: memoryview, rank: int) -> bytearray:
    """Return the slots of all ranks by rank, given rows that start with the one of `rank`."""
    first = len(rows) - rank * SLOT
    return bytearray().join((rows[first:], rows[:first]))


_SUMMARY = struct.Struct(f"={SUMMARY_VALUES}q")
_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of SO_PEERCRED on Linux, see unix(7)."""
_MAX_DIRECTORY_PATH = 90
"""Longest directory path in bytes: a Unix socket path has 104 bytes on macOS and 108 on Linux, with the rank's number."""
_SOCKET_BUFFER = 32 * 1024
"""Bytes that a socket accepts without a reader: half of the smallest buffer in use."""
_BACKLOG = 4096
_POLLS = 50
"""Number of polls before sleeping, since waking a process takes longer than most exchanges."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class SocketTransport(_PeerTransport):
    """Exchange bytes over sockets that block in the caller, in a tenth of gloo's time.

    Args:
        peers: A connected socket to every other rank.
        rank: The rank of this process.
        store: A store for this transport alone.
        timeout: How long to wait for other ranks.
    """

    def __init__(self, peers: Mapping[int, socket.socket], rank: int, store: Any, timeout: timedelta) -> None:
        super().__init__(store, rank, len(peers) + 1, timeout)
        self._peers = dict(peers)
        seconds = timeout.total_seconds()
        self._max_waits = max(1, math.ceil(seconds / WATCH_INTERVAL_S))
        """Number of waits of equal length after which an exchange times out."""
        self._wait_s = seconds / self._max_waits
        self._waits = 0
        """Number of waits of this exchange that have ended without a message."""
        for peer in self._peers.values():
            peer.settimeout(self._wait_s)
        # Polling keeps a core busy, which other ranks need if there are fewer cores than ranks.
        self._polls = _POLLS if self._size <= count_cpus() else 0
        # Row i holds the slot of the i-th rank after this one.
        self._bytes = memoryview(bytearray(self._size * SLOT))
        self._rounds = [
            (
                self._peers[to],
                self._bytes[: count * SLOT],
                self._peers[source],
                self._bytes[have * SLOT : (have + count) * SLOT],
            )
            for to, source, have, count in allgather_schedule(rank, self._size)
        ]
        # A data loader worker must not keep the connections of a dead rank open.
        _call_after_fork(self, SocketTransport._disconnect)

    def _begin(self) -> None:
        self._check()
        self._waits = 0

    def _wait_longer(self) -> None:
        """Raise TimeoutError after the timeout of an exchange; call the function of `call_during_waits` before it."""
        self._waits += 1
        if self._waits >= self._max_waits:
            raise TimeoutError("timed out")
        if self._on_wait is not None:
            self._on_wait()

    @override
    def all_reduce_min(self, values: Sequence[int]) -> tuple[int, ...]:
        self._begin()
        lowest, received = tuple(values), memoryview(bytearray(_SUMMARY.size))
        for to, _, source, _ in self._rounds:
            to.sendall(_SUMMARY.pack(*lowest), _NO_SIGNAL)
            _receive(source, received, self._polls, self._wait_longer)
            lowest = tuple(map(min, lowest, _SUMMARY.unpack(received)))
        return lowest

    @override
    def all_gather_slots(self, slot: memoryview) -> bytearray:
        self._begin()
        self._bytes[:SLOT] = slot
        for to, sent, source, buffer in self._rounds:
            if len(sent) > _SOCKET_BUFFER:
                self._pump({to: sent}, {source: buffer})
            else:
                to.sendall(sent, _NO_SIGNAL)
                _receive(source, buffer, self._polls, self._wait_longer)
        return to_rank_order(self._bytes, self._rank)

    @override
    def transfer(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        self._begin()
        self._pump(
            {self._peers[rank]: tensor_bytes(data) for rank, data in outgoing.items() if len(data)},
            {self._peers[rank]: tensor_bytes(buffer) for rank, buffer in incoming.items() if len(buffer)},
        )

    def _pump(
        self, outgoing: Mapping[socket.socket, memoryview], incoming: Mapping[socket.socket, memoryview]
    ) -> None:
        """Send and receive as each socket is ready: two ranks that only send would wait for each other."""
        outputs, inputs = dict(outgoing), dict(incoming)
        with selectors.DefaultSelector() as ready:
            for one in outputs.keys() | inputs.keys():
                ready.register(one, _ready_events(one, outputs, inputs))
            while outputs or inputs:
                selected = ready.select(self._wait_s)
                if not selected:
                    self._wait_longer()
                for key, events in selected:
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    if events & selectors.EVENT_WRITE:
                        _drop_sent(outputs, peer, peer.send(outputs[peer], _NO_SIGNAL))
                    if events & selectors.EVENT_READ:
                        _drop_sent(inputs, peer, _check_open(peer.recv_into(inputs[peer])))
                    if wanted := _ready_events(peer, outputs, inputs):
                        ready.modify(peer, wanted)
                    else:
                        ready.unregister(peer)

    @override
    def _disconnect(self) -> None:
        for peer in self._peers.values():
            peer.close()


def connect_sockets(group: Any, store: Any, timeout: timedelta) -> dict[int, socket.socket] | None:
    """Connect a socket to every other rank of a group on one node; collective, and it fails on all ranks or none.

    The sockets are in a directory that only this user may enter. Every other user of the machine can write into the store,
    so each rank checks the owner of the directory and of the process behind every connection: the ranks exchange pickled
    objects, which run code when they are loaded.

    Returns None if connecting fails and `ACCEL_TRUST_NETWORK=1` allows TCP.
    """
    directory, problem = None, ""
    if group.rank() == 0:
        try:
            directory = _make_directory()
        except OSError as error:
            problem = str(error)
        store.set("sockets", os.fsencode(directory) if directory else b"")
    path = Path(os.fsdecode(store.get("sockets") or b"(rank 0 cannot make a directory)"))
    peers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            problem = problem or _try_step(lambda: _listen(listener, path, group.rank()))
            if _all_ranks(group, done=not problem):
                problem = _try_step(lambda: _connect(group, listener, path, peers, deadline))
                if _all_ranks(group, done=not problem):
                    return peers
    finally:
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
    for peer in peers.values():
        peer.close()
    if read_switch(TRUST_NETWORK, os.environ.get(TRUST_NETWORK, "")):
        return None
    raise RuntimeError(
        f"Cannot connect the processes of this machine: {problem or 'see the error of another process'}. Set "
        f"TMPDIR to a directory that all of them can write, or {TRUST_NETWORK}=1 to exchange objects over TCP, which other "
        "users of this machine could redirect."
    )


def _make_directory() -> Path:
    """Create a directory that only this user may enter, with a path short enough for sockets in it."""
    problem: OSError | None = None
    for parent in (None, "/tmp"):  # noqa: S108 - mkdtemp makes a private folder in it
        directory = Path(tempfile.mkdtemp(prefix="accel-", dir=parent))
        try:
            _check_directory(directory)
        except OSError as error:
            problem = error
            directory.rmdir()
        else:
            return directory
    assert problem
    raise problem


def _check_directory(directory: Path) -> None:
    """Raise OSError unless only this user may enter a directory and its path is short enough."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM,
            f"not a directory of user {os.geteuid()} that only this user may enter",
            str(directory),
        )
    if len(os.fsencode(directory)) > _MAX_DIRECTORY_PATH:
        raise OSError(errno.ENAMETOOLONG, "too long for Unix sockets", str(directory))


def _listen(listener: socket.socket, directory: Path, rank: int) -> None:
    _check_directory(directory)
    listener.bind(str(directory / str(rank)))
    listener.listen(_BACKLOG)


def _connect(
    group: Any, listener: socket.socket, directory: Path, peers: dict[int, socket.socket], deadline: float
) -> None:
    """Connect to the ranks before this one and accept connections from those after it."""
    rank, size = group.rank(), group.size()
    for other in range(rank):
        peers[other] = socket.socket(socket.AF_UNIX)
        peers[other].connect(str(directory / str(other)))
        _check_peer(peers[other])
        peers[other].sendall(_RANK.pack(rank), _NO_SIGNAL)
    while len(peers) < size - 1:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        peer, _address = listener.accept()
        _check_peer(peer)
        peer.settimeout(max(deadline - time.monotonic(), 0.001))
        message = memoryview(bytearray(_RANK.size))
        _receive(peer, message)
        peers[_RANK.unpack(message)[0]] = peer


def _check_peer(peer: socket.socket) -> None:
    """Raise OSError if the process behind a connection belongs to another user, where the system reports it."""
    if hasattr(socket, "SO_PEERCRED"):
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if (user := _CREDENTIALS.unpack(raw)[1]) != os.geteuid():
            raise PermissionError(errno.EPERM, f"the process of a rank belongs to user {user}")


def _try_step(step: Callable[[], None]) -> str:
    """Run a step and return the text of its OSError, or an empty string."""
    try:
        step()
    except OSError as error:
        return str(error)
    return ""


def _all_ranks(group: Any, *, done: bool) -> bool:
    votes = torch.tensor([int(done)], device="cpu")
    group.allreduce([votes], dist.ReduceOp.MIN).wait()
    return bool(votes.item())


def _receive(
    source: socket.socket,
    buffer: memoryview,
    polls: int = 0,
    wait_longer: Callable[[], None] | None = None,
) -> None:
    """Fill a buffer; call `wait_longer` after each timeout of the socket, which raises an error to end the wait."""
    count = 0
    for _ in range(polls):
        # A socket with a timeout never blocks when it is read as a file.
        with contextlib.suppress(BlockingIOError):
            count = _check_open(os.readv(source.fileno(), [buffer]))
            break
        os.sched_yield()
    while count < len(buffer):
        try:
            count += _check_open(source.recv_into(buffer[count:]))
        except TimeoutError:
            if wait_longer is None:
                raise
            wait_longer()


def _check_open(count: int) -> int:
    if not count:
        raise ConnectionResetError("closed by the other rank")
    return count


def _drop_sent(buffers: dict[socket.socket, memoryview], peer: socket.socket, count: int) -> None:
    rest = buffers[peer][count:]
    if len(rest):
        buffers[peer] = rest
    else:
        del buffers[peer]


def _ready_events(
    peer: socket.socket, out: Mapping[socket.socket, memoryview], in_: Mapping[socket.socket, memoryview]
) -> int:
    return (selectors.EVENT_WRITE if peer in out else 0) | (selectors.EVENT_READ if peer in in_ else 0)


_SLOTS, _LARGE, _SUMMARIES = 1, 2, 3


@lru_cache(maxsize=2)
def connect_group(
    world: dist.ProcessGroup,  # noqa: ARG001 - the key, with the purpose
    purpose: str,  # noqa: ARG001
    timeout: timedelta,
    *,
    one_machine: bool,
) -> tuple[dist.ProcessGroup, Transport]:
    """Make a gloo group of all ranks for one purpose, and connect them, once per default group; collective."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    return group, connect_transport(group, group.get_group_store(), timeout, one_machine=one_machine)


def connect_transport(group: Any, store: Any, timeout: timedelta, *, one_machine: bool) -> Transport:
    """Connect the ranks of a gloo group that is used for nothing else; collective."""
    peers = connect_sockets(group, store, timeout) if one_machine else None
    if peers is None:
        return GlooTransport(group, store, timeout)
    return SocketTransport(peers, group.rank(), store, timeout)


class GlooTransport(_PeerTransport):
    """Exchange bytes by gloo's send and receive, into buffers of known size.

    gloo's `all_gather` passes every call to its own thread and back; send and receive do not, which is two to four times
    faster.

    Args:
        group: A gloo group that is used for nothing else.
        store: A store for this group alone.
        timeout: How long to wait for other ranks.
    """

    def __init__(self, group: Any, store: Any, timeout: timedelta) -> None:
        super().__init__(store, group.rank(), group.size(), timeout)
        self._group = group
        # Row i holds the slot of the i-th rank after this one.
        memory_ = bytearray(self._size * SLOT)
        self._bytes = memoryview(memory_)
        self._rows = torch.frombuffer(memory_, dtype=torch.uint8).view(self._size, SLOT)
        self._rounds = [
            ([self._rows[:count]], to, [self._rows[have : have + count]], source)
            for to, source, have, count in allgather_schedule(self._rank, self._size)
        ]

    @override
    def all_reduce_min(self, values: Sequence[int]) -> tuple[int, ...]:
        self._check()
        lowest = torch.tensor(values, dtype=torch.int64, device="cpu")
        received = torch.empty_like(lowest)
        for _, to, _, source in self._rounds:
            self._swap([lowest], to, [received], source, _SUMMARIES)
            lowest = torch.minimum(lowest, received)
        return tuple(lowest.tolist())

    @override
    def all_gather_slots(self, slot: memoryview) -> bytearray:
        self._check()
        self._bytes[:SLOT] = slot
        for sent, to, buffer, source in self._rounds:
            self._swap(sent, to, buffer, source, _SLOTS)
        return to_rank_order(self._bytes, self._rank)

    def _swap(
        self, sent: list[torch.Tensor], to: int, buffer: list[torch.Tensor], source: int, tag: int
    ) -> None:
        arrival = self._group.recv(buffer, source, tag)
        departure = self._group.send(sent, to, tag)
        arrival.wait(self._timeout)
        departure.wait(self._timeout)

    @override
    def transfer(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        self._check()
        works = [self._group.recv([buffer], rank, _LARGE) for rank, buffer in incoming.items() if len(buffer)]
        works += [self._group.send([data], rank, _LARGE) for rank, data in outgoing.items() if len(data)]
        for work in works:
            work.wait(self._timeout)

    @override
    def _disconnect(self) -> None:
        self._group.abort()
