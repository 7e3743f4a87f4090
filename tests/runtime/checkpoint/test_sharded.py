"""Runs whose models and optimizers are divided by `prepare` are saved on one mesh and go on on any other, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sharded_runs import ROWS, Net, accelerator, full, net, warm
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import DataLoaderConfiguration, ProjectConfiguration, init_empty_weights
from accel_runtime.checkpoint.directory import find_checkpoint
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.safetensors_file import MergeRequest, merge_tensors

PLAN = "blocks.*.up=colwise,blocks.*.down=rowwise"
SHARDED, HYBRID = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}
TENSOR = {"tp": 2, "dp_shard": 2, "tp_plan": PLAN}
PAIRS = [{"dp_shard": 2}, {"tp": 2, "tp_plan": PLAN}, {}]


class Run:
    """All that a script prepares, on a mesh."""

    def __init__(self, sizes, seed=1, *, meta=False, options=None, **arguments):
        config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
        torch.manual_seed(seed)
        self.accelerator = accelerator(sizes, options, dataloader_config=config, **arguments)
        if meta:
            with init_empty_weights(include_buffers=True):
                model = Net()
        else:
            model = net(seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        data = TensorDataset(torch.arange(32), torch.arange(32) % ROWS)
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
        """Everything, gathered, and the samples of the next batch."""
        self.accelerator._training_state()  # parameters are at rest
        model = self.accelerator.unwrap_model(self.model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        moments = {
            names[parameter]: {key: full(value).tolist() for key, value in state.items()}
            for parameter, state in self.optimizer.state.items()
        }
        values = {name: full(value.detach()).tolist() for name, value in model.state_dict().items()}
        return {"model": values, "moments": moments, "steps": self.optimizer.steps}

    def upcoming(self):
        return sorted(set(self.accelerator.gather_for_metrics(next(iter(self.loader))[0]).tolist()))


def written(folder, sizes, **more):
    """Three steps and a checkpoint; what there was, and what would have come."""
    run = Run(sizes)
    walk = iter(run.loader)
    for _ in range(3):
        run.learn(next(walk))
    run.model(torch.arange(3))  # an evaluation leaves parameters gathered
    run.accelerator.save_state(folder, **more)
    run.accelerator.wait_for_checkpoint()
    state = run.state()
    return state, sorted(set(run.accelerator.gather_for_metrics(next(walk)[0]).tolist()))


def read(folder, sizes, *, meta=False):
    """The same out of a checkpoint, into other values; and that it trains on."""
    run = Run(sizes, 2, meta=meta)
    shards = [id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]]
    run.accelerator.resume(folder)
    state = run.state(), run.upcoming()
    assert [id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]] == shards
    for batch in run.loader:
        run.learn(batch)
    assert run.state() != state[0]
    return state


def once(folder):
    """Every element lies in one chunk."""
    manifest = json.loads((Path(folder) / "checkpoint.json").read_text())["checkpoint"]
    for name, stored in manifest["tensors"].items():
        seen = torch.zeros(stored["shape"], dtype=torch.int32)
        for chunk in stored["chunks"]:
            box = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))
            seen[box] += 1
        assert bool((seen == 1).all()), name
    return manifest


def sharded_from(manifest):
    return [name for name, stored in manifest["tensors"].items() if len(stored["chunks"]) > 1]


@pytest.fixture(scope="module")
def ready(clusters):
    """Two processes, which have loaded what takes seconds."""
    clusters[2].run(warm)
    return clusters[2]


@pytest.fixture(scope="module")
def four_ready(clusters):
    clusters[4].run(warm)
    return clusters[4]


@pytest.mark.parametrize("sizes", PAIRS[:2], ids=str)
def test_what_two_wrote_is_read_on_two_and_on_one(ready, tmp_path, sizes):
    folder = str(tmp_path / "saved")
    want, same = ready.run(written, folder, sizes)
    assert want == same
    manifest = once(folder)
    assert sharded_from(manifest)
    assert not [
        name for name in manifest["tensors"] if "head.weight" in name and "embedding" not in name
    ] or not [name for name in manifest["tensors"] if name == "model/embedding.weight"], (
        "tied weights are written once"
    )
    assert manifest["about"]["model"] == "Net"
    for other in PAIRS:
        assert ready.run(read, folder, other) == [want] * 2
    assert read(folder, {}) == want
    assert read(folder, {"dp_shard": "auto"}) == want


def test_what_one_or_whole_models_wrote_is_read_into_shards(ready, tmp_path):
    alone, whole = str(tmp_path / "alone"), str(tmp_path / "whole")
    want = written(alone, {})
    assert ready.run(read, alone, {"dp_shard": 2}) == [want] * 2
    want, _ = ready.run(written, whole, {})
    assert ready.run(read, whole, {"dp_shard": 2}) == [want] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SHARDED, marks=pytest.mark.full), HYBRID, pytest.param(TENSOR, marks=pytest.mark.full)],
    ids=str,
)
def test_what_four_wrote_is_read_on_every_other_mesh(four_ready, ready, tmp_path, sizes):
    folder = str(tmp_path / "saved")
    want, *others = four_ready.run(written, folder, sizes)
    assert others == [want] * 3
    assert sharded_from(once(folder))
    for other in (SHARDED, HYBRID, TENSOR):
        assert four_ready.run(read, folder, other) == [want] * 4
    assert ready.run(read, folder, {"dp_shard": 2}) == [want] * 2
    assert read(folder, {}) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SHARDED, marks=pytest.mark.full), pytest.param(HYBRID, marks=pytest.mark.full), TENSOR],
    ids=str,
)
def test_what_few_wrote_is_read_on_four(four_ready, ready, tmp_path, sizes):
    want = written(str(tmp_path / "alone"), {})
    assert four_ready.run(read, str(tmp_path / "alone"), sizes) == [want] * 4
    want, _ = ready.run(written, str(tmp_path / "pair"), {"dp_shard": 2})
    assert four_ready.run(read, str(tmp_path / "pair"), sizes) == [want] * 4


def in_the_background(folder, sizes):
    """The script trains on while the copy is written."""
    run = Run(sizes)
    walk = iter(run.loader)
    run.learn(next(walk))
    run.accelerator.save_state(folder, async_save=True)
    state, following = run.state(), next(walk)
    run.learn(following)
    run.accelerator.wait_for_checkpoint()
    return state


def test_a_copy_is_written_while_shards_change(ready, tmp_path):
    folder = str(tmp_path / "saved")
    want, _ = ready.run(in_the_background, folder, {"dp_shard": 2})
    for state, _ in ready.run(read, folder, {"dp_shard": 2}):
        assert state == want
    assert read(folder, {})[0] == want


def test_a_model_without_memory_is_filled_from_a_checkpoint(ready, tmp_path):
    folder = str(tmp_path / "saved")
    want, _ = ready.run(written, folder, {"dp_shard": 2})

    assert ready.run(lambda: read(folder, {"dp_shard": 2}, meta=True)) == [want] * 2


def gone_on(folder, sizes):
    """With names of our own, and `resume`."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    run = Run(sizes, project_config=project)
    found = run.accelerator.resume() if (Path(folder) / "checkpoints").exists() else None
    if found is None:
        run.learn(next(iter(run.loader)))
        run.accelerator.save_state()
    return run.state()


def test_resume(ready, tmp_path, monkeypatch):
    first = ready.run(gone_on, str(tmp_path), {"dp_shard": 2})
    monkeypatch.setenv("ACCEL_RESUME", "1")
    assert gone_on(str(tmp_path), {}) == first[0]


def test_the_shell_merges_shards_into_one_file(ready, tmp_path):
    folder = tmp_path / "saved"
    (want, _), _ = ready.run(written, str(folder), {"dp_shard": 2})
    merge_tensors(find_checkpoint(folder), tmp_path / "m.safetensors", MergeRequest())
    found = {name: value.tolist() for name, value in load_file(tmp_path / "m.safetensors").items()}
    assert found.items() <= want["model"].items()
    assert want["model"].keys() - found.keys() in ({"head.weight"}, {"embedding.weight"})


# Half-way through a window -----------------------------------------------------------------


def half(folder, sizes, load, options=None):
    """Saved, or loaded, after one micro-batch of three; then the step."""
    run = Run(sizes, 2 if load else 1, options=options, gradient_accumulation_steps=3)
    if load:
        run.accelerator.resume(folder)
    walk = iter(run.loader)
    if not load:
        run.learn(next(walk))
        run.accelerator.save_state(folder)
    for _ in range(2):
        run.learn(next(walk))
    assert run.optimizer.steps == 1
    return run.state()


@pytest.mark.parametrize("reduce", ["auto", "bf16"])
def test_an_open_window_goes_on_bit_for_bit_on_the_same_mesh(ready, tmp_path, reduce):
    folder, options = str(tmp_path / "saved"), {"reduce_dtype": reduce}
    want = ready.run(half, folder, {"dp_shard": 2}, False, options)
    assert ready.run(half, folder, {"dp_shard": 2}, True, options) == want


def close(one, other):
    """Numbers of two states, which were added up in another order."""
    assert one["steps"] == other["steps"]
    for name, value in one["model"].items():
        assert torch.tensor(value, dtype=torch.float64).allclose(
            torch.tensor(other["model"][name], dtype=torch.float64), atol=1e-5
        ), name
    for name, state in one["moments"].items():
        for key, value in state.items():
            assert torch.tensor(value).allclose(torch.tensor(other["moments"][name][key]), atol=1e-5), (
                name,
                key,
            )


def test_an_open_window_goes_on_on_other_meshes(ready, tmp_path):
    folder = str(tmp_path / "saved")
    want, _ = ready.run(half, folder, {"dp_shard": 2}, False)
    close(half(folder, {}, True), want)
    for state in ready.run(half, folder, {}, True):
        close(state, want)
    half(str(tmp_path / "alone"), {}, False)
    for state in ready.run(half, str(tmp_path / "alone"), {"dp_shard": 2}, True):
        close(state, want)
    ready.run(half, str(tmp_path / "whole"), {}, False)
    for state in ready.run(half, str(tmp_path / "whole"), {"dp_shard": 2}, True):
        close(state, want)


@pytest.mark.slow
def test_an_open_window_of_four(four_ready, ready, tmp_path):
    for number, sizes in enumerate((SHARDED, HYBRID)):
        folder = str(tmp_path / str(number))
        want = four_ready.run(half, folder, sizes, False)
        assert four_ready.run(half, folder, sizes, True) == want
        for state in ready.run(half, folder, {"dp_shard": 2}, True):
            close(state, want[0])


def half_or_why(folder, sizes, load):
    try:
        return half(folder, sizes, load)
    except CheckpointError as error:
        return str(error)


def test_under_tensor_parallel_an_open_window_is_exact_or_refused(ready, tmp_path):
    folder, sizes = str(tmp_path / "saved"), {"tp": 2, "tp_plan": PLAN}
    want = ready.run(half_or_why, folder, sizes, False)
    if isinstance(want[0], str):
        assert "Save at the end of a cycle" in want[0]
        assert not Path(folder).exists()
        return
    assert ready.run(half, folder, sizes, True) == want


# Optimizers --------------------------------------------------------------------------------


def from_plain(state):
    """A plain run's state, loaded into the optimizer of a sharded model."""
    run = Run({"dp_shard": 2})
    run.optimizer.load_state_dict(state)
    kinds = {
        type(value).__name__
        for own in run.optimizer.state.values()
        for key, value in own.items()
        if key != "step"
    }
    found = run.optimizer.state_dict()
    run.optimizer.load_state_dict(found)
    found = run.state()["moments"]
    run.learn(next(iter(run.loader)))
    return kinds, found


def test_a_plain_state_is_divided_as_the_parameters_are(ready):
    run = Run({})
    run.learn(next(iter(run.loader)))
    want = run.state()["moments"]
    for kinds, found in ready.run(from_plain, run.optimizer.state_dict()):
        assert kinds == {"DTensor"}
        assert found == want
