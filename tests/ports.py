"""Ports of loopback for servers that start later."""

from __future__ import annotations

import socket
from contextlib import contextmanager


@contextmanager
def free_port():
    """Return a port that stays reserved for a server of the test inside this context.

    Linux lets several sockets with SO_REUSEADDR bind a port if none of them listens. The bound socket keeps the kernel
    from assigning the port to a connection, and servers, which set the option too, can bind it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
