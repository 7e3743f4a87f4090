"""Measure commands that train nothing: help, and the plan of a launch."""

from __future__ import annotations

import shlex

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.measure import interleaved
from benchmarks.report import Table, comparison_row

__all__ = ["measure"]

_TEXT = """\
The same task in each group, accel first. The last columns divide by the time of accel. The last two rows are
lower bounds: a Python that does nothing, and one that imports torch. Goal: `accel --help` takes at most an
eighth of `accelerate --help`."""
_HEADER = ("command", "CPU s", "wall s", "CPU ÷ accel", "wall ÷ accel")
_GROUPS = (
    ("accel --help", "accelerate --help"),
    ("accel config --help", "accelerate config --help"),
    ("accel launch --help", "accelerate launch --help", "torchrun --help"),
    ("accel launch --dry-run empty.py",),
    ("python -c pass",),
    ("python -c 'import torch'",),
)


def measure(bench: Bench) -> Table:
    """CPU and wall seconds of each command."""
    cases = {command: bench.run(*_argv(bench, command)) for group in _GROUPS for command in group}
    runs = interleaved(cases, bench.repeats)
    columns = {
        command: ([run.cpu for run in found], [run.wall for run in found]) for command, found in runs.items()
    }
    rows = [
        comparison_row(f"`{command}`", columns[command], columns[group[0]])
        for group in _GROUPS
        for command in group
    ]
    return Table("Commands", _TEXT, _HEADER, rows)


def _argv(bench: Bench, command: str) -> list[str]:
    """The command with the paths it has here."""
    program, *args = shlex.split(command.replace("empty.py", shlex.quote(str(SCRIPTS / "empty.py"))))
    folder = bench.accelerate if program == "accelerate" else bench.accel
    return [str(folder / program), *args]
