"""Ranks on one machine exchange bytes over sockets between every two of them."""

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

from accel_runtime.collectives.transport import (
    SLOT,
    ConnectionLostError,
    GlooTransport,
    SocketTransport,
    connect_sockets,
)


class Wires:
    """The wires of `size` ranks, each used in a thread of its own."""

    def __init__(self, size, timeout=20.0):
        peers = [{} for _ in range(size)]
        for low, high in combinations(range(size), 2):
            peers[low][high], peers[high][low] = socket.socketpair()
        store = dist.HashStore()
        seconds = timedelta(seconds=timeout)
        self.peers = peers
        self.wires = [SocketTransport(p, rank, store, seconds) for rank, p in enumerate(peers)]

    def run(self, step):
        """What `step(rank, wire)` gives on every rank, all at once."""
        with ThreadPoolExecutor(len(self.wires)) as threads:
            return list(threads.map(step, range(len(self.wires)), self.wires))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for peer in (one for peers in self.peers for one in peers.values()):
            peer.close()


def slot(rank):
    return memoryview(bytes([rank]) * SLOT)


def failed(wire, step, doing=""):
    """The error to raise after an exchange that fails."""
    with pytest.raises(BaseException) as caught:
        step()
    return wire.fail(caught.value, doing)


@settings(max_examples=20)
@given(size=st.integers(2, 20))
def test_every_rank_has_the_slots_of_all_in_rank_order(size):
    with Wires(size) as wires:
        for _ in range(2):
            for got in wires.run(lambda rank, wire: wire.all_gather_slots(slot(rank))):
                assert got == b"".join(map(slot, range(size)))


@settings(max_examples=15)
@given(data=st.data(), size=st.integers(2, 4))
def test_any_rank_sends_any_number_of_bytes_to_any_other_at_once(data, size):
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    counts = {pair: data.draw(st.sampled_from([0, 1, 5000, 3_000_000])) for pair in pairs}

    def step(rank, wire):
        own = {b: torch.full((counts[a, b],), a, dtype=torch.uint8) for a, b in pairs if a == rank}
        rooms = {a: torch.empty(counts[a, b], dtype=torch.uint8) for a, b in pairs if b == rank}
        wire.transfer(own, rooms)
        return rooms

    with Wires(size) as wires:
        for rank, rooms in enumerate(wires.run(step)):
            for other, room in rooms.items():
                assert torch.equal(room, torch.full((counts[other, rank],), other, dtype=torch.uint8))


@pytest.mark.parametrize("large", [False, True], ids=["slots", "large data"])
def test_a_rank_that_is_gone_is_missing_for_all_others_and_stays_so(large):
    def step(rank, wire):
        if rank == 2:
            for peer in wires.peers[2].values():
                peer.close()
            return None
        rooms = {2: torch.empty(100_000, dtype=torch.uint8)}
        step = partial(wire.transfer, {}, rooms) if large else partial(wire.all_gather_slots, slot(rank))
        first = failed(wire, step, f"here {rank}")
        assert failed(wire, partial(wire.all_gather_slots, slot(rank))) is first
        return first

    with Wires(3) as wires:
        *errors, _ = wires.run(step)
    assert [error.waiting for error in errors] == [{0: "here 0", 1: "here 1"}] * 2
    assert not errors[0].timed_out


def test_a_rank_that_does_not_come_in_time_is_missing_and_it_is_said_that_time_ran_out():
    def step(rank, wire):
        if rank == 1:
            time.sleep(1.5)
            return None
        return failed(wire, partial(wire.all_gather_slots, slot(rank)), "here")

    with Wires(2, timeout=0.3) as wires:
        error, _ = wires.run(step)
    assert error.waiting == {0: "here"}
    assert error.timed_out


def test_what_is_interrupted_half_way_is_never_taken_for_an_answer():
    def step(rank, wire):
        if rank == 0:
            step = partial(wire.transfer, {1: torch.ones(10, dtype=torch.uint8)}, {1: Interrupting()})
            assert isinstance(failed(wire, step), KeyboardInterrupt)
        else:
            assert isinstance(failed(wire, partial(wire.all_gather_slots, slot(rank))), ConnectionLostError)

    class Interrupting:
        def __len__(self):
            raise KeyboardInterrupt

    with Wires(2) as wires:
        wires.run(step)


def test_a_forked_child_holds_no_connection():
    with Wires(2) as wires:
        child = os.fork()
        if not child:
            os._exit(sum(peer.fileno() != -1 for peers in wires.peers for peer in peers.values()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert wires.run(lambda rank, wire: wire.all_gather_slots(slot(rank)))[0][SLOT:] == slot(1)


def wire():
    from accel_runtime import Accelerator

    return type(Accelerator()._backend.handshake._transport).__name__


def test_ranks_of_one_machine_meet_over_sockets_and_others_over_gloo(pair, clusters):
    assert pair.run(wire) == [SocketTransport.__name__] * 2
    assert clusters["apart"].run(wire) == [GlooTransport.__name__] * 3


def new_group():
    """Make a gloo group, whether or not another test has made the default one."""
    from accel_runtime import Accelerator

    Accelerator()
    return dist.new_group(backend="gloo")


def attempt_with(broken, environ=()):
    """Connect while rank 0 or all ranks meet an error; return the error, or what came of it."""
    import tempfile
    from unittest import mock

    def refuse(*_, **__):
        raise OSError("no room")

    group = new_group()
    what = {
        "no folder": (tempfile, "mkdtemp"),
        "cannot listen": (socket.socket, "listen"),
        "cannot call": (socket.socket, "connect"),
    }[broken]
    with mock.patch.object(*what, refuse), mock.patch.dict(os.environ, environ):
        try:
            return connect_sockets(group, group.get_group_store(), timedelta(seconds=1))
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("broken", ["no folder", "cannot listen", "cannot call"])
def test_where_one_rank_cannot_be_reached_all_refuse_to_go_on(pair, broken):
    said = pair.run(attempt_with, broken)
    assert all(text.startswith("Cannot connect the processes of this machine: ") for text in said)
    assert all("Set TMPDIR to a directory" in text and "ACCEL_TRUST_NETWORK=1" in text for text in said)
    assert any("no room" in text for text in said)


@pytest.mark.parametrize("broken", ["no folder", "cannot call"])
def test_where_one_rank_cannot_be_reached_a_user_may_allow_tcp_for_all(pair, broken):
    assert pair.run(attempt_with, broken, {"ACCEL_TRUST_NETWORK": "1"}) == [None, None]


@pytest.mark.parametrize("change", ["others may enter", "a link", "another owner"])
def test_a_folder_that_another_user_may_have_written_into_the_store_is_refused(pair, change, tmp_path):
    """The store has no authentication: whoever reaches its port can replace the folder of the ranks."""

    def attempt(change, folder):
        from unittest import mock

        group = new_group()
        place = Path(folder, "planted")
        if group.rank() == 0:
            place.mkdir(mode=0o700)
            if change == "others may enter":
                place.chmod(0o755)
            if change == "a link":
                place = Path(folder, "link")
                place.symlink_to(Path(folder, "planted"))
        store = mock.Mock(wraps=group.get_group_store())
        store.set = lambda key, value: group.get_group_store().set(key, os.fsencode(place) if value else "")
        other = mock.patch.object(os, "geteuid", return_value=os.getuid() + 1)
        with other if change == "another owner" and group.rank() == 1 else nullcontext():
            try:
                return connect_sockets(group, store, timedelta(seconds=1))
            except RuntimeError as error:
                return str(error)

    said = pair.run(attempt, change, str(tmp_path))
    assert all(text.startswith("Cannot connect the processes of this machine: ") for text in said), said
    assert "that only this user may enter" in said[1]


def test_a_connection_whose_process_belongs_to_another_user_is_refused(pair):
    def attempt():
        from unittest import mock

        from accel_runtime.collectives import transport

        group = new_group()
        # Of rank 1 the kernel names another user.
        there = mock.patch.object(
            transport, "_CREDENTIALS", mock.Mock(size=12, unpack=lambda _: (1, 4242, 1))
        )
        with there if group.rank() == 0 else nullcontext():
            try:
                return connect_sockets(group, group.get_group_store(), timedelta(seconds=1))
            except RuntimeError as error:
                return str(error)

    said = pair.run(attempt)
    assert "the process of a rank belongs to user 4242" in said[0]
    # Rank 0 may have closed the connection before rank 1 has written its number into it.
    assert "see the error of another process" in said[1] or "Broken pipe" in said[1]


def test_nobody_else_may_enter_the_place_where_ranks_meet(pair):
    def attempt():
        import stat
        from pathlib import Path
        from unittest import mock

        seen = []
        bind = socket.socket.bind

        def watched(self, path):
            bind(self, path)
            seen.append(stat.S_IMODE(Path(path).parent.stat().st_mode))

        class Watched(socket.socket):
            bind = watched

        group = new_group()
        with mock.patch.object(socket, "socket", Watched):
            peers = connect_sockets(group, group.get_group_store(), timedelta(seconds=10))
        for peer in peers.values():
            peer.close()
        return seen

    assert pair.run(attempt) == [[0o700], [0o700]]
