"""`python -m benchmarks`: compare accel with other libraries in one run, and write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import runtime
from benchmarks.bench import ACCELERATE, Bench, make_accelerate_environment, read_cpu_model
from benchmarks.checkpoints import measure_checkpoints
from benchmarks.launching import measure_commands, measure_forked, measure_imports, measure_start
from benchmarks.object_store import measure_object_store
from benchmarks.report import Table
from benchmarks.steps import measure_steps

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
SUBJECTS: dict[str, Callable[[Bench], Table]] = {
    "commands": measure_commands,
    "start": measure_start,
    "forked": measure_forked,
    "steps": measure_steps,
    "costs": runtime.measure_costs,
    "gather": runtime.measure_gather,
    "handshake": runtime.measure_handshake,
    "dispatch": runtime.measure_dispatch,
    "skip": runtime.measure_skip,
    "gradients": runtime.measure_gradients,
    "sharding": runtime.measure_sharding,
    "imports": measure_imports,
    "checkpoints": measure_checkpoints,
    "objects": measure_object_store,
    "xla": runtime.measure_xla,
    "calls": runtime.count_calls,
}
_MAX_LOAD = 0.5
"""Load per CPU above which times are not reliable."""
INTRODUCTION = """\
# Benchmarks

This page compares accel with bare torch, torchrun and Hugging Face Accelerate {accelerate}. `make bench` generates it. This run
was on {date}, on {machine}.

Compared programs alternate (A B C A B C) for {repeats} rounds, or half as many where a round repeats a measurement, after one
that does not count. A cell is the median. In **bold**: accel is slower, by more than 5 %, the resolution of such a run. CPU
seconds are user and system time of a command and all its child processes. Every process computes on the CPU on one thread, without
profile or configuration file, and with the same torch.
"""


def main() -> None:
    """Measure the chosen subjects."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        choices=SUBJECTS,
        metavar="NAME",
        help=f"print this one, write no page: {', '.join(SUBJECTS)}",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds that count (default 3)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats needs at least 1")
    accelerate = make_accelerate_environment(ROOT)
    if (load := os.getloadavg()[0] / (os.cpu_count() or 1)) > _MAX_LOAD:
        print(
            f"The load of this machine is {load:.1f} per CPU: wall times are not reliable.", file=sys.stderr
        )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.repeats, Path(sys.executable).parent, accelerate, Path(folder))
        tables = [_measure(name, bench) for name in SUBJECTS if args.only in {None, name}]
        text = "\n".join([_format_introduction(bench), *tables])
    if not args.only:
        PAGE.write_text(text, encoding="utf-8")
        print(f"written to {PAGE.relative_to(ROOT)}", file=sys.stderr)


def _measure(name: str, bench: Bench) -> str:
    print(f"measuring {name}", file=sys.stderr)
    section = SUBJECTS[name](bench).to_markdown()
    print(section, flush=True)
    return section


def _format_introduction(bench: Bench) -> str:
    """Format the introduction of the page, with versions and the properties of the machine that affect the numbers."""
    torch, other = (_read_torch_version(bench, commands) for commands in (bench.accel, bench.accelerate))
    torch = torch if torch == other else f"{torch} (Accelerate: {other})"
    machine = f"{os.cpu_count()} CPUs ({read_cpu_model()}) with Python {platform.python_version()} and torch {torch}"
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    return INTRODUCTION.format(accelerate=ACCELERATE, date=date, machine=machine, repeats=bench.repeats)


def _read_torch_version(bench: Bench, folder: Path) -> str:
    return bench.command(f"{folder}/python", "-c", "import torch; print(torch.__version__)")().output.strip()


if __name__ == "__main__":
    main()
