"""`load_state` of what Accelerate wrote: the run goes on, and what cannot come back is told."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator
from accel_runtime.checkpoint.errors import CheckpointError

DATA = Path(__file__).parents[2] / "data" / "accelerate-1.15.0"
WRITTEN = DATA / "checkpoints" / "checkpoint_0"
EXPECTED = json.loads((DATA / "expected.json").read_text())


class Best:
    """A registered object."""

    state = None

    def state_dict(self):
        return {"score": 0.0}

    def load_state_dict(self, state):
        self.state = state


class Run:
    """The run of the fixture, before its first step; its weights are others."""

    def __init__(self, width=3, schedule=True, best=True):
        self.accelerator = Accelerator(gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
        loader = DataLoader(torch.arange(24.0).view(12, 2) / 24, batch_size=1)
        prepared = self.accelerator.prepare(model, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared
        self.scheduler = self.accelerator.prepare(scheduler) if schedule else None
        self.best = Best()
        if best:
            self.accelerator.register_for_checkpointing(self.best)

    @property
    def weights(self):
        return {name: value.tolist() for name, value in self.accelerator.get_state_dict(self.model).items()}


def test_a_run_goes_on_on_any_number_of_processes(ranks, tmp_path):
    def run(written):
        import numpy as np

        here = Run()
        found = here.accelerator.load_state(written)
        drawn = {"torch": torch.rand(2).tolist(), "python": random.random(), "numpy": float(np.random.rand())}  # noqa: NPY002
        states = here.optimizer.state_dict()["state"]
        return {
            "weights": here.weights,
            "exp_avg": {str(k): state["exp_avg"].tolist() for k, state in states.items()},
            "last_epoch": here.scheduler.scheduler.last_epoch,
            "lr": here.scheduler.get_last_lr(),
            "score": here.best.state["score"],
            "steps": (here.optimizer.steps, found.manifest.step, found.manifest.world_size),
        }, drawn

    results = ranks.run(run, WRITTEN)
    wanted = {name: EXPECTED[name] for name in ("weights", "exp_avg", "last_epoch", "lr")}
    assert all(state == wanted | {"score": 0.75, "steps": (2, 2, 2)} for state, _ in results)
    drawn = [numbers for _, numbers in results]
    if ranks.size == 2:
        assert drawn == EXPECTED["drawn"]
    else:  # streams of their own, which follow from the old ones
        assert len({str(numbers) for numbers in drawn}) == ranks.size
        assert [numbers for _, numbers in ranks.run(run, WRITTEN)] == drawn


def test_what_accelerate_does_not_keep_is_told(caplog):
    here = Run()
    with caplog.at_level(logging.WARNING, "accel_runtime.checkpoint"):
        here.accelerator.load_state(WRITTEN)
    (told,) = caplog.messages
    assert (
        "was written by Accelerate, and loaded without: loader: Accelerate does not save the position" in told
    )
    assert "accelerator.skip_first_batches(loader, n)" in told
    assert "window: the checkpoint was saved 1 micro-batches into an accumulation cycle" in told


def test_gradients_that_are_held_are_no_part_of_the_run_that_goes_on():
    here = Run()
    with here.accelerator.accumulate(here.model):
        here.accelerator.backward(here.model(torch.ones(1, 2)).sum())
    here.accelerator.load_state(WRITTEN)
    assert all(parameter.grad is None for parameter in here.model.parameters())
    for synced in (False, True):
        with here.accelerator.accumulate(here.model):
            assert here.accelerator.sync_gradients is synced
            here.accelerator.backward(here.model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 4}, r"model/0.weight is \[3, 2\] in the checkpoint and \[4, 2\] here"),
        ({"schedule": False}, "scheduler: it is not prepared here"),
        ({"best": False}, "registered: it is not prepared here"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_changes(options, message):
    here = Run(**options)
    before = here.weights
    with pytest.raises(
        CheckpointError, match=rf"does not fit this run, and nothing was loaded(.|\n)*{message}"
    ):
        here.accelerator.load_state(WRITTEN)
    assert here.weights == before
    assert not here.optimizer.state_dict()["state"]
    assert here.best.state is None


def test_a_second_model_and_other_groups_are_told(tmp_path):
    accelerator = Accelerator()
    model, other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    accelerator.prepare(model, other, optimizer)
    with pytest.raises(CheckpointError) as told:
        accelerator.load_state(WRITTEN)
    assert "model_1: it is not in the checkpoint" in str(told.value)
    assert (
        "optimizer: the checkpoint has groups of [4] parameters, the optimizer here groups of [1, 1, 1, 1]"
        in str(told.value)
    )


def test_a_damaged_file_is_told_by_all_processes_and_left_out_where_that_is_asked_for(pair, tmp_path):
    def run(folder):
        here = Run()
        before = here.weights
        try:
            here.accelerator.load_state(folder)
        except CheckpointError as error:
            strict = str(error), here.weights == before
        here.accelerator.load_state(folder, strict=False)
        return *strict, here.weights == EXPECTED["weights"], here.scheduler.scheduler.last_epoch

    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    (folder / "scheduler.bin").write_bytes(b"PK")
    (folder / "random_states_1.pkl").write_bytes(b"")
    for said, unchanged, loaded, epoch in pair.run(run, folder):
        assert f"scheduler: {folder}/scheduler.bin cannot be read" in said
        assert unchanged
        assert loaded
        assert epoch == 0


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("damaged", ["random_states_0.pkl", "random_states_1.pkl"])
def test_random_states_that_are_damaged_are_an_error_on_any_number_of_processes(
    clusters, tmp_path, world, damaged
):
    def run(folder):
        accelerator = Run().accelerator
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            said = str(error)
        accelerator.load_state(folder, strict=False)
        return said

    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    (folder / damaged).write_bytes(b"PK")
    assert all(f"{folder}/{damaged} cannot be read" in said for said in clusters[world].run(run, folder))


def test_random_states_that_are_all_missing_are_an_error(tmp_path):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    for path in folder.glob("random_states_*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"random: {folder}/random_states_0.pkl is missing"):
        Run().accelerator.load_state(folder)


def test_tied_weights_that_a_file_names_once_are_those_of_the_live_model(tmp_path):
    from safetensors.torch import save_file

    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    for name in ("optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"):
        (folder / name).unlink()
    save_file({"0.weight": torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model = accelerator.prepare(model)
    accelerator.load_state(folder)
    assert model[1].weight.equal(torch.ones(2, 2))
