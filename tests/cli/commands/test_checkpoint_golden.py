"""Output of `accel checkpoint` for stored checkpoints, compared with golden files."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from support.cases import golden
from support.processes.commands import call_accel

KEPT = Path(__file__).parents[2] / "data" / "checkpoints" / "0.1.0"
COMMANDS = {
    "export": "export kept/two -o two.safetensors",
    "export-parts": "export kept/sharded -o parts.safetensors --max-shard-size 0.05KB --json",
    "export-rank": "export kept/two -o optimizer.safetensors --item optimizer --rank 1",
    "list": "list kept",
    "list-project": "list runs",
    "show-newest": "show runs",
    "list-json": "list kept --json",
    "prune": "prune runs --keep 2 --yes",
    "show": "show kept/sharded",
    "show-json": "show kept/one --json",
    "show-tensors": "show kept/open-cycle --tensors",
    "verify": "verify kept/stream",
    "verify-json": "verify kept/saved-by-one-rank --json",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_the_golden_file_for_stored_checkpoints(cwd, capfd, name):
    shutil.copytree(KEPT, cwd / "kept")
    for number, layout in enumerate(("one", "two", "open-cycle", "stream")):
        shutil.copytree(KEPT / layout, cwd / "runs" / "checkpoints" / f"checkpoint_{number}")
    result = call_accel(capfd, "checkpoint", *shlex.split(COMMANDS[name]))
    assert result.returncode == 0, result.stderr
    text = f"{result.stdout}\nstderr:\n{result.stderr}" if result.stderr else result.stdout
    golden.check(f"checkpoint/{name}.txt", text.replace(str(cwd), "<cwd>"))


def test_every_golden_file_belongs_to_a_command():
    assert golden.names("checkpoint") == set(COMMANDS)
