"""Recorded runs of a training script in forked ranks, as `accel launch --record-numerics` records them.

This file is both sides. Tests use `record_runs`; a forked process calls `run_rank`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

from support.processes.children import ForkedProcess, free_port
from support.processes.interpreter import Interpreter
from support.processes.waits import limit

from accel_cli.extensions.numerics.comparison import Run
from accel_runtime.observe.step_records.record import FILE, read_record

INTERPRETER = Interpreter(
    "torch",
    "numpy",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "torch._dynamo",
    "accel_runtime.extensions.numerics.recorder",
    "support.runs.numerics_runs",
)
"""The interpreter that has imported what a recorded rank imports."""


def record_runs(folder, *runs, selection="all,modules"):
    """Run a script several times at once, and return their records.

    Args:
        folder: A folder for the records.
        runs: Path of the script, world size and variables of each run.
        selection: What is recorded.
    """
    found = []
    with ExitStack() as stack:
        started = []
        for number, (script, world_size, variables) in enumerate(runs):
            port = stack.enter_context(free_port())
            for rank in range(world_size):
                rank_folder = Path(folder, f"run_{number}", f"rank_{rank}")
                rank_folder.mkdir(parents=True)
                environ = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    **variables,
                }
                log = stack.enter_context((rank_folder / "log").open("w"))
                process = ForkedProcess(
                    INTERPRETER,
                    "support.runs.numerics_runs:run_rank",
                    [str(script), str(rank_folder), selection],
                    stdout=log,
                    stderr=log,
                    env=environ,
                )
                started.append((stack.enter_context(process), rank_folder))
        for process, rank_folder in started:
            assert process.wait(timeout=limit(120)) == 0, (rank_folder / "log").read_text()
    for number, (_, world_size, _) in enumerate(runs):
        records = {
            rank: read_record(Path(folder, f"run_{number}", f"rank_{rank}", FILE))
            for rank in range(world_size)
        }
        found.append(Run("ab"[number] if number < 2 else str(number), records))
    return found


def run_rank(script, folder, selection):
    """Run a script as a recorded rank."""
    import torch

    from accel_runtime.extensions.numerics.recorder import NUMERICS

    torch.set_num_threads(1)
    NUMERICS.start(selection, Path(folder), os.environ)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    atexit._run_exitfuncs()  # which a forked process does not reach, and which write the end of the record
