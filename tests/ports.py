"""Ports of loopback for servers that start later."""

from __future__ import annotations

import socket
from contextlib import contextmanager


@contextmanager
def free_port():
    """A port that nobody takes by chance before a server of the test does, as long as the block lasts.

    Linux lets several sockets with SO_REUSEADDR have a port as long as none of them listens: this one keeps away those
    that want any port, as each connection does, and servers, which set the option too, are let in.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
