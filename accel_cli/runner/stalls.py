"""Whether a run gets on: the heartbeats of its processes as a table, and what is said when none of them moves."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_cli import console
from accel_cli.runner import forkserver, worker
from accel_cli.runner.run_dir import RankFolder
from accel_runtime import env

__all__ = ["Beat", "Stacks", "StallWatch", "format_stall", "request_stacks"]


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


class StallWatch:
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


def format_stall(folders: Mapping[int, RankFolder], *, full: bool = False) -> str:
    """Where processes are: a table of their heartbeats, and the stacks of all of them.

    Args:
        folders: Of the processes, by rank.
        full: Show all threads, and frames of libraries too.
    """
    answers = request_stacks(folders)
    beats = {rank: Beat.read(folder) for rank, folder in folders.items()}
    groups = _alike(answers, beats)
    return "\n".join([*_table(beats), *(_shown(ranks, answers[ranks[0]], full=full) for ranks in groups)])


def _stalled(folders: Mapping[int, RankFolder], beats: Mapping[int, Beat | None], seconds: float) -> str:
    answers = request_stacks(folders)
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


_PATIENCE_S = 3.0
_QUIET_S = 0.2
_START = Path(forkserver.__file__).with_name("forkserver_main.py")
_REPLICAS = f'File "{Path(worker.__file__).with_name("xla_replicas.py")}"'
_OURS = (f'File "{worker.__file__}"', f'File "{_START}"', 'File "<frozen runpy>"', _REPLICAS)
_STATES = {
    "T": "it is stopped",
    "t": "a debugger holds it",
    "D": "it waits for a device",
    "Z": "it has ended",
}


@dataclass(frozen=True)
class Stacks:
    """What a process answered; each stack begins with the innermost call."""

    main: tuple[str, ...] = ()
    """The frames of the main thread."""
    others: tuple[tuple[str, ...], ...] = ()
    """Those of the other threads of Python."""
    problem: str = ""
    """Why there is no answer."""


def request_stacks(folders: Mapping[int, RankFolder]) -> dict[int, Stacks]:
    """Ask processes where they are, all at the same time; it takes the slowest of them some tenths of a second.

    Only a process that has said it would answer is asked: any other the signal would end.
    """
    asked: dict[int, tuple[RankFolder, int]] = {}
    answers: dict[int, Stacks] = {}
    for rank, folder in folders.items():
        begin = _size(folder.stacks)
        if problem := _asked(folder):
            answers[rank] = Stacks(problem=problem)
        else:
            asked[rank] = (folder, begin)
    _settle([folder.stacks for folder, _ in asked.values()])
    for rank, (folder, begin) in asked.items():
        answers[rank] = _read(folder, begin) or Stacks(problem=f"it does not answer; {_state(folder)}")
    return dict(sorted(answers.items()))


def _asked(folder: RankFolder) -> str:
    """Send the signal, or say why not."""
    try:
        pid = int(folder.pid.read_text())
        status = Path(f"/proc/{pid}/status").read_text()
    except (OSError, ValueError):
        return (
            "it is not running"
            if Path("/proc/self/status").exists()
            else "it cannot be asked: there is no /proc"
        )
    # A handler is lost where the process becomes another program: the kernel knows, a file would not.
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    if not caught >> (worker.ASKED - 1) & 1:
        return "it cannot be asked: it is starting or ending, or it is no Python of accel's"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, worker.ASKED)
    return ""


def _settle(files: list[Path]) -> None:
    """Wait until all files have grown and stay as they are, or for as long as one waits."""
    begin = sizes = [_size(file) for file in files]
    now = quiet = time.monotonic()
    deadline = now + _PATIENCE_S
    while files and now < deadline:
        time.sleep(0.05)
        now, before, sizes = time.monotonic(), sizes, [_size(file) for file in files]
        if sizes != before:
            quiet = now
        grown = all(size > old for size, old in zip(sizes, begin, strict=True))
        if now - quiet > (_QUIET_S if grown else 1.0):
            return


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(folder: RankFolder, begin: int) -> Stacks | None:
    """What faulthandler added to a file: a block for each thread, the main one last."""
    with folder.stacks.open("rb") as opened:
        opened.seek(begin)
        text = opened.read().decode(errors="replace")
    blocks = [block for block in text.split("\n\n") if block.strip()]
    if not blocks:
        return None
    main = _main(blocks, folder)
    return Stacks(_frames(main), tuple(_frames(block) for block in blocks if block is not main))


def _main(blocks: list[str], folder: RankFolder) -> str:
    """The thread that runs the script: not the main one, where a replica is a thread."""
    if not folder.thread.exists():
        return blocks[-1]
    name = folder.thread.read_text()
    return next(
        (block for block in reversed(blocks) if name in block.lstrip().partition("\n")[0]), blocks[-1]
    )


def _frames(block: str) -> tuple[str, ...]:
    """The frames of a thread, without those that lead to the script: of accel, and of what started a replica."""
    frames = [line.strip() for line in block.splitlines() if line.startswith("  File ")]
    started = [index for index, frame in enumerate(frames) if frame.startswith(_REPLICAS)]
    frames = frames[: started[-1]] if started else frames
    while frames and frames[-1].startswith(_OURS):
        frames.pop()
    return tuple(frames)


def _state(folder: RankFolder) -> str:
    try:
        stat = Path(f"/proc/{folder.pid.read_text()}/stat").read_text()
    except OSError:
        return "it has ended"
    return _STATES.get(stat[stat.rindex(")") + 2], "it is ending, or busy outside of Python")
