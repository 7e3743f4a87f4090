"""Stall detection: the progress of ranks over time, the table of their progress, and their stacks."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from accel_cli import console, worker
from accel_cli.planning.plan import StallAction
from accel_cli.runner.collectives import explain_hang, request_traces
from accel_cli.runner.guard import send_signal
from accel_cli.runner.hang_exchange import HangRecord
from accel_cli.runs.beats import Beat
from accel_cli.runs.run_dir import RankFolder, format_ranks
from accel_cli.runs.run_files import open_file, read_pid, read_text
from accel_runtime.environment import settings as env
from accel_runtime.environment.text import decode_text

__all__ = [
    "Stacks",
    "Stall",
    "StallWatch",
    "describe_collectives",
    "explain_no_restart",
    "format_stall",
    "read_hang_record",
    "request_stacks",
]

_SHOWN_FRAMES = 8
_STARTUP_FACTOR = 10
"""How much longer than the timeout the time to the first step may be, unless the profile sets it."""
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", 'File "<frozen ', f"{Path(env.__file__).parents[1]}/")
"""Text in the frames of libraries; ranks are compared by the frames of the user's code."""


class Stall(NamedTuple):
    """A stall of all ranks of this node."""

    seconds: float
    """The time since the last progress."""
    has_trained: bool
    """True if a rank has made a step, or has got past its first batch, in this attempt."""
    is_seen: bool = True
    """True if any rank has recorded progress, such as the creation of an Accelerator."""


def explain_no_restart(
    action: StallAction, stall: Stall, restarts: tuple[int, int], *, follows_stall: bool
) -> str:
    """Return why a stall ends the run; empty if all processes restart.

    Args:
        action: The action of the profile, `restart` or `fail`.
        stall: The stall.
        restarts: The number of restarts that remain, and of all.
        follows_stall: True if the processes were started again because of a stall.
    """
    remaining, total = restarts
    if action == "fail":
        return "launcher.stall_action is fail"
    if not remaining:
        return f"all {total} restarts are used (launcher.max_restarts)"
    if follows_stall and not stall.has_trained:
        return "no step was made since the restart after the last stall"
    return ""


class StallWatch:
    """Watches the progress of ranks, and reports once if none of them makes progress for `timeout` seconds.

    Before the first step, which may wait for imports, connections, the first batch and a compiler, the limit is
    `startup_timeout`. The time begins when all ranks have begun their script, or one of them records progress.
    """

    def __init__(
        self,
        folders: Mapping[int, RankFolder],
        timeout: float,
        record: Callable[..., None] = lambda *_, **__: None,
        startup_timeout: float | None = None,
        collect: Callable[[HangRecord], HangRecord] = lambda own: own,
    ) -> None:
        self._folders, self._timeout, self._collect = folders, timeout, collect
        self._startup_timeout = startup_timeout or timeout * _STARTUP_FACTOR
        self._record = record
        """Records an event of the run."""
        self._started = self._next_check = time.monotonic()
        self._have_begun = False
        self._stalled_since: float | None = None

    def check(self) -> Stall | None:
        """Check for progress, at most four times per timeout, and return a stall once it has been reported."""
        now = time.monotonic()
        if now < self._next_check:
            return None
        self._next_check = now + min(1.0, self._timeout / 4)
        beats = {rank: Beat.read(folder.beat) for rank, folder in self._folders.items()}
        if not self._have_begun and (any(beats.values()) or self._have_scripts_begun()):
            self._have_begun, self._started = True, now
        has_trained = any(beat.steps or beat.batches > 1 for beat in beats.values() if beat)
        timeout = self._timeout if has_trained else self._startup_timeout
        newest = max([self._started, *(beat.time for beat in beats.values() if beat)])
        if self._stalled_since is not None and newest > self._stalled_since:
            seconds = newest - self._stalled_since
            console.note(f"progress resumed after {seconds:.0f} s")
            self._record("progress", seconds=seconds)
            self._stalled_since = None
        elif self._stalled_since is None and now - newest >= timeout:
            self._stalled_since = newest
            report = _format_report(self._folders, beats, now - newest, self._collect)
            console.note(report)
            self._record("stall", seconds=now - newest, text=report)
            return Stall(now - newest, has_trained, is_seen=any(beats.values()))
        return None

    def _have_scripts_begun(self) -> bool:
        """Return True if every rank has begun its script: just before, it opens the file for its stacks."""
        return all(folder.stacks.exists() for folder in self._folders.values())


def format_stall(folders: Mapping[int, RankFolder], *, full: bool = False) -> str:
    """Format the heartbeats of ranks as a table, followed by their stacks; `full` includes all threads and libraries."""
    stacks = request_stacks(folders)
    beats = {rank: Beat.read(folder.beat) for rank, folder in folders.items()}
    groups = [_format_stacks(ranks, stacks[ranks[0]], full=full) for ranks in _group_ranks(stacks, beats)]
    return "\n".join([*_format_table(beats), *groups, *_explain_hang(_read_record(folders, stacks))])


def describe_collectives(
    folders: Mapping[int, RankFolder], failed: int, collect: Callable[[HangRecord], HangRecord]
) -> str:
    """Describe the collective in which the rank `failed` has timed out, with the ranks outside of it.

    The text is empty if the rank has left no record of its collectives.

    Args:
        folders: The folders of the ranks of this node.
        failed: The rank.
        collect: Adds the records of other nodes.
    """
    return "\n".join(_explain_hang(collect(_read_record(folders, request_stacks(folders), failed))))


def read_hang_record(folders: Mapping[int, RankFolder]) -> HangRecord:
    """Request the collectives and the lines of the ranks of this node."""
    return _read_record(folders, request_stacks(folders))


def _read_record(
    folders: Mapping[int, RankFolder], stacks: Mapping[int, Stacks], failed: int | None = None
) -> HangRecord:
    locations = {
        rank: _format_place(frames[0])
        for rank, each in stacks.items()
        if (frames := _get_user_frames(each.main))
    }
    return HangRecord(request_traces(folders, failed), locations)


def _explain_hang(record: HangRecord) -> list[str]:
    """Describe the collectives in which ranks wait, with the ranks outside of them and their lines."""
    return explain_hang(record.traces, record.locations)


def _format_place(frame: str) -> str:
    """Return a frame of faulthandler as `train.py:12 (main)`."""
    match = _FRAME.fullmatch(frame)
    return f"{Path(match['file']).name}:{match['line']} ({match['function']})" if match else frame


def _format_report(
    folders: Mapping[int, RankFolder],
    beats: Mapping[int, Beat | None],
    seconds: float,
    collect: Callable[[HangRecord], HangRecord],
) -> str:
    """Format a stall: if most ranks are at one location, with the stacks of the other ranks only."""
    stacks = request_stacks(folders)
    groups = _group_ranks(stacks, beats)
    largest = max(groups, key=len)
    has_majority = len(groups) > 1 and 2 * len(largest) > len(beats)
    shown = [ranks for ranks in groups if ranks is not largest] if has_majority else groups
    unseen = "" if any(beats.values()) else " (no rank has made an optimizer step or an Accelerator yet)"
    lines = [f"no process on this machine has made progress for {seconds:.0f} s{unseen}"]
    lines += _format_table(beats)
    lines += [_format_stacks(ranks, stacks[ranks[0]], full=False) for ranks in shown]
    if has_majority:
        lines.append(f"  {format_ranks(largest)} are at the same place; show them with accel stacks")
    lines += _explain_hang(collect(_read_record(folders, stacks)))
    return "\n".join(lines)


def _group_ranks(stacks: Mapping[int, Stacks], beats: Mapping[int, Beat | None]) -> list[list[int]]:
    """Group the ranks that are at the same location."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for rank, entry in stacks.items():
        beat = beats[rank]
        progress = beat and (beat.steps, beat.location)
        groups[_get_user_frames(entry.main), entry.problem, progress].append(rank)
    return list(groups.values())


def _format_table(beats: Mapping[int, Beat | None]) -> list[str]:
    now = time.monotonic()
    rows = [("rank", "steps", "batches", "last progress", "location")]
    for rank, beat in beats.items():
        if beat is None:
            rows.append((str(rank), "-", "-", "-", "no step yet"))
        else:
            age = f"{now - beat.time:.0f} s ago"
            rows.append((str(rank), str(beat.steps), str(beat.batches), age, beat.location))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _format_stacks(ranks: list[int], stacks: Stacks, *, full: bool) -> str:
    if stacks.problem:
        return f"  {format_ranks(ranks)}: {stacks.problem}"
    frames = stacks.main if full else _get_user_frames(stacks.main)[:_SHOWN_FRAMES]
    lines = [f"  {format_ranks(ranks)}, innermost call first:", *(f"    {frame}" for frame in frames)]
    for thread in stacks.others if full else ():
        lines += ["  another thread:", *(f"    {frame}" for frame in thread)]
    return "\n".join(lines)


def _get_user_frames(frames: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames of the user's code, or all frames of a stack without user code."""
    user_frames = tuple(frame for frame in frames if not any(mark in frame for mark in _LIBRARIES))
    return user_frames or frames


_TIMEOUT_S = 3.0
_MAX_STACKS = 16 << 20
"""The most bytes of the stacks of a process."""
_IDLE_S, _LONG_IDLE_S = 0.2, 1.0
"""Stop waiting if no file grows for this time: once all ranks have answered, and before."""
_RUNNER = Path(__file__).parent
_REPLICAS, *_ENTRY_POINTS = (
    f'File "{path}"'
    for path in (_RUNNER / "xla_replicas.py", _RUNNER / "forkserver_main.py", worker.__file__)
)
_PROCESS_STATES = {
    "T": "it is stopped",
    "t": "it is stopped by a debugger",
    "D": "it waits for a device",
    "Z": "it has ended",
}


@dataclass(frozen=True)
class Stacks:
    """Stacks of a process; each begins with the innermost call."""

    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    problem: str = ""
    """The reason, if there are no stacks."""


def request_stacks(folders: Mapping[int, RankFolder]) -> dict[int, Stacks]:
    """Request the stacks of all ranks at the same time, and wait for them, up to three seconds.

    Processes that do not handle the signal are left out, since it would end them.
    """
    offsets = {rank: _get_size(folder.stacks) for rank, folder in folders.items()}
    problems = {rank: _send_request(folder) for rank, folder in folders.items()}
    _wait_for_stacks([folder.stacks for rank, folder in folders.items() if not problems[rank]])
    stacks = {}
    for rank, folder in sorted(folders.items()):
        answer = None if problems[rank] else _read_stacks(folder, offsets[rank])
        state = _PROCESS_STATES.get(
            _read_status(folder).get("State", "Z")[0], "it is ending, or busy in C code"
        )
        stacks[rank] = answer or Stacks(problem=problems[rank] or f"no answer: {state}")
    return stacks


def _send_request(folder: RankFolder) -> str:
    """Send the signal, or return the reason why it cannot be sent."""
    status = _read_status(folder)
    if not status:
        has_proc = Path("/proc/self/status").exists()
        return "not running" if has_proc else "stacks are not available: there is no /proc"
    # Ask the kernel: the handler is lost if the process executes another program.
    if not int(status["SigCgt"], 16) >> (worker.STACK_SIGNAL - 1) & 1:
        return (
            "stacks are not available: the process is starting or ending, or is not a Python process of accel"
        )
    if not _has_open(status["Pid"], folder.stacks):
        return "stacks are not available: the script has closed the file for them"
    send_signal([int(status["Pid"])], worker.STACK_SIGNAL)
    return ""


def _has_open(pid: str, file: Path) -> bool:
    """Return False if a process has no descriptor of a file; True also if its descriptors cannot be read."""
    try:
        wanted = file.stat()
        descriptors = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names, not paths
    except OSError:
        return True
    for descriptor in descriptors:
        with suppress(OSError):  # closed since
            found = os.stat(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH116 - as above
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _read_status(folder: RankFolder) -> dict[str, str]:
    """Read `/proc/PID/status` of a rank; return an empty dictionary if it has ended."""
    lines = read_text(Path("/proc", str(read_pid(folder.pid)), "status")).splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _wait_for_stacks(files: list[Path]) -> None:
    """Wait until all files have grown and do not change any more, or until the timeout."""
    initial = sizes = [_get_size(file) for file in files]
    now = last_change = time.monotonic()
    deadline = now + _TIMEOUT_S
    while files and now < deadline:
        time.sleep(0.05)
        now, previous, sizes = time.monotonic(), sizes, [_get_size(file) for file in files]
        if sizes != previous:
            last_change = now
        is_complete = all(size > start for size, start in zip(sizes, initial, strict=True))
        if now - last_change > (_IDLE_S if is_complete else _LONG_IDLE_S):
            return


def _get_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read_stacks(folder: RankFolder, offset: int) -> Stacks | None:
    """Read the stacks that faulthandler wrote: a block for each thread, the main one last; None without any."""
    with open_file(folder.stacks) as file:
        file.seek(offset)
        text = decode_text(file.read(_MAX_STACKS))
    blocks = [block for block in text.split("\n\n") if block.strip()]
    if not blocks:
        return None
    main = blocks[-1]
    if folder.thread.exists():  # the thread of a replica runs its script
        thread = read_text(folder.thread)
        main = next((block for block in blocks[::-1] if thread in block.lstrip().partition("\n")[0]), main)
    return Stacks(_parse_frames(main), tuple(_parse_frames(block) for block in blocks if block is not main))


def _parse_frames(block: str) -> tuple[str, ...]:
    """Parse the frames of a thread, without those of accel that lead to the script."""
    frames = [line.strip() for line in block.splitlines() if line.startswith("  File ")]
    replica_frames = [index for index, frame in enumerate(frames) if frame.startswith(_REPLICAS)]
    frames = frames[: replica_frames[-1]] if replica_frames else frames
    while frames and frames[-1].startswith((*_ENTRY_POINTS, _REPLICAS, 'File "<frozen runpy>"')):
        frames.pop()
    return tuple(frames)
