"""Golden losses: three tiny models by each strategy and precision, compared with a file for each device.

The file of a device that has none is written. Another device needs nothing more than a run of this part there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof import RECORDS, ROOT, Options

__all__ = [
    "FOLDER",
    "TITLE",
    "Device",
    "compare_runs",
    "compute_difference",
    "find_devices",
    "headline",
    "is_exact",
    "measure_runs",
    "read_golden",
    "render",
    "run",
]

TITLE = "Golden losses"
FOLDER = RECORDS / "losses"
SCRIPT = ROOT / "tests" / "support" / "runs" / "golden_runs.py"
XLA_PYTHON = ROOT / ".venv-xla" / "bin" / "python"
XLA_CELLS = ("one process", "accumulation")
TIMEOUT_S = 3600
Run = dict[str, Any]
Launch = Callable[[int, Sequence[str]], str]
"""Launches the script with a number of processes and its arguments, and returns its output."""


@dataclass(frozen=True)
class Device:
    """A kind of device of this machine.

    Attributes:
        name: The name of its golden file.
        count: The number of processes that can have one each; None for any number.
        python: The interpreter.
        options: Options of `accel launch`.
        variables: Environment variables.
        layouts: The strategies that are run; None for all.
    """

    name: str
    count: int | None = None
    python: Path = Path(sys.executable)
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    layouts: tuple[str, ...] | None = None

    def run(self, *args: str) -> str:
        """Run the interpreter; return its output."""
        with tempfile.TemporaryDirectory() as home:
            path = {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}", "ACCEL_HOME": home}
            done = subprocess.run(
                [str(self.python), *args],
                env={**os.environ, **path, **dict(self.variables)},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"Cannot measure losses: exit code {done.returncode}.\n{done.stderr}")
        return done.stdout

    def launch(self, processes: int, cells: Sequence[str]) -> str:
        """Train cells in one launch; return its output."""
        size = () if "launcher.kind=xla" in self.options else ("--nproc-per-node", str(processes))
        options = ("-q", "--no-profile", *self.options, *size)
        return self.run("-m", "accel_cli", "launch", *options, str(SCRIPT), *cells)

    def describe(self) -> str:
        """Return the processors and versions."""
        return self.run("-c", "import proof; print(proof.describe_machine())").strip()


def find_devices() -> list[Device]:
    """Return the devices of this machine: its accelerator or else the CPU, and torch_xla's CPU device if it is installed."""
    import torch

    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else str(kind)
        slug = re.sub(r"\W+", "-", name.lower()).strip("-")
        return [Device(slug, torch.accelerator.device_count())]
    devices = [Device("cpu", options=("--cpu",))]
    if XLA_PYTHON.exists():
        options = ("--set", "launcher.kind=xla")
        xla = {"PJRT_DEVICE": "CPU"}
        devices.append(Device("xla-cpu", 1, XLA_PYTHON, options, tuple(xla.items()), XLA_CELLS))
    return devices


def list_cells(device: Device) -> list[str]:
    """Return the cells that fit the number of devices."""
    from support.runs.golden_runs import CELLS, LAYOUTS

    return [
        cell
        for cell in CELLS
        for layout in [cell.split("/")[1]]
        if (device.count is None or LAYOUTS[layout].world_size <= device.count)
        and (device.layouts is None or layout in device.layouts)
        and not (device.name == "mps" and cell.endswith("fp64"))  # it has no float64
    ]


def measure_runs(cells: Iterable[str], launch: Launch) -> dict[str, Run]:
    """Train cells, in one launch for each number of processes; return the losses and norm of each."""
    from support.runs.golden_runs import LAYOUTS

    by_size: dict[int, list[str]] = {}
    for cell in cells:
        by_size.setdefault(LAYOUTS[cell.split("/")[1]].world_size, []).append(cell)
    runs = {}
    for size, names in by_size.items():
        lines = [line.partition("GOLDEN ")[2] for line in launch(size, names).splitlines()]
        found = {run.pop("cell"): run for run in map(json.loads, filter(None, lines))}
        if missing := set(names) - set(found):
            raise RuntimeError(f"Cannot measure losses: no result of {', '.join(sorted(missing))}.")
        runs |= found
    return runs


def compute_difference(run: Run, other: Run) -> float:
    """Return the largest relative difference of the losses of a step and of the norm of the weights."""
    pairs = [*zip(run["losses"], other["losses"], strict=True), (run["norm"], other["norm"])]
    # A comparison with NaN is false, and a loss that is NaN must not pass.
    return max(abs(a - b) / abs(b) if a == a and b == b else float("inf") for a, b in pairs)  # noqa: PLR0124


def compare_runs(runs: Mapping[str, Run], golden: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """Compare each run with that of the golden file, and with one process in float64.

    Returns:
        By cell, `golden`: its relative difference from the golden run, None if the file lacks it; `one`: from one process in
        float64; `matches`: the first is within the tolerance of its precision.
    """
    from support.runs.golden_runs import PRECISIONS

    compared = {}
    for cell, run in runs.items():
        model, _, precision = cell.split("/")
        one = runs.get(f"{model}/one process/fp64") or golden.get(f"{model}/one process/fp64")
        difference = compute_difference(run, golden[cell]) if cell in golden else None
        compared[cell] = {
            "golden": difference,
            "one": compute_difference(run, one) if one else None,
            "matches": difference is not None and difference <= PRECISIONS[precision],
        }
    return compared


def is_exact(cell: str) -> bool:
    """Return whether a run in float64 equals one process: batch norm normalizes the samples of one forward pass."""
    from support.runs.golden_runs import LAYOUTS

    model, layout, precision = cell.split("/")
    batches = LAYOUTS[layout].accumulation * LAYOUTS[layout].sizes.get("dp_shard", 1)
    is_split = batches > 1 or layout.startswith("ddp")
    return precision == "fp64" and not (model == "mlp" and is_split)


def read_golden(device: str) -> dict[str, Any] | None:
    """Return the golden file of a device, or None."""
    path = FOLDER / f"{device}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_golden(device: Device, runs: Mapping[str, Run]) -> dict[str, Any]:
    """Write the golden file of a device."""
    from support.runs.golden_runs import BATCH, PRECISIONS, STEPS

    golden = {
        "device": device.name,
        "machine": device.describe(),
        "steps": STEPS,
        "batch": BATCH,
        "tolerances": PRECISIONS,
        "runs": dict(runs),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps(golden, indent=1)
    # A run is a line.
    text = re.sub(r"\[\n\s+([^\]]+?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    (FOLDER / f"{device.name}.json").write_text(text + "\n", encoding="utf-8")
    return golden


def run(options: Options) -> dict[str, Any]:
    """Measure each device of this machine, and compare with its golden file, or write it."""
    devices = {}
    for device in find_devices():
        runs = measure_runs(list_cells(device), device.launch)
        golden = read_golden(device.name)
        is_new = golden is None
        golden = golden or write_golden(device, runs)
        devices[device.name] = {
            "is_new": is_new,
            "golden_machine": golden["machine"],
            "cells": compare_runs(runs, golden["runs"]),
        }
    return {"devices": devices}


def render(results: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    from support.runs.golden_runs import BATCH, LAYOUTS, PRECISIONS, STEPS

    bars = ", ".join(f"{precision} {bar:g}" for precision, bar in PRECISIONS.items())
    method = (
        f"An MLP with batch norm, a convolutional net and a causal transformer train {STEPS} steps of {BATCH} samples, the same "
        "samples under every strategy. The losses and the norm of the weights must equal those of the golden file of the device, "
        f"`docs/proof/losses/`, up to a relative difference of {bars}; `bf16` is mixed precision."
    )
    parts = [method]
    failures = []
    for device, record in results["devices"].items():
        cells = record["cells"]
        for cell, row in cells.items():
            if not row["matches"]:
                why = "not in the golden file" if row["golden"] is None else f"differs by {row['golden']:.1e}"
                failures.append(f"`{device}`, `{cell}`: {why}")
        matching = sum(row["matches"] for row in cells.values())
        state = "which this run wrote" if record["is_new"] else f"measured on {record['golden_machine']}"
        exact = [row["one"] for cell, row in cells.items() if is_exact(cell) and row["one"] is not None]
        parts.append(
            f"**`{device}`**: {matching} of {len(cells)} runs match [the golden file](proof/losses/{device}.json), {state}. Of the "
            f"{len(exact)} runs in float64 whose mathematics are those of one process, {sum(one <= PRECISIONS['fp64'] for one in exact)} "
            "equal it. The table has the largest relative difference from one process in float64."
        )
        models = {"mlp": "MLP", "conv": "conv net", "lm": "transformer"}
        header = [f"{models[model]}, {precision}" for model in models for precision in PRECISIONS]
        rows = [["Strategy", *header], ["---"] * (len(header) + 1)]
        for layout in LAYOUTS:
            values = [
                cells.get(f"{model}/{layout}/{precision}", {}).get("one")
                for model in models
                for precision in PRECISIONS
            ]
            if any(value is not None for value in values):
                cells_text = ["" if value is None else f"{value:.0e}" if value else "0" for value in values]
                rows.append([layout, *cells_text])
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(re.sub(r"\| +(?=\|)", "| ", table))
    parts.append(
        "Batch norm takes its statistics of the samples of one forward pass, so that the MLP differs under data parallelism and "
        "accumulation as in bare PyTorch. The tolerances leave room for the kernels of other processors of the same kind; only the named machines were measured."
    )
    if failures:
        parts.append("Runs that do not match:\n\n" + "\n".join(f"- {failure}" for failure in failures))
    parts.append(
        "To add a device, run `make proof PARTS=losses` on a machine that has it, and open a pull request with the new file, or "
        "paste the file into an issue of the form *Golden losses of a device*. Strategies that need more devices than the "
        "machine has are left out."
    )
    return "\n\n".join(parts)


def headline(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return how many runs match their golden file."""
    rows = [row for record in results["devices"].values() for row in record["cells"].values()]
    return (
        f"{sum(row['matches'] for row in rows)} of {len(rows)}",
        "runs of a strategy, precision and device match their golden losses",
    )
