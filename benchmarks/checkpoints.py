"""Measure saving and loading of training states: Accelerate's `save_state`, `torch.save`, and accel, also in the background."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.measure import Run, interleaved
from benchmarks.report import NONE, Table, format_spread, ratio

__all__ = ["measure"]

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
_GIGABYTE = 1e9


def measure(bench: Bench) -> Table:
    """Seconds a save and a load."""
    rows = [
        row
        for name, root, sizes in (("tmpfs", "/dev/shm", _SIZES), ("disk", None, _SIZES[:1]))  # noqa: S108 - its purpose
        for millions in sizes
        for row in _rows(bench, f"{millions} M, {name}", millions, root)
    ]
    return Table("Checkpoints", _TEXT, _HEADER, rows)


def _rows(bench: Bench, label: str, millions: int, root: str | None) -> list[tuple[str, ...]]:
    folder = root if root and Path(root).is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = (str(SCRIPTS / "checkpoint.py"),)
        who = {
            "accel": bench.accel,
            "background": bench.accel,
            "accelerate": bench.accelerate,
            "synced": bench.accelerate,
            "torch": bench.accel,
        }
        runs = interleaved(
            {
                name: bench.run(f"{home}/python", *command, name, str(millions), place)
                for name, home in who.items()
            },
            # A run of a script makes three saves; those of the larger state take most of the time of all benchmarks.
            (bench.repeats + 1) // 2 if millions == min(_SIZES) else 1,
        )
    found = {name: _pooled(own) for name, own in runs.items()}
    theirs, own, behind = found["accelerate"], found["accel"], found["background"]
    return [
        _row(f"{label}: Accelerate saves", theirs["save"], theirs["save"], None),
        _row(f"{label}: Accelerate saves, then fsync", found["synced"]["save"], theirs["save"], None),
        _row(f"{label}: torch.save", found["torch"]["save"], theirs["save"], None),
        _row(f"{label}: accel saves", own["save"], theirs["save"], None),
        _row(f"{label}: blocked by the first asynchronous save", behind["first"], theirs["save"], None),
        _row(f"{label}: blocked by a later one", behind["later"], theirs["save"], None),
        _row(f"{label}: asynchronous save, complete", behind["whole"], theirs["save"], None),
        _row(f"{label}: Accelerate loads", theirs["load"], None, theirs["load"]),
        _row(f"{label}: torch.load", found["torch"]["load"], None, theirs["load"]),
        _row(f"{label}: accel loads", own["load"], None, theirs["load"]),
        (
            f"{label}: memory of the asynchronous save, GB",
            format_spread([b / _GIGABYTE for b in behind["more"]]),
            NONE,
            NONE,
        ),
    ]


def _row(
    label: str, own: Sequence[float], saves: Sequence[float] | None, loads: Sequence[float] | None
) -> tuple[str, ...]:
    return (
        label,
        format_spread(own),
        *(NONE if other is None else ratio(other, own) for other in (saves, loads)),
    )


def _pooled(runs: Sequence[Run]) -> dict[str, list[float]]:
    """All numbers of all runs, by what they are."""
    pooled: dict[str, list[float]] = {}
    for run in runs:
        for what, numbers in json.loads(run.output).items():
            pooled.setdefault(what, []).extend(numbers)
    return pooled
