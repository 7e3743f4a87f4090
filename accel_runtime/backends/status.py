"""Where each rank is: asked through the store, answered by a thread that sleeps in the store until it is asked.

docs/design/save-alone.md has the reasons.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from accel_runtime.exchange.agreement import RankLostError, StallError
from accel_runtime.exchange.callsite import TORCH, call_site, site_of
from accel_runtime.heartbeat import Counts, Progress

__all__ = ["PATIENCE_S", "RankStatus", "StatusService", "explained"]

PATIENCE_S = 2.0
"""Seconds in which a rank answers, unless its threads have to wait for code that keeps the interpreter to itself."""
_PAUSE_S = 0.005
_DAY = timedelta(days=1)
_LEAVE = "leave "
_DISMISS_S = 0.5
_NAMED = 3
"""Ranks that are named in the first line of a message."""
_SILENT = "does not answer: its process has ended, or runs code that keeps the interpreter to itself"


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is."""

    counts: Counts
    """How far it has come since the last collective of accel."""
    text: str
    """The same in words: `is at train.py:12 (<module>) after 3 steps`."""
    in_backward: bool = False
    """Whether it is in a backward pass."""
    ended: bool = False
    """Whether its script has ended."""

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        """Return what `to_json` made."""
        told = json.loads(text)
        return cls(**told | {"counts": Counts(*told["counts"])})

    def is_beyond(self, counts: Counts) -> bool:
        """Return whether the rank cannot come any more to where another one with these counts is."""
        return self.ended or self.counts.is_beyond(counts)


class StatusService:
    """The side of one rank: asks others where they are, and answers them from a thread.

    Args:
        store: A store that all ranks share; its `clone` may wait for a key while others use the store.
        rank: Of this process.
        size: Number of ranks.
        progress: Of this process.
    """

    def __init__(self, store: Any, rank: int, size: int, progress: Progress) -> None:
        # A group that was made anew with the same store has a service of its own.
        generation = store.add(f"accel/status/{rank}", 1)
        self.store: Any = PrefixStore(f"accel/status/{generation}", store)
        """Of this service and its counterparts on the other ranks."""
        self.rank, self.size, self._progress = rank, size, progress
        self._main = threading.main_thread().ident
        self._left, self._pid = False, os.getpid()
        self._host: RankStatus | None = None
        """Where the rank was whose process had the store, once that has ended."""
        self._thread = threading.Thread(target=self._answer, name="accel-status", daemon=True)
        self._thread.start()
        # A thread that is woken while the interpreter ends would abort the process: docs/design/leaving-gloo.md.
        atexit.register(self.leave)

    @property
    def counts(self) -> Counts:
        """How far this rank is."""
        return self._progress.counts

    def ask(self, ranks: Iterable[int], patience_s: float = PATIENCE_S) -> dict[int, RankStatus]:
        """Return where other ranks are, without those that do not answer in time."""
        if self._host is not None:
            return {0: self._host}
        found: dict[int, RankStatus] = {}
        with suppress(RuntimeError):
            waiting = {rank: self._request(rank) for rank in ranks if rank != self.rank}
            end = time.monotonic() + patience_s
            while waiting and time.monotonic() < end:
                for rank, key in list(waiting.items()):
                    if text := self._read(f"left/{rank}") or self._read(key):
                        found[rank] = RankStatus.from_json(text)
                        self.store.delete_key(key)
                        del waiting[rank]
                if waiting:
                    time.sleep(_PAUSE_S)
        return found

    def leave(self) -> None:
        """Tell the others that this rank has ended, and end the thread that answers."""
        if self._left or os.getpid() != self._pid:  # a process that the script has forked ends by itself
            return
        self._left = True
        if self._host is not None:
            return
        with suppress(RuntimeError):
            last = self._last_status().to_json()
            self.store.set(f"left/{self.rank}", last)
            if self.rank == 0 and not dist.is_torchelastic_launched():
                self._dismiss(last)
            self._request(self.rank, _LEAVE)
            self._thread.join(PATIENCE_S)

    def _dismiss(self, last: str) -> None:
        """End the threads of other ranks: the store ends with this process, and each would write a stack of C++ then."""
        others = [rank for rank in range(self.size) if rank and not self.store.check([f"left/{rank}"])]
        keys = [self._request(rank, f"{_LEAVE}{last}").replace("answer", "ask", 1) for rank in others]
        end = time.monotonic() + _DISMISS_S
        while time.monotonic() < end and any(self.store.check([key]) for key in keys):
            time.sleep(_PAUSE_S)

    def _request(self, rank: int, word: str = "status") -> str:
        """Ask one rank; return the key of its answer."""
        number = self.store.add(f"asked/{rank}", 1)
        self.store.set(f"ask/{rank}/{number}", word)
        return f"answer/{rank}/{number}"

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _answer(self) -> None:
        """Answer until this rank leaves, or the store is gone."""
        number = 1
        with suppress(RuntimeError):
            store = self.store.clone()
            while True:
                key = f"ask/{self.rank}/{number}"
                if not _wait(store, key):
                    continue
                word = store.get(key).decode()
                store.delete_key(key)
                if word.startswith(_LEAVE):
                    if status := word.removeprefix(_LEAVE):
                        self._host = RankStatus.from_json(status)
                    return
                store.set(f"answer/{self.rank}/{number}", self._status().to_json())
                number += 1

    def _status(self) -> RankStatus:
        """Return where the main thread of this process is."""
        progress = self._progress
        counts, inside, in_backward = progress.counts, progress.inside, False
        if inside is not None:
            where = f"waits in {inside[0]} at {inside[1]}"
        else:
            frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - documented, for such uses
            in_backward = _is_in_backward(frame)
            where = f"is {'in backward() ' if in_backward else ''}at {site_of(frame, TORCH)}"
        return RankStatus(counts, f"{where} {self.told}", in_backward)

    def _last_status(self) -> RankStatus:
        """Return what is told once the script has ended."""
        how = "with an error" if self._progress.has_failed else "normally"
        return RankStatus(self.counts, f"ended {how} {self.told}", ended=True)

    @property
    def told(self) -> str:
        """How far this rank is, in words."""
        steps, batches = self._progress.steps, self._progress.batches
        return (
            f"after {steps} step{'' if steps == 1 else 's'} and {batches} batch{'' if batches == 1 else 'es'}"
        )


def _wait(store: Any, key: str) -> bool:
    """Return once a key is there, or False after a day."""
    try:
        store.wait([key], _DAY)
    except dist.DistStoreError:
        return False
    return True


def _is_in_backward(frame: Any) -> bool:
    """Return whether a stack is inside of a backward pass of torch."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.startswith(TORCH):
            return True
        frame = frame.f_back
    return False


def explained(error: RuntimeError, operation: str, service: StatusService) -> RuntimeError:
    """Return an error that tells where all ranks are, if this one comes from a collective of torch; else the same.

    Args:
        error: Raised by torch.
        operation: The call that raised it.
        service: Asks the others.
    """
    text = str(error)
    if not (isinstance(error, dist.DistError) or "gloo" in text):
        return error
    site, counts = call_site(TORCH), service.counts
    found = service.ask(range(service.size))
    told = {rank: status.text for rank, status in found.items()}
    told[service.rank] = f"is in {operation} at {site} {service.told}"
    others = [rank for rank in range(service.size) if rank != service.rank]
    odd = [rank for rank in others if rank not in found or found[rank].counts != counts]
    odd = odd or [rank for rank in others if found[rank].ended or not found[rank].in_backward]
    first = "; ".join(f"rank {rank} {told.get(rank, _SILENT)}" for rank in odd[:_NAMED])
    lines = "".join(f"\n  rank {rank}: {told.get(rank, _SILENT)}" for rank in range(service.size))
    kind = StallError if "timed out" in text.lower() else RankLostError
    return kind(f"{operation} at {site} cannot complete{': ' if first else ''}{first}{lines}")
