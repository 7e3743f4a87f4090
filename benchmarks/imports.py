"""Measure the import of a library, compared with torch alone."""

from __future__ import annotations

from statistics import median

from benchmarks.bench import Bench
from benchmarks.measure import interleaved
from benchmarks.report import NONE, Table, format_spread, number, ratio

__all__ = ["measure"]

_TEXT = """\
Each in a new interpreter. Over torch is the CPU time beyond `import torch` in the same environment and round.
It is negative if torch was not imported: `import accel_runtime` imports torch with the first name that needs
it, so compare the rows of `Accelerator`."""
_HEADER = ("statement", "CPU s", "wall s", "CPU s over torch", "CPU ÷ accel")
_PAIRS = {
    "import accel_runtime": "import accelerate",
    "from accel_runtime import Accelerator": "from accelerate import Accelerator",
}


def measure(bench: Bench) -> Table:
    """CPU and wall seconds of each import."""
    folders = {"accel": bench.accel, "Accelerate": bench.accelerate}
    statements = {"accel": ("import torch", *_PAIRS), "Accelerate": ("import torch", *_PAIRS.values())}
    cases = {
        f"{where}: `{statement}`": bench.run(f"{folders[where]}/python", "-c", statement)
        for where, all_ in statements.items()
        for statement in all_
    }
    runs = interleaved(cases, bench.repeats)
    cpu = {case: [run.cpu for run in results] for case, results in runs.items()}
    beside = {f"Accelerate: `{theirs}`": f"accel: `{ours}`" for ours, theirs in _PAIRS.items()}
    rows = []
    for case, seconds in cpu.items():
        torch = cpu[f"{case.partition(':')[0]}: `import torch`"]
        over = (
            NONE if seconds is torch else number(median(a - b for a, b in zip(seconds, torch, strict=True)))
        )
        compared = ratio(seconds, cpu[beside[case]]) if case in beside else NONE
        rows.append(
            (case, format_spread(seconds), format_spread([run.wall for run in runs[case]]), over, compared)
        )
    return Table("Imports", _TEXT, _HEADER, rows)
