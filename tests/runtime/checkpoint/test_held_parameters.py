"""Ranks that hold different parameters save each of them once, under its plain name."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.processes.ranks import RanksFailedError
from support.training.stage_strategy import StageStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from accel_runtime import Accelerator
from accel_runtime.accelerator import run
from accel_runtime.checkpoint.save import SaveOperation, SaveTarget
from accel_runtime.checkpoint.state_items import ModelItem
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

    def __init__(self, layers, seed=1, *, groups=2, named=False, **options):
        choose = lambda backend, *_: StageStrategy(backend, layers)  # noqa: E731 - on one line
        with mock.patch.object(run, "choose_strategy", choose):
            self.accelerator = Accelerator(**options)
        self.net = Net(sorted({name for each in layers for name in each}), seed)
        parameters = [*self.net.named_parameters()]
        both = [
            {"params": [p for name, p in parameters if name.endswith("weight")]},
            {"params": [p for name, p in parameters if name.endswith("bias")], "lr": 0.5},
        ]
        one = [{"params": parameters if named else [p for _, p in parameters]}]
        self.model, self.optimizer = self.accelerator.prepare(
            self.net, torch.optim.AdamW(one if named or groups == 1 else both, lr=0.1, amsgrad=True)
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


def test_a_rank_may_hold_no_tensors_of_the_state(clusters, tmp_path):
    def save_bare(*, load=False):
        this = Run([["first"], []], seed=7 if load else 1)
        del this.net.scale
        if load:
            this.accelerator.load_state(tmp_path / "saved")
        else:
            this.accelerator.save_state(tmp_path / "saved")
        return this.read()

    saved = clusters[2].run(save_bare)
    assert [len(values) for values in saved] == [2, 0]
    assert clusters[2].run(lambda: save_bare(load=True)) == saved


def test_the_groups_of_ranks_are_joined_with_the_names_of_their_parameters(clusters, tmp_path):
    def save_named():
        this = Run(STAGES, named=True)
        this.step()
        this.accelerator.save_state(tmp_path / "saved")
        return this.read()

    def load_named(layers):
        this = Run(layers, seed=7, named=True)
        this.accelerator.load_state(tmp_path / "saved")
        (group,) = this.optimizer.param_groups
        return this.read(), group["param_names"]

    saved = clusters[2].run(save_named)
    (group,) = read_manifest(tmp_path / "saved")["values"]["optimizer"]["groups"]
    assert group["params"] == [f"model.{name}" for name in group["param_names"]]
    names = [[f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")] for layers in STAGES]
    assert group["param_names"] == names[0] + names[1]
    assert clusters[2].run(load_named, STAGES) == list(zip(saved, names, strict=True))
    assert clusters[1].run(load_named, WHOLE) == [(merge(saved), names[0] + names[1])]
    # Of an optimizer without names, on the other ranks.
    assert clusters[2].run(load_unnamed, STAGES[::-1], tmp_path / "saved") == saved[::-1]


def load_unnamed(layers, folder):
    """Load into an optimizer of one group without names of its parameters; return the values of this rank."""
    this = Run(layers, seed=7, groups=1)
    this.accelerator.load_state(folder)
    (group,) = this.optimizer.param_groups
    assert "param_names" not in group
    return this.read()


@pytest.mark.parametrize("layers", [STAGES, STAGES[::-1]])
def test_ranks_with_different_numbers_of_groups_are_refused(pair, tmp_path, layers):
    def differ():
        this = Run(layers)
        if this.accelerator.process_index == layers.index(["second"]):
            this.optimizer.add_param_group({"params": []})
        with pytest.raises(
            CheckpointError, match=r"the ranks have different numbers of parameter groups \((2, 3|3, 2)\)\. "
        ):
            this.accelerator.save_state(tmp_path / "saved")

    pair.run(differ)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("layers", [STAGES, [["first", "third"], ["second"], ["second"]]])
def test_parameters_of_no_model_are_refused(clusters, tmp_path, layers):
    def save_weights():
        this = Run(layers)
        weight = nn.Parameter(torch.tensor(float(this.accelerator.process_index)))
        this.optimizer.add_param_group({"params": [weight]})
        this.step()
        with pytest.raises(
            CheckpointError,
            match=r"Cannot save optimizer: optimizer\.2\.0 is in no prepared model, and the ranks",
        ):
            this.accelerator.save_state(tmp_path / "saved")

    clusters[len(layers)].run(save_weights)
    assert not (tmp_path / "saved").exists()


def test_the_size_of_a_tensor_with_shards_on_some_ranks_is_that_of_all_shards(clusters, tmp_path):
    def save_sharded():
        accelerator = Accelerator()
        net, mesh = nn.Linear(4, 6, bias=False), DeviceMesh("cpu", [1, 2])
        if accelerator.process_index:
            net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
        else:
            del net.weight
        group = accelerator._run.build_group("test")
        saving = SaveOperation(group, FileStore())
        items = [ModelItem("model", net, elsewhere=frozenset())]
        saving.open(SaveTarget(lambda: str(tmp_path / "saved")), lambda: items)
        saving.finish(group)
        return saving.plan.bytes

    assert clusters[3].run(save_sharded) == [4 * 6 * 4] * 3
    assert read_manifest(tmp_path / "saved")["tensors"]["model/weight"]["shape"] == [6, 4]


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
            lambda: this.accelerator.gathered(this.model),
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
