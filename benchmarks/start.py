"""Measure the time that a launcher adds to a script that only imports torch, on one process and on several."""

from __future__ import annotations

import socket
from collections.abc import Callable

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.measure import Run, interleaved
from benchmarks.report import Table, comparison_row

__all__ = ["measure"]

_TEXT = """\
The script imports torch and ends. Ready is the time from the start of the command until torch is imported in
the last of its processes. `python -c 'import torch'` is shown for comparison. Goals: ready with 4 processes in
at most half of the time of torchrun, with 8 in at most 0.4 of it and at most a fifth more than with 4, and with
2 in at most 1.8 imports of torch. 8 and 16 processes are compared with torchrun only, in
half as many rounds."""
_HEADER = ("command", "CPU s", "wall s", "ready s", "CPU ÷ accel", "wall ÷ accel", "ready ÷ accel")
_SCRIPT = str(SCRIPTS / "ready.py")
_COUNTS = (2, 4, 8, 16)
_MANY = 8
"""Processes from which on only torchrun is compared, in half as many rounds: a start takes 16 to 33 CPU seconds."""


def measure(bench: Bench) -> Table:
    """CPU and wall seconds to the end, and wall seconds to the script's first line."""
    return Table(
        "Starting a script",
        _TEXT,
        _HEADER,
        [*_alone(bench), *(row for count in _COUNTS for row in _several(bench, count))],
    )


def _alone(bench: Bench) -> list[tuple[str, ...]]:
    cases = {
        "accel launch": bench.run(f"{bench.accel}/accel", "launch", _SCRIPT),
        "python": bench.run(f"{bench.accel}/python", _SCRIPT),
        "torchrun": _torchrun(bench, 1),
        "accelerate launch --cpu": _accelerate(bench, "--cpu", "--num_processes", "1"),
    }
    return _rows(bench, cases, processes=1)


def _several(bench: Bench, count: int) -> list[tuple[str, ...]]:
    accel = (f"{bench.accel}/accel", "launch", "--ranks", "all", "--nproc-per-node", str(count))
    cases = {"accel launch": bench.run(*accel, _SCRIPT), "torchrun": _torchrun(bench, count)}
    if count < _MANY:
        cases["accel launch, exec"] = bench.run(*accel, "--set", "launcher.start_method=exec", _SCRIPT)
        # `--cpu` would start one process only: this is how several are started on a machine without GPUs.
        cases["accelerate launch --multi_gpu"] = _accelerate(
            bench, "--multi_gpu", "--num_processes", str(count)
        )
    return _rows(bench, cases, processes=count)


def _torchrun(bench: Bench, processes: int) -> Callable[[], Run]:
    def run() -> Run:
        count = ("--nproc-per-node", str(processes))
        return bench.run(f"{bench.accel}/torchrun", *count, "--master-port", _free_port(), _SCRIPT)()

    return run


def _accelerate(bench: Bench, *options: str) -> Callable[[], Run]:
    def run() -> Run:
        launch = (f"{bench.accelerate}/accelerate", "launch", "--main_process_port", _free_port())
        return bench.run(*launch, *options, _SCRIPT)()

    return run


def _free_port() -> str:
    """A port that is free now: left alone, torchrun and Accelerate always meet at 29500."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _rows(bench: Bench, cases: dict[str, Callable[[], Run]], processes: int) -> list[tuple[str, ...]]:
    """The table's rows for one number of processes; accel's is the first."""
    runs = interleaved(cases, bench.repeats if processes < _MANY else (bench.repeats + 1) // 2)
    measured = {name: _measured(results, processes) for name, results in runs.items()}
    ours = next(iter(measured.values()))
    count = "1 process" if processes == 1 else f"{processes} processes"
    return [comparison_row(f"{count}: `{name}`", columns, ours) for name, columns in measured.items()]


def _measured(runs: list[Run], processes: int) -> tuple[list[float], list[float], list[float]]:
    ready = [_ready(run, processes) for run in runs]
    return [run.cpu for run in runs], [run.wall for run in runs], ready


def _ready(run: Run, processes: int) -> float:
    """Seconds until the last process was at the script's first line."""
    times = run.numbers("began")
    assert len(times) == processes, (
        f"{len(times)} processes began where {processes} were asked for: {run.output}"
    )
    return max(times) - run.began
