"""Goodput of a run: the share of its wall time that moved the newest kept step forward, and the causes of the rest.

The definition follows the ML Productivity Goodput of Google (https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity):
steps that a restart repeats are lost, and so is the time in which no step is computed. Everything is read from the folder of the run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

from accel_cli import console
from accel_cli.runs.heartbeats import Beat, Totals
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.run_files import read_last_objects

__all__ = ["CAUSES", "Goodput", "measure_goodput", "read_checkpoints"]

CAUSES: Mapping[str, str] = {
    "start": "until the end of the first step: processes, imports, data, compilation",
    "restarts": "from the last step before a restart until the end of the first one after it",
    "lost_steps": "steps after the checkpoint from which a restart continued; at a failure, after the newest checkpoint",
    "saves": "checkpoints, as far as the training waited for them",
    "data": "waits for batches",
    "between_steps": "evaluations, logging and everything else between two steps",
    "end": "from the last step to the end",
}
"""The causes of the time that moved no step forward, in the order of a run, with what each is."""
_MIN_WALL_S = 60.0
"""The shortest run whose goodput is shown in a line."""
_MIN_SHARE = 0.01
_MAX_SHOWN = 3


@dataclass(frozen=True)
class Goodput:
    """Wall time of a run, divided; times in seconds."""

    wall: float
    productive: float
    """Time in the forward and backward passes and the updates of steps that were kept."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """The rest by the names of `CAUSES`."""

    @property
    def share(self) -> float:
        """The share of the wall time that was productive, from 0 to 1."""
        return self.productive / self.wall if self.wall > 0 else 0.0

    def format(self) -> str:
        """Return the share and the largest causes of the rest, as in `goodput 81% (start 3.1 s, saves 1.2 s)`."""
        shown = sorted(
            ((seconds, name) for name, seconds in self.causes.items() if seconds >= _MIN_SHARE * self.wall),
            reverse=True,
        )[:_MAX_SHOWN]
        rest = ", ".join(
            f"{name.replace('_', ' ')} {console.format_duration(seconds)}" for seconds, name in shown
        )
        return f"goodput {self.share:.0%}{f' ({rest})' if rest else ''}"

    def format_end(self) -> str:
        """Return the text for the line that closes a launch; empty for a short run."""
        return self.format() if self.wall >= _MIN_WALL_S else ""

    def to_json(self) -> dict[str, Any]:
        """Return the times as JSON data."""
        return {"share": self.share, "wall_s": self.wall, "productive_s": self.productive, "lost_s": dict(self.causes)}  # fmt: skip


class _Attempt(NamedTuple):
    """What an attempt has recorded; times in seconds since 1970."""

    beat: Beat
    first: float
    """The end of the first step."""
    last: float
    """The end of the last one."""
    saves: tuple[tuple[float, float, str], ...]
    """The checkpoints that were saved: the end, the seconds and the path of each."""
    loaded: str
    """The path of the checkpoint from which the attempt continued; empty without one."""


def read_checkpoints(run: RunFolder, attempts: list[int] | None = None) -> list[Mapping[str, Any]]:
    """Return the records of checkpoints of attempts, all without a list of them; the oldest first."""
    records = [
        record
        for attempt in (run.attempts if attempts is None else attempts)
        for folder in run.list_ranks(attempt).values()
        for record in read_last_objects(folder.checkpoints)
        if isinstance(record.get("time"), float) and isinstance(record.get("seconds"), (int, float))
    ]
    return sorted(records, key=lambda record: float(record["time"]))


def measure_goodput(run: RunFolder, started: float | None, now: float, *, is_kept: bool) -> Goodput | None:
    """Return the goodput of a run up to a time.

    Args:
        run: The folder of the run, with the ranks of this node.
        started: The start of the launch in seconds since 1970.
        now: The end of the run, or the present, in seconds since 1970.
        is_kept: True if the steps after the newest checkpoint are kept: of a run that has succeeded, or is in progress.

    Returns:
        None if it is not known: no step was seen, or steps were lost in a run whose checkpoints are not (those of `torch.save`).
    """
    numbers = run.attempts
    attempts = [found for number in numbers if (found := _read_attempt(run, number))]
    if started is None or not attempts or now <= started:
        return None
    has_saves = any(attempt.saves for attempt in attempts)
    if not has_saves and (len(numbers) > 1 or not is_kept):
        return None
    causes = dict.fromkeys(CAUSES, 0.0)
    productive, before = 0.0, started
    for attempt, kept_until in zip(attempts, _find_kept(attempts, is_kept=is_kept), strict=True):
        causes["start" if before == started else "restarts"] += max(0.0, attempt.first - before)
        end = min(attempt.last, max(attempt.first, kept_until))
        causes["lost_steps"] += attempt.last - end
        productive += _divide(attempt, end, causes)
        before = attempt.last
    final = sum(seconds for time, seconds, _ in attempts[-1].saves if time > before)
    causes["saves"] += min(final, max(0.0, now - before))
    causes["end"] += max(0.0, now - before - final)
    return Goodput(now - started, productive, causes)


def _divide(attempt: _Attempt, end: float, causes: dict[str, float]) -> float:
    """Add the causes in the kept part of an attempt, and return its productive time."""
    span = end - attempt.first
    saves = min(span, sum(seconds for time, seconds, _ in attempt.saves if attempt.first < time <= end))
    totals = _find_totals(attempt.beat, end)
    data = min(totals.data, span - saves)
    steps = totals.forward + totals.backward + totals.update + totals.wait
    # Without backward passes that are seen, as in a compiled step, everything but the data is a step.
    productive = min(steps if steps - totals.wait > 0 else math.inf, span - saves - data)
    causes["saves"] += saves
    causes["data"] += data
    causes["between_steps"] += span - saves - data - productive
    return productive


def _find_totals(beat: Beat, time: float) -> Totals:
    """Return the totals of a rank at a time in seconds since 1970, interpolated."""
    history = [*beat.history, beat.totals]
    index = bisect_right(history, time, key=lambda entry: beat.to_epoch(entry.time))
    if index in {0, len(history)}:
        return history[max(0, index - 1)]
    before, after = history[index - 1], history[index]
    part = (time - beat.to_epoch(before.time)) / max(1e-9, after.time - before.time)
    return Totals(*(low + part * (high - low) for low, high in zip(before, after, strict=True)))


def _find_kept(attempts: list[_Attempt], *, is_kept: bool) -> list[float]:
    """Return the time until which the steps of each attempt are kept."""
    kept = [math.inf] * len(attempts)
    if not is_kept:
        kept[-1] = max((time for time, _, _ in attempts[-1].saves), default=0.0)
    for index in range(1, len(attempts)):
        loaded = attempts[index].loaded
        place, time = next(
            (
                (number, time)
                for number in reversed(range(index))
                for time, _, path in reversed(attempts[number].saves)
                if loaded and _is_same_path(path, loaded)
            ),
            # A checkpoint of an earlier run, or none: nothing of this run is continued.
            (0, 0.0),
        )
        kept[place] = min(kept[place], time)
        for number in range(place + 1, index):
            kept[number] = 0.0
    return kept


def _is_same_path(first: str, second: str) -> bool:
    """Return True for two paths of which one may be relative to a working folder."""
    pairs = zip(reversed(PurePath(first).parts), reversed(PurePath(second).parts), strict=False)
    return all(one == other for one, other in pairs)


def _read_attempt(run: RunFolder, number: int) -> _Attempt | None:
    """Return what an attempt has recorded; None without a step."""
    beats: Iterator[Beat | None] = (Beat.read(folder.beat) for folder in run.list_ranks(number).values())
    beat = next((beat for beat in beats if beat and beat.steps), None)
    if beat is None:
        return None
    first = beat.history[0].time if beat.history else beat.started
    records = read_checkpoints(run, [number])
    loaded = [str(record.get("path")) for record in records if record.get("kind") == "load"]
    return _Attempt(
        beat,
        beat.to_epoch(first),
        max(beat.to_epoch(first), beat.to_epoch(beat.step_time)),
        tuple(
            (float(record["time"]), float(record["seconds"]), str(record.get("path")))
            for record in records
            if record.get("kind") != "load"
        ),
        loaded[0] if loaded else "",
    )
