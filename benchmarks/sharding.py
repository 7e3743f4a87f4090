"""Measure the time that accel adds to a step of a sharded model, compared with torch's `fully_shard` alone."""

from __future__ import annotations

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.blocks import pooled
from benchmarks.measure import interleaved
from benchmarks.report import Table

__all__ = ["measure"]

_TEXT = """\
Milliseconds of wall time on two gloo processes for a step of AdamW on a transformer of 3.4 million parameters,
8 rows of 64 tokens for each process, sharded over both. Bare calls `fully_shard` on every layer and on the
model; the library calls `prepare` with `dp_shard: auto`. Both run in the same processes, in alternating blocks,
and the first losses are equal. Accelerate is not measured: without a GPU it replicates such a model. Goal: at
most 1.03 times the bare time."""
_HEADER = ("", "bare", "library", "added", "library ÷ bare")


def measure(bench: Bench) -> Table:
    """Milliseconds a sharded step."""
    script = ("--standalone", "--nproc-per-node", "2", str(SCRIPTS / "sharding.py"), "cpu")
    runs = interleaved({"accel": bench.run(f"{bench.accel}/torchrun", *script)}, (bench.repeats + 1) // 2)
    rows = [
        blocks.row(f"2 processes, {what}: {name}")
        for what, found in pooled(runs).items()
        for name, blocks in found.items()
    ]
    return Table("A step of a sharded model, ms", _TEXT, _HEADER, rows)
