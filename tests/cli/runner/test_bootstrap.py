"""Connections to the store of the rendezvous."""

from __future__ import annotations

import gc
import socket
import sys
from pathlib import Path

import pytest

from accel_cli.planning.network import Endpoint
from accel_cli.runner.bootstrap import limit_connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def opened():
    return sorted(Path("/proc/self/fd").iterdir())


def test_limit_connections_changes_sockets_of_the_store_only(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(server.getsockname()) as connection,
        socket.create_connection(other.getsockname()) as elsewhere,
        (tmp_path / "open").open("w") as file,
    ):
        gc.collect()  # what others left open is closed now, and not between the two looks
        before = opened()
        limit_connections(Endpoint("127.0.0.1", server.getsockname()[1]), 9)
        assert opened() == before
        file.write("still open")
        timeouts = [
            some.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for some in (connection, elsewhere)
        ]
    assert timeouts == [9000, 0]
