"""`accel launch` in processes that another launcher has started: mpirun, srun, torchrun."""

import os
import subprocess
import sys

import pytest
from support.processes.waits import limit

TELL = (
    "import os, sys\n"
    'line = " ".join(os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))\n'
    'sys.stdout.write(f"{line}\\n")  # at once: lines of two processes may mix otherwise\n'
)
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), flush=True)
dist.destroy_process_group()
"""


def ranks(variables, count, *options):
    """Start processes with the variables of ranks, as mpirun does."""
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", *options, "train.py"]
    started = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **{name: value.format(rank=rank, size=count) for name, value in variables.items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return [(*process.communicate(timeout=limit(200)), process.returncode) for process in started]


OMPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{size}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
}  # fmt: skip


@pytest.mark.slow
def test_each_process_of_mpirun_runs_as_its_rank(script):
    script(SUM)
    for out, err, code in ranks(OMPI, 2):
        assert (out, code) == ("sum 2\n", 0), err
        assert "single, 1 process" in err
        assert "OMPI_* (mpirun): RANK" in err


def test_a_number_of_processes_is_an_error_under_mpirun(script):
    script(TELL)
    ((_, err, code),) = ranks(
        {**OMPI, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, "--nproc-per-node", "2"
    )
    assert code == 2
    assert "Cannot use --nproc-per-node 2: this process is already rank 0 of 2 (OMPI_* (mpirun))" in err


def test_a_process_of_torchrun_runs_as_its_rank(script):
    script(TELL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
               sys.executable, "-m", "accel_cli", "launch", "-q", "--cpu", "train.py"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit(200))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0 0 2 2", "1 1 2 2"]


def test_a_profile_of_several_processes_runs_one_in_each_started_rank(script, accel):
    script(TELL)
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # fmt: skip
    result = accel(
        "launch", "--cpu", "--set", "launcher.kind=torchrun", "--set", "launcher.nproc_per_node=4", "train.py",
        env={**os.environ, **variables},
    )  # fmt: skip
    assert result.stdout == "1 1 2 2\n", result.stderr
    assert "RANK and WORLD_SIZE: RANK 1, LOCAL_RANK 1, WORLD_SIZE 2" in result.stderr
