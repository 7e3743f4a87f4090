"""Training steps on torch_xla's CPU device: what accel adds to a loop written by hand, and what both compile."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.blocks import pooled
from benchmarks.measure import interleaved
from benchmarks.report import Table

__all__ = ["measure"]

_TEXT = """\
Microseconds of wall time for a step, one replica on torch_xla's CPU device, in the environment that `make
test-xla` creates. A step is forward and backward of three linear layers (784, 512, 512, 10) on 64 samples,
clipping, AdamW and a schedule. By hand is a loop over `MpDeviceLoader`. Both alternate in one interpreter, in
epochs of 100 steps. Graphs are those compiled by the end of that number of steps in the first epoch. Goals: the
same number of graphs after 100 steps as after 10, and at most 1.05 of the time by hand."""
_ENVIRONMENT = ".venv-xla"


def measure(bench: Bench) -> Table:
    """Microseconds a step, and graphs."""
    python = _python(Path(__file__).parents[1])
    runs = interleaved({"accel": bench.run(python, str(SCRIPTS / "xla.py"))}, (bench.repeats + 1) // 2)
    rows = [blocks["accel"].row(what) for what, blocks in pooled(runs).items()]
    return Table("XLA", _TEXT, ("", "by hand", "accel", "added", "accel ÷ by hand"), rows)


def _python(root: Path) -> str:
    subprocess.run(["make", "--silent", "-C", root, f"{_ENVIRONMENT}/.ready"], check=True)
    return str(root / _ENVIRONMENT / "bin" / "python")
