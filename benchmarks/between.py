"""Measure exchanges between processes: gathers, and batches that one rank reads for all, compared with bare torch."""

from __future__ import annotations

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.blocks import Blocks, pooled
from benchmarks.measure import Run, interleaved
from benchmarks.report import NONE, Table, ratio

__all__ = ["measure_dispatch", "measure_gather"]

_HEADER = ("", "bare", "library", "added", "library ÷ bare", "library ÷ accel", "the ratio ÷ accel")
_COLUMNS = """\
Waiting for another process varies much more than computing. Therefore two ratios are shown: of the times
themselves (`library ÷ accel`), and of each library's `library ÷ bare` to that of accel (`the ratio ÷ accel`)."""
_GATHER = f"""\
Milliseconds of wall time on two and on four gloo processes for one `gather` of a dict of 20 tensors of 8
numbers, and for one `gather_object` of a list of 4 small dicts. Bare is `torch.distributed.all_gather` and
`torch.cat`, tensor by tensor, or `all_gather_object`, in the same processes, in alternating blocks. Goals: on
two and on four processes, Accelerate takes at least 8 times as long for the tensors, and on two processes 3
times for the objects.
{_COLUMNS}"""
_DISPATCH = f"""\
Microseconds of wall time for a batch of an iterable dataset that rank 0 reads for two gloo processes
(`dispatch_batches=True`): 4 samples for each process, each a tensor of 4 numbers or a dict of 5 such tensors;
reading them takes almost no time. Bare is rank 0's loader and `torch.distributed.scatter_object_list`, in the
same processes, in alternating blocks. Goal: Accelerate takes at least 5 times as long.
{_COLUMNS}"""


def measure_gather(bench: Bench) -> Table:
    """Milliseconds a gather."""
    rows = _rows(bench, "gather.py", 2) + _rows(bench, "gather.py", 4)
    return Table("Gathering small tensors and objects, ms", _GATHER, _HEADER, rows)


def measure_dispatch(bench: Bench) -> Table:
    """Microseconds a batch."""
    rows = _rows(bench, "dispatch.py", 2)
    return Table("A batch that one process reads for all, µs", _DISPATCH, _HEADER, rows)


def _in_processes(bench: Bench, script: str, processes: int) -> dict[str, list[Run]]:
    """Run a script with each library, in turn, on several processes."""
    command = ("--standalone", "--nproc-per-node", str(processes), str(SCRIPTS / script))
    return interleaved(
        {
            "accel": bench.run(f"{bench.accel}/torchrun", *command, "accel_runtime"),
            "Accelerate": bench.run(f"{bench.accelerate}/torchrun", *command, "accelerate"),
        },
        (bench.repeats + 1) // 2,
    )


def _rows(bench: Bench, script: str, processes: int) -> list[tuple[str, ...]]:
    found = pooled(_in_processes(bench, script, processes))
    return [
        row
        for what, blocks in found.items()
        for name, own in blocks.items()
        for row in [(*own.row(f"{processes} processes, {what}: {name}"), *_ratios(own, blocks["accel"]))]
    ]


def _ratios(own: Blocks, ours: Blocks) -> tuple[str, str]:
    return (NONE, NONE) if own is ours else (ratio(own.library, ours.library), ratio(own.times, ours.times))
