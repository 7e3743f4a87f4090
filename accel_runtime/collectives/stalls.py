"""Find the ranks that will not join a collective call within seconds.

docs/design/save-alone.md has the reasons.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_runtime.collectives.handshake import RankLostError, StallError
from accel_runtime.environment.text import decode_text, encode_text
from accel_runtime.foundation.heartbeat import (
    TORCH,
    CallSite,
    Progress,
    ProgressCounts,
    call_site,
    call_site_of_frame,
    heartbeat,
    user_call_sites,
)
from accel_runtime.foundation.torch_internals import PrefixStore, TCPStore

__all__ = [
    "MissingRanks",
    "RankMonitor",
    "StatusService",
    "rank_monitor_of",
]

_REQUEST_INTERVALS_S = 0.25, 2.0
"""Seconds before the first status request to missing ranks, and the longest interval between requests."""
_SILENT_S = 10.0
"""Seconds after which a rank that does not answer is left to the transport, which detects lost connections."""
_POLL_INTERVALS_S = 0.0005, 0.05


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
        self._leaders: dict[tuple[CallSite, ...], int] = {}
        self._last: tuple[str, ProgressCounts, int] = ("", ProgressCounts(0, 0, 0, 0), 0)
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

        If ranks were missing at an earlier call from the same lines, its leader does not wait. If the store is gone, the next
        collective names the lost rank.
        """
        counts, stack, site = self.service.counts, user_call_sites(), call_site()
        repetition = self._last[2] + 1 if self._last[:2] == (operation, counts) else 0
        self._last = (operation, counts, repetition)
        key = f"{operation}/{'-'.join(map(str, counts))}/{repetition}"
        with suppress(dist.DistError):
            presence = self._presence_key(operation, counts, self._rank)
            if self._presence and presence != self._presence:
                self._store.delete_key(self._presence)
            self._presence = presence
            self._store.set(presence, "here")
            if self._leaders.get(stack) == self._rank:
                return MissingRanks(site, self._rank, self._rank, {}, key, self)
            missing = self._wait_for_all(operation, counts, site, key)
            if missing is not None:
                self._leaders[stack] = missing.first
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

    def _wait_for_all(
        self, operation: str, counts: ProgressCounts, site: CallSite, key: str
    ) -> MissingRanks | None:
        presence_keys = {
            rank: self._presence_key(operation, counts, rank)
            for rank in range(self._size)
            if rank != self._rank
        }
        started, pause, interval = time.monotonic(), _POLL_INTERVALS_S[0], _REQUEST_INTERVALS_S[0]
        last_request, last_answer, texts = started, started, dict[int, str]()
        while not self._store.check(list(presence_keys.values())):
            now = time.monotonic()
            present = [self._rank, *(rank for rank, key in presence_keys.items() if self._store.check([key]))]
            if self._store.check([key]):
                others = [rank for rank in present if rank != self._rank]
                return MissingRanks(site, self._rank, min(others, default=-1), {}, key, self)
            if now - last_request > interval:
                missing = [rank for rank in presence_keys if rank not in present]
                statuses = self.service.ask(missing)
                texts = {rank: status.text for rank, status in statuses.items()}
                if any(status.is_beyond(counts) for status in statuses.values()):
                    return MissingRanks(site, self._rank, min(present), texts, key, self)
                last_request, interval = time.monotonic(), min(2 * interval, _REQUEST_INTERVALS_S[1])
                last_answer = last_request if len(statuses) == len(missing) else last_answer
                if last_request - last_answer > _SILENT_S:
                    return None
            if now - started > self._timeout:
                statuses_of_all = dict.fromkeys(range(self._size), "is missing") | texts
                statuses_of_all |= dict.fromkeys(present, f"waits in {operation}")
                ranks = ", ".join(str(rank) for rank in range(self._size) if rank not in present)
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
        first = _name_ranks({rank: texts.get(rank, _NO_ANSWER) for rank in suspects})
        error_type = StallError if "timed out" in text.lower() else RankLostError
        lines = self._format_statuses(texts)
        return error_type(f"{operation} at {site} cannot complete{': ' if first else ''}{first}{lines}")

    def _format_statuses(self, texts: Mapping[int, str]) -> str:
        return "".join(f"\n  rank {rank}: {texts.get(rank, _NO_ANSWER)}" for rank in range(self._size))

    @staticmethod
    def _presence_key(operation: str, counts: ProgressCounts, rank: int) -> str:
        # Every rank has entered the same number of collectives; other counts may differ after uneven loops.
        return f"{operation}/{counts.collectives}/rank {rank}"


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


SAMPLE_INTERVAL_S = 10.0
"""Seconds between two samples of the status of this rank."""
REPORT_WAIT_S = 30.0
"""Seconds after which a rank that waits for others says so."""
IDLE_S = 1.5
"""Seconds for which a rank that waits in a collective must be idle before it counts as blocked."""
BACKWARD_S = 10.0
"""Seconds for which a backward pass must be unchanged; the script's own code may run in it."""
_LONGEST_INTERVAL_S = 10.0
"""The most seconds between two checks of one wait."""
PATIENCE_S = 2.0
"""Seconds in which a rank answers, unless its threads wait for code that holds the GIL."""
_PAUSE_S = 0.005
_DAY = timedelta(days=1)
_LEAVE, _PRINT = "leave ", "print "
_STOP_TIMEOUT_S = 0.5
_MAX_NAMED_RANKS = 3
"""The number of ranks named in the first line of a message."""
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")} | {"<frozen "}
)
"""Starts of the file names of libraries; a status names the line of the user's code that called them."""
_DDP = f"{TORCH}nn/parallel/distributed.py"
_OWN_WORK = (f"{TORCH}distributed/checkpoint/", f"{TORCH}distributed/elastic/")
"""Files of torch that read and write files, and wait for these rather than for other ranks."""
_COLLECTIVES = (f"{TORCH}distributed/", _DDP, f"{Path(__file__).parents[1] / 'backends' / 'distributed.py'}")
"""Files with functions that wait for other ranks."""
_IDLE_SHARE = 0.1
"""The most CPU time of a process that waits, as a share of the time."""
_NO_ANSWER = "does not answer: its process has ended, or runs code that holds the GIL"


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank."""

    counts: ProgressCounts
    """Progress counts since the last collective of accel."""
    text: str
    """The status as text: `is at train.py:12 (<module>) after 3 steps`."""
    in_backward: bool = False
    """True in a backward pass."""
    in_handshake: bool = False
    """True in a collective of accel, before all ranks have joined it."""
    in_torch: bool = False
    """True in a function of torch that communicates (a collective, or DDP before a forward pass), or in a wait for a store key."""
    ended: bool = False
    """True if the script has ended."""
    time: float = field(default=0.0, compare=False)
    """Monotonic clock of the rank, in seconds."""
    cpu_time: float = field(default=0.0, compare=False)
    """Seconds of CPU time that the process has used."""

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        """Parse the fields of a status."""
        fields = json.loads(text)
        return cls(**fields | {"counts": ProgressCounts(*fields["counts"])})

    @property
    def waits(self) -> bool:
        """True if the rank may wait for others."""
        return self.in_backward or self.in_handshake or self.in_torch

    def is_idle_since(self, previous: RankStatus) -> bool:
        """Return whether the rank waits, and has used no CPU time since a previous, equal status."""
        return self.waits and self.cpu_time - previous.cpu_time < _IDLE_SHARE * (self.time - previous.time)

    def is_beyond(self, counts: ProgressCounts) -> bool:
        """Return whether the rank can no longer reach the point of a rank with these counts."""
        return self.ended or self.counts.is_beyond(counts)


class StatusService:
    """Request the status of other ranks, and answer their requests in a thread.

    Args:
        store: A store of all ranks; its `clone` may wait for a key while others use the store.
        rank: The rank of this process.
        size: The number of ranks.
        progress: The progress of this process.
    """

    def __init__(self, store: Any, rank: int, size: int, progress: Progress) -> None:
        # A group that was made anew with the same store has a service of its own.
        generation = store.add(f"accel/status/{rank}", 1)
        self.store: Any = PrefixStore(f"accel/status/{generation}", store)
        """Of this service and its counterparts on the other ranks."""
        self.rank, self.size, self.progress = rank, size, progress
        self._main = threading.main_thread().ident
        self._closed, self._pid = False, os.getpid()
        self._host_status: RankStatus | None = None
        """Where the rank was whose process had the store, once that has ended."""
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._answer_requests, name="accel-status", daemon=True)
        self._thread.start()
        # A wait in the store cannot be short: torch prints a warning when it times out.
        self._watch = threading.Thread(target=self._watch_waits, name="accel-waits", daemon=True)
        self._watch.start()
        # A thread that is woken while the interpreter ends would abort the process: docs/design/leaving-gloo.md.
        atexit.register(self.close)

    @property
    def counts(self) -> ProgressCounts:
        """The progress counts of this rank."""
        return self.progress.counts

    def ask(self, ranks: Iterable[int], patience_s: float = PATIENCE_S) -> dict[int, RankStatus]:
        """Return the status of other ranks, of those that answer in time."""
        if self._host_status is not None:
            return {0: self._host_status}
        statuses: dict[int, RankStatus] = {}
        with suppress(RuntimeError):
            pending = {rank: self._request(rank) for rank in ranks if rank != self.rank}
            end = time.monotonic() + patience_s
            while pending and time.monotonic() < end:
                for rank, key in list(pending.items()):
                    if text := self._read(f"left/{rank}") or self._read(key):
                        statuses[rank] = RankStatus.from_json(text)
                        self.store.delete_key(key)
                        del pending[rank]
                if pending:
                    time.sleep(_PAUSE_S)
        return statuses

    def print_on(self, ranks: Iterable[int], text: str) -> None:
        """Print a text on other ranks; only the first of several ranks that do so in one wait has an effect."""
        number = self.progress.counts.collectives
        with suppress(RuntimeError):
            if self.store.add(f"stall {number}", 1) == 1:
                for rank in ranks:
                    self._request(rank, f"{_PRINT}{text}")

    def close(self) -> None:
        """Publish that this rank has ended, and stop the thread that answers."""
        if self._closed or os.getpid() != self._pid:  # a process that the script has forked ends by itself
            return
        self._closed = True
        self._has_left.set()
        self._watch.join(PATIENCE_S)
        if self._host_status is not None:
            return
        with suppress(RuntimeError):
            how = "with an error" if self.progress.has_failed else "normally"
            status = RankStatus(self.counts, f"ended {how} {self.progress_text}", ended=True)
            last = json.dumps(asdict(status))
            self.store.set(f"left/{self.rank}", encode_text(last))
            if self.rank == 0 and not dist.is_torchelastic_launched():
                self._stop_other_threads(last)
            self._request(self.rank, _LEAVE)
            self._thread.join(PATIENCE_S)

    def _stop_other_threads(self, last: str) -> None:
        """Stop the threads of other ranks, which would print a C++ stack when the store ends with this process."""
        others = [rank for rank in range(self.size) if rank and not self.store.check([f"left/{rank}"])]
        keys = [self._request(rank, f"{_LEAVE}{last}").replace("answer", "ask", 1) for rank in others]
        end = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < end and any(self.store.check([key]) for key in keys):
            time.sleep(_PAUSE_S)

    def _request(self, rank: int, word: str = "status") -> str:
        """Request the status of one rank; return the key of its answer."""
        number = self.store.add(f"asked/{rank}", 1)
        self.store.set(f"ask/{rank}/{number}", word)
        return f"answer/{rank}/{number}"

    def _read(self, key: str) -> str | None:
        return decode_text(self.store.get(key)) if self.store.check([key]) else None

    def _answer_requests(self) -> None:
        """Answer requests until this rank leaves or the store is gone."""
        number = 1
        with suppress(RuntimeError):
            store = self.store.clone()
            while True:
                key = f"ask/{self.rank}/{number}"
                try:
                    store.wait([key], _DAY)
                except dist.DistStoreError:
                    continue
                word = decode_text(store.get(key))
                store.delete_key(key)
                if word.startswith(_PRINT):
                    _print(word.removeprefix(_PRINT))
                    number += 1
                    continue
                if word.startswith(_LEAVE):
                    if status := word.removeprefix(_LEAVE):
                        self._host_status = RankStatus.from_json(status)
                    return
                store.set(f"answer/{self.rank}/{number}", json.dumps(asdict(self._status())))
                number += 1

    def _watch_waits(self) -> None:
        """Report, once for each line, that this rank has waited long for others."""
        sampled, since = self._status(), 0.0
        while not self._has_left.wait(SAMPLE_INTERVAL_S):
            status = self._status()
            if status != sampled or not status.is_idle_since(sampled):
                sampled, since = status, status.time
            elif status.time - since >= REPORT_WAIT_S:
                since = math.inf  # not again in this wait
                with suppress(RuntimeError):
                    self._report_wait(status)

    def _report_wait(self, status: RankStatus) -> None:
        """Print the lines of all ranks, on one of those that wait."""
        number, site = status.counts.collectives - status.in_handshake, status.text.partition(" after ")[0]
        if self.store.add(f"wait {number}", 1) > 1 or self.store.add(f"wait {site}", 1) > 1:
            return
        texts = {rank: other.text for rank, other in self.ask(range(self.size)).items()} | {
            self.rank: status.text
        }
        lines = "".join(f"\n  rank {rank}: {texts.get(rank, _NO_ANSWER)}" for rank in range(self.size))
        text = f"rank {self.rank} has waited {REPORT_WAIT_S:.0f} s for other ranks:{lines}"
        _print(text)
        if self.rank and _is_log(sys.stderr):
            self._request(0, f"{_PRINT}{text}")

    def _status(self) -> RankStatus:
        """Return the status of this rank's main thread."""
        progress = self.progress
        counts, inside, in_backward, in_torch = progress.counts, progress.inside, False, ""
        if progress.in_store is not None:
            operation, site = progress.in_store
            location, in_torch = f"is in {operation} at {site}", operation
        elif inside is not None:
            location = f"waits in {inside[0]} at {inside[1]}"
        else:
            frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - documented, for such uses
            in_backward, in_torch = _is_in_backward(frame), _get_torch_collective(frame)
            site = call_site_of_frame(frame, TORCH, *_LIBRARIES)
            if not site.line:  # the script itself is installed, as a module of a package
                site = call_site_of_frame(frame, TORCH)
            operation = "backward()" if in_backward else in_torch
            location = f"is {f'in {operation} ' if operation else ''}at {site}"
        return RankStatus(
            counts,
            f"{location} {self.progress_text}",
            in_backward=in_backward,
            in_handshake=inside is not None,
            in_torch=bool(in_torch),
            time=time.monotonic(),
            cpu_time=time.process_time(),
        )

    @property
    def progress_text(self) -> str:
        """The progress of this rank as text."""
        steps, batches = self.progress.steps, self.progress.batches
        return (
            f"after {steps} step{'' if steps == 1 else 's'} and {batches} batch{'' if batches == 1 else 'es'}"
        )


def _get_torch_collective(frame: Any) -> str:
    """Return the function of torch that communicates, if it is the innermost one of a stack; else an empty string.

    Not a function around it: wrappers of modules call the model.
    """
    file = "" if frame is None else frame.f_code.co_filename
    if not file.startswith(_COLLECTIVES) or file.startswith(_OWN_WORK):
        return ""
    if frame.f_code.co_filename == _DDP:
        return "the forward pass"
    name = ""
    while frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVES):
        # `wrapper` is that of torch's decorators.
        name = name if name and frame.f_code.co_name == "wrapper" else f"{frame.f_code.co_name}()"
        frame = frame.f_back
    return name


def _print(text: str) -> None:
    if sys.stderr is not None:
        print(f"accel: {text}", file=sys.stderr, flush=True)  # noqa: T201 - for the terminal, whatever the logging


def _is_log(stream: Any) -> bool:
    """Return whether a stream is a file, such as the log of a rank that is not shown."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):
        return False


def _is_in_backward(frame: Any) -> bool:
    """Return whether a stack is inside of a torch backward pass."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.startswith(TORCH):
            return True
        frame = frame.f_back
    return False
