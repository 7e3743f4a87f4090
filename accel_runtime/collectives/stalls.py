"""Find the ranks that will not join a collective call within seconds.

docs/design/save-alone.md has the reasons.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from accel_runtime.collectives.handshake import RankLostError, StallError
from accel_runtime.collectives.rank_status import NO_ANSWER, RankStatus, StatusService
from accel_runtime.environment.text import decode_text, encode_text
from accel_runtime.foundation.torch_internals import TORCH, PrefixStore, TCPStore
from accel_runtime.observe.call_sites import CallSite, call_site, user_call_sites
from accel_runtime.observe.heartbeat import heartbeat
from accel_runtime.observe.progress import ProgressCounts

__all__ = [
    "MissingRanks",
    "RankMonitor",
    "rank_monitor_of",
]

_REQUEST_INTERVALS_S = 0.25, 2.0
"""Seconds before the first status request to missing ranks, and the longest interval between requests."""
_SILENT_S = 10.0
"""Seconds after which a rank that does not answer is left to the transport, which detects lost connections."""
_POLL_INTERVALS_S = 0.0005, 0.05
IDLE_S = 1.5
"""Seconds for which a rank that waits in a collective must be idle before it counts as blocked."""
BACKWARD_S = 10.0
"""Seconds for which a backward pass must be unchanged; the script's own code may run in it."""
_LONGEST_INTERVAL_S = 10.0
"""The most seconds between two checks of one wait."""
_MAX_NAMED_RANKS = 3
"""The number of ranks named in the first line of a message."""


@dataclass(frozen=True)
class MissingRanks:
    """A call that some ranks make and others can no longer make."""

    site: CallSite
    """The line of the call on this rank."""
    rank: int
    """This rank."""
    first: int
    """The lowest rank that makes the call."""
    missing: Mapping[int, str]
    """The status of each missing rank; empty if an earlier call from the same lines found it."""
    key: str
    """The store key of this call, equal on all ranks that make it."""
    monitor: RankMonitor
    """Sends the outcome of the call between the ranks that make it."""

    @property
    def is_leader(self) -> bool:
        """Return whether this rank acts for all ranks that make the call."""
        return self.rank == self.first


@dataclass(frozen=True)
class CallingGroup:
    """Ranks that make calls without the others, from lines at which others were missing before."""

    name: str
    """The store key of the first such call, unique and equal on all of these ranks."""
    scope: str
    """The operation, or the group without its leader, whose call that was."""
    leader: int
    """The rank that acts for them, without waiting."""


class RankMonitor:
    """Wait for the calls that all ranks should make.

    Args:
        service: Requests the status of ranks.
        timeout_s: Seconds after which a missing rank is an error.
    """

    def __init__(self, service: StatusService, timeout_s: float) -> None:
        self.service = service
        self._store = PrefixStore("calls", service.store)
        self._rank, self._size, self._timeout = service.rank, service.size, timeout_s
        self._calls: dict[str, tuple[ProgressCounts, int]] = {}
        """The counts at the last call of each operation or group, and the number of calls at these counts."""
        self._presence = ""
        self._blocked: dict[int, RankStatus] = {}
        """Ranks that waited for this one when that was last checked."""
        self._waiting: dict[int, RankStatus] = {}
        """The oldest status of each other rank that is still unchanged."""
        self._next_check: tuple[ProgressCounts, float, float] = (ProgressCounts(-1, 0, 0, 0), 0.0, 0.0)
        """The collective for which deadlocks are checked, the earliest time of the next check and the interval after it."""

    def check_for_deadlock(self) -> None:
        """Raise StallError if this rank waits in a collective, and others in torch for this rank.

        This is certain for a backward pass that this rank has not begun, and if all other ranks wait and use no CPU time.
        This rank calls it repeatedly while it waits; the status of the other ranks must not have changed for a time.
        """
        progress = self.service.progress
        counts = progress.counts_before_collective
        if not self._is_check_due(counts):
            return
        statuses = self.service.ask(range(self._size))
        oldest = {
            rank: previous if (previous := self._waiting.get(rank)) == status else status
            for rank, status in statuses.items()
        }
        self._waiting = oldest
        blocked = {
            rank: status.text
            for rank, status in statuses.items()
            if status.in_backward
            and status.time - oldest[rank].time >= BACKWARD_S
            and status.counts.collectives == counts.collectives
            and status.counts.backwards > counts.backwards
        }
        unchanged = {
            rank: status
            for rank, status in statuses.items()
            if status.time - oldest[rank].time >= (BACKWARD_S if status.in_backward else IDLE_S)
        }
        if not blocked and sum(status.is_idle_since(oldest[rank]) for rank, status in unchanged.items()) == (
            self._size - 1
        ):
            blocked = {rank: status.text for rank, status in unchanged.items() if not status.in_handshake}
        if not blocked or progress.inside is None:
            return
        operation, site = progress.inside
        texts = {rank: status.text for rank, status in statuses.items()}
        texts[self._rank] = f"waits in {operation} at {site} {self.service.progress_text}"
        message = (
            f"{operation} at {site} cannot complete: {_name_ranks(blocked)}. Call it on all ranks; to leave a loop on all "
            "ranks at once, use set_trigger() and check_trigger()."
            f"{self._format_statuses(texts)}"
        )
        # The error of a call of torch does not name the ranks.
        self.service.print_on([rank for rank in blocked if statuses[rank].in_torch], f"StallError: {message}")
        raise StallError(message)

    def _is_check_due(self, counts: ProgressCounts) -> bool:
        """Return whether a wait is checked now: often at first, then seldom, since every check takes time of all ranks."""
        now = time.monotonic()
        checked, due, interval = self._next_check
        if checked != counts:
            due, interval = now, 0.0
            self._waiting = {}
        if now < due:
            return False
        self._next_check = (counts, now + interval, min(interval + 1.0, _LONGEST_INTERVAL_S))
        return True

    def describe_wait(self, rank: int) -> str:
        """Return the status of a rank that waits for this one in a collective or a backward pass, otherwise an empty string.

        Call it repeatedly: the status must have been the same in the previous call.
        """
        counts = self.service.counts
        waiting = {
            rank: status
            for rank, status in self.service.ask([rank]).items()
            if not status.ended and (status.in_backward or status.counts.collectives > counts.collectives)
        }
        previous, self._blocked = self._blocked, waiting
        return waiting[rank].text if rank in waiting and previous.get(rank) == waiting[rank] else ""

    def wait(self, operation: str) -> MissingRanks | None:
        """Wait until all ranks make this call and return None, or until a rank is known never to make it.

        If ranks were missing at an earlier call from the same lines, its leader does not wait, and the others wait for the
        leader only. If the store is gone, the next collective names the lost rank.
        """
        counts, site = self.service.counts, call_site()
        group_key = f"group/{hashlib.sha256(repr(user_call_sites()).encode()).hexdigest()}"
        with suppress(dist.DistError):
            group = (
                CallingGroup(**json.loads(self._store.get(group_key)))
                if self._store.check([group_key])
                else None
            )
            if group and group.name == self._name_call(group.scope, counts):  # formed in this very call
                self._count_call(group.scope, counts)
                return MissingRanks(site, self._rank, group.leader, {}, group.name, self)
            # Calls from other lines are other calls, also if they are made at the same counts.
            scope = group.name if group else operation
            key = self._name_call(scope, counts)
            self._count_call(scope, counts)
            self._announce(f"{scope}/{counts.collectives}")
            if group and group.leader == self._rank:
                return MissingRanks(site, self._rank, self._rank, {}, key, self)
            others = [group.leader] if group else [rank for rank in range(self._size) if rank != self._rank]
            missing = self._wait_for_others(operation, site, key, others)
            if missing is not None:
                group = CallingGroup(key, scope, missing.first)
                self._store.set(group_key, json.dumps(asdict(group)))
            elif group:
                return MissingRanks(site, self._rank, group.leader, {}, key, self)
            return missing
        return None

    def publish_outcome(self, missing: MissingRanks, outcome: str) -> None:
        """Publish the outcome of a call to the other ranks that make it, and stop announcing this rank."""
        with suppress(dist.DistError):
            self._store.set(missing.key, encode_text(outcome))  # type: ignore[arg-type]  # bytes are accepted, too
            self._store.delete_key(self._presence)

    def read_outcome(self, missing: MissingRanks) -> str:
        """Return the outcome that the leading rank published."""
        end, pause = time.monotonic() + self._timeout, _POLL_INTERVALS_S[0]
        while not self._store.check([missing.key]):
            if time.monotonic() > end:
                raise StallError(f"rank {missing.first} did not finish the call at {missing.site} in time")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_INTERVALS_S[1])
        self._store.delete_key(self._presence)
        return decode_text(self._store.get(missing.key))

    def _name_call(self, scope: str, counts: ProgressCounts) -> str:
        """Return the store key of the next call of an operation or group, equal on all ranks that make it."""
        return f"{scope}/{'-'.join(map(str, counts))}/{self._read_calls(scope, counts)}"

    def _count_call(self, scope: str, counts: ProgressCounts) -> None:
        self._calls[scope] = counts, self._read_calls(scope, counts) + 1

    def _read_calls(self, scope: str, counts: ProgressCounts) -> int:
        """Return the number of calls of an operation or group at these counts."""
        last, calls = self._calls.get(scope, (counts, 0))
        return calls if last == counts else 0

    def _announce(self, call: str) -> None:
        """Let the others see that this rank makes a call, and no earlier one."""
        presence = f"{call}/rank {self._rank}"
        if self._presence and presence != self._presence:
            self._store.delete_key(self._presence)
        self._presence = presence
        self._store.set(presence, "here")

    def _wait_for_others(
        self, operation: str, site: CallSite, key: str, others: Sequence[int]
    ) -> MissingRanks | None:
        """Wait until the other ranks make a call and return None, or until one of them is known never to make it."""
        counts, call = self.service.counts, self._presence.removesuffix(f"/rank {self._rank}")
        started, pause, interval = time.monotonic(), _POLL_INTERVALS_S[0], _REQUEST_INTERVALS_S[0]
        last_request, last_answer, texts = started, started, dict[int, str]()
        while not self._store.check([f"{call}/rank {rank}" for rank in others]):
            now = time.monotonic()
            present = [rank for rank in range(self._size) if self._store.check([f"{call}/rank {rank}"])]
            if self._store.check([f"{key}/leader"]):
                return MissingRanks(site, self._rank, int(self._store.get(f"{key}/leader")), {}, key, self)
            if now - last_request > interval:
                missing = [rank for rank in others if rank not in present]
                statuses = self.service.ask(missing)
                texts = {rank: status.text for rank, status in statuses.items()}
                if any(status.is_beyond(counts) for status in statuses.values()):
                    # Several ranks may find this at once, and not all of them present.
                    leader = self._store.compare_set(f"{key}/leader", "", str(min(present)))
                    return MissingRanks(site, self._rank, int(leader), texts, key, self)
                last_request, interval = time.monotonic(), min(2 * interval, _REQUEST_INTERVALS_S[1])
                last_answer = last_request if len(statuses) == len(missing) else last_answer
                if last_request - last_answer > _SILENT_S:
                    return None
            if now - started > self._timeout:
                statuses_of_all = dict.fromkeys(range(self._size), "is missing") | texts
                statuses_of_all |= dict.fromkeys(present, f"waits in {operation}")
                ranks = ", ".join(str(rank) for rank in others if rank not in present)
                lines = "".join(f"\n  rank {rank}: {text}" for rank, text in statuses_of_all.items())
                raise StallError(f"rank {ranks} did not come to {operation} at {site} in time:{lines}")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_INTERVALS_S[1])
        return None

    def explain_error(self, error: RuntimeError, operation: str) -> RuntimeError:
        """Return an error with the status of all ranks if `error` comes from a torch collective, else `error`."""
        text, service = str(error), self.service
        if not (isinstance(error, dist.DistError) or "gloo" in text):
            return error
        site, counts = call_site(TORCH), service.counts
        statuses = service.ask(range(service.size))
        texts = {rank: status.text for rank, status in statuses.items()}
        texts[service.rank] = f"is in {operation} at {site} {service.progress_text}"
        others = [rank for rank in range(service.size) if rank != service.rank]
        suspects = [rank for rank in others if rank not in statuses or statuses[rank].counts != counts]
        suspects = suspects or [
            rank for rank in others if statuses[rank].ended or not statuses[rank].in_backward
        ]
        first = _name_ranks({rank: texts.get(rank, NO_ANSWER) for rank in suspects})
        error_type = StallError if "timed out" in text.lower() else RankLostError
        lines = self._format_statuses(texts)
        return error_type(f"{operation} at {site} cannot complete{': ' if first else ''}{first}{lines}")

    def _format_statuses(self, texts: Mapping[int, str]) -> str:
        return "".join(f"\n  rank {rank}: {texts.get(rank, NO_ANSWER)}" for rank in range(self._size))


def _name_ranks(texts: Mapping[int, str]) -> str:
    """Return the texts of the first few ranks in one line."""
    return "; ".join(f"rank {rank} {texts[rank]}" for rank in list(texts)[:_MAX_NAMED_RANKS])


@lru_cache(maxsize=1)
def rank_monitor_of(
    world: dist.ProcessGroup,  # noqa: ARG001 - the key
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
) -> RankMonitor | None:
    """Return the monitor of a default process group, or None if it is not supported; collective.

    Only a TCPStore can wait in one thread while another uses it.
    """
    progress, underlying = heartbeat(), store
    while isinstance(underlying, PrefixStore):
        underlying = underlying.underlying_store
    if progress is None or size == 1 or not isinstance(underlying, TCPStore):
        return None
    return RankMonitor(StatusService(store, rank, size, progress), timeout.total_seconds())
