"""`end_training`: trackers are finished, and the process group is destroyed after its last use."""

from __future__ import annotations

import json

import pytest
import torch
from support.processes.ranks import Cluster

from accel_runtime import Accelerator


@pytest.fixture
def fresh():
    """Return two new ranks, since the test destroys their process group."""
    two = Cluster(2)
    yield two
    two.close()


def test_the_last_accelerator_destroys_the_process_group(fresh):
    def run():
        import torch.distributed as dist

        first, second = Accelerator(), Accelerator()
        first.end_training()
        first.end_training()
        reduced = second.reduce(torch.tensor(1.0)).item()
        second.end_training()
        return reduced, dist.is_initialized(), bool(first.is_main_process)

    assert fresh.run(run) == [(2.0, False, True), (2.0, False, False)]


def test_a_process_group_of_the_script_is_kept(fresh):
    def run():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        accelerator = Accelerator()
        accelerator.end_training()
        return dist.is_initialized()

    assert fresh.run(run) == [True, True]


@pytest.mark.slow
def test_a_launched_script_exits_cleanly_after_end_training(accel, script, cwd):
    script(
        "from accel_runtime import Accelerator\n"
        "accelerator = Accelerator(log_with='jsonl', project_dir='logs')\n"
        "accelerator.init_trackers('project', config={'lr': 0.1})\n"
        "accelerator.log({'loss': 1.0}, step=0)\n"
        "accelerator.end_training()\n"
        "accelerator.print('done')\n"
    )
    process = accel("launch", "--cpu", "-q", "--nproc-per-node", "2", "train.py")
    assert (process.returncode, process.stdout, process.stderr) == (0, "done\n", "")
    config, values = (cwd / "logs" / "project.jsonl").read_text().splitlines()
    assert (json.loads(config)["config"], json.loads(values)["values"]) == ({"lr": 0.1}, {"loss": 1.0})


def test_end_training_works_without_a_process_group(tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.end_training()
    accelerator.end_training()
    accelerator.wait_for_everyone()
    assert accelerator.log_with == ["jsonl"]
    assert accelerator.reduce(torch.tensor(1)).item() == 1
