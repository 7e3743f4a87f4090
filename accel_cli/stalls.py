"""Whether a run gets on: the heartbeats of its processes as a table, and what is said when none of them moves."""

from __future__ import annotations

import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_cli import console, stacks
from accel_cli.runs import RankFolder
from accel_cli.stacks import Stacks
from accel_runtime import env

__all__ = ["Beat", "Watch", "told"]

_NUMBERS = struct.Struct(f"={len(env.BEAT_NUMBERS)}q")
_FRAMES = 8
"""Frames of a stack that are shown, unless all are asked for."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", 'File "<frozen ', f"{Path(env.__file__).parent}/")
"""What a frame has that is nobody's own code; where it is inside of that, the ranks still differ in theirs."""


@dataclass(frozen=True)
class Beat:
    """How far a process is, as it wrote it down itself."""

    steps: int
    batches: int
    inside: bool
    """Whether it is in a collective now."""
    news: float
    """When it last got on, on the monotonic clock."""
    place: str
    """Its newest collective and the line; empty before the first."""

    @classmethod
    def read(cls, folder: RankFolder) -> Beat | None:
        """The beat of a process; None where it has made no Accelerator yet."""
        try:
            data = folder.beat.read_bytes()
            numbers = dict(zip(env.BEAT_NUMBERS, _NUMBERS.unpack_from(data), strict=True))
        except (OSError, struct.error):
            return None
        return cls(
            steps=numbers["steps"],
            batches=numbers["batches"],
            inside=bool(numbers["inside"]),
            news=numbers["news_ns"] / 1e9,
            place=data[_NUMBERS.size :].rstrip(b"\0").decode(errors="replace"),
        )

    @property
    def where(self) -> str:
        """Where it is, as far as its collectives say."""
        if not self.place:
            return "no collective yet"
        return f"in {self.place}" if self.inside else f"after {self.place}"


class Watch:
    """Looks whether any of some processes gets on, and says so once when none does for too long.

    Args:
        folders: Of the processes on this machine, by rank.
        timeout: Seconds without progress on all of them.
    """

    def __init__(self, folders: Mapping[int, RankFolder], timeout: float) -> None:
        self._folders, self._timeout = folders, timeout
        self._started = self._next = time.monotonic()
        self._told: float | None = None

    def look(self) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + min(1.0, self._timeout / 4)
        beats = {rank: Beat.read(folder) for rank, folder in self._folders.items()}
        newest = max([self._started, *(beat.news for beat in beats.values() if beat)])
        if self._told is not None and newest > self._told:
            console.note(f"there is progress again, after {newest - self._told:.0f} s")
            self._told = None
        elif self._told is None and now - newest >= self._timeout:
            self._told = newest
            console.note(_stalled(self._folders, beats, now - newest))


def told(folders: Mapping[int, RankFolder], *, full: bool = False) -> str:
    """Where processes are: a table of their heartbeats, and the stacks of all of them.

    Args:
        folders: Of the processes, by rank.
        full: Show all threads, and frames of libraries too.
    """
    answers = stacks.ask(folders)
    beats = {rank: Beat.read(folder) for rank, folder in folders.items()}
    groups = _alike(answers, beats)
    return "\n".join([*_table(beats), *(_shown(ranks, answers[ranks[0]], full=full) for ranks in groups)])


def _stalled(folders: Mapping[int, RankFolder], beats: Mapping[int, Beat | None], seconds: float) -> str:
    answers = stacks.ask(folders)
    groups = _alike(answers, beats)
    most = max(groups, key=len)
    odd = [ranks for ranks in groups if ranks is not most] if 2 * len(most) > len(beats) else groups
    lines = [f"no process on this machine has made progress for {seconds:.0f} s"]
    if not any(beats.values()):
        lines[0] += " that can be seen: none has made an Accelerator"
    lines += _table(beats)
    lines += [_shown(ranks, answers[ranks[0]], full=False) for ranks in odd or groups]
    if odd and odd != groups:
        lines.append(f"  the others ({_named(most)}) wait alike; `accel stacks` shows them too")
    return "\n".join(lines)


def _alike(answers: Mapping[int, Stacks], beats: Mapping[int, Beat | None]) -> list[list[int]]:
    """The ranks in groups of those that are at the same place."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for rank, answer in answers.items():
        beat = beats[rank]
        groups[_own(answer.main), answer.problem, beat and (beat.steps, beat.where)].append(rank)
    return list(groups.values())


def _table(beats: Mapping[int, Beat | None]) -> list[str]:
    now = time.monotonic()
    rows = [("rank", "steps", "batches", "last news", "where")]
    for rank, beat in beats.items():
        if beat is None:
            rows.append((str(rank), "-", "-", "-", "no Accelerator yet"))
        else:
            news = f"{now - beat.news:.0f} s ago"
            rows.append((str(rank), str(beat.steps), str(beat.batches), news, beat.where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _shown(ranks: list[int], answer: Stacks, *, full: bool) -> str:
    if answer.problem:
        return f"  {_named(ranks)}: {answer.problem}"
    title = f"{_named(ranks)}, innermost call first:"
    if not full:
        return _block(title, _own(answer.main)[:_FRAMES])
    others = (_block("another thread:", frames) for frames in answer.others)
    return "\n".join([_block(title, answer.main), *others])


def _own(frames: tuple[str, ...]) -> tuple[str, ...]:
    """The frames of nobody's library; all of them where there is no other."""
    own = tuple(frame for frame in frames if not any(mark in frame for mark in _LIBRARIES))
    return own or frames


def _block(title: str, frames: Iterable[str]) -> str:
    return "\n".join([f"  {title}", *(f"    {frame}" for frame in frames)])


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
