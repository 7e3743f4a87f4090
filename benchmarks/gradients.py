"""Measure the error of the gradients of several processes, compared with one process."""

from __future__ import annotations

import json

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.report import Table

__all__ = ["measure"]

_TEXT = """\
The largest relative error of a gradient (norm of the difference by the norm) over all optimizer steps of 12 epochs,
against one process that takes all samples of the window at once. The loss is the mean over tokens; four rows in five
ask for one or two tokens, the fifth for 24. Datasets of 16, 13, 21 and 33 rows are read in batches of 2 a process, so
that windows and batches have ragged tails. accel is told the tokens, `backward(loss, weight=n)`, and repeats nothing,
`even_batches=False`; Accelerate gets the mean loss as its `backward(loss)` has it, and fills up the tails, because
without that its processes wait for each other. Nothing here is a time, and all of it is the same in every run. What we
hold ourselves to: at most 1e-6."""
_HEADER = ("processes, micro-batches a window", "steps", "accel", "Accelerate")
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
