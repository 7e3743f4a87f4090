"""Measure saving and loading of training states: Accelerate's `save_state`, `torch.save`, and accel, also asynchronous."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench import SCRIPTS, Bench, run_interleaved
from benchmarks.report import NONE, Table, format_ratio, format_spread, merge_numbers

__all__ = ["measure_checkpoints"]

_TEXT = """\
Seconds of wall time on one process for the state of a model with AdamW: 50 million parameters (0.6 GB of state)
and 200 million (2.4 GB), in memory (`tmpfs`), and the smaller one on disk. Goals: saving and loading are not slower than
Accelerate, although every byte is hashed and verified; the first asynchronous save blocks the script for at
most a fifth of Accelerate's save, and later ones for a tenth. An asynchronous save allocates memory of the size
of the state once (`ProjectConfiguration(async_save=True)` allocates it after the first step).

On disk, accel's save ends when the bytes are synced. Accelerate's and `torch.save` end when they are in the
page cache, which is lost with a power failure. Accelerate makes the same promise in the row with fsync, in which
the script calls `os.fsync` for every file and directory after `save_state`: compare accel's save with that row.
An asynchronous save spends the time of the disk while the script continues. Such a save blocks the script for one
copy of the state, at the speed of the memory."""
_HEADER = ("", "seconds", "Accelerate's save ÷ it", "Accelerate's load ÷ it")
_SIZES = (50, 200)
"""Millions of parameters; on disk only the first."""
_GIGABYTE = 1e9


def measure_checkpoints(bench: Bench) -> Table:
    """Measure seconds of a save and of a load."""
    rows = _measure_sizes(bench, "tmpfs", "/dev/shm", _SIZES)  # noqa: S108 - memory is meant
    rows += _measure_sizes(bench, "disk", None, _SIZES[:1])
    return Table("Checkpoints", _TEXT, _HEADER, rows)


def _measure_sizes(
    bench: Bench, storage: str, root: str | None, sizes: Sequence[int]
) -> list[tuple[str, ...]]:
    return [
        row for millions in sizes for row in _measure_size(bench, f"{millions} M, {storage}", millions, root)
    ]


def _measure_size(bench: Bench, label: str, millions: int, root: str | None) -> list[tuple[str, ...]]:
    environments = {
        "accel": bench.accel,
        "async": bench.accel,
        "accelerate": bench.accelerate,
        "synced": bench.accelerate,
        "torch": bench.accel,
    }
    with tempfile.TemporaryDirectory(dir=root if root and Path(root).is_dir() else None) as folder:
        arguments = (str(millions), folder)
        programs = {
            name: bench.command(f"{commands}/python", str(SCRIPTS / "checkpoint.py"), name, *arguments)
            for name, commands in environments.items()
        }
        # A run of the script makes three saves; those of the larger state take most of the time of all benchmarks.
        runs = run_interleaved(programs, bench.half if millions == min(_SIZES) else 1)
    seconds = {name: merge_numbers(results) for name, results in runs.items()}
    save, load = seconds["accelerate"]["save"], seconds["accelerate"]["load"]
    saves = {
        "Accelerate saves": save,
        "Accelerate saves, then fsync": seconds["synced"]["save"],
        "torch.save": seconds["torch"]["save"],
        "accel saves": seconds["accel"]["save"],
        "blocked by the first asynchronous save": seconds["async"]["first"],
        "blocked by a later one": seconds["async"]["later"],
        "asynchronous save, complete": seconds["async"]["complete"],
    }
    loads = {
        "Accelerate loads": load,
        "torch.load": seconds["torch"]["load"],
        "accel loads": seconds["accel"]["load"],
    }
    memory = format_spread([size / _GIGABYTE for size in seconds["async"]["memory"]])
    return [
        *(
            (f"{label}: {name}", format_spread(own), format_ratio(save, own), NONE)
            for name, own in saves.items()
        ),
        *(
            (f"{label}: {name}", format_spread(own), NONE, format_ratio(load, own))
            for name, own in loads.items()
        ),
        (f"{label}: memory of the asynchronous save, GB", memory, NONE, NONE),
    ]
