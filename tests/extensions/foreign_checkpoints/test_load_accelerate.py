"""`load_state` of checkpoints of Accelerate: the run continues, and missing state is logged."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
from support.runs.sharded_runs import build_accelerator
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator
from accel_runtime.storage.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

DATA = Path(__file__).parents[2] / "data" / "accelerate-1.15.0"
WRITTEN = DATA / "checkpoints" / "checkpoint_0"
EXPECTED = json.loads((DATA / "expected.json").read_text())


class Best:
    """An object that is registered for checkpointing."""

    state = None

    def state_dict(self):
        return {"score": 0.0}

    def load_state_dict(self, state):
        self.state = state


class Run:
    """The run that wrote the stored checkpoint, before its first step and with other weights."""

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


def test_a_run_continues_from_accelerate_on_any_world_size(ranks, tmp_path):
    def load(written):
        import numpy as np

        run = Run()
        checkpoint = run.accelerator.load_state(written)
        random_numbers = {
            "torch": torch.rand(2).tolist(),
            "python": random.random(),
            "numpy": float(np.random.rand()),  # noqa: NPY002
        }
        states = run.optimizer.state_dict()["state"]
        return {
            "weights": run.weights,
            "exp_avg": {str(k): state["exp_avg"].tolist() for k, state in states.items()},
            "last_epoch": run.scheduler.scheduler.last_epoch,
            "lr": run.scheduler.get_last_lr(),
            "score": run.best.state["score"],
            "steps": (run.optimizer.steps, checkpoint.manifest.step, checkpoint.manifest.world_size),
        }, random_numbers

    results = ranks.run(load, WRITTEN)
    expected = {name: EXPECTED[name] for name in ("weights", "exp_avg", "last_epoch", "lr")}
    assert all(state == expected | {"score": 0.75, "steps": (2, 2, 2)} for state, _ in results)
    random_numbers = [numbers for _, numbers in results]
    if ranks.size == 2:
        assert random_numbers == EXPECTED["drawn"]
    else:  # each rank derives its own stream from the saved ones
        assert len({str(numbers) for numbers in random_numbers}) == ranks.size
        assert [numbers for _, numbers in ranks.run(load, WRITTEN)] == random_numbers


def test_state_that_accelerate_does_not_save_is_logged(caplog):
    run = Run()
    with caplog.at_level(logging.WARNING, "accel_runtime.checkpoint"):
        run.accelerator.load_state(WRITTEN)
    (message,) = caplog.messages
    assert (
        "was written by Accelerate, and loaded without: loader: Accelerate does not save the position"
        in message
    )
    assert "accelerator.skip_first_batches(loader, n)" in message
    assert "accumulation: the checkpoint was saved 1 micro-batches into an accumulation cycle" in message


def test_load_state_clears_gradients_and_the_accumulation_cycle():
    run = Run()
    with run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.model(torch.ones(1, 2)).sum())
    run.accelerator.load_state(WRITTEN)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    for synced in (False, True):
        with run.accelerator.accumulate(run.model):
            assert run.accelerator.sync_gradients is synced
            run.accelerator.backward(run.model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 4}, r"model/0.weight is \[3, 2\] in the checkpoint and \[4, 2\] here"),
        ({"schedule": False}, "scheduler: it is not prepared here"),
        ({"best": False}, "registered: it is not prepared here"),
    ],
)
def test_a_mismatch_with_the_run_is_reported_before_anything_changes(options, message):
    run = Run(**options)
    before = run.weights
    with pytest.raises(
        CheckpointError, match=rf"does not fit this run, and nothing was loaded(.|\n)*{message}"
    ):
        run.accelerator.load_state(WRITTEN)
    assert run.weights == before
    assert not run.optimizer.state_dict()["state"]
    assert run.best.state is None


def test_an_additional_model_and_other_parameter_groups_are_reported(tmp_path):
    accelerator = Accelerator()
    model, other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    accelerator.prepare(model, other, optimizer)
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(WRITTEN)
    assert "model_1: it is not in the checkpoint" in str(raised.value)
    assert (
        "optimizer: the checkpoint has groups of [4] parameters, the optimizer here groups of [1, 1, 1, 1]"
        in str(raised.value)
    )


def test_a_damaged_file_fails_on_all_ranks_and_is_skipped_without_strict(pair, tmp_path):
    def load(folder):
        run = Run()
        before = run.weights
        try:
            run.accelerator.load_state(folder)
        except CheckpointError as error:
            strict = str(error), run.weights == before
        run.accelerator.load_state(folder, strict=False)
        return *strict, run.weights == EXPECTED["weights"], run.scheduler.scheduler.last_epoch

    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    (folder / "scheduler.bin").write_bytes(b"PK")
    (folder / "random_states_1.pkl").write_bytes(b"")
    for message, unchanged, loaded, epoch in pair.run(load, folder):
        assert f"scheduler: {folder}/scheduler.bin cannot be read" in message
        assert unchanged
        assert loaded
        assert epoch == 0


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("damaged", ["random_states_0.pkl", "random_states_1.pkl"])
def test_damaged_random_states_are_an_error_on_any_world_size(clusters, tmp_path, world, damaged):
    def load(folder):
        accelerator = Run().accelerator
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            message = str(error)
        accelerator.load_state(folder, strict=False)
        return message

    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    (folder / damaged).write_bytes(b"PK")
    assert all(
        f"{folder}/{damaged} cannot be read" in message for message in clusters[world].run(load, folder)
    )


def test_missing_random_states_are_an_error(tmp_path):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    for path in folder.glob("random_states_*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"random: {folder}/random_states_0.pkl is missing"):
        Run().accelerator.load_state(folder)


def load_tied_folder(folder, sizes):
    accelerator = build_accelerator(sizes)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model = accelerator.prepare(model)
    accelerator.load_state(folder)
    assert model[1].weight is model[0].weight
    return accelerator.get_state_dict(model, everywhere=True)


@pytest.mark.parametrize(("size", "sizes"), [(1, {}), (2, {"dp_shard": "auto"}), (3, {"dp_shard": "auto"})])
def test_tied_weights_stored_once_load_into_both_layers(clusters, tmp_path, size, sizes):
    from safetensors.torch import save_file

    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    for name in ("optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"):
        (folder / name).unlink()
    save_file({"0.weight": torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    for state in clusters[size].run(load_tied_folder, folder, sizes):
        assert state["0.weight"].equal(torch.ones(2, 2))
        assert state["1.weight"].equal(torch.ones(2, 2))
