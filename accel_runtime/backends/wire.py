"""How bytes get from rank to rank on the CPU: a gloo group of our own, and nothing but send and receive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from typing_extensions import override

from accel_runtime.exchange.agreement import SLOT, SilenceError, Wire
from accel_runtime.exchange.raw import memory

__all__ = ["GlooWire", "control_group"]

_NEWS_S = 2.0
_SLOTS, _LARGE = 1, 2


@lru_cache(maxsize=1)
def control_group(world: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:  # noqa: ARG001 - the key
    """The group our own bytes travel on, one for every default group: all ranks call this together."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


class GlooWire(Wire):
    """Exchanges of bytes in which no rank can receive more than it has room for.

    gloo's `all_gather` hands every call to a thread of its own and back; its send and receive do not, so what
    is built of them is two to four times faster.

    Args:
        group: A gloo group that nobody else uses.
        timeout: How long to wait for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._rank, self._size = group.rank(), group.size()
        self._store = group.get_group_store()
        self._broken: SilenceError | None = None
        # Row i holds the slot of the i-th rank after this one.
        memory_ = bytearray(self._size * SLOT)
        self._bytes = memoryview(memory_)
        self._rows = torch.frombuffer(memory_, dtype=torch.uint8).view(self._size, SLOT)
        self._rounds = list(self._dissemination())

    def _dissemination(self) -> list[tuple[list[torch.Tensor], int, list[torch.Tensor], int]]:
        """What to send to whom, and what to receive from whom, doubling what one has in every round."""
        rounds, have = [], 1
        while have < self._size:
            count = min(have, self._size - have)
            to, from_ = (self._rank - have) % self._size, (self._rank + have) % self._size
            rounds.append(([self._rows[:count]], to, [self._rows[have : have + count]], from_))
            have += count
        return rounds

    @override
    def swap(self, slot: torch.Tensor, where: Callable[[], str]) -> torch.Tensor:
        self._check()
        self._bytes[:SLOT] = memory(slot)
        try:
            for sent, to, room, from_ in self._rounds:
                arrival = self._group.recv(room, from_, _SLOTS)
                departure = self._group.send(sent, to, _SLOTS)
                arrival.wait(self._timeout)
                departure.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, where()) from error
        first = (self._size - self._rank) * SLOT
        ordered = bytearray().join((self._bytes[first:], self._bytes[:first]))
        return torch.frombuffer(ordered, dtype=torch.uint8).view(self._size, SLOT)

    @override
    def transfer(
        self,
        outgoing: Mapping[int, torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        where: Callable[[], str],
    ) -> None:
        self._check()
        try:
            works = [self._group.recv([room], rank, _LARGE) for rank, room in incoming.items() if len(room)]
            works += [self._group.send([data], rank, _LARGE) for rank, data in outgoing.items() if len(data)]
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, where()) from error

    def _check(self) -> None:
        if self._broken:
            raise self._broken

    def _lost(self, error: RuntimeError, where: str) -> SilenceError:
        """Tell the others where this rank is, let go of them so that they see, and hear where they are."""
        timed_out = "timed out" in str(error).lower()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._rank}", ("T" if timed_out else "L") + where)
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        news = self._news()
        news.setdefault(self._rank, ("T" if timed_out else "L") + where)
        timed_out = any(text[0] == "T" for text in news.values())
        self._broken = SilenceError({rank: text[1:] for rank, text in news.items()}, timed_out=timed_out)
        return self._broken

    def _news(self) -> dict[int, str]:
        """What the ranks have left in the store; those who can do so do it soon."""
        news: dict[int, str] = {}
        deadline = time.monotonic() + _NEWS_S
        with contextlib.suppress(RuntimeError):
            while len(news) < self._size and time.monotonic() < deadline:
                for rank in range(self._size):
                    if rank not in news and self._store.check([f"{rank}"]):
                        news[rank] = self._store.get(f"{rank}").decode()
                time.sleep(0.05)
        return news
