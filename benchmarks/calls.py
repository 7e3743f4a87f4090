"""Count the files and functions of a library that a call enters, and that a reader must follow."""

from __future__ import annotations

import json

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.report import Table

__all__ = ["measure"]

_TEXT = """\
Files and functions of the library that a call enters, once each, on rank 0 of 2 processes: a linear model, SGD,
a DataLoader of 11 samples in batches of 2. They are counted with `sys.setprofile` in all threads, without
functions of torch and other libraries, functions defined in C, and functions that run while a module is
imported."""


def measure(bench: Bench) -> Table:
    """Count files and functions a call."""
    script = str(SCRIPTS / "calls.py")
    found = {}
    for name, folder, library in (
        ("accel", bench.accel, "accel_runtime"),
        ("Accelerate", bench.accelerate, "accelerate"),
    ):
        command = (f"{folder}/torchrun", "--nproc-per-node", "2", script, library)
        found[name] = json.loads(bench.run(*command)().output)
    rows = [
        (
            f"`{call}`",
            *(f"{files}, {functions}" for files, functions in (found[name][call] for name in found)),
        )
        for call in found["accel"]
    ]
    return Table("Files and functions that a call enters", _TEXT, ("", *found), rows)
