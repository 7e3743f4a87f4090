"""Addresses of this machine that other nodes can reach, from the kernel's routes and not from the host name."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from accel_cli.errors import UsageError

__all__ = [
    "Endpoint",
    "bind_free_port",
    "find_interface",
    "find_loopback_address",
    "find_own_address",
    "is_hostname_loopback",
]

_SIOCGIFADDR = 0x8915
_LOCAL_NAMES = frozenset(
    {"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
)
_REMOTE_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation: the route to them is the default route, and nothing is sent."""


@dataclass(frozen=True)
class Endpoint:
    """A rendezvous endpoint, host and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Return the endpoint of `host:port`, with brackets around an IPv6 address."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if the host is a loopback name or address, or the unspecified address (`0.0.0.0`, `::`)."""
        name, address = self.host.lower().rstrip("."), _parse_address(self.host)
        if address:
            return address.is_loopback or address.is_unspecified
        return name in _LOCAL_NAMES or name.endswith(".localhost")

    def resolve(self) -> str:
        """Return the IP address, for a name the first; raise UsageError if the name does not resolve here."""
        try:
            return _resolve(self.host, self.port)
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"Cannot resolve the host {self.host!r} of rdzv_endpoint {self} on {socket.gethostname()}: {error}. Use a name "
                "or address of one node that resolves on all nodes."
            ) from None

    def is_local(self) -> bool:
        """Return True if the host is an address of this machine."""
        address = self.resolve()
        with socket.socket(_get_family(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return False
        return True

    def find_local_address(self) -> str:
        """Return the address of this machine that other nodes can reach: that of the route to the endpoint.

        If this machine is the endpoint and its own name is 127.0.1.1 (Debian), that route is loopback. Then it is the
        address of the default route, or else of the first interface.
        """
        address = self.resolve()
        source = _find_source_address(address)
        if source is None:
            raise UsageError(
                f"Cannot reach rdzv_endpoint {self}: {socket.gethostname()} has no route to {address}. Check its network."
            )
        if self.is_loopback or not _is_loopback(source):
            return source
        return find_own_address() or source


def find_own_address() -> str | None:
    """Return the address of this machine's default route, or else of its first interface, or None."""
    for remote in _REMOTE_ADDRESSES:
        if (address := _find_source_address(remote)) and not _is_loopback(address):
            return address
    return next(iter(_list_addresses()), None)


def find_loopback_address() -> str:
    """Return the address with which processes of this machine reach each other, preferably IPv4."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.create_server((address, 0), family=family) as server:
            # A server can listen on an interface that is down.
            socket.create_connection(server.getsockname()[:2], timeout=1).close()
            return address
    raise UsageError(
        "Cannot connect the processes of this machine: it has neither 127.0.0.1 nor ::1. Set its loopback interface up: "
        "ip link set lo up"
    )


def bind_free_port(first: int, count: int) -> socket.socket:
    """Return a socket that is bound to the first free port of a range, or else to any free port; it does not listen.

    The port is that of this socket until it is closed: no other program can take it, or connect to it.
    """
    dual = socket.has_dualstack_ipv6()
    for port in (*range(first, first + count), 0):
        # Without SO_REUSEADDR, with which several sockets that do not listen may have one port.
        bound = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        with suppress(OSError):
            bound.bind(("", port))
            return bound
        bound.close()
    raise OSError(errno.EADDRINUSE, "no port is free")


def find_interface(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address."""
    return _list_addresses().get(address)


def is_hostname_loopback() -> bool:
    """Return True if this machine's name resolves to loopback or not at all: gloo would publish that address."""
    try:
        return _is_loopback(_resolve(socket.gethostname()))
    except (OSError, UnicodeError):
        return True


def _list_addresses() -> dict[str, str]:
    """Return the interface of each IPv4 address, without loopback."""
    import fcntl  # noqa: PLC0415 - not on every platform, and needed on several nodes only

    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
                address = socket.inet_ntoa(reply[20:24])
                if not _is_loopback(address):
                    interfaces[address] = name
    return interfaces


def _find_source_address(address: str) -> str | None:
    """Return the source address of packets to an address, or None without a route; nothing is sent."""
    with socket.socket(_get_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _resolve(host: str, port: int | None = None) -> str:
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_loopback(text: str) -> bool:
    address = _parse_address(text)
    return address is not None and address.is_loopback


def _get_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
