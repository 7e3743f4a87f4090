"""The functions of accel that a step calls, as counts in a golden file: what a step costs, on any machine."""

from __future__ import annotations

import pytest
from support.cases import golden
from support.processes.commands import run_accel
from support.processes.ranks import run_script
from support.runs import step_calls

SCRIPT = step_calls.__file__


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_in_a_launch_calls_the_functions_of_its_golden_file(cwd, ranks):
    process = run_accel("launch", "--cpu", "--nproc-per-node", ranks, SCRIPT, "calls.txt", cwd=cwd)
    assert process.returncode == 0, process.stderr
    golden.check(f"step_calls/launch-{ranks}.txt", (cwd / "calls.txt").read_text())


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_a_step_outside_of_a_launch_calls_the_functions_of_its_golden_file(cwd, launcher, port):
    group = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [group | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(2)]
    outputs = run_script(SCRIPT, ranks if launcher == "torchrun" else [{}], arguments=["calls.txt"])
    assert all(code == 0 for *_, code in outputs), outputs
    golden.check(f"step_calls/{launcher}.txt", (cwd / "calls.txt").read_text())
