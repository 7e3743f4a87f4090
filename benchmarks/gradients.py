"""Measure the error of the gradients of several processes, compared with one process."""

from __future__ import annotations

import json

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.report import Table

__all__ = ["measure"]

_TEXT = """\
The largest relative error of a gradient (norm of the difference divided by the norm) over all optimizer steps
of 12 epochs, compared with one process that takes all samples of the accumulation cycle at once. The loss is
the mean over tokens; four rows in five have one or two tokens, the fifth has 24. Datasets of 16, 13, 21 and 33
rows are read in batches of 2 for each process, so that cycles and batches are uneven at the end. accel gets the
number of tokens, `backward(loss, weight=n)`, and does not pad, `even_batches=False`. Accelerate gets the mean
loss, and pads, since otherwise its processes would hang. Nothing here is a time, and every run gives the same
numbers. Goal: at most 1e-6."""
_HEADER = ("processes, micro-batches a cycle", "steps", "accel", "Accelerate")
_PROCESSES = (1, 2, 4)


def measure(bench: Bench) -> Table:
    """The worst relative error."""
    rows = []
    for processes in _PROCESSES:
        ours = _errors(bench, f"{bench.accel}", processes, "accel_runtime")
        theirs = _errors(bench, f"{bench.accelerate}", processes, "accelerate")
        rows += [
            (f"{processes}, {window}", str(len(errors)), f"{max(errors):.1e}", f"{max(theirs[window]):.1e}")
            for window, errors in ours.items()
        ]
    return Table("Gradients against one process", _TEXT, _HEADER, rows)


def _errors(bench: Bench, folder: str, processes: int, library: str) -> dict[str, list[float]]:
    script = (str(SCRIPTS / "gradients.py"), library)
    command = (
        (f"{folder}/python", *script)
        if processes == 1
        else (f"{folder}/torchrun", "--standalone", "--nproc-per-node", str(processes), *script)
    )
    answer: dict[str, list[float]] = json.loads(bench.run(*command)().output)
    return answer
