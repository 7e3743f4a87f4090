"""The layout of checkpoints changes on purpose only: `tests/data/checkpoint` is one that was written when it last did.

`WRITE_GOLDEN=1` writes it again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs.file_system import RegisteredState, write_manifest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator
from accel_runtime.storage.directory import read_checkpoint
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import NAME
from accel_runtime.utils import gather_object

KEPT = Path(__file__).parents[2] / "data" / "checkpoint"
LAST = 2
"""The batch after which it was saved, within an accumulation cycle."""


class Values(RegisteredState):
    """An object of the script, by the name that the kept checkpoint has."""


def build_values():
    return {
        "plain": [None, True, 2.5, float("inf"), 2**70, "x"],
        "numbers": (3 + 4j, np.int8(-3), np.arange(4).reshape(2, 2)),
        "bytes": b"\0\xff",
        "torch": [torch.bfloat16, torch.device("cpu"), torch.tensor(1.5, dtype=torch.bfloat16)],
        "containers": [{1, 2}, OrderedDict(b=1, a=2), Path("a/b")],
        "keys": {1: "one", (2, "b"): None, "$": "escaped", "a/b.c": torch.ones(2)},
    }


class Run:
    """Two ranks: buffers that differ, tied and frozen weights, a loader for all ranks, one for each, and an object of the script."""

    def __init__(self):
        self.accelerator = Accelerator(gradient_accumulation_steps=2)
        rank = self.accelerator.process_index
        torch.manual_seed(1 + rank)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
            model[3].weight = model[2].weight
            model[3].bias.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.values = Values()
        self.accelerator.register_for_checkpointing(self.values)
        samples = torch.arange(48.0).view(16, 3) / 48
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, DataLoader(TensorDataset(samples), 2, shuffle=True)
        )
        self.local = self.accelerator.prepare_data_loader(
            DataLoader(TensorDataset(samples[rank::2]), 2, shuffle=True), data="sharded"
        )

    def batches(self):
        """Yield the batches of both loaders, gathered."""
        for (batch,), (local,) in zip(self.loader, self.local, strict=True):
            yield batch, self.accelerator.gather(torch.cat([batch, local])).tolist()

    def learn(self, batch):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).square().mean(), weight=len(batch))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def describe(self):
        """Return what a checkpoint restores, as JSON."""
        state = self.accelerator.get_state_dict(self.model)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return {
            "model": {name: tensor.tolist() for name, tensor in sorted(state.items())},
            "moments": [value["exp_avg"].tolist() for value in self.optimizer.state.values()],
            "gradients": [gradient.tolist() for gradient in gradients],
            "steps": self.optimizer.steps,
            "rate": self.schedule.get_last_lr(),
            "values": repr(self.values.state) == repr(build_values()),
        }


def write(path):
    """Train until a save, and return what a run that loads the checkpoint has: its state, random numbers and samples."""
    run = Run()
    run.values.state = build_values()
    expected = None
    for number, (batch, samples) in enumerate(run.batches()):
        if expected is not None:
            expected["samples"].append(samples)
            continue
        run.learn(batch)
        if number == LAST:
            run.accelerator.save_state(path)
            expected = run.describe() | {"samples": [], "random": draw()}
    return expected


def read(path):
    """Load the checkpoint of `write` into a new run, and return the same."""
    run = Run()
    run.accelerator.resume(path)
    found = run.describe()
    random = draw()
    return found | {"samples": [samples for _, samples in run.batches()], "random": random}


def draw():
    """Return a random number of each rank."""
    return gather_object([torch.rand(()).item()])


def describe_fields(value):
    """Return JSON with the types of its values instead of them."""
    if isinstance(value, dict):
        return {name: describe_fields(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [describe_fields(entry) for entry in value]
    return type(value).__name__


def read_layout(path):
    """Return the names of the files of a checkpoint, and the fields of its manifest."""
    manifest = json.loads((path / NAME).read_text())["checkpoint"]
    # The fields of schedulers and the options of optimizers are those of the installed torch.
    del manifest["values"]["scheduler"]
    manifest["values"]["optimizer"]["groups"] = [
        group["params"] for group in manifest["values"]["optimizer"]["groups"]
    ]
    return sorted(file.name for file in path.iterdir()), describe_fields(manifest)


def test_a_checkpoint_has_the_files_and_fields_of_the_kept_one(pair, tmp_path):
    expected, _ = pair.run(write, tmp_path / "checkpoint")
    if os.environ.get("WRITE_GOLDEN"):
        shutil.rmtree(KEPT, ignore_errors=True)
        shutil.copytree(tmp_path / "checkpoint", KEPT)
        KEPT.with_suffix(".json").write_text(json.dumps(expected, indent=1) + "\n")
    assert read_layout(tmp_path / "checkpoint") == read_layout(KEPT)


def test_the_kept_checkpoint_restores_the_state_that_was_saved(pair, tmp_path):
    path = shutil.copytree(KEPT, tmp_path / "checkpoint")
    found, _ = pair.run(read, path)
    assert found == json.loads(KEPT.with_suffix(".json").read_text())


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_layout_is_refused_with_the_version_of_accel_that_wrote_it(tmp_path, version):
    path = shutil.copytree(KEPT, tmp_path / "checkpoint")
    body = json.loads((path / NAME).read_text())["checkpoint"]
    write_manifest(path, json.dumps(body | {"version": version, "versions": {"accel": "9.9"}}))
    with pytest.raises(
        CheckpointError, match=r"its format has version .*by accel 9\.9\. Install that version"
    ):
        read_checkpoint(path)
