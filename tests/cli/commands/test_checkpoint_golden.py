"""Output of `accel checkpoint` for stored checkpoints, compared with golden files."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from support.cases import golden
from support.processes.commands import call_accel

KEPT = Path(__file__).parents[2] / "data" / "checkpoint"
COMMANDS = {
    "export": "export kept/two -o two.safetensors",
    "export-parts": "export kept/two -o parts.safetensors --max-shard-size 0.05KB --json",
    "export-rank": "export kept/two -o optimizer.safetensors --item optimizer --rank 1",
    "list": "list kept",
    "list-project": "list runs",
    "show-newest": "show runs",
    "list-json": "list kept --json",
    "prune": "prune runs --keep 2 --yes",
    "show": "show kept/two",
    "show-json": "show kept/two --json",
    "show-tensors": "show kept/two --tensors",
    "verify": "verify kept/two",
    "verify-json": "verify kept/two --json",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_the_golden_file_for_stored_checkpoints(cwd, capfd, name):
    shutil.copytree(KEPT, cwd / "kept" / "two")
    for number in range(4):
        shutil.copytree(KEPT, cwd / "runs" / "checkpoints" / f"checkpoint_{number}")
    result = call_accel(capfd, "checkpoint", *shlex.split(COMMANDS[name]))
    assert result.returncode == 0, result.stderr
    text = f"{result.stdout}\nstderr:\n{result.stderr}" if result.stderr else result.stdout
    golden.check(f"checkpoint/{name}.txt", text.replace(str(cwd), "<cwd>"))


def test_every_golden_file_belongs_to_a_command():
    assert golden.names("checkpoint") == set(COMMANDS)
