"""Stall detection: the progress of ranks, their table and stacks, and ranks that wait for one that has exited with code 0."""

from __future__ import annotations

import itertools
import math
import os
import re
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli import console, worker
from accel_cli.planning.plan import StallAction
from accel_cli.runner.failures import read_thread_failures
from accel_cli.runner.guard import list_processes, send_signal
from accel_cli.runner.hang_report import (
    HangRecord,
    Observation,
    explain_hang,
    judge,
    observe_ranks,
    request_traces,
)
from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import RankFolder, format_ranks
from accel_cli.runs.run_files import open_file, read_json, read_pid, read_size, read_text
from accel_cli.runs.usage import read_cpu_time
from accel_runtime.environment import settings as env
from accel_runtime.environment.text import decode_text
from accel_runtime.observe.request_pipes import send_request

__all__ = [
    "FRAME",
    "EarlyExit",
    "ExitWatch",
    "RankObserver",
    "Stacks",
    "Stall",
    "StallWatch",
    "describe_collectives",
    "explain_no_restart",
    "format_exits",
    "format_location",
    "format_stall",
    "read_exit",
    "read_exit_record",
    "read_hang_record",
    "request_stacks",
]

_SHOWN_FRAMES = 8
_STARTUP_FACTOR = 10
"""How much longer than the timeout the time to the first step may be, unless the profile sets it."""
_DOUBT_FACTOR = 10
"""How much longer than the limit ranks may show signs of work without progress."""
_MIN_PAUSE_S = 2.0
"""A launcher that does not run for this time was stopped; a busy computer delays it for less."""
_MAX_OBSERVATION_S = 20.0
"""The most seconds of an observation: stacks and collectives of this node, three each, and the answers of the others, eight."""
_SHOWN_DOUBTS = 3
FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
"""A frame in a stack of faulthandler."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", 'File "<frozen ', f"{Path(env.__file__).parents[1]}/")
"""Text in the frames of libraries; ranks are compared by the frames of the user's code."""
_SAMPLE_S, _MAX_SAMPLE_S = 30.0, 600.0
"""Seconds between two looks at the ranks that still run: at first, and at most."""
_MAX_SHOWN = 2
_STDLIB = f'File "{sysconfig.get_path("stdlib")}/'
"""The start of a frame of the standard library, such as that of a queue or a lock."""
_LIBRARY_FILES = ("/site-packages/", "/dist-packages/", "<frozen ", f"{sysconfig.get_path('stdlib')}/")
_COMMUNICATION = "/torch/distributed/"
_RUNTIME = f"{Path(env.__file__).parents[1]}/"
_DECORATORS = (f"{_RUNTIME}collectives/signatures.py", f"{_RUNTIME}foundation/keywords.py")
"""The decorators of the calls of accel."""
_WAITING = (f"{_RUNTIME}collectives/", f"{_RUNTIME}backends/")
"""The folders of accel whose functions wait for other ranks."""
_OWN_WORK = ("/torch/distributed/checkpoint/", "/torch/distributed/elastic/")
"""Folders of torch whose functions read and write files, rather than wait for other ranks."""


class Stall(NamedTuple):
    """A stall of all ranks of this node."""

    seconds: float
    """The time since the last progress."""
    has_trained: bool
    """True if a rank has made a step, or has got past its first batch, in this attempt."""
    is_seen: bool = True
    """True if any rank has recorded progress, such as the creation of an Accelerator."""


class RankObserver:
    """Observes the ranks of this node for a `StallWatch`.

    Args:
        folders: Their folders.
        collect: Adds the records of other nodes to that of this one.
        has_other_nodes: True if ranks of other nodes take part.
    """

    def __init__(
        self,
        folders: Mapping[int, RankFolder],
        collect: Callable[[HangRecord], HangRecord] = lambda own: own,
        *,
        has_other_nodes: bool = False,
    ) -> None:
        self._folders, self._collect, self._has_other_nodes = folders, collect, has_other_nodes

    def read_clock(self) -> float:
        """Return a time in seconds that goes on while the computer sleeps, where there is such a clock."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()

    def read_beats(self) -> dict[int, Beat | None]:
        """Read the heartbeats of the ranks."""
        return {rank: Beat.read(folder.beat) for rank, folder in self._folders.items()}

    def have_scripts_begun(self) -> bool:
        """Return True if every rank has begun its script: just before, it opens the file for its stacks."""
        return all(folder.stacks.exists() for folder in self._folders.values())

    def observe(self, beats: Mapping[int, Beat | None], moment: float, *, with_others: bool) -> Observation:
        """Observe the ranks by their stacks, collectives, processor time, transferred bytes and output.

        Args:
            beats: Their heartbeats.
            moment: The time of the observation, in seconds.
            with_others: Ask the other nodes too.
        """
        stacks = request_stacks(self._folders)
        collectives = {rank: (beat.collectives, beat.is_inside) for rank, beat in beats.items() if beat}
        frames = {rank: each.main for rank, each in stacks.items()}
        record = _read_record(self._folders, stacks)
        return Observation(
            moment,
            observe_ranks(self._folders, frames, collectives),
            self._collect(record) if with_others else record,
            self._has_other_nodes,
        )

    def format_report(self, beats: Mapping[int, Beat | None], seconds: float) -> str:
        """Format the report of a stall."""
        return _format_report(self._folders, beats, seconds, self._collect)


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
    """Watches the ranks of this node, and reports once if they hang.

    The time without progress is that in which the watch itself ran: a launcher that was stopped, or whose computer slept,
    begins again. At a half of the limit and at the limit the ranks are observed, and the observations compared. Without any
    sign of work the stall is reported; signs that may be work extend the limit at most tenfold; see `hang_report.py`.

    Before the first step, which may wait for imports, connections, the first batch and a compiler, the limit is
    `startup_timeout`. The time begins when all ranks have begun their script, or one of them records progress.

    Args:
        observer: Observes the ranks.
        timeout: The limit in seconds.
        startup_timeout: The limit before the first step; by default ten times the limit.
        record: Records an event of the run.
    """

    def __init__(
        self,
        observer: RankObserver,
        timeout: float,
        startup_timeout: float | None = None,
        record: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._observer, self._timeout, self._record = observer, timeout, record
        self._startup_timeout = startup_timeout or timeout * _STARTUP_FACTOR
        self._interval = min(1.0, timeout / 4)
        self._last_check = observer.read_clock()
        self._watched = 0.0
        """The time in which this watch ran, in seconds; the following times are read from it."""
        self._last_progress = 0.0
        self._last_doubt: float | None = None
        self._next_observation = 0.0
        self._observation: Observation | None = None
        self._doubts: Sequence[str] = ()
        self._signs: object = None
        self._has_begun = self._is_stalled = self._is_explained = False

    def check(self) -> Stall | None:
        """Check for progress, at most four times per timeout, and return a stall once it has been reported."""
        now = self._observer.read_clock()
        elapsed = now - self._last_check
        if elapsed < self._interval:
            return None
        self._last_check = now
        self._watched += min(elapsed, 2 * self._interval)
        beats = self._observer.read_beats()
        has_trained = any(beat.steps or beat.batches > 1 for beat in beats.values() if beat)
        signs = _read_signs(beats)
        has_begun = self._has_begun or any(beats.values()) or self._observer.have_scripts_begun()
        is_pause = elapsed > max(_MIN_PAUSE_S, self._timeout / 4)
        if is_pause or signs != self._signs or has_begun != self._has_begun:
            self._signs, self._has_begun = signs, has_begun
            self._restart_count(is_progress=not is_pause)
        if self._is_stalled:
            return None
        limit = self._timeout if has_trained else self._startup_timeout
        if self._watched < max(self._next_observation, self._last_progress + limit / 2):
            return None
        silence = self._judge(beats, limit)
        if silence is None:
            return None
        self._is_stalled = True
        report = self._observer.format_report(beats, silence)
        console.note(report)
        self._record("stall", seconds=silence, text=report)
        return Stall(silence, has_trained, is_seen=any(beats.values()))

    def skip_time(self) -> None:
        """Leave out the time since the last check, in which the launcher has observed the ranks for another node: it is no pause."""
        started, self._last_check = self._last_check, self._observer.read_clock()
        if self._last_check - started > _MAX_OBSERVATION_S:
            self._restart_count(is_progress=False)

    def describe_activity(self) -> str:
        """Describe what the ranks of this node do that may be work; empty if they seem to hang."""
        if self._is_stalled:
            return ""
        if self._watched - self._last_progress < self._timeout / 2:
            return "ranks make progress"
        return self._doubts[0] if self._doubts else ""

    def _judge(self, beats: Mapping[int, Beat | None], limit: float) -> float | None:
        """Observe the ranks; return the seconds without progress if they hang."""
        silence = self._watched - self._last_progress
        is_due = silence >= limit
        before = self._observation
        self._observation = self._observer.observe(beats, self._watched, with_others=is_due)
        # The time that the observation takes is no pause, but it may contain one, and progress.
        started = self._last_check
        self.skip_time()
        self._next_observation = self._watched + limit / 2
        if (
            self._last_check - started > _MAX_OBSERVATION_S
            or before is None
            or _read_signs(self._observer.read_beats()) != self._signs
        ):
            return None
        judgement = judge(before, self._observation)
        self._doubts = judgement.doubts
        if judgement.has_progress:
            self._restart_count(is_progress=True)
            return None
        if judgement.doubts:
            self._last_doubt = self._watched
        if not is_due:
            return None
        is_idle = self._last_doubt is None or self._watched - self._last_doubt >= limit
        if judgement.is_hang or is_idle or silence >= _DOUBT_FACTOR * limit:
            return silence
        if not self._is_explained:
            self._is_explained = True
            reasons = "; ".join(judgement.doubts[:_SHOWN_DOUBTS])
            if reasons:
                console.note(
                    f"no progress for {silence:.0f} s, but no sure sign of a hang: {reasons}. It is a stall after "
                    f"{_DOUBT_FACTOR * limit:.0f} s, or after {limit:.0f} s without such a sign"
                )
        return None

    def _restart_count(self, *, is_progress: bool) -> None:
        """Count the time without progress from now on."""
        if self._is_stalled and is_progress:
            seconds = self._watched - self._last_progress
            console.note(f"progress resumed after {seconds:.0f} s")
            self._record("progress", seconds=seconds)
            self._is_stalled = False
        self._last_progress, self._last_doubt, self._next_observation = self._watched, None, 0.0
        self._observation, self._doubts, self._is_explained = None, (), False


def _read_signs(beats: Mapping[int, Beat | None]) -> list[object]:
    return [beat and beat.signs_of_life for beat in beats.values()]


def format_stall(folders: Mapping[int, RankFolder], *, full: bool = False) -> str:
    """Format the heartbeats of ranks as a table, followed by their stacks; `full` includes all threads and libraries."""
    stacks = request_stacks(folders)
    beats = {rank: Beat.read(folder.beat) for rank, folder in folders.items()}
    groups = [_format_stacks(ranks, stacks[ranks[0]], full=full) for ranks in _group_ranks(stacks, beats)]
    hang = _explain_hang(_read_record(folders, stacks), stacks)
    return "\n".join([*_format_table(beats), *groups, *describe_loader_workers(folders), *hang])


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
    return "\n".join(explain_hang(collect(_read_record(folders, request_stacks(folders), failed))))


def read_hang_record(folders: Mapping[int, RankFolder]) -> HangRecord:
    """Request the collectives and the lines of the ranks of this node."""
    return _read_record(folders, request_stacks(folders))


def _read_record(
    folders: Mapping[int, RankFolder], stacks: Mapping[int, Stacks], failed: int | None = None
) -> HangRecord:
    locations = {rank: place for rank, each in stacks.items() if (place := format_location(each.main))}
    calls = {rank: call for rank, each in stacks.items() if (call := _find_waiting_call(each.main))}
    problems = {rank: each.problem for rank, each in stacks.items() if each.problem not in {"", *_ENDED}}
    threads = {rank: text for rank, folder in folders.items() if (text := read_thread_failures(folder))}
    # One that is stopped does not answer either.
    running = {rank: folder for rank, folder in folders.items() if problems.get(rank) != _STOPPED}
    return HangRecord(request_traces(running, failed), locations, calls, problems, threads)


def format_location(stack: tuple[str, ...]) -> str:
    """Return the innermost frame of the user's code in a stack of faulthandler as `train.py:12 (main)`; empty without a stack."""
    frames = _get_user_frames(stack)
    frame = next((frame for frame in frames if not frame.startswith(_STDLIB)), next(iter(frames), ""))
    match = FRAME.fullmatch(frame)
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
    lines += describe_loader_workers(folders)
    lines += _explain_hang(collect(_read_record(folders, stacks)), stacks)
    return "\n".join(lines)


def _explain_hang(record: HangRecord, shown: Collection[int]) -> list[str]:
    """Explain a hang below the stacks of the ranks `shown`, which have the reason if one does not answer."""
    problems = {rank: problem for rank, problem in record.problems.items() if rank not in shown}
    return explain_hang(replace(record, problems=problems))


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


_PATIENCE_S, _SIGNAL_TIMEOUT_S = 2.0, 1.0
"""Seconds in which Python code answers, also on a busy computer, and faulthandler after that."""
_BLOCKED_SHARE, _BUSY_SHARE = 0.05, 0.5
"""The part of a processor below which a silent process is blocked, and above which it runs C code; in between, its Python code may
just not have had its turn."""
_MAX_STACKS = 16 << 20
"""The most bytes of the stacks of a process."""
_IDLE_S, _POLL_S = 0.2, 0.05
"""Seconds without growth after which a file is complete, and between two looks at it."""
_PACKAGE = f'File "{Path(worker.__file__).parent}/'
"""The start of a frame of accel, which leads to the script."""
_HANDLER = f'File "{worker.__file__}"'
"""The innermost frame of a forked child that writes its stack."""
_HOOK = f'File "{worker.HOOKS}"'
"""The frames between those of the script and of torch, while the heartbeat measures a step."""
_THREAD = re.compile(r"^(?=Thread 0x|Current thread 0x)", re.MULTILINE)
_PROCESS_STATES = {
    "T": "it is stopped",
    "t": "it is stopped by a debugger",
    "D": "it waits for a device",
    "Z": "it has ended",
}


_STOPPED = f"no answer: {_PROCESS_STATES['T']}"
_ENDED = frozenset({"not running", f"no answer: {_PROCESS_STATES['Z']}"})


@dataclass(frozen=True)
class Stacks:
    """Stacks of a process; each begins with the innermost call."""

    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    problem: str = ""
    """The reason, if there are no stacks."""


def request_stacks(folders: Mapping[int, RankFolder]) -> dict[int, Stacks]:
    """Request the stacks of all ranks at the same time, and wait for them, up to three seconds."""
    return _collect_stacks(
        folders,
        {rank: read_pid(folder.pid) for rank, folder in folders.items()},
        lambda rank: _ask_rank(folders[rank]),
    )


def _request_children(folders: Mapping[int, RankFolder], pids: Mapping[int, int]) -> dict[int, Stacks]:
    """Request the stacks of one forked child of each rank."""
    return _collect_stacks(
        {rank: folders[rank] for rank in pids},
        pids,
        lambda rank: _send_signal(pids[rank], worker.CHILD_STACK_SIGNAL, folders[rank].stacks),
    )


def _collect_stacks(
    folders: Mapping[int, RankFolder], pids: Mapping[int, int | None], ask: Callable[[int], str]
) -> dict[int, Stacks]:
    """Return the stacks of one process of each rank: the answer of its Python code, or what faulthandler finds without it.

    faulthandler reads frames that a computing interpreter is just changing: one of some hundred requests ended a healthy rank
    with SIGSEGV (CPython 3.11.7, a loop over a generator). It reads those of a process whose Python code does not run.

    Args:
        folders: The folders of the ranks.
        pids: The processes, by rank.
        ask: Requests the answer of a process; returns the reason if that is impossible.
    """
    offsets = {rank: read_size(folder.stacks) for rank, folder in folders.items()}
    times = {rank: read_cpu_time(pid or 0) for rank, pid in pids.items()}
    problems = {rank: ask(rank) for rank in folders}
    asked = {folders[rank].stacks: offsets[rank] for rank in folders if not problems[rank]}
    _wait_for_stacks(asked, _PATIENCE_S)
    silent = [
        rank for rank in folders if not problems[rank] and read_size(folders[rank].stacks) == offsets[rank]
    ]
    for rank in silent:
        share = (read_cpu_time(pids[rank] or 0) - times[rank]) / _PATIENCE_S
        problems[rank] = (
            "no answer: it waits for a processor"
            if _BLOCKED_SHARE < share < _BUSY_SHARE
            else _send_signal(pids[rank], worker.STACK_SIGNAL, folders[rank].stacks)
        )
    signalled = {folders[rank].stacks: offsets[rank] for rank in silent if not problems[rank]}
    _wait_for_stacks(signalled, _SIGNAL_TIMEOUT_S)
    stacks = {}
    for rank, folder in sorted(folders.items()):
        answer = None if problems[rank] else _read_stacks(folder, offsets[rank])
        stacks[rank] = answer or Stacks(problem=problems[rank] or _explain_silence(pids[rank]))
    return stacks


_WORKER_NAME = "pt_data_worker"
"""The name that torch gives to the main thread of a data-loader worker (torch 2.9 and later)."""
_WORKER_LOOP, _WORKER_FETCH = "/torch/utils/data/_utils/worker.py", "/torch/utils/data/_utils/fetch.py"
_MAX_WORKERS = 32
"""The most data-loader workers of a rank whose stacks are requested, one after the other."""


def describe_loader_workers(folders: Mapping[int, RankFolder]) -> list[str]:
    """Describe the data-loader workers that load a sample, or do not answer, with their process ids and stacks."""
    found: defaultdict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    pending = {rank: _list_loader_workers(read_pid(folder.pid)) for rank, folder in folders.items()}
    while any(pending.values()):
        # A rank and its workers have one file, so that they write one after the other.
        asked = {rank: pids.pop(0) for rank, pids in pending.items() if pids}
        for rank, answer in _request_children(folders, asked).items():
            frames = answer.main
            loop = next((i for i, frame in enumerate(frames) if _WORKER_LOOP in frame), len(frames))
            if any(_WORKER_FETCH in frame for frame in frames[:loop]):
                found[_get_user_frames(frames[:loop])[:_SHOWN_FRAMES]].append((rank, asked[rank]))
            elif answer.problem:
                found[(answer.problem,)].append((rank, asked[rank]))
    lines = []
    for frames, workers in found.items():
        names = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in workers)
        noun = "a data-loader worker" if len(workers) == 1 else "data-loader workers"
        lines += [f"  {noun} of {names}, innermost call first:", *(f"    {frame}" for frame in frames)]
    return lines


def _list_loader_workers(pid: int | None) -> list[int]:
    children = [process.pid for process in list_processes() if process.parent == pid]
    names = {child: read_text(Path("/proc", str(child), "comm")).strip() for child in children}
    return sorted(child for child, name in names.items() if name == _WORKER_NAME)[:_MAX_WORKERS]


def _explain_silence(pid: int | None) -> str:
    """Return why a process does not answer."""
    state = _read_status(pid).get("State", "Z")[0]
    return f"no answer: {_PROCESS_STATES.get(state, 'it is ending, or busy in C code')}"


_UNAVAILABLE = (
    "stacks are not available: the process is starting or ending, or is not a Python process of accel"
)


def _ask_rank(folder: RankFolder) -> str:
    """Ask the thread of a rank for the stacks, or return the reason why that is impossible."""
    status = _read_status(read_pid(folder.pid))
    if status.get("State", "").startswith("T"):
        # The answer would come once it continues.
        return _STOPPED
    problem = _find_problem(status, folder.stacks)
    return problem or ("" if send_request(folder.stack_request) else _UNAVAILABLE)


def _send_signal(pid: int | None, number: int, stacks: Path) -> str:
    """Send a signal to a process that writes its stacks to a file, or return the reason why it cannot be sent."""
    status = _read_status(pid)
    if problem := _find_problem(status, stacks):
        return problem
    # Ask the kernel: the handler is lost if the process executes another program.
    if not int(status["SigCgt"], 16) >> (number - 1) & 1:
        return _UNAVAILABLE
    if status["State"][0] in "Tt":
        # faulthandler would read the frames when the process continues, at any instruction.
        return _explain_silence(pid)
    send_signal([int(status["Pid"])], number)
    return ""


def _find_problem(status: Mapping[str, str], stacks: Path) -> str:
    """Return the reason why a process cannot write its stacks to a file; empty if it may."""
    if not status:
        has_proc = Path("/proc/self/status").exists()
        return "not running" if has_proc else "stacks are not available: there is no /proc"
    return (
        ""
        if _has_open(status["Pid"], stacks)
        else "stacks are not available: the script has closed the file for them"
    )


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


def _read_status(pid: int | None) -> dict[str, str]:
    """Read `/proc/PID/status`; return an empty dictionary if the process has ended."""
    lines = read_text(Path("/proc", str(pid), "status")).splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _wait_for_stacks(offsets: Mapping[Path, int], timeout: float) -> None:
    """Wait until all files are longer than before and do not change any more, or until the timeout."""
    now, last_change, sizes = time.monotonic(), -math.inf, dict(offsets)
    deadline = now + timeout
    while now - last_change < _IDLE_S or (now < deadline and not offsets.items().isdisjoint(sizes.items())):
        time.sleep(_POLL_S)
        now, previous, sizes = time.monotonic(), sizes, {file: read_size(file) for file in offsets}
        if sizes != previous:
            last_change = now


def _read_stacks(folder: RankFolder, offset: int) -> Stacks | None:
    """Read the stacks that faulthandler wrote: a block for each thread, the main one last; None without any."""
    with open_file(folder.stacks) as file:
        file.seek(offset)
        text = decode_text(file.read(_MAX_STACKS))
    blocks = [block for block in _THREAD.split(text) if block.strip()]
    if not blocks:
        return None
    main = blocks[-1]
    if folder.thread.exists():  # the thread of a replica runs its script
        thread = read_text(folder.thread)
        main = next((block for block in blocks[::-1] if thread in block.lstrip().partition("\n")[0]), main)
    return Stacks(_parse_frames(main), tuple(_parse_frames(block) for block in blocks if block is not main))


def _parse_frames(block: str) -> tuple[str, ...]:
    """Parse the frames of a thread, without those of accel that lead to the script, write the stack, or measure."""
    lines = [line.strip() for line in block.splitlines() if line.startswith("  File ")]
    frames = [line for line in lines if not line.startswith(_HOOK)]
    while frames and frames[0].startswith(_HANDLER):
        del frames[0]
    # A library may start the threads in which accel runs the script.
    outermost = max((i for i, frame in enumerate(frames) if frame.startswith(_PACKAGE)), default=len(frames))
    frames = frames[:outermost]
    while frames and frames[-1].startswith((_PACKAGE, 'File "<frozen runpy>"')):
        frames.pop()
    return tuple(frames)


@dataclass(frozen=True)
class EarlyExit:
    """A rank that has ended with exit code 0."""

    rank: int
    host: str
    place: str
    """Where its script ended, as ` at train.py:7 (main) after 3 steps`; empty if it recorded nothing, as with `_exit` in C code."""
    time: float
    """When its script ended, on the monotonic clock of its machine."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} had exited before with code 0{self.place}"


def read_exit_record(folder: RankFolder, pid: int) -> Mapping[str, Any]:
    """Return the record of a script that has ended with code 0; its process may still be exiting. Empty without one."""
    try:
        record = read_json(folder.exit)
    except (OSError, ValueError):
        return {}
    return record if record.get("pid") == pid else {}


def read_exit(folder: RankFolder, rank: int, host: str, pid: int) -> EarlyExit:
    """Read where the script of a rank has ended."""
    record = read_exit_record(folder, pid)
    if not record:
        return EarlyExit(rank, host, "", time.monotonic())
    frames = record["frames"]
    place = f" at {_format_frame(frames)}" if frames else " at the end of its script"
    beat = Beat.read(folder.beat)
    if beat and beat.steps:
        place += f" after {beat.steps} step{'' if beat.steps == 1 else 's'}"
    return EarlyExit(rank, host, place, record["monotonic"])


def _format_frame(frames: Sequence[Sequence[Any]]) -> str:
    """Return the innermost line of the user's code; of a stack without any, that of a library."""
    user_frames = [frame for frame in frames if not any(name in frame[0] for name in _LIBRARY_FILES)]
    file, line, name, *_ = [*frames, *user_frames][-1]
    return f"{Path(file).name}:{line} ({name})"


def format_exits(exits: Collection[EarlyExit]) -> str:
    """Return which ranks had exited, the first ones with their lines; empty without any."""
    ordered = sorted(exits, key=lambda each: (each.time, each.rank))
    more = len(ordered) - _MAX_SHOWN
    rest = [f"and {more} more rank{'' if more == 1 else 's'}"] if more > 0 else []
    return ", ".join([*map(str, ordered[:_MAX_SHOWN]), *rest])


class ExitWatch:
    """Prints a line, once, if a rank waits in a collective after another one has exited with code 0.

    A rank that exports or uploads after the others have ended is left alone: only one that is found twice at the same line of a
    function that communicates is reported.

    Args:
        folders: The folders of the ranks of this machine.
        find_exits: Returns the ranks of all machines that have exited with code 0.
    """

    def __init__(
        self, folders: Mapping[int, RankFolder], find_exits: Callable[[], Collection[EarlyExit]]
    ) -> None:
        self._folders, self._find_exits = folders, find_exits
        self._interval = _SAMPLE_S
        self._next = time.monotonic() + self._interval
        self._before: Mapping[int, _Wait] = {}
        self._is_reported = False

    def check(self) -> None:
        """Look at the ranks that still run, now and then."""
        now = time.monotonic()
        if self._is_reported or now < self._next:
            return
        exits = self._find_exits()
        waits = self._find_waits({each.rank for each in exits}) if exits else {}
        if stuck := sorted(rank for rank, wait in waits.items() if self._before.get(rank) == wait):
            self._report(stuck, waits[stuck[0]], exits)
        # The stacks of a rank that uploads for hours must not fill its file.
        is_busy = bool(exits and not waits)
        self._interval = min(2 * self._interval, _MAX_SAMPLE_S) if is_busy else _SAMPLE_S
        self._before, self._next = waits, now + self._interval

    def _report(self, ranks: Sequence[int], wait: _Wait, exits: Collection[EarlyExit]) -> None:
        self._is_reported = True
        verb = "waits" if len(ranks) == 1 else "wait"
        console.note(
            f"{format_ranks(ranks)} {verb} in {wait.operation} at {wait.line}, and {format_exits(exits)}: a rank that has ended "
            "joins no collective. Let all ranks make the same calls until the end. Stacks: accel stacks. End the run: Ctrl-C."
        )

    def _find_waits(self, exited: Collection[int]) -> dict[int, _Wait]:
        """Return the collectives in which ranks wait, other than those of groups whose ranks all run."""
        running = {rank: folder for rank, folder in self._folders.items() if rank not in exited}
        stacks, traces = request_stacks(running), request_traces(running)
        waits = {}
        for rank, each in stacks.items():
            pending = [trace for trace in traces.get(rank, {}).values() if trace.pending is not None]
            if pending and all(trace.ranks and not set(trace.ranks) & set(exited) for trace in pending):
                continue
            numbers = tuple((trace.ranks, trace.pending) for trace in pending)
            if operation := _find_communication(each.main) or ("a collective" if pending else ""):
                waits[rank] = _Wait(operation, format_location(each.main), numbers)
        return waits


class _Wait(NamedTuple):
    """A collective in which a rank is."""

    operation: str
    line: str
    numbers: tuple[object, ...]
    """The groups and numbers of its collectives that have not completed: two waits at one line differ in them."""


def _find_waiting_call(stack: Sequence[str]) -> str:
    """Return the call of torch or of accel that waits for other ranks, if a rank is in one; else an empty text."""
    hidden = (_STDLIB, *(f'File "{file}"' for file in _DECORATORS))
    frames = [frame for frame in stack if not frame.startswith(hidden)]
    if call := _find_communication(frames):
        return call
    matches = [match for match in map(FRAME.search, frames) if match]
    calls = [*itertools.takewhile(lambda match: _RUNTIME in match["file"], matches)]
    is_waiting = bool(calls) and any(folder in calls[0]["file"] for folder in _WAITING)
    return f"{calls[-1]['function']}()" if is_waiting else ""


def _find_communication(stack: Iterable[str]) -> str:
    """Return the function of torch that communicates, if it is the innermost one of a stack; else an empty text."""
    name = ""
    for match in filter(None, map(FRAME.search, stack)):
        if _COMMUNICATION not in match["file"] or any(folder in match["file"] for folder in _OWN_WORK):
            break
        # `wrapper` is that of torch's decorators.
        name = name if name and match["function"] == "wrapper" else f"{match['function']}()"
    return name
