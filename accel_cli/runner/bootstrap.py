"""How machines come together before torch's rendezvous: the store they share, and what each says of itself."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import threading
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistError

from accel_cli.errors import AccelError, UsageError
from accel_cli.planning.network import Endpoint, loopback_address
from accel_cli.runner import rendezvous
from accel_cli.runner.run_dir import HOST_KEY

__all__ = ["BootstrapStore", "NodeInfo", "open_listener", "serve_store"]

_STORE_S = 60
"""Seconds a value may be waited for that another machine is about to set."""
_NAME_S = 10
"""Seconds a name that was typed may take to resolve."""
_ANSWER_S = 15
"""Seconds a store that listens may take to answer."""
_TICK_S = 1.0
_DEPARTURE_S = 1.0
"""Seconds a machine that was told to end waits until the others know."""
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


@dataclass(frozen=True)
class NodeInfo:
    """What a machine says of itself when it comes."""

    host: str
    address: str
    pid: int
    nproc: int
    nnodes: str
    node_rank: int | None
    torch: str
    accel: str
    id: str = ""
    """Its identity: containers may share an address, and have the same process ids."""

    @property
    def name(self) -> str:
        """The machine for a person."""
        return self.host if self.host == self.address else f"{self.host} ({self.address})"

    def text(self) -> str:
        """The card as a value of the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, said: bytes | str) -> NodeInfo:
        """The reverse of `text`; fields of another version are left out, so that the versions can be compared."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in json.loads(said).items() if name in known})


class BootstrapStore:
    """The store that all machines of a run share, and the place of this one in it."""

    def __init__(self, said: dict[str, Any], nproc: int, *, derived: bool) -> None:
        self._said = said
        self._derived = derived
        self.alone = bool(said["local_addr"])
        self.endpoint = Endpoint.parse(said["rdzv_endpoint"])
        self.deadline = time.monotonic() + said["rdzv_timeout"]
        self.wanted: tuple[int, int] = (said["min_nodes"], said["max_nodes"])
        self.store: Store = self._alone() if self.alone else self._with_others()
        low, high = self.wanted
        self.card = NodeInfo(
            host=said.get(HOST_KEY) or socket.gethostname(),
            address=self.address,
            pid=os.getpid(),
            nproc=nproc,
            nnodes=str(high) if low == high else f"{low}:{high}",
            node_rank=said["node_rank"],
            torch=torch.__version__,
            # Reading it takes a while, and nobody else would compare it.
            accel="" if self.alone else version("accel"),
            id=f"{self.address}/{uuid.uuid4().hex}",
        )
        if not self.alone:
            self._come_in()

    @property
    def left(self) -> int:
        """Whole seconds left to wait for the others."""
        return max(1, int(self.deadline - time.monotonic()))

    def again(self) -> None:
        """Begin to wait anew, for the machines of the next round."""
        self.deadline = time.monotonic() + self._said["rdzv_timeout"]

    def key(self, name: str) -> str:
        """A key of this run: several runs may meet in one store."""
        return f"accel/{self._said['run_id']}/{name}"

    def card_of(self, identity: str) -> NodeInfo | None:
        """The card of a machine that has come."""
        key = self.key(f"card/{identity}")
        return NodeInfo.read(self.store.get(key)) if self.store.check([key]) else None

    def _alone(self) -> Store:
        self.address, self.hosts = loopback_address(), True
        return HashStore()

    def _with_others(self) -> TCPStore:
        self._resolve()
        self.address = self.endpoint.local_address()
        # An address that no machine has itself leads to a scheduler's first machine by a translation.
        first = self._said["node_rank"] == 0 and not self._said["static"]
        self.hosts = first or self.endpoint.is_here()
        if self.hosts:
            try:
                opened = open_listener("", self.endpoint.port)
            except OSError:
                # The other launcher of this machine has it, or another program: connecting tells which.
                self.hosts = False
            else:
                return serve_store(opened, "127.0.0.1" if opened.family == socket.AF_INET else "::1")
        return self._connect()

    def _resolve(self) -> None:
        """Wait for the endpoint's name: in a cluster that is starting, names come with the machines."""
        until = self.deadline if self._derived else min(self.deadline, time.monotonic() + _NAME_S)
        with rendezvous.RendezvousProgress(
            lambda: f"the name {self.endpoint.host!r} does not resolve yet; {self.left} s left"
        ):
            while True:
                try:
                    self.endpoint.address()
                except UsageError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.5)
                else:
                    return

    def _connect(self) -> TCPStore:
        self._reason = "not tried yet"
        with rendezvous.RendezvousProgress(self._unanswered):
            while not self._open():
                if time.monotonic() > self.deadline:
                    raise AccelError(
                        f"nobody answered at rdzv_endpoint {self.endpoint} for {self._said['rdzv_timeout']} s "
                        f"({self._reason}). Is `accel launch` running on that machine, and is the port open between them?"
                    )
                time.sleep(0.5)
        store = _client(self.endpoint)
        if not store:
            raise AccelError(
                f"something answers at rdzv_endpoint {self.endpoint} that is no meeting place of torch: "
                "another program has that port, choose another one"
            )
        limit(self.endpoint, self._said["lost_after"])
        return store

    def _open(self) -> bool:
        try:
            with socket.create_connection((self.endpoint.host, self.endpoint.port), timeout=2):
                return True
        except OSError as error:
            self._reason = error.strerror or str(error) or "no answer"
            return False

    def _unanswered(self) -> str:
        low, high = self.wanted
        hint = (
            "; this machine alone reaches it, so give an address all of them reach" * self.endpoint.loopback
        )
        return (
            f"waiting: nobody at the meeting place {self.endpoint} yet ({self._reason}){hint}, {low - 1 or high - 1} "
            f"missing; {self.left} s left"
        )

    def _come_in(self) -> None:
        try:
            self._introduce()
        except DistError:
            raise AccelError(
                f"the meeting place {self.endpoint} answered, but not as that of this run: its launcher has just ended, or "
                f"another run is there, and no machine of {self._said['run_id']!r}. Is `accel launch` running on that machine?"
            ) from None

    def _introduce(self) -> None:
        """Say who this is, once it is clear that this machine and the meeting place can work together."""
        if self.hosts:
            assert isinstance(self.store, TCPStore)
            self.store.set(self.key("reference"), self.card.text())
            stop = threading.Event()
            weakref.finalize(self, stop.set)
            arguments = (self.store.host, self.store.port, self.key("clock"), stop)
            threading.Thread(target=_publish_time, args=arguments, name="clock", daemon=True).start()
        else:
            self._compare(NodeInfo.read(self.store.get(self.key("reference"))))
            self._check_clock()
        self.store.set(self.key(f"card/{self.card.id}"), self.card.text())

    def _compare(self, other: NodeInfo) -> None:
        for what in ("torch", "accel", "nnodes"):
            mine, theirs = getattr(self.card, what), getattr(other, what)
            if mine != theirs:
                verb = "is told" if what == "nnodes" else "has"
                problem = f"{self.card.name} {verb} {what} {mine}, and {other.name} {verb} {what} {theirs}"
                self.store.set(self.key("refused"), problem)
                raise UsageError(
                    f"the machines do not fit together: {problem}. Make them the same on all machines."
                )

    def _check_clock(self) -> None:
        """Torch's rendezvous compares times of several machines: one whose clock is off counts as dead."""
        skew = time.time() - float(self.store.get(self.key("clock")))
        if abs(skew) > max(3.0, self._said["lost_after"] / 2):
            problem = f"the clock of {self.card.host} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the others'"
            self.store.set(self.key("refused"), problem)
            raise UsageError(
                f"{problem}. Machines that meet need the same time: set up NTP (timedatectl, chrony)."
            )

    def depart(self, why: str) -> None:
        """Say that this machine leaves the run, and why; a store that does not answer is not waited for long."""

        def tell() -> None:
            with suppress(DistError, RuntimeError):
                self.store.set(self.key(f"departed/{self.card.id}"), why)

        telling = threading.Thread(target=tell, name="departure", daemon=True)
        telling.start()
        telling.join(_DEPARTURE_S)

    def departure(self, card: NodeInfo) -> str | None:
        """Why a machine has left the run, if it said so."""
        key = self.key(f"departed/{card.id}")
        return self.store.get(key).decode() if self.store.check([key]) else None

    def refused(self) -> str | None:
        """Why a machine that came was not let in."""
        key = self.key("refused")
        return self.store.get(key).decode() if self.store.check([key]) else None


def open_listener(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on an address; none means all of this machine's.

    Raises:
        OSError: The port is taken.
    """
    if not address:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def serve_store(opened: socket.socket, address: str) -> TCPStore:
    """A store on a port that is already ours, so that nobody else can take it in between."""
    port = opened.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_S),
        master_listen_fd=opened.detach(),
    )


def _publish_time(host: str, port: int, key: str, stop: threading.Event) -> None:
    """Keep the time of this machine in the store that it serves, until `stop` is set or the store is gone."""
    with suppress(DistError, RuntimeError):
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        while True:
            store.set(key, str(time.time()))
            if stop.wait(_TICK_S):
                return


def _client(endpoint: Endpoint) -> TCPStore | None:
    """A connection to the store; None where something else answers, at which torch would wait for ever."""
    made: list[TCPStore] = []

    def connect() -> None:
        with suppress(DistError, RuntimeError, ValueError):
            made.append(
                TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timedelta(seconds=_STORE_S))
            )

    attempt = threading.Thread(target=connect, name="meeting", daemon=True)
    attempt.start()
    attempt.join(_ANSWER_S)
    return made[0] if made else None


def limit(endpoint: Endpoint, seconds: int) -> None:
    """Let connections to the meeting place fail after so many silent seconds; the kernel's own limit is 15 minutes.

    PyTorch has no limit for most calls of its store, so that an agent on a machine whose link is cut would wait for
    the kernel. The connections are found among this process's own, as torch does not give them out.
    """
    address = endpoint.address()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # noqa: PTH112, PTH208
        with suppress(OSError), _connection(int(name)) as connection:
            peer = connection.getpeername()
            if isinstance(peer, tuple) and peer[1] == endpoint.port and address in str(peer[0]):
                _limit(connection, seconds)


def _connection(number: int) -> socket.socket:
    """The socket behind one of this process's files.

    Raises:
        OSError: It is none; nothing stays open.
    """
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(errno.ENOTSOCK, "no socket")
    return socket.socket(fileno=os.dup(number))


def _limit(connection: socket.socket, seconds: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, seconds * 1000)
    every = max(1, seconds // 3)
    for option, value in (("TCP_KEEPIDLE", every), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
