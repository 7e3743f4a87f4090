"""The heartbeat: what a process leaves for its launcher to see how far it is."""

import copy
import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from accel_cli.runner.run_dir import RankFolder
from accel_cli.runner.stalls import Beat
from accel_runtime import Accelerator
from accel_runtime.env import RANK_FOLDER
from accel_runtime.heartbeat import Heartbeat, _create_progress, heartbeat


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a rank that a launcher watches."""
    monkeypatch.setenv(RANK_FOLDER, str(tmp_path))
    _create_progress.cache_clear()
    yield RankFolder(tmp_path)
    _create_progress.cache_clear()


def trained(accelerator, batches):
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.ones(batches, 2))
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def test_a_launcher_reads_the_steps_the_batches_and_the_last_collective(folder):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    begun = Beat.read(folder)
    trained(accelerator, batches=6)
    beat = Beat.read(folder)
    assert (beat.steps, beat.batches, beat.is_inside) == (3, 6, False)
    assert beat.time > begun.time
    assert begun.location == "no collective yet"
    accelerator.wait_for_everyone()
    assert Beat.read(folder).location.startswith("after wait_for_everyone at test_heartbeat.py:")


def test_a_process_in_a_collective_says_which(folder):
    accelerator = Accelerator()
    seen = []
    all_gather_slots = accelerator._backend.handshake._transport.all_gather_slots
    accelerator._backend.handshake._transport.all_gather_slots = lambda *args: (
        seen.append(Beat.read(folder)),
        all_gather_slots(*args),
    )[1]
    accelerator.wait_for_everyone()
    assert seen[0].location.startswith("in wait_for_everyone at test_heartbeat.py:")


def test_nothing_is_kept_where_no_launcher_watches(monkeypatch):
    monkeypatch.delenv(RANK_FOLDER, raising=False)
    _create_progress.cache_clear()
    assert heartbeat() is None


def test_a_process_that_the_script_starts_leaves_the_heartbeat_alone(folder):
    Heartbeat(folder.beat).step()
    assert heartbeat() is None
    assert Beat.read(folder).steps == 1


def test_a_folder_that_is_gone_is_no_error(folder, monkeypatch):
    monkeypatch.setenv(RANK_FOLDER, os.devnull)
    assert heartbeat() is None


def test_a_prepared_optimizer_is_copied_without_the_heartbeat(folder):
    optimizer = trained(Accelerator(), batches=1)
    state = optimizer.state_dict()
    assert copy.deepcopy(optimizer).state_dict() == state
    assert pickle.loads(pickle.dumps(optimizer)).state_dict() == state  # noqa: S301 - written a line above


def test_the_file_has_its_space_before_it_is_mapped(folder):
    Heartbeat(folder.beat)
    assert folder.beat.stat().st_blocks  # on a full disk a store to a hole would end the process
