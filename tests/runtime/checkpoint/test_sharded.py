"""Runs with sharded models and optimizers: a checkpoint of one mesh resumes on any other, bitwise equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs.sharded_runs import build_accelerator, build_model, import_sharding, to_full
from support.training.models import UnevenTiedNet
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import DataLoaderConfiguration, ProjectConfiguration, init_empty_weights
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors

PLAN = "blocks.*.up=colwise,blocks.*.down=rowwise"
SHARDED, HYBRID = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}
TENSOR = {"tp": 2, "dp_shard": 2, "tp_plan": PLAN}
PAIRS = [{"dp_shard": 2}, {"tp": 2, "tp_plan": PLAN}, {}]


class Run:
    """The prepared objects of a script on a mesh."""

    def __init__(self, sizes, seed=1, *, meta=False, options=None, **arguments):
        config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
        torch.manual_seed(seed)
        self.accelerator = build_accelerator(sizes, options, dataloader_config=config, **arguments)
        if meta:
            with init_empty_weights(include_buffers=True):
                model = UnevenTiedNet()
        else:
            model = build_model(seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        data = TensorDataset(torch.arange(32), torch.arange(32) % UnevenTiedNet.rows)
        loader = DataLoader(data, batch_size=8, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def learn(self, batch):
        number, inputs = batch
        with self.accelerator.accumulate(self.model):
            loss = self.model(inputs).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return sorted(set(self.accelerator.gather_for_metrics(number).tolist()))

    def state(self):
        """Return the gathered model, optimizer moments and step count."""
        self.accelerator._checkpoints._training_state()  # reshards the parameters
        model = self.accelerator.unwrap_model(self.model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        moments = {
            names[parameter]: {key: to_full(value).tolist() for key, value in state.items()}
            for parameter, state in self.optimizer.state.items()
        }
        values = {name: to_full(value.detach()).tolist() for name, value in model.state_dict().items()}
        return {"model": values, "moments": moments, "steps": self.optimizer.steps}

    def read_next_samples(self):
        return sorted(set(self.accelerator.gather_for_metrics(next(iter(self.loader))[0]).tolist()))


def train_and_save(folder, sizes, **more):
    """Train three steps and save; return the state, and the samples of the next batch."""
    run = Run(sizes)
    batches = iter(run.loader)
    for _ in range(3):
        run.learn(next(batches))
    run.model(torch.arange(3))  # an evaluation leaves parameters gathered
    run.accelerator.save_state(folder, **more)
    run.accelerator.wait_for_checkpoint()
    state = run.state()
    return state, sorted(set(run.accelerator.gather_for_metrics(next(batches)[0]).tolist()))


def resume_and_train(folder, sizes, *, meta=False):
    """Resume with other initial values and train on; return the loaded state and the samples of the next batch."""
    run = Run(sizes, 2, meta=meta)
    shards = [id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]]
    run.accelerator.resume(folder)
    state = run.state(), run.read_next_samples()
    assert [id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]] == shards
    for batch in run.loader:
        run.learn(batch)
    assert run.state() != state[0]
    return state


def check_chunks(folder):
    """Check that every element is in exactly one chunk; return the manifest."""
    manifest = json.loads((Path(folder) / "checkpoint.json").read_text())["checkpoint"]
    for name, stored in manifest["tensors"].items():
        counts = torch.zeros(stored["shape"], dtype=torch.int32)
        for chunk in stored["chunks"]:
            region = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))
            counts[region] += 1
        assert bool((counts == 1).all()), name
    return manifest


def list_sharded_tensors(manifest):
    return [name for name, stored in manifest["tensors"].items() if len(stored["chunks"]) > 1]


@pytest.fixture(scope="module")
def pair_ready(clusters):
    """Return a cluster of two ranks with slow imports done."""
    clusters[2].run(import_sharding)
    return clusters[2]


@pytest.fixture(scope="module")
def four_ready(clusters):
    clusters[4].run(import_sharding)
    return clusters[4]


@pytest.mark.parametrize("sizes", PAIRS[:2], ids=str)
def test_a_sharded_checkpoint_of_two_ranks_loads_on_two_and_on_one(pair_ready, tmp_path, sizes):
    folder = str(tmp_path / "saved")
    expected, actual = pair_ready.run(train_and_save, folder, sizes)
    assert expected == actual
    manifest = check_chunks(folder)
    assert list_sharded_tensors(manifest)
    assert not [
        name for name in manifest["tensors"] if "head.weight" in name and "embedding" not in name
    ] or not [name for name in manifest["tensors"] if name == "model/embedding.weight"], (
        "tied weights are written once"
    )
    assert manifest["class_names"]["model"] == "UnevenTiedNet"
    for other in PAIRS:
        assert pair_ready.run(resume_and_train, folder, other) == [expected] * 2
    assert resume_and_train(folder, {}) == expected
    assert resume_and_train(folder, {"dp_shard": "auto"}) == expected


def test_a_checkpoint_of_full_models_loads_into_shards(pair_ready, tmp_path):
    alone, full_path = str(tmp_path / "alone"), str(tmp_path / "whole")
    expected = train_and_save(alone, {})
    assert pair_ready.run(resume_and_train, alone, {"dp_shard": 2}) == [expected] * 2
    expected, _ = pair_ready.run(train_and_save, full_path, {})
    assert pair_ready.run(resume_and_train, full_path, {"dp_shard": 2}) == [expected] * 2


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SHARDED, marks=pytest.mark.full), HYBRID, pytest.param(TENSOR, marks=pytest.mark.full)],
    ids=str,
)
def test_a_checkpoint_of_four_ranks_loads_on_every_other_mesh(four_ready, pair_ready, tmp_path, sizes):
    folder = str(tmp_path / "saved")
    expected, *others = four_ready.run(train_and_save, folder, sizes)
    assert others == [expected] * 3
    assert list_sharded_tensors(check_chunks(folder))
    for other in (SHARDED, HYBRID, TENSOR):
        assert four_ready.run(resume_and_train, folder, other) == [expected] * 4
    assert pair_ready.run(resume_and_train, folder, {"dp_shard": 2}) == [expected] * 2
    assert resume_and_train(folder, {}) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SHARDED, marks=pytest.mark.full), pytest.param(HYBRID, marks=pytest.mark.full), TENSOR],
    ids=str,
)
def test_a_checkpoint_of_one_or_two_ranks_loads_on_four(four_ready, pair_ready, tmp_path, sizes):
    expected = train_and_save(str(tmp_path / "alone"), {})
    assert four_ready.run(resume_and_train, str(tmp_path / "alone"), sizes) == [expected] * 4
    expected, _ = pair_ready.run(train_and_save, str(tmp_path / "pair"), {"dp_shard": 2})
    assert four_ready.run(resume_and_train, str(tmp_path / "pair"), sizes) == [expected] * 4


def save_asynchronously(folder, sizes):
    """Train on during an asynchronous save; return the saved state."""
    run = Run(sizes)
    batches = iter(run.loader)
    run.learn(next(batches))
    run.accelerator.save_state(folder, async_save=True)
    state, following = run.state(), next(batches)
    run.learn(following)
    run.accelerator.wait_for_checkpoint()
    return state


def test_an_asynchronous_save_is_not_changed_by_later_steps(pair_ready, tmp_path):
    folder = str(tmp_path / "saved")
    expected, _ = pair_ready.run(save_asynchronously, folder, {"dp_shard": 2})
    for state, _ in pair_ready.run(resume_and_train, folder, {"dp_shard": 2}):
        assert state == expected
    assert resume_and_train(folder, {})[0] == expected


def test_a_model_on_the_meta_device_loads_from_a_checkpoint(pair_ready, tmp_path):
    folder = str(tmp_path / "saved")
    expected, _ = pair_ready.run(train_and_save, folder, {"dp_shard": 2})

    assert pair_ready.run(lambda: resume_and_train(folder, {"dp_shard": 2}, meta=True)) == [expected] * 2


def save_or_resume(folder, sizes):
    """Save with automatic names, or resume if a checkpoint exists; return the state."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    run = Run(sizes, project_config=project)
    checkpoint = run.accelerator.resume() if (Path(folder) / "checkpoints").exists() else None
    if checkpoint is None:
        run.learn(next(iter(run.loader)))
        run.accelerator.save_state()
    return run.state()


def test_resume_loads_shards_on_one_process(pair_ready, tmp_path, monkeypatch):
    first = pair_ready.run(save_or_resume, str(tmp_path), {"dp_shard": 2})
    monkeypatch.setenv("ACCEL_RESUME", "1")
    assert save_or_resume(str(tmp_path), {}) == first[0]


def test_merge_tensors_merges_shards_into_one_file(pair_ready, tmp_path):
    folder = tmp_path / "saved"
    (expected, _), _ = pair_ready.run(train_and_save, str(folder), {"dp_shard": 2})
    with FileStore().open(str(folder)) as snapshot:
        merge_tensors(snapshot, tmp_path / "m.safetensors", MergeRequest())
    merged = {name: value.tolist() for name, value in load_file(tmp_path / "m.safetensors").items()}
    assert merged.items() <= expected["model"].items()
    assert expected["model"].keys() - merged.keys() in ({"head.weight"}, {"embedding.weight"})


# Within an accumulation cycle ---------------------------------------------------------------


def save_or_resume_within_cycle(folder, sizes, load, options=None):
    """Save or resume after one of three micro-batches; return the state after the step."""
    run = Run(sizes, 2 if load else 1, options=options, gradient_accumulation_steps=3)
    if load:
        run.accelerator.resume(folder)
    batches = iter(run.loader)
    if not load:
        run.learn(next(batches))
        run.accelerator.save_state(folder)
    for _ in range(2):
        run.learn(next(batches))
    assert run.optimizer.steps == 1
    return run.state()


@pytest.mark.parametrize("reduce", ["auto", "bf16"])
def test_an_accumulation_cycle_continues_bitwise_on_the_same_mesh(pair_ready, tmp_path, reduce):
    folder, options = str(tmp_path / "saved"), {"reduce_dtype": reduce}
    expected = pair_ready.run(save_or_resume_within_cycle, folder, {"dp_shard": 2}, False, options)
    assert pair_ready.run(save_or_resume_within_cycle, folder, {"dp_shard": 2}, True, options) == expected


def require_close(actual, expected):
    """Require that two states are equal up to the order of sums."""
    assert actual["steps"] == expected["steps"]
    for name, value in actual["model"].items():
        assert torch.tensor(value, dtype=torch.float64).allclose(
            torch.tensor(expected["model"][name], dtype=torch.float64), atol=1e-5
        ), name
    for name, state in actual["moments"].items():
        for key, value in state.items():
            assert torch.tensor(value).allclose(torch.tensor(expected["moments"][name][key]), atol=1e-5), (
                name,
                key,
            )


def test_an_accumulation_cycle_continues_on_another_mesh(pair_ready, tmp_path):
    folder = str(tmp_path / "saved")
    expected, _ = pair_ready.run(save_or_resume_within_cycle, folder, {"dp_shard": 2}, False)
    require_close(save_or_resume_within_cycle(folder, {}, True), expected)
    for state in pair_ready.run(save_or_resume_within_cycle, folder, {}, True):
        require_close(state, expected)
    save_or_resume_within_cycle(str(tmp_path / "alone"), {}, False)
    for state in pair_ready.run(save_or_resume_within_cycle, str(tmp_path / "alone"), {"dp_shard": 2}, True):
        require_close(state, expected)
    pair_ready.run(save_or_resume_within_cycle, str(tmp_path / "whole"), {}, False)
    for state in pair_ready.run(save_or_resume_within_cycle, str(tmp_path / "whole"), {"dp_shard": 2}, True):
        require_close(state, expected)


@pytest.mark.slow
def test_an_accumulation_cycle_of_four_ranks_continues_on_two(four_ready, pair_ready, tmp_path):
    for number, sizes in enumerate((SHARDED, HYBRID)):
        folder = str(tmp_path / str(number))
        expected = four_ready.run(save_or_resume_within_cycle, folder, sizes, False)
        assert four_ready.run(save_or_resume_within_cycle, folder, sizes, True) == expected
        for state in pair_ready.run(save_or_resume_within_cycle, folder, {"dp_shard": 2}, True):
            require_close(state, expected[0])


# Optimizers --------------------------------------------------------------------------------


def load_unsharded_state(state):
    """Load the optimizer state of an unsharded run into a sharded one; return the tensor types and moments."""
    run = Run({"dp_shard": 2})
    run.optimizer.load_state_dict(state)
    kinds = {
        type(value).__name__
        for parameter_state in run.optimizer.state.values()
        for key, value in parameter_state.items()
        if key != "step"
    }
    state_dict = run.optimizer.state_dict()
    run.optimizer.load_state_dict(state_dict)
    state_dict = run.state()["moments"]
    run.learn(next(iter(run.loader)))
    return kinds, state_dict


def test_an_unsharded_optimizer_state_is_sharded_like_the_parameters(pair_ready):
    run = Run({})
    run.learn(next(iter(run.loader)))
    expected = run.state()["moments"]
    for kinds, state in pair_ready.run(load_unsharded_state, run.optimizer.state_dict()):
        assert kinds == {"DTensor"}
        assert state == expected
