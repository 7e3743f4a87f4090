"""Report where each rank is, to the other ranks and to the user.

docs/design/save-alone.md has the reasons.
"""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_runtime.environment.text import decode_text, encode_text, print_note
from accel_runtime.foundation.torch_internals import TORCH, PrefixStore
from accel_runtime.observe import torch_hooks
from accel_runtime.observe.call_sites import call_site_of_frame
from accel_runtime.observe.progress import Progress, ProgressCounts

__all__ = ["NO_ANSWER", "RankStatus", "StatusService"]

NO_ANSWER = "does not answer: its process has ended, or runs code that holds the GIL"
SAMPLE_INTERVAL_S = 10.0
"""Seconds between two samples of the status of this rank."""
REPORT_WAIT_S = 30.0
"""Seconds after which a rank that waits for others says so."""
PATIENCE_S = 2.0
"""Seconds in which a rank answers, unless its threads wait for code that holds the GIL."""
_PAUSE_S = 0.005
_DAY = timedelta(days=1)
_LEAVE, _PRINT = "leave ", "print "
_STOP_TIMEOUT_S = 0.5
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
        atexit.unregister(self.close)
        self._has_left.set()
        # Without a time-out: a thread that is scheduled only after the interpreter has ended would abort the process.
        self._watch.join()
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
            self._thread.join()

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
                    print_note(word.removeprefix(_PRINT))
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
        lines = "".join(f"\n  rank {rank}: {texts.get(rank, NO_ANSWER)}" for rank in range(self.size))
        text = f"rank {self.rank} has waited {REPORT_WAIT_S:.0f} s for other ranks:{lines}"
        print_note(text)
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
            with _pause_garbage_collection():
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


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause it while the stack of another thread is read.

    CPython 3.11 makes the object of a frame when it is asked for it, and may collect garbage then. A finalizer lets the other
    thread run, and the frame is gone when the object gets it: the process crashes. Later versions collect between
    instructions only.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _get_torch_collective(frame: Any) -> str:
    """Return the function of torch that communicates, if it is the innermost one of a stack; else an empty string.

    Not a function around it: wrappers of modules call the model.
    """
    while frame is not None and frame.f_code.co_filename == torch_hooks.__file__:  # it measures the wait
        frame = frame.f_back
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
