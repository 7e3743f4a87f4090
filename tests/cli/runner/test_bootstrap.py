"""Connections to the store of the rendezvous, and the progress of a node that waits for others."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.waits import limit
from torch.distributed import DistNetworkError

from accel_cli.planning.network import Endpoint
from accel_cli.runner import bootstrap
from accel_cli.runner.bootstrap import RendezvousProgress, limit_connections


def opened():
    return sorted(Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
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
            connected_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            for connected_socket in (connection, elsewhere)
        ]
    assert timeouts == [9000, 0]


def test_progress_is_printed_to_a_pipe_every_ten_seconds_whatever_changes(capsys, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(bootstrap, "time", clock)
    progress = RendezvousProgress(lambda: f"{clock.now:.0f}")

    def pass_time(seconds):
        clock.now += seconds
        return clock.now > 125

    progress._done = SimpleNamespace(wait=pass_time)
    progress._print_lines()
    assert capsys.readouterr().err.split() == ["accel:", "100", "accel:", "110", "accel:", "120"]


def test_progress_on_a_terminal_is_one_line_that_is_cleared(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    is_shown = threading.Event()

    def format_line():
        is_shown.set()
        return "waiting; 9 s left"

    with RendezvousProgress(format_line, quiet=0.01):
        assert is_shown.wait(limit(120))
    written = capsys.readouterr().err
    assert written.startswith("\r\x1b[Kaccel: waiting; 9 s left")
    assert written.endswith("\r\x1b[K")
    assert "\n" not in written


def test_a_lost_store_ends_the_progress_without_a_traceback(monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)

    def format_line():
        raise DistNetworkError("Connection reset by peer")

    with RendezvousProgress(format_line, quiet=0.01) as progress:
        progress._thread.join(limit(60))
        assert not progress._thread.is_alive()
    assert not errors


def test_no_progress_is_printed_if_all_nodes_join_at_once(capsys):
    with RendezvousProgress(lambda: "waiting"):
        pass
    assert capsys.readouterr().err == ""
