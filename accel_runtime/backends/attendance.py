"""Which ranks come to a call that all ranks should make: those that do not are found within seconds.

docs/design/save-alone.md has the reasons.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from accel_runtime.backends.status import StatusService
from accel_runtime.exchange.agreement import StallError
from accel_runtime.exchange.callsite import CallSite, call_site, user_stack
from accel_runtime.heartbeat import Counts, heartbeat

__all__ = ["Absence", "Attendance", "attendance_of"]

_ASK_S = 0.25, 2.0
"""Seconds until a rank is first asked where ranks are that have not come, and the longest time between two such looks."""
_SILENT_S = 10.0
"""Seconds after which a rank that does not answer is left to the transport, which sees lost connections."""
_PAUSES_S = 0.0005, 0.05


@dataclass(frozen=True)
class Absence:
    """A call that some ranks make, and others cannot make any more."""

    site: CallSite
    """The line of the call on this rank."""
    rank: int
    """This rank."""
    first: int
    """The lowest rank that makes the call."""
    missing: Mapping[int, str]
    """Where the ranks are that do not make it; empty if that was found at an earlier call from the same lines."""
    key: str
    """The name of this call in the store, equal on all ranks that make it."""

    @property
    def leads(self) -> bool:
        """Whether this rank does what is to be done, for all that make the call."""
        return self.rank == self.first


class Attendance:
    """The calls of one rank that all ranks should make.

    Args:
        service: Asks ranks where they are.
        rank: Of this process.
        size: Number of ranks.
        timeout_s: Seconds after which a rank that has not come is an error.
    """

    def __init__(self, service: StatusService, rank: int, size: int, timeout_s: float) -> None:
        self.service = service
        self._store = PrefixStore("calls", service.store)
        self._rank, self._size, self._timeout = rank, size, timeout_s
        self._known: dict[tuple[CallSite, ...], int] = {}
        self._last: tuple[str, Counts, int] = ("", Counts(0, 0, 0, 0), 0)
        self._presence = ""

    def wait(self, operation: str) -> Absence | None:
        """Wait until all ranks make this call, or one is known never to make it.

        A call from lines at which some ranks were missing before is not waited for by the rank that led it then.

        Returns:
            None if all ranks make it: they may go on to a collective.

        Raises:
            StallError: A rank did not come in time, and may still come.
        """
        counts, stack, site = self.service.counts, user_stack(), call_site()
        repeats = self._last[2] + 1 if self._last[:2] == (operation, counts) else 0
        self._last = (operation, counts, repeats)
        done = f"{operation}/{'-'.join(map(str, counts))}/{repeats}"
        self._enter(operation, counts)
        if self._known.get(stack) == self._rank:
            return Absence(site, self._rank, self._rank, {}, done)
        absence = self._look(operation, counts, site, done)
        if absence is not None:
            self._known[stack] = absence.first
        return absence

    def finish(self, absence: Absence, outcome: str) -> None:
        """Tell the other ranks that make this call what has come of it, and take back that this one waits."""
        self._store.set(absence.key, outcome)
        self._store.delete_key(self._presence)

    def outcome(self, absence: Absence) -> str:
        """Return what the first rank that makes the call has told.

        Raises:
            StallError: It has not in time.
        """
        end, pause = time.monotonic() + self._timeout, _PAUSES_S[0]
        while not self._store.check([absence.key]):
            if time.monotonic() > end:
                raise StallError(f"rank {absence.first} did not finish the call at {absence.site} in time")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
        self._store.delete_key(self._presence)
        return str(self._store.get(absence.key).decode())

    def _enter(self, operation: str, counts: Counts) -> None:
        """Leave word that this rank is here; what it left the last time is of no use to others any more."""
        presence = self._key(operation, counts, self._rank)
        if self._presence and presence != self._presence:
            self._store.delete_key(self._presence)
        self._presence = presence
        self._store.set(presence, "here")

    def _look(self, operation: str, counts: Counts, site: CallSite, done: str) -> Absence | None:
        keys = {rank: self._key(operation, counts, rank) for rank in range(self._size) if rank != self._rank}
        begun, pause, patience = time.monotonic(), _PAUSES_S[0], _ASK_S[0]
        asked, heard, told = begun, begun, dict[int, str]()
        while not self._store.check(list(keys.values())):
            now = time.monotonic()
            present = [self._rank, *(rank for rank, key in keys.items() if self._store.check([key]))]
            if self._store.check([done]):
                others = [rank for rank in present if rank != self._rank]
                return Absence(site, self._rank, min(others, default=-1), {}, done)
            if now - asked > patience:
                missing = [rank for rank in keys if rank not in present]
                found = self.service.ask(missing)
                told = {rank: status.text for rank, status in found.items()}
                if any(status.is_beyond(counts) for status in found.values()):
                    return Absence(site, self._rank, min(present), told, done)
                asked, patience = time.monotonic(), min(2 * patience, _ASK_S[1])
                heard = asked if len(found) == len(missing) else heard
                if asked - heard > _SILENT_S:
                    return None
            if now - begun > self._timeout:
                raise self._stalled(operation, site, present, told)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
        return None

    def _stalled(
        self, operation: str, site: CallSite, present: list[int], told: Mapping[int, str]
    ) -> StallError:
        missing = [rank for rank in range(self._size) if rank not in present]
        lines = "".join(
            f"\n  rank {rank}: "
            + (told.get(rank, "is missing") if rank in missing else f"waits in {operation}")
            for rank in range(self._size)
        )
        listed = ", ".join(map(str, missing))
        return StallError(f"rank {listed} did not come to {operation} at {site} in time:{lines}")

    @staticmethod
    def _key(operation: str, counts: Counts, rank: int) -> str:
        # All ranks have entered the same number of collectives; other counts may differ after uneven loops.
        return f"{operation}/{counts.collectives}/rank {rank}"


@lru_cache(maxsize=1)
def attendance_of(
    world: dist.ProcessGroup,  # noqa: ARG001 - the key
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
) -> Attendance | None:
    """Return the attendance of a default process group; None where it cannot be told: all ranks call this together.

    Args:
        world: The default group.
        store: Through which its ranks met. Others than TCPStore cannot wait in one thread and be used in another.
        rank: Of this process.
        size: Number of ranks.
        timeout: How long to wait for other ranks.
    """
    progress, underlying = heartbeat(), store
    while isinstance(underlying, PrefixStore):
        underlying = underlying.underlying_store
    if progress is None or size == 1 or not isinstance(underlying, TCPStore):
        return None
    service = StatusService(store, rank, size, progress)
    return Attendance(service, rank, size, timeout.total_seconds())
