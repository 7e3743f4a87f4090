"""Measure saving and loading of training states: Accelerate's `save_state`, `torch.save`, and accel, also asynchronous."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.bench import SCRIPTS, Bench, run_interleaved
from benchmarks.report import Table, format_beside, format_median, merge_numbers

__all__ = ["measure_checkpoints"]

_TEXT = """\
Seconds of wall time on one process for the state of a model with AdamW: 50 million parameters (0.6 GB) and 200 million (2.4 GB), in
memory (`tmpfs`) and on disk. Goals: saving and loading are not slower than Accelerate, although every byte is hashed and verified;
the first asynchronous save blocks the script for at most a fifth of Accelerate's save, and later ones for a tenth: for one copy of
the state. It allocates memory of the size of the state once.

On disk, accel's save ends when the bytes are synced, those of Accelerate and `torch.save` when they are in the page cache, which is
lost with a power failure. In the row with fsync, the script calls `os.fsync` for every file and directory after `save_state`."""
_SIZES = (50, 200)
"""Millions of parameters; on disk only the first."""
_GIGABYTE = 1e9


def measure_checkpoints(bench: Bench) -> Table:
    """Measure seconds of a save and of a load."""
    columns = {f"{millions} M, tmpfs": _measure_size(bench, millions, "/dev/shm") for millions in _SIZES}  # noqa: S108 - memory is meant
    columns[f"{_SIZES[0]} M, disk"] = _measure_size(bench, _SIZES[0], None)
    rows = [(name, *(column[name] for column in columns.values())) for name in next(iter(columns.values()))]
    return Table("Checkpoints", _TEXT, ("", *columns), rows)


def _measure_size(bench: Bench, millions: int, root: str | None) -> dict[str, str]:
    """Return the cells of a column."""
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
    save, load = seconds["accel"]["save"], seconds["accel"]["load"]
    first, later, complete = (seconds["async"][name] for name in ("first", "later", "complete"))
    return {
        "accel saves": format_median(save),
        "Accelerate saves": format_beside(seconds["accelerate"]["save"], save),
        "Accelerate saves, then fsync": format_beside(seconds["synced"]["save"], save),
        "`torch.save`": format_beside(seconds["torch"]["save"], save),
        "blocked by the first asynchronous save": format_median(first),
        "blocked by a later one": format_median(later),
        "asynchronous save, complete": format_median(complete),
        "accel loads": format_median(load),
        "Accelerate loads": format_beside(seconds["accelerate"]["load"], load),
        "`torch.load`": format_beside(seconds["torch"]["load"], load),
        "memory of the asynchronous save, GB": format_median(
            [size / _GIGABYTE for size in seconds["async"]["memory"]]
        ),
    }
