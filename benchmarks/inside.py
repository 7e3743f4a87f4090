"""Measure the time that a library adds to a step and to a batch, compared with the bare loop."""

from __future__ import annotations

from statistics import median

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.blocks import pooled
from benchmarks.measure import interleaved
from benchmarks.report import NONE, Table, ratio

__all__ = ["measure"]

_LOOP = """\
Microseconds of CPU time of the training thread, one process. A step is forward and backward of Linear(4, 4),
`optimizer.step()` of SGD, `scheduler.step()` of LambdaLR and `zero_grad()`, with so little arithmetic that
overhead dominates. A batch is 32 samples of a TensorDataset of 8192; the start of an epoch is spread over its
256 batches. Each library runs in its own interpreter, where blocks of the bare loop and of the loop with the
library alternate. Added is the median difference of two such blocks. `accel launch` adds the heartbeat, from
which `accel top` reads the progress. Goals: at most 5 added to a step, and 1.7 to a batch."""


def measure(bench: Bench) -> Table:
    """Microseconds a training step and a batch."""
    script = str(SCRIPTS / "loop.py")
    runs = interleaved(
        {
            "accel": bench.run(f"{bench.accel}/python", script, "accel_runtime"),
            "accel launch": bench.run(f"{bench.accel}/accel", "launch", "--quiet", script, "accel_runtime"),
            "Accelerate": bench.run(f"{bench.accelerate}/python", script, "accelerate"),
        },
        bench.repeats,
    )
    rows = []
    for what, blocks in pooled(runs).items():
        ours = blocks["accel"]
        for name, found in blocks.items():
            comparable = found is not ours and median(ours.added) > 0
            compared = ratio(found.added, ours.added) if comparable else NONE
            rows.append((*found.row(f"{what}: {name}"), compared))
    header = ("", "bare", "library", "added", "library ÷ bare", "added ÷ accel")
    return Table("A training step and a batch, µs", _LOOP, header, rows)
