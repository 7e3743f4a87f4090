"""Measure commands: help, plans, the start of scripts on one process and on several, restarts, and imports."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Mapping
from statistics import mean

from benchmarks.bench import SCRIPTS, Bench, Run, run_interleaved
from benchmarks.report import NONE, Table, format_beside, format_median, format_ratio

__all__ = ["measure_commands", "measure_forked", "measure_imports", "measure_start"]

_COMMANDS_TEXT = """\
CPU seconds of the same task in each group, accel first. The last two rows are lower bounds. Goal: `accel --help` takes at
most an eighth of `accelerate --help`."""
_COMMANDS_HEADER = ("command", "CPU s", "÷ accel")
_COMMANDS = (
    ("accel --help", "accelerate --help"),
    ("accel config --help", "accelerate config --help"),
    ("accel launch --help", "accelerate launch --help", "torchrun --help"),
    ("accel launch --dry-run empty.py",),
    ("python -c pass",),
    ("python -c 'import torch'",),
)
"""Commands for the same task; the first is that of accel."""


def measure_commands(bench: Bench) -> Table:
    """Measure CPU seconds of commands that train nothing."""
    programs = {
        command: bench.command(*_locate(bench, command)) for commands in _COMMANDS for command in commands
    }
    runs = run_interleaved(programs, bench.repeats)
    seconds = {command: [run.cpu for run in results] for command, results in runs.items()}
    rows = [
        (
            f"`{command}`",
            format_median(seconds[command]),
            NONE if command == commands[0] else format_ratio(seconds[command], seconds[commands[0]]),
        )
        for commands in _COMMANDS
        for command in commands
    ]
    return Table("Commands", _COMMANDS_TEXT, _COMMANDS_HEADER, rows)


def _locate(bench: Bench, command: str) -> list[str]:
    """Return a command with the paths on this machine."""
    program, *args = shlex.split(command.replace("empty.py", shlex.quote(str(SCRIPTS / "empty.py"))))
    folder = bench.accelerate if program == "accelerate" else bench.accel
    return [str(folder / program), *args]


_START_TEXT = """\
The script imports torch and ends. Ready is the wall time from the start of the command until torch is imported in the last of
its processes. Accelerate gets `--cpu` for one process and `--multi_gpu` for several. Goals: ready with 4 processes in at most
half of the time of torchrun, with 8 in at most 0.4 of it and at most a fifth more than with 4, and with 2 in at most 1.8
imports of torch."""
_START_PROGRAMS = ("accel launch", "accel launch, exec", "torchrun", "accelerate launch", "python")
_START_HEADER = ("", *(f"`{program}`" for program in _START_PROGRAMS))
_READY = str(SCRIPTS / "ready.py")
_NPROCS = (2, 4, 8, 16)
_MANY = 8
"""From this number of processes on, only torchrun is compared, in half as many rounds: a start takes 16 to 33 CPU seconds."""


def measure_start(bench: Bench) -> Table:
    """Measure CPU seconds of a script that imports torch, and wall seconds to its first line."""
    single = {
        "accel launch": bench.command(f"{bench.accel}/accel", "launch", _READY),
        "python": bench.command(f"{bench.accel}/python", _READY),
        "torchrun": _build_torchrun(bench, 1),
        "accelerate launch": _build_accelerate(bench, "--cpu", "--num_processes", "1"),
    }
    rows = _measure_start(bench, single, nproc=1)
    for nproc in _NPROCS:
        accel = (f"{bench.accel}/accel", "launch", "--ranks", "all", "--nproc-per-node", str(nproc))
        programs = {"accel launch": bench.command(*accel, _READY), "torchrun": _build_torchrun(bench, nproc)}
        if nproc < _MANY:
            programs["accel launch, exec"] = bench.command(
                *accel, "--set", "launcher.start_method=exec", _READY
            )
            # `--cpu` starts one process only; `--multi_gpu` starts several on a machine without GPUs too.
            programs["accelerate launch"] = _build_accelerate(
                bench, "--multi_gpu", "--num_processes", str(nproc)
            )
        rows += _measure_start(bench, programs, nproc)
    return Table("Starting a script", _START_TEXT, _START_HEADER, rows)


def _build_torchrun(bench: Bench, nproc: int) -> Callable[[], Run]:
    command = (f"{bench.accel}/torchrun", "--nproc-per-node", str(nproc), "--master-port")
    # A port for each run.
    return lambda: bench.command(*command, _find_free_port(), _READY)()  # noqa: PLW0108


def _build_accelerate(bench: Bench, *options: str) -> Callable[[], Run]:
    command = (f"{bench.accelerate}/accelerate", "launch", "--main_process_port")
    return lambda: bench.command(*command, _find_free_port(), *options, _READY)()  # noqa: PLW0108


def _find_free_port() -> str:
    """Return a free port; the default of torchrun and Accelerate is always 29500."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _measure_start(bench: Bench, programs: dict[str, Callable[[], Run]], nproc: int) -> list[tuple[str, ...]]:
    """Return the rows for a number of processes."""
    runs = run_interleaved(programs, bench.repeats if nproc < _MANY else bench.half)
    count = "1 process" if nproc == 1 else f"{nproc} processes"
    reads: dict[str, Callable[[Run], float]] = {
        "ready s": lambda run: _ready(run, nproc),
        "CPU s": lambda run: run.cpu,
    }
    rows = []
    for label, read in reads.items():
        seconds = {name: [read(run) for run in results] for name, results in runs.items()}
        cells = (
            format_beside(seconds[name], seconds["accel launch"]) if name in seconds else NONE
            for name in _START_PROGRAMS
        )
        rows.append((f"{count}: {label}", *cells))
    return rows


def _ready(run: Run, nproc: int) -> float:
    """Return the seconds until the last process was at the first line of the script."""
    times = run.numbers("began")
    assert len(times) == nproc, f"{len(times)} of {nproc} processes started: {run.output}"
    return max(times) - run.started


_FORKED_TEXT = """\
Restart is the time from the failure of one of 2 processes until torch is imported again in both. Memory (PSS) and threads are
those of 8 ranks that have trained 100 steps of Linear(4, 4) with DDP over gloo, without a library. Goals: a restart takes less
than a second, and the memory is at most half of that under torchrun."""
_FORKED_HEADER = ("", "`accel launch`", "`accel launch, exec`", "`torchrun`")
_MIB = 1024


def measure_forked(bench: Bench) -> Table:
    """Measure seconds to a restart, and memory and threads of ranks."""
    rows = _measure_forked(
        bench,
        ("restarted.py", 2, bench.repeats),
        {"restart, s": lambda run: max(run.numbers("began")) - min(run.numbers("failed"))},
    ) + _measure_forked(
        bench,
        ("memory.py", 8, 1),  # memory hardly varies
        {
            "memory of 8 ranks and their launcher, MiB": lambda run: run.numbers("command")[0] / _MIB,
            "memory of a rank, MiB": lambda run: mean(run.numbers("rank")) / _MIB,
            "threads of a rank": lambda run: mean(run.numbers("threads")),
        },
    )
    return Table("Forked processes", _FORKED_TEXT, _FORKED_HEADER, rows)


def _measure_forked(
    bench: Bench, task: tuple[str, int, int], reads: Mapping[str, Callable[[Run], float]]
) -> list[tuple[str, ...]]:
    """Return the rows of what is read from runs of a script, by its name, processes and rounds."""
    name, nproc, repeats = task
    script, nprocs = str(SCRIPTS / name), ("--nproc-per-node", str(nproc))
    accel = (f"{bench.accel}/accel", "launch", "--ranks", "all", *nprocs, "--set", "launcher.max_restarts=1")
    programs = {
        "forkserver": bench.command(*accel, script),
        "exec": bench.command(*accel, "--set", "launcher.start_method=exec", script),
        "torchrun": bench.command(
            f"{bench.accel}/torchrun", "--standalone", "--max-restarts=1", *nprocs, script
        ),
    }
    runs = run_interleaved(programs, repeats).values()
    rows = []
    for label, read in reads.items():
        columns = [[read(run) for run in results] for results in runs]
        rows.append((label, *(format_beside(column, columns[0]) for column in columns)))
    return rows


_IMPORTS_TEXT = """\
CPU seconds, each in a new interpreter. `import accel_runtime` imports torch with the first name that needs it."""
_IMPORTS_HEADER = ("", "accel", "Accelerate")
_IMPORTS = (
    ("import torch", "import torch"),
    ("import accel_runtime", "import accelerate"),
    ("from accel_runtime import Accelerator", "from accelerate import Accelerator"),
)
"""Statements of accel, and those of Accelerate that they are compared with."""


def measure_imports(bench: Bench) -> Table:
    """Measure CPU seconds of imports."""
    programs = {
        f"{folder}: {statement}": bench.command(f"{folder}/python", "-c", statement)
        for statements in _IMPORTS
        for folder, statement in zip((bench.accel, bench.accelerate), statements, strict=True)
    }
    runs = run_interleaved(programs, bench.repeats)
    cpu = {program: [run.cpu for run in results] for program, results in runs.items()}
    rows = []
    for own, other in _IMPORTS:
        accel, accelerate = cpu[f"{bench.accel}: {own}"], cpu[f"{bench.accelerate}: {other}"]
        label = f"`{own}`" if own == other else f"`{own}`, `{other}`"
        rows.append((label, format_median(accel), format_beside(accelerate, accel)))
    return Table("Imports", _IMPORTS_TEXT, _IMPORTS_HEADER, rows)
