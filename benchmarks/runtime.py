"""Measure a script with a library: preparation, exchanges between processes, gradients, and the calls they make."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median

from accel_runtime.collectives.transport import SLOT, SUMMARY_VALUES
from benchmarks.bench import SCRIPTS, Bench, Run, run_interleaved
from benchmarks.report import (
    NONE,
    Table,
    format_median,
    format_number,
    format_ratio,
    merge_blocks,
)

__all__ = [
    "count_calls",
    "measure_costs",
    "measure_dispatch",
    "measure_gather",
    "measure_gradients",
    "measure_handshake",
    "measure_sharding",
    "measure_skip",
    "measure_xla",
]

_COSTS_TEXT = """\
Milliseconds that are added to the bare ones, in the same processes and alternating blocks: CPU time of the main thread for
preparations and evaluations, else wall time, which varies more. Bare is `model.to` for a model with its optimizer; a new
`DataLoader` for a loader that is prepared again; torch's `DataLoader`; `all_reduce` of a copy; a loop over the batches of one
process with a model in DDP. accel seeds the generators of a worker for each batch."""
_COSTS_LIBRARIES = ("accel", "Accelerate", "accel launch")


def measure_costs(bench: Bench) -> Table:
    """Measure milliseconds of preparation, reduction of large tensors, loading by workers, and evaluation."""
    script = str(SCRIPTS / "costs.py")
    single = bench.commands(script)
    single["accel launch"] = bench.command(
        f"{bench.accel}/accel", "launch", "--quiet", script, "accel_runtime"
    )
    rows = []
    for count, programs in (
        (1, single),
        *(
            (
                count,
                bench.commands("--standalone", "--nproc-per-node", f"{count}", script, program="torchrun"),
            )
            for count in (2, 8)
        ),
    ):
        for measurement, by_library in merge_blocks(run_interleaved(programs, bench.half)).items():
            added = {name: format_median(blocks.added) for name, blocks in by_library.items()}
            label = f"{count} process{'es' * (count > 1)}, {measurement}"
            bare = format_median(by_library["accel"].bare)
            rows.append((label, bare, *(added.get(name, NONE) for name in _COSTS_LIBRARIES)))
    header = ("", "bare", "accel", "Accelerate", "accel, `accel launch`")
    return Table("Preparation, reduction, workers and evaluation", _COSTS_TEXT, header, rows)


_EXCHANGES_HEADER = ("", "bare", "accel", "Accelerate", "Accelerate ÷ accel")
_GATHER_TEXT = """\
Milliseconds of wall time on gloo processes for one `gather` of a dict of 20 tensors of 8 numbers, and for one `gather_object` of a
list of 4 small dicts. Bare is `torch.distributed.all_gather` and `torch.cat`, tensor by tensor, or `all_gather_object`. Goals:
Accelerate takes at least 8 times as long for the tensors, and on two processes 3 times for the objects."""
_DISPATCH_TEXT = """\
Microseconds of wall time for a batch of an iterable dataset that rank 0 reads for two gloo processes (`dispatch_batches=True`): 4
samples for each process. Bare is rank 0's loader and `torch.distributed.scatter_object_list`. Goal: Accelerate takes at least 5
times as long."""


def measure_gather(bench: Bench) -> Table:
    """Measure milliseconds of gathers of tensors and objects."""
    rows = _measure_exchanges(bench, "gather.py", 2) + _measure_exchanges(bench, "gather.py", 4)
    return Table("Gathering small tensors and objects, ms", _GATHER_TEXT, _EXCHANGES_HEADER, rows)


def measure_dispatch(bench: Bench) -> Table:
    """Measure microseconds of a batch that rank 0 reads for all processes."""
    rows = _measure_exchanges(bench, "dispatch.py", 2)
    return Table("A batch that one process reads for all, µs", _DISPATCH_TEXT, _EXCHANGES_HEADER, rows)


def _measure_exchanges(bench: Bench, script: str, nproc: int) -> list[tuple[str, ...]]:
    options = ("--standalone", "--nproc-per-node", str(nproc), str(SCRIPTS / script))
    runs = run_interleaved(bench.commands(*options, program="torchrun"), bench.half)
    rows = []
    for measurement, by_library in merge_blocks(runs).items():
        accel, other = by_library["accel"], by_library["Accelerate"]
        medians = (format_median(times) for times in (accel.bare, accel.library, other.library))
        ratio = format_ratio(other.library, accel.library)
        rows.append((f"{nproc} processes, {measurement}", *medians, ratio))
    return rows


_HANDSHAKE_TEXT = """\
Microseconds of wall time for one [handshake](scaling.md) without data, over Unix sockets. All ranks share the cores of this
machine, so that the times show the number of messages and not the latency of a network. Bytes and rounds are computed. *Slots*
is 4096 bytes of each rank to all others, *summary* 64 bytes a round, which comes first with more than 32 ranks."""
_HANDSHAKE_HEADER = (
    "Ranks",
    "Rounds",
    "Slots: sent by a rank",
    "Summary: sent by a rank",
    "Slots, µs",
    "Summary, µs",
)
_MEASURED_SIZES = (2, 4, 8, 16, 32)
_COMPUTED_SIZES = (64, 256, 1024, 4096)


def measure_handshake(bench: Bench) -> Table:
    """Measure the handshake before a collective in small worlds, and compute its traffic in large ones."""
    rows = []
    for world_size in (*_MEASURED_SIZES, *_COMPUTED_SIZES):
        times: tuple[str, ...] = (NONE, NONE)
        if world_size in _MEASURED_SIZES:
            options = ("--nproc-per-node", str(world_size), str(SCRIPTS / "handshake.py"))
            blocks, calls = str(2 * bench.repeats + 1), str(max(20, 800 // world_size))
            run = bench.command(f"{bench.accel}/torchrun", *options, blocks, calls)()
            slots, summary = json.loads(run.output.splitlines()[-1]).values()
            times = tuple(format_number(mid) for mid, _ in (slots, summary))
        rounds = math.ceil(math.log2(world_size))
        sent = ((world_size - 1) * SLOT, rounds * SUMMARY_VALUES * 8)
        rows.append((str(world_size), str(rounds), *map(_format_bytes, sent), *times))
    return Table(
        "The handshake before a collective, by number of ranks", _HANDSHAKE_TEXT, _HANDSHAKE_HEADER, rows
    )


def _format_bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{format_number(count / size)} {unit}"
    return f"{count} B"


_SKIP_TEXT = """\
Milliseconds of wall time to the first batch after 100 000 batches of 32 numbers on one process, with the preparation of the
loader, by `skip_first_batches`. For an iterable dataset with `state_dict`, accel loads the state of the loader, and Accelerate,
which needs torchdata for such states, skips. Added is the time beyond the first batch of a fresh iteration; for a shuffled epoch
it is the full time, to be compared with `torch.randperm`, alone and converted to a list. Goals: less than 1 in order, one
permutation shuffled, less than 10 for an iterable dataset."""
_SKIP_HEADER = ("", "accel", "added", "Accelerate", "added")


def measure_skip(bench: Bench) -> Table:
    """Measure milliseconds to the first batch in the middle of an epoch."""
    runs = run_interleaved(bench.commands(str(SCRIPTS / "skip.py")), bench.half)
    rows = []
    for measurement in ("in order", "shuffled", "stream"):
        cells: list[str] = []
        for results in runs.values():
            fresh, skipped = (_collect(results, measurement, part) for part in ("fresh", "skipped"))
            # A shuffled epoch needs its permutation in both cases.
            start = 0.0 if measurement == "shuffled" else median(fresh)
            cells += [format_median(skipped), format_number(median(skipped) - start)]
        rows.append((measurement, *cells))
    for permutation in ("randperm", "randperm and tolist"):
        time = format_median(_collect(runs["accel"], "floor", permutation))
        rows.append((f"`{permutation}`", time, NONE, NONE, NONE))
    return Table("100 000 batches skipped, ms", _SKIP_TEXT, _SKIP_HEADER, rows)


def _collect(runs: list[Run], measurement: str, part: str) -> list[float]:
    return [time for run in runs for time in json.loads(run.output)[measurement][part]]


_GRADIENTS_TEXT = """\
The largest relative error of a gradient over all optimizer steps of 12 epochs, compared with one process that takes all samples of
the accumulation cycle at once. The loss is the mean over tokens; four rows in five have one or two tokens, the fifth has 24.
Datasets of 16, 13, 21 and 33 rows are read in batches of 2. accel gets `backward(loss, weight=n)` and `even_batches=False`;
Accelerate gets the mean loss, and pads, since otherwise its processes would hang. Every run gives the same numbers. Goal: at
most 1e-6."""


def measure_gradients(bench: Bench) -> Table:
    """Compute the largest error of the gradients of several processes, compared with one process."""
    rows = []
    for nproc in (1, 2, 4):
        program = "python" if nproc == 1 else "torchrun"
        options = () if nproc == 1 else ("--standalone", "--nproc-per-node", str(nproc))
        commands = bench.commands(*options, str(SCRIPTS / "gradients.py"), program=program)
        accel, accelerate = (json.loads(run().output) for run in commands.values())
        rows += [
            (f"{nproc}, {steps}", str(len(errors)), f"{max(errors):.1e}", f"{max(accelerate[steps]):.1e}")
            for steps, errors in accel.items()
        ]
    header = ("processes, micro-batches a cycle", "steps", "accel", "Accelerate")
    return Table("Gradients against one process", _GRADIENTS_TEXT, header, rows)


_SHARDING_TEXT = """\
Milliseconds of wall time on two gloo processes for a step of AdamW on a transformer of 3.4 million parameters, 8 rows of 64 tokens
for each process. Bare calls `fully_shard` on every layer and on the model, accel `prepare` with `dp_shard: auto`. Accelerate
replicates such a model without a GPU. Goal: at most 1.03 times the bare time."""


def measure_sharding(bench: Bench) -> Table:
    """Measure milliseconds of a step of a sharded model, compared with torch's `fully_shard`."""
    options = ("--standalone", "--nproc-per-node", "2", str(SCRIPTS / "sharding.py"), "cpu")
    runs = run_interleaved({"accel": bench.command(f"{bench.accel}/torchrun", *options)}, bench.half)
    rows = []
    for measurement, by_library in merge_blocks(runs).items():
        accel = by_library["accel"]
        medians = (format_median(times) for times in (accel.bare, accel.library, accel.added))
        rows.append((f"2 processes, {measurement}", *medians, accel.ratio))
    header = ("", "bare", "accel", "added", "accel ÷ bare")
    return Table("A step of a sharded model, ms", _SHARDING_TEXT, header, rows)


_XLA_TEXT = """\
Microseconds of wall time for a step, one replica on torch_xla's CPU device: three linear layers (784, 512, 512, 10) on 64 samples,
clipping, AdamW and a schedule. By hand is a loop over `MpDeviceLoader`. Graphs are those compiled by the end of that number of
steps. Goals: the same number of graphs after 100 steps as after 10, and at most 1.05 of the time by hand."""


def measure_xla(bench: Bench) -> Table:
    """Measure microseconds of a step on torch_xla's CPU device, and count graphs."""
    python = str(Path(__file__).parents[1] / ".venv-xla" / "bin" / "python")
    runs = run_interleaved({"accel": bench.command(python, str(SCRIPTS / "xla.py"))}, bench.half)
    rows = []
    for measurement, by_library in merge_blocks(runs).items():
        accel = by_library["accel"]
        rows.append((measurement, format_median(accel.bare), format_median(accel.library), accel.ratio))
    return Table("XLA", _XLA_TEXT, ("", "by hand", "accel", "accel ÷ by hand"), rows)


_CALLS_TEXT = """\
Files and functions of the library that a call enters, once each, on rank 0 of 2 processes: a linear model, SGD, a DataLoader of 11
samples in batches of 2. They are counted with `sys.setprofile` in all threads, without imports and functions defined in C."""


def count_calls(bench: Bench) -> Table:
    """Count the files and functions of a library that a call enters."""
    commands = bench.commands("--nproc-per-node", "2", str(SCRIPTS / "calls.py"), program="torchrun")
    counts = {name: json.loads(run().output) for name, run in commands.items()}
    rows = []
    for call in counts["accel"]:
        cells = (f"{files}, {functions}" for files, functions in (counts[name][call] for name in counts))
        rows.append((f"`{call}`", *cells))
    return Table("Files and functions that a call enters", _CALLS_TEXT, ("", *counts), rows)
