"""Connections between each pair of nodes, before any process group exists: addresses, names and clocks."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from accel_runtime.extensions.node_check.facts import PeerFacts

__all__ = ["Listener", "PeerAddress", "find_address", "reach_peers"]

_CONNECT_S = 3.0
_THREADS = 64
_EXCHANGES = 3
"""The shortest of these round trips gives the offset of the clock."""
_SIOCGIFADDR = 0x8915
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class PeerAddress:
    """The address at which a node listens during the check."""

    node: int
    host: str
    address: str
    port: int


class Listener:
    """Answers each line of a connection with the number of this node and its time, in a thread, until it is closed."""

    def __init__(self, node: int, address: str) -> None:
        self._node = node
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The name of this node may lead to another of its addresses.
        everywhere = "::" if family is socket.AF_INET6 else "0.0.0.0"  # noqa: S104 - for the seconds of the check
        host = address if _is_loopback(address) else everywhere
        self._server = socket.create_server((host, 0), family=family, backlog=1024)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, name="node-check", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(2 * _CONNECT_S)
        with connection, suppress(OSError), connection.makefile("rw") as stream:
            while stream.readline():
                print(json.dumps({"node": self._node, "time": time.time()}), file=stream, flush=True)


def find_address(environ: Mapping[str, str]) -> str:
    """Return the address of this machine that collectives use.

    It is that of the interface of `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME`, else that of the host name, as gloo chooses
    it, and else that of the route to the first node.
    """
    for variable in _INTERFACES:
        if (name := environ.get(variable)) and (address := _get_interface_address(name)):
            return address
    with suppress(OSError, UnicodeError):
        address = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
        if not _is_loopback(address):
            return address
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def reach_peers(own: int, peers: Sequence[PeerAddress]) -> list[PeerFacts]:
    """Connect to all other nodes, and return the result for each."""
    others = [peer for peer in peers if peer.node != own]
    if not others:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(others)), thread_name_prefix="node-check") as pool:
        return list(pool.map(_reach_peer, others))


def _reach_peer(peer: PeerAddress) -> PeerFacts:
    """Connect to a node by its address, compare the clocks, and connect by its name."""
    try:
        offset, error = _exchange_times(peer.address, peer)
    except (OSError, ValueError) as failure:
        return PeerFacts(peer.node, f"{peer.address} port {peer.port}: {_describe(failure)}")
    return PeerFacts(peer.node, "", _try_name(peer), offset, error)


def _try_name(peer: PeerAddress) -> str:
    """Return why the name of a node does not lead to it; empty if it does."""
    problems = ["its lookup has not ended"]

    def connect() -> None:
        try:
            _exchange_times(peer.host, peer)
            problems[0] = ""
        except (OSError, UnicodeError, ValueError) as failure:
            problems[0] = _describe(failure)

    # In a thread, since a name server that does not answer is waited for much longer.
    thread = threading.Thread(target=connect, name="node-check", daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    return f"the name {peer.host} does not lead to it: {problems[0]}" if problems[0] else ""


def _exchange_times(host: str, peer: PeerAddress) -> tuple[float, float]:
    """Return the clock of this node minus that of a peer, and by how much that may be wrong."""
    trips = []
    with (
        socket.create_connection((host, peer.port), timeout=_CONNECT_S) as connection,
        connection.makefile("rw") as stream,
    ):
        for _ in range(_EXCHANGES):
            begin = time.time()
            print(file=stream, flush=True)
            answer = json.loads(stream.readline())
            end = time.time()
            if answer["node"] != peer.node:
                raise ValueError(f"node {answer['node']} answers there, not node {peer.node}")
            trips.append(((end - begin) / 2, (begin + end) / 2 - answer["time"]))
    error, offset = min(trips)
    return offset, error


def _describe(failure: Exception) -> str:
    if isinstance(failure, TimeoutError):
        return f"no answer within {_CONNECT_S:.0f} s"
    return getattr(failure, "strerror", None) or str(failure)


def _get_interface_address(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none, as for the patterns that NCCL accepts."""
    import fcntl  # noqa: PLC0415 - not on every platform

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", os.fsencode(name)[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
