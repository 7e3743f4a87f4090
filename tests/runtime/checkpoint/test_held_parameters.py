"""Ranks that hold different parameters save each of them once, under its plain name."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import RanksFailedError
from support.stage_strategy import StageStrategy
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.accelerator import run
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors

LAYERS = ("first", "second", "third")


class Net(nn.Module):
    """A model with a buffer that every rank has."""

    def __init__(self, layers, seed):
        super().__init__()
        self.register_buffer("scale", torch.full((2,), float(seed)))
        for name in layers:
            torch.manual_seed(seed + LAYERS.index(name))
            self.add_module(name, nn.Linear(3, 3, dtype=torch.float64))

    def forward(self, inputs):
        return sum(layer(inputs).square().mean() for layer in self.children())


class Run:
    """A run whose ranks have some layers each."""

    def __init__(self, layers, seed=1, **options):
        choose = lambda backend, *_: StageStrategy(backend, layers)  # noqa: E731 - on one line
        with mock.patch.object(run, "choose_strategy", choose):
            self.accelerator = Accelerator(**options)
        self.net = Net(sorted({name for each in layers for name in each}), seed)
        groups = [
            {"params": [p for name, p in self.net.named_parameters() if name.endswith("weight")]},
            {"params": [p for name, p in self.net.named_parameters() if name.endswith("bias")], "lr": 0.5},
        ]
        self.model, self.optimizer = self.accelerator.prepare(
            self.net, torch.optim.AdamW(groups, lr=0.1, amsgrad=True)
        )

    def step(self):
        self.accelerator.backward(self.model(torch.arange(6.0, dtype=torch.float64).view(2, 3)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read(self):
        """Return the values of this rank, and its moments, by name."""
        states = {
            f"{name} {key}": value.tolist()
            for name, parameter in self.net.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {name: value.tolist() for name, value in self.net.state_dict().items()} | states


def save(layers, folder, steps=2):
    """Train and save; return the values of this rank."""
    this = Run(layers)
    for _ in range(steps):
        this.step()
    this.accelerator.save_state(folder)
    return this.read()


def load(layers, folder, *, steps=0):
    """Load into other values; return those of this rank."""
    this = Run(layers, seed=7)
    this.accelerator.load_state(folder)
    for _ in range(steps):
        this.step()
    return this.read()


def merge(results):
    """Return the values of all ranks by name."""
    return {name: value for values in results for name, value in values.items()}


STAGES = [["first"], ["second"]]
WHOLE = [["first", "second"]]


def read_manifest(folder):
    return json.loads((folder / "checkpoint.json").read_text())["checkpoint"]


def test_each_tensor_is_saved_once_under_its_plain_name(pair, tmp_path):
    pair.run(save, STAGES, tmp_path / "saved")
    manifest = read_manifest(tmp_path / "saved")
    names = {name for name in manifest["tensors"] if name.startswith(("model", "optimizer"))}
    assert {f"model/{layer}.{kind}" for layer in STAGES[0] + STAGES[1] for kind in ("weight", "bias")} < names
    assert not [name for name in names if "#" in name]
    assert not {"model", "optimizer"} & manifest["values_by_rank"].keys()
    assert {len(manifest["tensors"][name]["chunks"]) for name in names} == {1}


@pytest.mark.parametrize("steps", [0, 2])
def test_the_parts_of_two_ranks_load_on_one_process_and_back(clusters, tmp_path, steps):
    saved = clusters[2].run(save, STAGES, tmp_path / "two", steps)
    (loaded,) = clusters[1].run(load, WHOLE, tmp_path / "two")
    assert loaded == merge(saved)
    whole = clusters[1].run(save, WHOLE, tmp_path / "one", steps)
    assert whole == [loaded]
    assert clusters[2].run(load, STAGES, tmp_path / "one") == saved
    assert clusters[2].run(load, STAGES[::-1], tmp_path / "two") == saved[::-1]


def test_a_run_continues_with_the_parts_of_its_ranks(pair, tmp_path):
    pair.run(save, STAGES, tmp_path / "saved", 2)
    assert pair.run(lambda: load(STAGES, tmp_path / "saved", steps=1)) == pair.run(
        save, STAGES, tmp_path / "longer", 3
    )


def test_ranks_may_hold_some_tensors_together(clusters, tmp_path):
    layers = [["first", "second"], ["second"], ["third"]]
    saved = clusters[3].run(save, layers, tmp_path / "saved")
    names = read_manifest(tmp_path / "saved")["tensors"]
    assert not [name for name in names if name.startswith(("model", "optimizer")) and "#" in name]
    assert clusters[1].run(load, [list(LAYERS)], tmp_path / "saved") == [merge(saved)]


def test_holders_with_different_values_are_named(clusters, tmp_path):
    def differ():
        this = Run([["first"], ["second"], ["second"]])
        with torch.no_grad():
            next(this.net.children()).bias.add_(this.accelerator.process_index)
        with pytest.raises(CheckpointError, match=r"Cannot save model/second\.bias: ranks 1, 2 hold it with"):
            this.accelerator.save_state(tmp_path / "saved")

    clusters[3].run(differ)
    assert not (tmp_path / "saved").exists()


def test_a_checkpoint_without_a_parameter_that_a_rank_holds_is_refused(pair, tmp_path):
    pair.run(save, STAGES, tmp_path / "saved")
    with pytest.raises(RanksFailedError, match=r"missing in the checkpoint: third\.weight"):
        pair.run(load, [["first"], ["third"]], tmp_path / "saved")


def test_an_unfinished_cycle_continues_on_as_many_ranks_only(clusters, tmp_path):
    def train(*, ends):
        this = Run(STAGES, gradient_accumulation_steps=2)
        with this.accelerator.accumulate(this.model):
            this.step()
        this.accelerator.save_state(tmp_path / "saved")
        if not ends:
            this = Run(STAGES, seed=7, gradient_accumulation_steps=2)
            this.accelerator.load_state(tmp_path / "saved")
        with this.accelerator.accumulate(this.model):
            this.step()
        return this.read()

    assert clusters[2].run(lambda: train(ends=False)) == clusters[2].run(lambda: train(ends=True))
    with pytest.raises(
        CheckpointError, match="within an accumulation cycle by ranks that hold different parameters"
    ):
        clusters[1].run(load, WHOLE, tmp_path / "saved")


def test_an_export_of_a_part_is_refused_and_that_of_a_checkpoint_has_all_weights(pair, tmp_path):
    def export():
        this = Run(STAGES)
        for call in (
            lambda: this.accelerator.save_model(this.model, tmp_path / "model"),
            lambda: this.accelerator.load_model(this.model, tmp_path / "model"),
            lambda: this.accelerator.get_state_dict(this.model),
        ):
            with pytest.raises(ValueError, match="failed: the ranks hold different parameters of Net"):
                call()
        return save(STAGES, tmp_path / "saved")

    saved = merge(pair.run(export))
    with FileStore().open(str(tmp_path / "saved")) as snapshot:
        merge_tensors(snapshot, tmp_path / "model.safetensors", MergeRequest())
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value for name, value in saved.items() if " " not in name
    }
