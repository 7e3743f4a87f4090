"""How bytes get from rank to rank on the CPU: over sockets on one machine, else over a gloo group of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from accel_runtime.backends.dissemination import in_rank_order, rounds
from accel_runtime.backends.news import News
from accel_runtime.backends.sockets import SocketWire, connected
from accel_runtime.exchange.agreement import SLOT, SilenceError, Wire

__all__ = ["GlooWire", "control_group", "side_wire", "wire_between", "wire_of"]

_SLOTS, _LARGE = 1, 2


@lru_cache(maxsize=1)
def control_group(world: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:  # noqa: ARG001 - the key
    """The group our own bytes travel on, one for every default group: all ranks call this together."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


@lru_cache(maxsize=1)
def side_wire(world: dist.ProcessGroup, *, one_machine: bool) -> Wire:  # noqa: ARG001 - the key
    """Connect the ranks for another thread, which may wait for a day: all ranks call this together."""
    timeout = timedelta(days=1)
    group = dist.new_group(backend="gloo", timeout=timeout)
    return wire_between(group, group.get_group_store(), timeout, one_machine=one_machine)


@lru_cache(maxsize=1)
def wire_of(group: dist.ProcessGroup, timeout: timedelta, *, one_machine: bool) -> Wire:
    """What carries bytes between the ranks of the control group: all ranks call this together."""
    return wire_between(group, group.get_group_store(), timeout, one_machine=one_machine)


def wire_between(group: Any, store: Any, timeout: timedelta, *, one_machine: bool) -> Wire:
    """What carries bytes between the ranks of a group: all ranks call this together.

    Args:
        group: A gloo group that nobody else uses.
        store: Of this group alone.
        timeout: How long to wait for the others.
        one_machine: Whether all ranks are on this machine.

    Raises:
        RuntimeError: They are, and cannot be connected; see `connected`.
    """
    peers = connected(group, store, timeout) if one_machine else None
    if peers is None:
        return GlooWire(group, store, timeout)
    return SocketWire(peers, group.rank(), News(store, group.rank(), group.size()), timeout)


class GlooWire(Wire):
    """Exchanges of bytes in which no rank can receive more than it has room for.

    gloo's `all_gather` hands every call to a thread of its own and back; its send and receive do not, so what
    is built of them is two to four times faster.

    Args:
        group: A gloo group that nobody else uses.
        store: Of this group alone.
        timeout: How long to wait for the others.
    """

    def __init__(self, group: Any, store: Any, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._rank, self._size = group.rank(), group.size()
        self._news = News(store, self._rank, self._size)
        # Row i holds the slot of the i-th rank after this one.
        memory_ = bytearray(self._size * SLOT)
        self._bytes = memoryview(memory_)
        self._rows = torch.frombuffer(memory_, dtype=torch.uint8).view(self._size, SLOT)
        self._rounds = [
            ([self._rows[:count]], to, [self._rows[have : have + count]], source)
            for to, source, have, count in rounds(self._rank, self._size)
        ]

    @override
    def swap(self, slot: memoryview, where: Callable[[], str]) -> bytearray:
        self._news.check()
        self._bytes[:SLOT] = slot
        try:
            for sent, to, room, from_ in self._rounds:
                arrival = self._group.recv(room, from_, _SLOTS)
                departure = self._group.send(sent, to, _SLOTS)
                arrival.wait(self._timeout)
                departure.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, where()) from error
        return in_rank_order(self._bytes, self._rank)

    @override
    def transfer(
        self,
        outgoing: Mapping[int, torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        where: Callable[[], str],
    ) -> None:
        self._news.check()
        try:
            works = [self._group.recv([room], rank, _LARGE) for rank, room in incoming.items() if len(room)]
            works += [self._group.send([data], rank, _LARGE) for rank, data in outgoing.items() if len(data)]
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, where()) from error

    def _lost(self, error: RuntimeError, where: str) -> SilenceError:
        return self._news.lost(where, self._group.abort, timed_out="timed out" in str(error).lower())
