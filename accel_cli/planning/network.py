"""Addresses of this machine as others see them: asked of the kernel, never of the host's name."""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from accel_cli.errors import UsageError

__all__ = [
    "Endpoint",
    "addresses",
    "interface",
    "is_loopback",
    "loopback_address",
    "named_wrongly",
    "own_address",
]

_SIOCGIFADDR = 0x8915
_LOCAL_NAMES = frozenset(
    {"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
)
_ANY_OTHER = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation: the route to them is the default route, and nothing is sent."""


@dataclass(frozen=True)
class Endpoint:
    """Where machines meet."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """`host:port`, with brackets around an IPv6 address."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether it was written as an address no other machine reaches."""
        name = self.host.lower().rstrip(".")
        return (
            name in _LOCAL_NAMES
            or name.endswith(".localhost")
            or is_loopback(self.host)
            or _is_any(self.host)
        )

    def address(self) -> str:
        """Its address; of a name, the first one.

        Raises:
            UsageError: The name does not resolve here.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"the name {self.host!r} of rdzv_endpoint {self} does not resolve on {socket.gethostname()} ({error}); "
                "give a name or address of one of the machines that all of them know"
            ) from None
        return str(found[0][4][0])

    def is_here(self) -> bool:
        """Whether it is an address of this machine."""
        address = self.address()
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return False
        return True

    def local_address(self) -> str:
        """The address of this machine that the others reach it by: the one on the route to the endpoint.

        A machine whose own name is 127.0.1.1 (Debian) meets itself on loopback, where no other comes: there it is
        the address of its default route, or else of its first interface.
        """
        found = _toward(self.address())
        if self.loopback or not is_loopback(found):
            return found
        return own_address() or found


def own_address() -> str | None:
    """The address that others reach this machine by, if any: that of its default route, or else of its first interface."""
    away = (_outward(address) for address in _ANY_OTHER)
    found = next((address for address in away if address and not is_loopback(address)), None)
    return found or next(iter(addresses()), None)


def loopback_address() -> str:
    """Return the address with which processes of this machine reach each other: IPv4 where there is one.

    Raises:
        UsageError: The loopback interface is down.
    """
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.create_server((address, 0), family=family) as server:
            # One can listen on an interface that is down.
            socket.create_connection(server.getsockname()[:2], timeout=1).close()
            return address
    raise UsageError(
        "the processes of this machine cannot reach each other: it has neither 127.0.0.1 nor ::1. Set its loopback "
        "interface up: ip link set lo up"
    )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_any(address: str) -> bool:
    """Return True for 0.0.0.0 and ::, which stand for every address of the machine itself."""
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface but loopback, keyed by the address; the value is the interface."""
    import fcntl  # noqa: PLC0415 - not on every platform; asked for on several machines only

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                said = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(said[20:24])
                if not is_loopback(address):
                    found[address] = name
    return found


def interface(address: str) -> str | None:
    """The name of the interface that has an address."""
    return addresses().get(address)


def named_wrongly() -> bool:
    """Whether this machine's own name leads to loopback, or to nothing: gloo would tell the others that address."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return is_loopback(str(found[0][4][0]))


def _toward(address: str) -> str:
    """The source address of packets to an address; a datagram socket is connected, and nothing is sent.

    Raises:
        UsageError: There is no route.
    """
    found = _outward(address)
    if not found:
        raise UsageError(f"{socket.gethostname()} has no route to {address}; is its network up?")
    return found


def _outward(address: str) -> str | None:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
