"""The files that ranks leave in the run folder: their heartbeats, logged values, description and checkpoints."""

import json

import pytest
from support.processes.commands import run_accel

from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import find_run

TRAINS = """
import sys, torch
from accel_runtime import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.ones(8, 2)))
for step, batch in enumerate(loader):
    loss = model(batch).sum()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.log({"loss": loss}, step=step)
accelerator.save_state("saved")
if sys.argv[1:] == [str(accelerator.process_index)]:
    raise RuntimeError("too large")
accelerator.wait_for_everyone()
"""


@pytest.mark.slow
def test_a_run_records_the_progress_and_the_end_of_each_rank(script, home):
    script(TRAINS)
    finished = run_accel("launch", "-q", "--nproc-per-node", "2", "train.py")
    assert finished.returncode == 0, finished.stderr
    folder = find_run(home / "runs")
    ranks = folder.list_ranks(folder.attempts[-1])
    for beat in (Beat.read(folder.beat) for folder in ranks.values()):
        assert (beat.steps, beat.batches, beat.epoch, beat.epoch_batches, beat.epoch_length) == (
            4,
            4,
            0,
            4,
            4,
        )
        assert beat.ended is not None
        assert beat.ended > beat.step_time > beat.started
        assert not beat.has_failed
    lines = [json.loads(line) for line in ranks[0].metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert json.loads(ranks[0].description.read_text())["data"]["processes"]["world_size"] == 2
    assert json.loads(ranks[0].checkpoints.read_text())["path"].endswith("saved")
    assert not ranks[1].metrics.exists()


@pytest.mark.full
def test_a_failed_rank_is_recorded_as_failed(script, home):
    script(TRAINS)
    assert run_accel("launch", "-q", "--nproc-per-node", "2", "train.py", "1").returncode != 0
    folder = find_run(home / "runs")
    beat = Beat.read(folder.list_ranks(folder.attempts[-1])[1].beat)
    assert (beat.steps, beat.has_failed) == (4, True)
    assert beat.ended is not None
