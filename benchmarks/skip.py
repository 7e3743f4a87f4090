"""Measure the start in the middle of an epoch."""

from __future__ import annotations

import json
from statistics import median

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.measure import Run, interleaved
from benchmarks.report import NONE, Table, format_spread, number, ratio

__all__ = ["measure"]

_TEXT = """\
Milliseconds of wall time to the first batch after 100 000 batches of 32 samples, one process, including the
creation and preparation of the loader; the samples are numbers. In order and shuffled use `skip_first_batches`.
For an iterable dataset with `state_dict` and `load_state_dict`, accel loads the state of the loader, and
Accelerate, which needs torchdata for such states, skips. Added is the median time beyond the first batch of a
fresh iteration; for a shuffled epoch it is the full time, to be compared with `torch.randperm` of the same
length, alone and converted to a list. Goals: less than 1 in order, one permutation shuffled, less than 10 for
an iterable dataset."""
_HEADER = ("", "fresh", "skipped", "added", "added ÷ accel")


def measure(bench: Bench) -> Table:
    """Milliseconds beyond those of a fresh start."""
    script = str(SCRIPTS / "skip.py")
    runs = interleaved(
        {
            "accel": bench.run(f"{bench.accel}/python", script, "accel_runtime"),
            "Accelerate": bench.run(f"{bench.accelerate}/python", script, "accelerate"),
        },
        (bench.repeats + 1) // 2,
    )
    rows = []
    for what in ("in order", "shuffled", "stream"):
        times = {
            name: [_all(found, what, part) for part in ("fresh", "skipped")] for name, found in runs.items()
        }
        added = {name: _added(what, *parts) for name, parts in times.items()}
        rows += [
            (
                f"{what}: {name}",
                *map(format_spread, parts),
                number(median(added[name])),
                _compared(name, added),
            )
            for name, parts in times.items()
        ]
    for what in ("randperm", "randperm and tolist"):
        own = _all(runs["accel"], "floor", what)
        rows.append((f"`{what}`", NONE, format_spread(own), number(median(own)), NONE))
    return Table("100 000 batches skipped, ms", _TEXT, _HEADER, rows)


def _all(runs: list[Run], what: str, part: str) -> list[float]:
    return [time for run in runs for time in json.loads(run.output)[what][part]]


def _added(what: str, fresh: list[float], skipped: list[float]) -> list[float]:
    if what == "shuffled":
        return skipped
    usual = median(fresh)
    return [time - usual for time in skipped]


def _compared(name: str, added: dict[str, list[float]]) -> str:
    return NONE if name == "accel" or median(added["accel"]) <= 0 else ratio(added[name], added["accel"])
