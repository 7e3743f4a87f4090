"""What a launcher adds to a script that only imports torch, on one process and on two."""

from __future__ import annotations

import socket
from collections.abc import Callable

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.measure import Run, interleaved
from benchmarks.report import Table, beside

__all__ = ["measure"]

_TEXT = """\
The script imports torch and ends. Ready is the time from the start of the command to the first line of the
script in the last of its processes."""
_HEADER = ("command", "CPU s", "wall s", "ready s", "CPU ÷ accel", "wall ÷ accel", "ready ÷ accel")
_SCRIPT = str(SCRIPTS / "empty.py")


def measure(bench: Bench) -> Table:
    """CPU and wall seconds to the end, and wall seconds to the script's first line."""
    return Table("Starting a script", _TEXT, _HEADER, [*_alone(bench), *_two(bench)])


def _alone(bench: Bench) -> list[tuple[str, ...]]:
    cases = {
        "accel launch": bench.run(f"{bench.accel}/accel", "launch", _SCRIPT),
        "python": bench.run(f"{bench.accel}/python", _SCRIPT),
        "torchrun": _torchrun(bench, 1),
        "accelerate launch --cpu": _accelerate(bench, "--cpu", "--num_processes", "1"),
    }
    return _rows(bench, cases, processes=1)


def _two(bench: Bench) -> list[tuple[str, ...]]:
    cases = {
        "accel launch": bench.run(f"{bench.accel}/accel", "launch", "--nproc-per-node", "2", _SCRIPT),
        "torchrun": _torchrun(bench, 2),
        # `--cpu` would start one process only: this is how two are started on a machine without GPUs.
        "accelerate launch --multi_gpu": _accelerate(bench, "--multi_gpu", "--num_processes", "2"),
    }
    return _rows(bench, cases, processes=2)


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
    runs = interleaved(cases, bench.repeats)
    measured = {name: _measured(results, processes) for name, results in runs.items()}
    ours = next(iter(measured.values()))
    count = "1 process" if processes == 1 else f"{processes} processes"
    return [beside(f"{count}: `{name}`", columns, ours) for name, columns in measured.items()]


def _measured(runs: list[Run], processes: int) -> tuple[list[float], list[float], list[float]]:
    ready = [_ready(run, processes) for run in runs]
    return [run.cpu for run in runs], [run.wall for run in runs], ready


def _ready(run: Run, processes: int) -> float:
    """Seconds until the last process was at the script's first line."""
    times = [float(line.split()[1]) for line in run.output.splitlines() if line.startswith("began ")]
    assert len(times) == processes, (
        f"{len(times)} processes began where {processes} were asked for: {run.output}"
    )
    return max(times) - run.began
