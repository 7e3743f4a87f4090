"""Evidence of a hang: what the ranks of this node do, at two moments, and whether they have done anything in between.

Silence alone is no hang: a run that is paused, saves, exports, compiles, evaluates or finishes makes no steps either. Two
observations are compared. Output and collectives that complete are progress. Processor time, transferred bytes, another
call, and the phases of `_PHASES` are doubts, which extend the limit. A rank that waits in a collective for one that has
not entered it shows neither, whatever its other threads do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from accel_cli.runner.collectives import find_absent_ranks, has_different_calls, have_collectives_advanced
from accel_cli.runner.guard import list_processes
from accel_cli.runner.hang_exchange import HangRecord
from accel_cli.runs.run_dir import RankFolder, format_ranks
from accel_cli.runs.run_files import read_pid, read_size
from accel_cli.runs.usage import read_cpu_time

__all__ = ["Judgement", "Observation", "RankObservation", "judge", "observe_ranks"]

_BUSY_SHARE = 0.02
"""The part of a processor that shows work: a sleeping rank with the threads of accel uses 0.3 % of one."""
_BUSY_BYTES_PER_S = 64 << 10
_BARRIER = "a barrier waits for a rank that works alone"
_PHASES: Mapping[str, tuple[str, ...]] = {
    "a checkpoint or a model is saved or loaded": (
        "/accel_runtime/accelerator/checkpointing.py",
        "/accel_runtime/checkpoint/",
        "/accel_runtime/export/",
        "/accel_runtime/storage/",
        "/torch/serialization.py",
        "/torch/distributed/checkpoint/",
        "/safetensors/",
        " in save_pretrained",
    ),
    _BARRIER: (
        " in wait_for_everyone",
        " in barrier",
        " in monitored_barrier",
        " in main_process_first",
        " in local_main_process_first",
    ),
    "a model is exported or compiled": (
        "/torch/onnx/",
        "/torch/export/",
        "/torch/_inductor/",
        "/torch/_dynamo/",
        "/triton/",
    ),
    "a debugger waits for input": ("/pdb.py", "/bdb.py"),
    "files are transferred": ("/huggingface_hub/", "/http/client.py", "/urllib3/", "/botocore/"),
}
"""Long work that may be silent, and the parts of the frames of the main thread that show it."""


class RankObservation(NamedTuple):
    """What a rank has done up to a moment."""

    stack: tuple[str, ...] = ()
    """The frames of the thread that runs the script, the innermost first."""
    has_ended: bool = False
    """True if its process has ended; with another code than 0, the run ends or restarts before it is observed."""
    collectives: int = 0
    """The number of collectives of an Accelerator that have completed."""
    is_in_collective: bool = False
    """True in a collective of an Accelerator."""
    processor_s: float = 0.0
    """Processor time of the rank and its child processes."""
    transferred: int = 0
    """Bytes that they have read and written."""
    output: int = 0
    """Bytes of its output."""


class Observation(NamedTuple):
    """What the ranks have done up to a moment."""

    time: float
    ranks: Mapping[int, RankObservation]
    """The ranks of this node."""
    record: HangRecord
    """The collectives of the ranks of this node, or of all nodes."""
    has_other_nodes: bool


@dataclass(frozen=True)
class Judgement:
    """The conclusion from two observations."""

    has_progress: bool = False
    """True if the ranks have certainly worked since the first one."""
    is_hang: bool = False
    """True if the collectives that ranks wait in can never complete."""
    doubts: Sequence[str] = field(default_factory=list)
    """Reasons for which the silence may be work; none if nothing has happened."""


def observe_ranks(
    folders: Mapping[int, RankFolder],
    stacks: Mapping[int, tuple[str, ...]],
    collectives: Mapping[int, tuple[int, bool]],
) -> dict[int, RankObservation]:
    """Observe the ranks of this node.

    Args:
        folders: Their folders.
        stacks: The frames of their scripts.
        collectives: The number of collectives of an Accelerator that each has completed, and if it is in one.
    """
    processes = list_processes()
    running = {process.pid for process in processes}
    sessions: dict[int, list[int]] = {}
    for process in processes:
        sessions.setdefault(process.session, []).append(process.pid)
    ranks = {}
    for rank, folder in folders.items():
        pid = read_pid(folder.pid) or 0
        pids = sessions.get(pid, []) if pid else []
        ranks[rank] = RankObservation(
            stacks.get(rank, ()),
            bool(pid and running) and pid not in running,
            *collectives.get(rank, (0, False)),
            processor_s=sum(map(read_cpu_time, pids)),
            transferred=sum(map(_read_transferred, pids)),
            output=read_size(folder.output),
        )
    return ranks


def judge(before: Observation, now: Observation) -> Judgement:
    """Compare two observations of the same ranks."""
    ranks = now.ranks.keys() & before.ranks.keys()
    absent, was_absent = find_absent_ranks(now.record.traces), find_absent_ranks(before.record.traces)
    waiting = absent.keys() | _find_handshake_waits(now)
    has_output = any(now.ranks[rank].output > before.ranks[rank].output for rank in ranks - waiting)
    if has_output or have_collectives_advanced(before.record.traces, now.record.traces):
        return Judgement(has_progress=True)
    ended = {rank for rank, each in now.ranks.items() if each.has_ended}
    missing = {rank for waiter in absent.keys() & was_absent.keys() for rank in absent[waiter]}
    differs = has_different_calls(before.record.traces) and has_different_calls(now.record.traces)
    if differs or missing & ended:
        return Judgement(is_hang=True)
    finishing = [f"{format_ranks(ended)} finished with exit code 0"] if ended else []
    return Judgement(
        doubts=[
            *finishing,
            *_describe_phases(now, waiting),
            *_describe_work(before, now, ranks - waiting - ended),
            *now.record.activity.values(),
        ]
    )


def _find_handshake_waits(now: Observation) -> set[int]:
    """Return the ranks in a collective of an Accelerator that another rank of this node has not entered."""
    inside = {rank for rank, each in now.ranks.items() if each.is_in_collective}
    have_all_entered = (
        inside == now.ranks.keys() and len({each.collectives for each in now.ranks.values()}) == 1
    )
    return set() if have_all_entered else inside


def _describe_phases(now: Observation, waiting: AbstractSet[int]) -> list[str]:
    """Describe the long work of ranks that do not wait for others, and barriers that not all have entered."""
    doubts = []
    for text, marks in _PHASES.items():
        ranks = {rank for rank, each in now.ranks.items() if _contains(each.stack, marks)}
        if text != _BARRIER:
            ranks -= waiting
        elif ranks == now.ranks.keys() and not now.has_other_nodes:
            continue
        if ranks:
            doubts.append(f"{text} ({format_ranks(ranks)})")
    return doubts


def _contains(stack: Iterable[str], marks: Sequence[str]) -> bool:
    return any(mark in frame for frame in stack for mark in marks)


def _describe_work(before: Observation, now: Observation, ranks: AbstractSet[int]) -> list[str]:
    """Describe the ranks that have used a processor, transferred bytes, or have made another call."""
    seconds = max(now.time - before.time, 1e-3)
    doubts = []
    for rank in sorted(ranks):
        first, last = before.ranks[rank], now.ranks[rank]
        share = (last.processor_s - first.processor_s) / seconds
        if share >= _BUSY_SHARE:
            doubts.append(f"rank {rank} uses {share:.0%} of a processor")
        elif last.transferred - first.transferred >= _BUSY_BYTES_PER_S * seconds:
            doubts.append(f"rank {rank} reads or writes files")
        elif first.stack and last.stack and first.stack != last.stack:
            doubts.append(f"rank {rank} is at another call than before")
    return doubts


def _read_transferred(pid: int) -> int:
    """Return the bytes that a process has read and written, also from caches and pipes; 0 if they cannot be read."""
    with suppress(OSError, ValueError):
        lines = Path("/proc", str(pid), "io").read_text(encoding="ascii").splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["rchar"]) + int(counts["wchar"])
    return 0
