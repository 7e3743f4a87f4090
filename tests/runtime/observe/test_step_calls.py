"""The functions of accel that a step calls, as counts in a golden file: what a step costs, on any machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import golden
from support.commands import run_accel
from support.runs import step_calls
from support.waits import limit

SCRIPT = step_calls.__file__


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_in_a_launch_calls_the_functions_of_its_golden_file(cwd, ranks):
    process = run_accel("launch", "--cpu", "--nproc-per-node", ranks, SCRIPT, "calls.txt", cwd=cwd)
    assert process.returncode == 0, process.stderr
    golden.check(f"step_calls/launch-{ranks}.txt", (cwd / "calls.txt").read_text())


@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")],
    ids=["python", "torchrun"],
)
def test_a_step_outside_of_a_launch_calls_the_functions_of_its_golden_file(cwd, launcher):
    command = [sys.executable, *launcher, SCRIPT, "calls.txt"]
    process = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=limit(120), check=False
    )
    assert process.returncode == 0, process.stderr
    golden.check(f"step_calls/{'torchrun' if launcher else 'python'}.txt", (cwd / "calls.txt").read_text())
