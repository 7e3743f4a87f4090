"""Ranks on one node exchange bytes over a socket between each two of them."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.children import fork, wait_for_exit

from accel_runtime.collectives import transport
from accel_runtime.collectives.transport import (
    SLOT,
    ConnectionLostError,
    GlooTransport,
    SocketTransport,
    connect_sockets,
)


class SocketRanks:
    """The transports of `size` ranks, each used in its own thread."""

    def __init__(self, size, timeout=20.0):
        peers = [{} for _ in range(size)]
        for low, high in combinations(range(size), 2):
            peers[low][high], peers[high][low] = socket.socketpair()
        store = dist.HashStore()
        seconds = timedelta(seconds=timeout)
        self.peers = peers
        self.wires = [SocketTransport(p, rank, store, seconds) for rank, p in enumerate(peers)]

    def run(self, step):
        """Call `step(rank, transport)` on all ranks at once, and return the results."""
        with ThreadPoolExecutor(len(self.wires)) as threads:
            return list(threads.map(step, range(len(self.wires)), self.wires))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for peer in (connection for peers in self.peers for connection in peers.values()):
            peer.close()


def build_slot(rank):
    return memoryview(bytes([rank]) * SLOT)


def fail_exchange(wire, step, doing=""):
    """Run a failing exchange, and return the error to raise."""
    with pytest.raises(BaseException) as caught:
        step()
    return wire.fail(caught.value, doing)


@settings(max_examples=20)
@given(size=st.integers(2, 20))
def test_all_gather_slots_returns_slots_in_rank_order(size):
    with SocketRanks(size) as wires:
        for _ in range(2):
            for actual in wires.run(lambda rank, wire: wire.all_gather_slots(build_slot(rank))):
                assert actual == b"".join(map(build_slot, range(size)))


@settings(max_examples=15)
@given(data=st.data(), size=st.integers(2, 4))
def test_transfer_sends_any_number_of_bytes_between_any_ranks(data, size):
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    counts = {pair: data.draw(st.sampled_from([0, 1, 5000, 3_000_000])) for pair in pairs}

    def step(rank, wire):
        buffers = {b: torch.full((counts[a, b],), a, dtype=torch.uint8) for a, b in pairs if a == rank}
        rooms = {a: torch.empty(counts[a, b], dtype=torch.uint8) for a, b in pairs if b == rank}
        wire.transfer(buffers, rooms)
        return rooms

    with SocketRanks(size) as wires:
        for rank, rooms in enumerate(wires.run(step)):
            for other, room in rooms.items():
                assert torch.equal(room, torch.full((counts[other, rank],), other, dtype=torch.uint8))


@pytest.mark.parametrize("large", [False, True], ids=["slots", "large data"])
def test_a_lost_rank_is_an_error_for_all_others_now_and_later(large):
    def step(rank, wire):
        if rank == 2:
            for peer in wires.peers[2].values():
                peer.close()
            return None
        rooms = {2: torch.empty(100_000, dtype=torch.uint8)}
        step = (
            partial(wire.transfer, {}, rooms) if large else partial(wire.all_gather_slots, build_slot(rank))
        )
        first = fail_exchange(wire, step, f"here {rank}")
        assert fail_exchange(wire, partial(wire.all_gather_slots, build_slot(rank))) is first
        return first

    with SocketRanks(3) as wires:
        *errors, _ = wires.run(step)
    assert [error.waiting for error in errors] == [{0: "here 0", 1: "here 1"}] * 2
    assert not errors[0].timed_out


def test_a_late_rank_is_reported_as_a_timeout():
    def step(rank, wire):
        if rank == 1:
            time.sleep(1.5)
            return None
        return fail_exchange(wire, partial(wire.all_gather_slots, build_slot(rank)), "here")

    with SocketRanks(2, timeout=0.3) as wires:
        error, _ = wires.run(step)
    assert error.waiting == {0: "here"}
    assert error.timed_out


def test_a_long_wait_calls_a_function_whose_error_ends_it(monkeypatch):
    monkeypatch.setattr(transport, "WATCH_INTERVAL_S", 0.05)
    calls = []

    def step(rank, wire):
        if rank == 1:
            time.sleep(1)
            wire.all_gather_slots(build_slot(rank))
            return None
        wire.call_during_waits(lambda: calls.append(rank))
        return wire.all_gather_slots(build_slot(rank))

    def fail(rank, wire):
        def on_wait():
            raise RuntimeError("rank 1 is elsewhere")

        if rank == 1:
            return
        wire.call_during_waits(on_wait)
        with pytest.raises(RuntimeError, match="elsewhere"):
            wire.all_gather_slots(build_slot(rank))

    with SocketRanks(2) as wires:
        assert wires.run(step)[0] == bytes(build_slot(0)) + bytes(build_slot(1))
        assert len(calls) > 5
        wires.run(fail)


def test_the_data_of_an_interrupted_transfer_is_never_returned():
    def step(rank, wire):
        if rank == 0:
            step = partial(wire.transfer, {1: torch.ones(10, dtype=torch.uint8)}, {1: Interrupting()})
            assert isinstance(fail_exchange(wire, step), KeyboardInterrupt)
        else:
            assert isinstance(
                fail_exchange(wire, partial(wire.all_gather_slots, build_slot(rank))),
                ConnectionLostError,
            )

    class Interrupting:
        def __len__(self):
            raise KeyboardInterrupt

    with SocketRanks(2) as wires:
        wires.run(step)


def test_a_forked_child_holds_no_connection():
    with SocketRanks(2) as wires:
        peers = [peer for connections in wires.peers for peer in connections.values()]

        def check_connections():
            assert {peer.fileno() for peer in peers} == {-1}

        assert wait_for_exit(fork(check_connections)) == 0
        assert wires.run(lambda rank, wire: wire.all_gather_slots(build_slot(rank)))[0][SLOT:] == build_slot(
            1
        )


def read_transport_name():
    from accel_runtime import Accelerator

    return type(Accelerator()._backend.handshake._transport).__name__


def test_ranks_of_one_node_use_sockets_and_others_gloo(pair, clusters):
    assert pair.run(read_transport_name) == [SocketTransport.__name__] * 2
    assert clusters["apart"].run(read_transport_name) == [GlooTransport.__name__] * 3


def create_group():
    """Create a gloo group, whether or not another test has created the default one."""
    from accel_runtime import Accelerator

    Accelerator()
    return dist.new_group(backend="gloo")


def connect_with_error(broken, environ=()):
    """Connect while a call fails on rank 0 or on all ranks; return the error or the connections."""
    import tempfile
    from unittest import mock

    def refuse(*_, **__):
        raise OSError("no room")

    group = create_group()
    replacements = {
        "no folder": (tempfile, "mkdtemp"),
        "cannot listen": (socket.socket, "listen"),
        "cannot call": (socket.socket, "connect"),
    }[broken]
    with mock.patch.object(*replacements, refuse), mock.patch.dict(os.environ, environ):
        try:
            return connect_sockets(group, group.get_group_store(), timedelta(seconds=1))
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("broken", ["no folder", "cannot listen", "cannot call"])
def test_all_ranks_fail_if_one_cannot_connect(pair, broken):
    messages = pair.run(connect_with_error, broken)
    assert all(text.startswith("Cannot connect the processes of this machine: ") for text in messages)
    assert all("Set TMPDIR to a directory" in text and "ACCEL_TRUST_NETWORK=1" in text for text in messages)
    assert any("no room" in text for text in messages)


@pytest.mark.parametrize("broken", ["no folder", "cannot call"])
def test_trust_network_allows_tcp_if_one_rank_cannot_connect(pair, broken):
    assert pair.run(connect_with_error, broken, {"ACCEL_TRUST_NETWORK": "1"}) == [None, None]


@pytest.mark.parametrize("change", ["others may enter", "a link", "another owner"])
def test_a_socket_folder_that_another_user_could_have_set_is_rejected(pair, change, tmp_path):
    """The store has no authentication: other users could replace the folder of the ranks."""

    def attempt(change, folder):
        from unittest import mock

        group = create_group()
        folder_of_attacker = Path(folder, "planted")
        if group.rank() == 0:
            folder_of_attacker.mkdir(mode=0o700)
            if change == "others may enter":
                folder_of_attacker.chmod(0o755)
            if change == "a link":
                folder_of_attacker = Path(folder, "link")
                folder_of_attacker.symlink_to(Path(folder, "planted"))
        store = mock.Mock(wraps=group.get_group_store())
        store.set = lambda key, value: group.get_group_store().set(
            key, os.fsencode(folder_of_attacker) if value else ""
        )
        other = mock.patch.object(os, "geteuid", return_value=os.getuid() + 1)
        with other if change == "another owner" and group.rank() == 1 else nullcontext():
            try:
                return connect_sockets(group, store, timedelta(seconds=1))
            except RuntimeError as error:
                return str(error)

    messages = pair.run(attempt, change, str(tmp_path))
    assert all(text.startswith("Cannot connect the processes of this machine: ") for text in messages), (
        messages
    )
    assert "that only this user may enter" in messages[1]


def test_a_connection_of_another_user_is_rejected(pair):
    def attempt():
        from unittest import mock

        from accel_runtime.collectives import transport

        group = create_group()
        # Let the kernel report another user for rank 1.
        there = mock.patch.object(
            transport, "_CREDENTIALS", mock.Mock(size=12, unpack=lambda _: (1, 4242, 1))
        )
        with there if group.rank() == 0 else nullcontext():
            try:
                return connect_sockets(group, group.get_group_store(), timedelta(seconds=1))
            except RuntimeError as error:
                return str(error)

    messages = pair.run(attempt)
    assert "the process of a rank belongs to user 4242" in messages[0]
    # Rank 0 may have closed the connection before rank 1 has written its number into it.
    assert "see the error of another process" in messages[1] or "Broken pipe" in messages[1]


def test_the_socket_folder_is_accessible_only_to_its_user(pair):
    def attempt():
        import stat
        from pathlib import Path
        from unittest import mock

        modes = []
        bind = socket.socket.bind

        def watched(self, path):
            bind(self, path)
            modes.append(stat.S_IMODE(Path(path).parent.stat().st_mode))

        class Watched(socket.socket):
            bind = watched

        group = create_group()
        with mock.patch.object(socket, "socket", Watched):
            peers = connect_sockets(group, group.get_group_store(), timedelta(seconds=10))
        for peer in peers.values():
            peer.close()
        return modes

    assert pair.run(attempt) == [[0o700], [0o700]]
