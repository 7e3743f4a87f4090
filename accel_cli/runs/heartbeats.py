"""Heartbeats of ranks: the file that `accel_runtime` maps into its memory, read while it changes."""

from __future__ import annotations

import re
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, overload

from typing_extensions import override

from accel_cli.runs.run_files import MAX_PID, open_file
from accel_runtime.environment import settings as env
from accel_runtime.environment.text import decode_text

__all__ = ["Beat", "Totals", "simplify_operation"]


_NUMBERS = struct.Struct(f"={len(env.BEAT_NUMBERS)}q")
_WIDTH = len(env.BEAT_ENTRY)
_ENTRIES, _THINNINGS = (
    slice(8 * index, 8 * index + 8) for index in map(env.BEAT_NUMBERS.index, ("entries", "thinnings"))
)
"""The bytes of two numbers."""
_ATTEMPTS, _PAUSE_S = 5, 0.001
"""Reads of a file whose history is being thinned, and the pause between them."""


class Totals(NamedTuple):
    """Totals of a rank at the end of a step whose parts were measured, since its first step; times in seconds."""

    steps: float
    """The number of steps."""
    time: float
    """The time of the step, on the monotonic clock."""
    own: float
    """Time in which the rank did not wait for others."""
    data: float
    """Time in which it waited for batches."""
    forward: float
    """Time from a batch to its backward pass."""
    backward: float
    """Time of backward passes, until the gradients of this rank were complete if they are averaged."""
    update: float
    """Time from a backward pass to the end of the optimizer step, such as that of clipping."""
    wait: float
    """Time in collectives, and in which averaging backward passes waited for other ranks."""
    samples: float
    """Samples of all ranks that were trained on, those of the first step included."""
    tokens: float

    @property
    def rest(self) -> float:
        """Own time that is in no part: from the end of a step to the next batch."""
        return max(0.0, self.own - self.data - self.forward - self.backward - self.update)

    def average_since(self, other: Totals) -> Totals:
        """Return the differences to earlier totals per step; there is a step in between."""
        steps = self.steps - other.steps
        return Totals(*(max(0, now - before) / steps for now, before in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a rank: its progress, as it writes it to its folder.

    Times are those of the monotonic clock, in seconds, unless `to_epoch` converts them.
    """

    pid: int
    steps: int
    batches: int
    collectives: int
    is_inside: bool
    """True if the rank is in a collective now."""
    time: float
    """The time of the last progress."""
    collective: str
    """The newest collective with the line of its call; before the first one, the first optimizer step; else empty."""
    started: float
    """The time at which the rank created its first Accelerator, or made its first optimizer step."""
    started_epoch: float
    """The same moment, in seconds since 1970."""
    step_time: float
    """The time of the last optimizer step, within a tenth of a second; 0 before the first."""
    totals: Totals
    """The totals at the end of the last step whose parts were measured."""
    flops: int
    """The floating-point operations of a step of this rank; 0 if they were not measured."""
    peak_flops: int
    """The floating-point operations that its device can execute per second; 0 if that is unknown."""
    epoch: int
    """The epoch, from 0, of the loader that returned the last batch."""
    epoch_batches: int
    """The number of batches of that epoch that were returned or skipped."""
    epoch_length: int | None
    """The number of batches in that epoch; None if the loader has no length."""
    epoch_first: int
    """The number of batches that were skipped at the start of that epoch."""
    epoch_started: float
    """The time at which that epoch began; 0 before the first batch."""
    first_batch: float | None
    """The time at which a loader returned the first batch; None before it."""
    ended: float | None
    """The time at which the interpreter exited; None if it has not, or was killed."""
    has_failed: bool
    """True if it exited by an exception."""
    recent: tuple[float, ...]
    """The times of the last steps, at most 64, the oldest first."""
    history: Sequence[Totals]
    """The totals at the end of step 1, and of other measured steps."""
    part: str = ""
    """The part of a step in which a rank without progress is, such as `data_ns`; empty in progress, or if it is unknown."""

    @classmethod
    def read(cls, file: Path) -> Beat | None:
        """Read the heartbeat of a rank; return None if the file is missing, as before the first Accelerator or step, or is not a heartbeat."""
        try:
            data = _read_unchanged(file)
        except OSError:
            return None
        if len(data) != env.BEAT_SIZE:
            return None
        numbers = dict(zip(env.BEAT_NUMBERS, _NUMBERS.unpack_from(data), strict=True))
        return cls._parse(data, numbers) if 0 <= numbers["pid"] <= MAX_PID else None

    @classmethod
    def _parse(cls, data: bytes, numbers: Mapping[str, int]) -> Beat:
        steps = numbers["steps"]
        entries = memoryview(data)[env.BEAT_HISTORY_RANGE].cast("q")
        recent = _parse_recent(memoryview(data)[env.BEAT_RECENT_RANGE].cast("q"), numbers["timed_steps"])
        step_time = recent[-1] if recent else 0.0
        count = max(0, min(numbers["entries"], env.BEAT_HISTORY))
        return cls(
            pid=numbers["pid"],
            steps=steps,
            batches=numbers["batches"],
            collectives=numbers["collectives"],
            is_inside=bool(numbers["inside"]),
            time=max(numbers["changed_ns"] / 1e9, step_time),
            collective=decode_text(data[env.BEAT_TEXT_RANGE].rstrip(b"\0")),
            started=numbers["started_ns"] / 1e9,
            started_epoch=numbers["started_epoch_ns"] / 1e9,
            step_time=step_time,
            totals=_parse_totals([numbers[name] for name in env.BEAT_ENTRY]),
            flops=numbers["flops"],
            peak_flops=numbers["peak_flops"],
            part=_find_part(numbers["part"]),
            epoch=numbers["epoch"],
            epoch_batches=numbers["batches"] - numbers["epoch_base"] if numbers["epoch_ns"] else 0,
            epoch_length=numbers["epoch_length"] or None,
            epoch_first=numbers["epoch_first"],
            epoch_started=numbers["epoch_ns"] / 1e9,
            first_batch=numbers["first_batch_ns"] / 1e9 if numbers["first_batch_ns"] else None,
            ended=numbers["ended_ns"] / 1e9 if numbers["ended_ns"] else None,
            has_failed=bool(numbers["failed"]),
            recent=recent,
            history=_History(entries[: _WIDTH * count]),
        )

    @property
    def signs_of_life(self) -> tuple[object, ...]:
        """All that changes when the rank does anything that its heartbeat records."""
        return (self.steps, self.batches, self.collectives, self.is_inside, self.time, self.part, self.totals)

    @property
    def location(self) -> str:
        """The location of the rank relative to its newest collective; without one, the part of its step, or its last one."""
        if not self.collectives and not self.is_inside and self.part in _PARTS:
            return _PARTS[self.part]
        if not self.collective:
            return "no step yet" if not self.steps else "after a step"
        operation, at, line = self.collective.partition(" at ")
        call = f"{simplify_operation(operation)}{at}{line}"
        return f"in {call}" if self.is_inside else f"after {call}"

    @property
    def rate_now(self) -> float | None:
        """Steps per second over `recent`; None with fewer than two steps."""
        seconds = self.recent[-1] - self.recent[0] if self.recent else 0.0
        return (len(self.recent) - 1) / seconds if seconds > 0 else None

    @property
    def rate_mean(self) -> float | None:
        """Steps per second from the start to the last step; None before the first step."""
        seconds = self.step_time - self.started
        return self.steps / seconds if self.steps and seconds > 0 else None

    def compute_eta(self, now: float) -> float | None:
        """Return the seconds from `now` to the end of the epoch, at its mean speed until `now`; None if that is unknown."""
        returned = self.epoch_batches - self.epoch_first
        if self.epoch_length is None or returned <= 0:
            return None
        remaining = max(self.epoch_length - self.epoch_batches, 0)
        return remaining * max(0.0, now - self.epoch_started) / returned

    def to_epoch(self, time: float) -> float:
        """Convert a time of the monotonic clock to seconds since 1970."""
        return self.started_epoch + time - self.started


_PARTS: Mapping[str, str] = {
    "data_ns": "loading data",
    "forward_ns": "forward pass",
    "backward_ns": "backward pass",
    "update_ns": "after a backward pass",
    "wait_ns": "waiting",
}
_SUBJECT = re.compile(r"(?!broadcast_object_list|gather_for_metrics)\w+ of (.+?)(?: from rank \d+)?$")
"""The name of a collective of accel itself; the two others are calls of the script."""


def simplify_operation(text: str) -> str:
    """Return the name of a collective without its arguments: `reduce()` for `reduce mean scale 1.0`.

    Those of accel itself are named by their subject: `exchange of random states` for `broadcast_object of random states`.
    """
    if match := _SUBJECT.match(text):
        return f"exchange of {match[1]}"
    name = text.partition(" ")[0]
    return f"{name}()" if name.isidentifier() else text if name == text else name


def _find_part(index: int) -> str:
    return env.BEAT_NUMBERS[index] if 0 < index < len(env.BEAT_NUMBERS) else ""


def _parse_totals(numbers: Sequence[int]) -> Totals:
    return Totals._make(
        value / 1e9 if name.endswith("_ns") else value
        for name, value in zip(env.BEAT_ENTRY, numbers, strict=True)
    )


class _History(Sequence[Totals]):
    """The entries of the history, which are converted when they are read: a table of ranks needs one of a thousand."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers

    @override
    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    @overload
    def __getitem__(self, index: int) -> Totals: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Totals]: ...

    @override
    def __getitem__(self, index: int | slice) -> Totals | Sequence[Totals]:
        if isinstance(index, slice):
            return tuple(self)[index]
        first = _WIDTH * range(len(self))[index]
        return _parse_totals(self._numbers[first : first + _WIDTH].tolist())


def _read_unchanged(file: Path) -> bytes:
    """Read the file again while its history is thinned; the result has no entries if that does not end, as in a killed process."""
    for attempt in range(_ATTEMPTS):
        with open_file(file) as opened:
            # A longer file is no heartbeat.
            data = opened.read(env.BEAT_SIZE + 1)
            opened.seek(0)
            after = opened.read(_NUMBERS.size)
        if len(data) != env.BEAT_SIZE:
            return data
        before, after = data[_THINNINGS], after[_THINNINGS]
        if before == after and int.from_bytes(before, sys.byteorder) % 2 == 0:
            return data
        if attempt + 1 < _ATTEMPTS:
            time.sleep(_PAUSE_S)
    return data[: _ENTRIES.start] + bytes(8) + data[_ENTRIES.stop :]


def _parse_recent(ring: memoryview, steps: int) -> tuple[float, ...]:
    """Return the times in the ring up to the last step, the oldest first."""
    first = max(steps - env.BEAT_RECENT, 0)
    times = [ring[step % env.BEAT_RECENT] for step in range(first, steps)]
    # Steps that ended after `steps` was read have replaced the oldest times.
    replaced = [index for index, value in enumerate(times) if value > times[-1]]
    return tuple(value / 1e9 for value in times[replaced[-1] + 1 if replaced else 0 :])
