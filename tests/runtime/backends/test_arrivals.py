"""Processes with the variables of a rank: missing ranks are reported, and a child of a rank does not take its place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.processes.ranks import run_script

from accel_cli.errors import UsageError
from accel_cli.planning.nodes import NodeOptions, find_nodes
from accel_runtime.environment.settings import RANK_PROCESS, find_rank_process, format_rank_process

WAITS = """
from accel_runtime import PartialState
from accel_runtime.backends import arrivals
arrivals.REPORT_S = 0.3
PartialState(cpu=True)
"""


def build_environ(rank, size, port):
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCEL_PROCESS_GROUP_TIMEOUT": "2",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "variables", "expected"),
    [
        ([0], {"SLURM_PTY_PORT": "1"}, {0: "for ranks 1, 2, 3 to connect at 127.0.0.1:PORT. Only the first task of srun --pty"}),
        ([0, 2], {}, {0: "for ranks 1, 3 to connect at 127.0.0.1:PORT. Start all 4 processes"}),
        ([1], {}, {1: "for rank 0, and no process listens at 127.0.0.1:PORT"}),
    ],
)  # fmt: skip
def test_a_rank_that_waits_for_the_others_reports_within_seconds_who_is_missing(
    tmp_path, port, ranks, variables, expected
):
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    results = run_script(script, [build_environ(rank, 4, port) | variables for rank in ranks])
    for rank, (_, errors, code) in zip(ranks, results, strict=True):
        assert code
        reports = [line for line in errors.splitlines() if line.startswith("accel: ")]
        if rank not in expected:
            continue
        assert reports, errors
        assert f"accel: rank {rank} of 4 has waited " in reports[0]
        assert any(expected[rank].replace("PORT", str(port)) in line for line in reports), errors
        assert ("srun -n1 --pty" in reports[0]) == bool(variables)


STARTS_A_CHILD = """
import subprocess, sys
from accel_runtime import Accelerator
accelerator = Accelerator(cpu=True)
if accelerator.process_index == 1:
    command = [sys.executable, "-c", "from accel_runtime import PartialState; PartialState(cpu=True)"]
    print(subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr.splitlines()[-1])
accelerator.wait_for_everyone()
"""


@pytest.mark.slow
def test_a_script_that_a_rank_starts_is_refused_with_the_variables_to_leave_out(tmp_path, port):
    script = tmp_path / "train.py"
    script.write_text(STARTS_A_CHILD)
    results = run_script(script, [build_environ(rank, 2, port) | {"ACCEL_PROCESS_GROUP_TIMEOUT": "60"} for rank in range(2)])  # fmt: skip
    assert [code for _, _, code in results] == [0, 0], results
    assert "has inherited the variables of rank 1 of 2 from process" in results[1][0]
    assert "without RANK, WORLD_SIZE and LOCAL_RANK" in results[1][0]


def test_a_process_is_a_child_of_a_rank_only_with_its_variables_and_while_it_runs():
    parent, rank = os.getppid(), build_environ(1, 2, 29500)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record = format_rank_process(rank, parent)
    assert find_rank_process(rank) is None
    assert find_rank_process(rank | {RANK_PROCESS: record}) == parent
    # A run of its own that the child starts, a script that replaces itself, and one that follows a rank.
    assert find_rank_process(rank | {RANK_PROCESS: record, "MASTER_PORT": "29501"}) is None
    assert find_rank_process(rank | {RANK_PROCESS: format_rank_process(rank, os.getpid())}) is None
    assert find_rank_process(rank | {RANK_PROCESS: format_rank_process(rank, ended.pid)}) is None
    assert find_rank_process({RANK_PROCESS: record}) is None
    one = rank | {"WORLD_SIZE": "1", "RANK": "0"}
    assert find_rank_process(one | {RANK_PROCESS: format_rank_process(one, parent)}) is None


def test_accel_launch_in_a_child_of_a_rank_is_refused():
    rank = build_environ(1, 2, 29500)
    with pytest.raises(UsageError, match=rf"process {os.getppid()} is that rank.*Unset RANK"):
        find_nodes(NodeOptions(), rank | {RANK_PROCESS: format_rank_process(rank, os.getppid())})
