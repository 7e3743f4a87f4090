"""The record of a run in its folder: facts, events and memory of the ranks, for `accel top` and `accel report`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_cli import console, start_time
from accel_cli.planning.plan import Plan
from accel_cli.runs.run_dir import RunFolder, get_log_home, get_temporary_home
from accel_cli.runs.run_files import read_pid, read_text
from accel_cli.runs.usage import read_cpu_time, read_gpu_usage, read_rss
from accel_runtime.environment import settings as env

__all__ = ["RunRecorder", "build_record", "note_temporary_home", "read_git_commit", "record_script"]

_INTERVAL_S = 5.0
"""Seconds between two samples of the memory, at first."""
_MAX_SAMPLES = 1024
"""The most lines of the file; when it is full, every second one is dropped and the interval doubles."""
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_REFERENCE = re.compile(r"ref: (refs/[\w./-]+)")


def build_record(plan: Plan, torch_version: str, begin: float) -> dict[str, Any]:
    """Return the facts about a launch that are recorded at its start; the command began at `begin`, on the monotonic clock."""
    details = plan.details
    arguments = list(details.arguments) if details else []
    command = plan.argv[: len(plan.argv) - len(arguments)]
    masked = console.mask_arguments(arguments)
    return {
        "argv": [*command, *masked],
        "started": time.time() - (time.monotonic() - begin),
        "target": plan.target,
        "arguments": masked,
        "launcher": plan.launcher,
        "device": plan.device,
        "nnodes": plan.nnodes,
        "nproc_per_node": plan.nproc_per_node,
        "headline": details.headline if details else "",
        "profile": dict(details.profile) if details else {},
        "git_commit": _read_commit(),
        "versions": {
            "accel": env.__version__,
            "torch": torch_version,
            "python": platform.python_version(),
        },
    }


def _read_commit() -> str:
    """Return the commit of the working directory; a repository that cannot be read does not prevent a launch."""
    with suppress(OSError, ValueError):
        return read_git_commit(Path.cwd())
    return ""


def record_script(
    plan: Plan, environ: Mapping[str, str], *, keep_runs: int, keep_days: int
) -> RunRecorder | None:
    """Create the folder of a run whose script replaces this process; return None if that fails.

    A home that is missing, read-only or full does not prevent the launch.
    """
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # the script may need none
        torch_version = ""
    record = build_record(plan, torch_version, start_time.STARTED)
    base = get_log_home(environ)
    with suppress(OSError):
        folder = RunFolder.create(
            base,
            plan.target,
            {**record, "replaces_process": True, "world_size": 1},
            keep_runs=keep_runs,
            keep_days=keep_days,
        )
        note_temporary_home(base)
        folder.get_rank(0, 0).path.mkdir(parents=True)
        recorder = RunRecorder(folder, start_time.STARTED)
        recorder.record_pid(0, 0)
        recorder.record("start", attempt=0, world_size=1, ranks=[0])
        return recorder
    return None


def note_temporary_home(base: Path) -> None:
    """Print a line if the runs are in a temporary folder."""
    if base == get_temporary_home():
        console.note(
            f"the home directory cannot be written: the files of this run are in {base}. Set ACCEL_HOME to keep them elsewhere."
        )


class RunRecorder:
    """Writes `events.jsonl` and `memory.jsonl` of a run; errors of the disk never end the run.

    Args:
        folder: The folder of the run.
        begin: The start of the command, on the monotonic clock.
    """

    def __init__(self, folder: RunFolder, begin: float) -> None:
        self.folder = folder
        self._samples: list[str] = []
        self._cpu_times: dict[int, tuple[float, float]] = {}
        """The time of the last sample, and the CPU time of the process at it, by process."""
        self._interval = _INTERVAL_S
        self._begin, self.last_event = begin, time.monotonic()
        """The time of the newest event, on the monotonic clock."""
        self._next_sample = self.last_event + _INTERVAL_S

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to `events.jsonl`."""
        self.last_event = time.monotonic()
        line = json.dumps({"time": time.time(), "event": event, **fields})
        with suppress(OSError), (self.folder.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def record_pid(self, attempt: int, rank: int) -> None:
        """Write the id of this process as that of a rank."""
        with suppress(OSError):
            self.folder.get_rank(attempt, rank).pid.write_text(str(os.getpid()))

    def sample_memory(self, attempt: int) -> None:
        """Append the memory of the ranks to `memory.jsonl`, unless the newest sample is recent."""
        now = time.monotonic()
        if now < self._next_sample:
            return
        folders = self.folder.list_ranks(attempt)
        pids = {rank: pid for rank, folder in folders.items() if (pid := read_pid(folder.pid))}
        rss = {rank: size for rank, pid in pids.items() if (size := read_rss(pid))}
        if rss:
            usage = read_gpu_usage(set(pids.values()))
            sample: dict[str, Any] = {"time": time.time(), "attempt": attempt, "rss": rss}
            if cpu := self._measure_cpu(pids, now):
                sample["cpu"] = cpu
            if usage:
                sample["gpu"] = {rank: usage[pid][0] for rank, pid in pids.items() if pid in usage}
                sample["gpu_use"] = {rank: usage[pid][1] for rank, pid in pids.items() if pid in usage}
            with suppress(OSError):
                self._append_sample(json.dumps(sample))
        self._next_sample = now + self._interval

    def _measure_cpu(self, pids: Mapping[int, int], now: float) -> dict[int, float]:
        """Return the CPUs that each rank has used since the last sample: 1.5 for one and a half."""
        before, self._cpu_times = self._cpu_times, {pid: (now, read_cpu_time(pid)) for pid in pids.values()}
        return {
            rank: round(max(0.0, self._cpu_times[pid][1] - before[pid][1]) / (now - before[pid][0]), 3)
            for rank, pid in pids.items()
            if pid in before and now > before[pid][0]
        }

    def _append_sample(self, line: str) -> None:
        file = self.folder.path / "memory.jsonl"
        self._samples.append(line)
        if len(self._samples) <= _MAX_SAMPLES:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(f"{line}\n")
            return
        self._samples = self._samples[::2]
        self._interval *= 2
        new = file.with_suffix(".new")
        new.write_text("".join(f"{sample}\n" for sample in self._samples), encoding="utf-8")
        new.replace(file)

    def end(self, code: int) -> None:
        """Record the end of the run with its exit code.

        Raises:
            OSError: The record cannot be written.
        """
        self.record("end", exit_code=code)
        self.folder.update({"exit_code": code, "ended": time.time()})

    def format_end(self, processes: str, code: int) -> str:
        """Return how a run of some processes, as in `2 processes`, has ended."""
        duration = console.format_duration(time.monotonic() - self._begin)
        end = (
            f"finished in {duration}, exit code 0"
            if code == 0
            else f"ended after {duration} with exit code {code}"
        )
        return f"{processes} {end}"


def read_git_commit(folder: Path) -> str:
    """Return the commit and the branch of the repository that a folder is in; empty outside of one.

    Changes that are not committed do not show.
    """
    top = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
    if top is None:
        return ""
    git = top / ".git"
    if git.is_file():  # a worktree or submodule
        git = top / read_text(git).removeprefix("gitdir:").strip()
    head = read_text(git / "HEAD").strip()
    if _COMMIT.fullmatch(head):
        return head
    match = _REFERENCE.fullmatch(head)
    if match is None or ".." in match[1]:
        return ""
    common = git / (read_text(git / "commondir").strip() or ".")
    commit = _read_reference(git, common, match[1])
    return f"{commit} ({match[1].removeprefix('refs/heads/')})" if commit else ""


def _read_reference(git: Path, common: Path, name: str) -> str:
    for folder in (git, common):
        if _COMMIT.fullmatch(text := read_text(folder / name).strip()):
            return text
    packed = re.search(
        rf"^([0-9a-f]{{40,64}}) {re.escape(name)}$", read_text(common / "packed-refs"), re.MULTILINE
    )
    return packed[1] if packed else ""
