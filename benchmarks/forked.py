"""Measure the savings of forked processes: time at a restart, and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.measure import Run, interleaved
from benchmarks.report import Table, format_spread, ratio

__all__ = ["measure"]

_TEXT = """\
Restart is the time from the failure of one of 2 processes until torch is imported again in both. Memory is the
sum of the private memory of 4 processes that wait in a process group. Goals: a restart takes less than a
second, and the memory is at most half of that under torchrun."""
_HEADER = (
    "measurement",
    "accel launch",
    "accel launch, exec",
    "torchrun",
    "exec ÷ accel",
    "torchrun ÷ accel",
)
_MIB = 1024


def measure(bench: Bench) -> Table:
    """Seconds to a restart, and MiB of private memory."""
    restart = _columns(bench, "restarted.py", 2, _restart)
    memory = _columns(bench, "idle.py", 4, _private)
    rows = [_row("restart, s", restart), _row("private memory of 4, MiB", memory)]
    return Table("Forked processes", _TEXT, _HEADER, rows)


def _columns(bench: Bench, script: str, count: int, value: Callable[[Run], float]) -> list[list[float]]:
    path, processes = str(SCRIPTS / script), str(count)
    restarts = ("--set", "launcher.max_restarts=1") if script == "restarted.py" else ()
    ours = (f"{bench.accel}/accel", "launch", "--ranks", "all", "--nproc-per-node", processes, *restarts)
    theirs = (f"{bench.accel}/torchrun", "--standalone", "--max-restarts=1", "--nproc-per-node", processes)
    cases = {
        "forkserver": bench.run(*ours, path),
        "exec": bench.run(*ours, "--set", "launcher.start_method=exec", path),
        "torchrun": bench.run(*theirs, path),
    }
    return [[value(run) for run in runs] for runs in interleaved(cases, bench.repeats).values()]


def _row(what: str, columns: Sequence[Sequence[float]]) -> tuple[str, ...]:
    ours, *others = columns
    return (what, *map(format_spread, columns), *(ratio(other, ours) for other in others))


def _restart(run: Run) -> float:
    return max(run.numbers("began")) - min(run.numbers("failed"))


def _private(run: Run) -> float:
    return sum(run.numbers("private")) / _MIB
